"""Verify: read every chunk of a version again, whatever is known of it, and hash it.

One rule: the index thread finds out what to read, a worker thread reads and hashes it; and a chunk
counts as corrupt only if the index still says that its bytes are where they were read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio

from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.formats import Layout, Reader, parse
from ckptfs.store.ids import ChunkId, CidCodec, RecipeId, cid_text
from ckptfs.store.segment_files import Bad, find_bad, place_of
from ckptfs.store.segment_format import Location
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

_BATCH_BYTES = 32 << 20
_WORKERS = 2
Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Use:
    """Where a chunk was met: in the file (or directory) `path`, at byte `offset` of the file."""

    path: bytes
    recipe: RecipeId | None
    offset: int
    codec: CidCodec = CidCodec.RAW


@dataclass(slots=True)
class Verdict:
    """What was found: `corrupt` are the JSON rows of ARCHITECTURE.md, section 8."""

    checked_bytes: int = 0
    chunks: int = 0
    corrupt: list[Json] = field(default_factory=list)


class Verifier:
    """One verification. Belongs to one task in the index thread."""

    def __init__(self, disk: Disk, segments: Segments, limiter: trio.CapacityLimiter, report: Report) -> None:
        """`limiter` bounds the worker threads of all verifications together."""
        self._top: Entry | None = None
        self._disk = disk
        self._segments = segments
        self._limiter = limiter
        self._report = report
        self._seen: set[int] = set()
        self._recipes: set[RecipeId] = set()
        self._batch: dict[ChunkId, tuple[Location, _Use]] = {}
        self._batch_bytes = 0
        self._walked_bytes = 0
        self._layouts: dict[RecipeId, Layout | None] = {}
        self.verdict = Verdict()

    async def check(self, top: Entry, inner: tuple[bytes, ...]) -> Verdict:
        """Check everything at and below `inner` in the version whose top directory is `top`.

        NotFound if the version has nothing there.
        """
        self._top = top
        way = way_into(self._segments, top, inner)
        if len(way) <= len(inner):
            raise NotFound(f"this version has no {os.fsdecode(b'/'.join(inner))}")
        for saved in walk(self._segments, Saved(b"/".join(inner), way[-1]), lambda *_: None):
            if saved.entry.tree is not None:
                self._add(saved.entry.tree, _Use(saved.path, None, 0, CidCodec.DAG_CBOR))
            if saved.entry.recipe is not None:
                await self._check_file(saved.path, saved.entry.recipe)
                self._walked_bytes += saved.entry.size
            await trio.lowlevel.checkpoint()
        await self._flush()
        return self.verdict

    async def _check_file(self, path: bytes, identity: RecipeId) -> None:
        if identity in self._recipes:
            return
        self._recipes.add(identity)
        self._add(identity, _Use(path, None, 0))
        try:
            recipe = self._segments.read_recipe(identity)
        except Corrupt:
            return  # its own chunk is in the batch and will say so
        for index, piece in enumerate(recipe.pieces()):
            if piece.chunk is not None:
                self._add(piece.chunk, _Use(path, identity, recipe.start(index)))
            if self._batch_bytes >= _BATCH_BYTES:
                await self._flush()

    def _add(self, chunk: ChunkId, use: _Use) -> None:
        # Eight bytes of the digest tell chunks apart well enough for not reading one twice.
        short = int.from_bytes(chunk[:8], "big")
        if short in self._seen:
            return
        self._seen.add(short)
        location = self._segments.locate(chunk)
        if location is None:
            self._blame(use, chunk, "no place: the index does not know it")
            return
        self._batch[chunk] = location, use
        self._batch_bytes += location.stored

    async def _flush(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, {}, 0
        bad = await self._find_bad([(chunk, location) for chunk, (location, _) in batch.items()])
        again = [(one.chunk, moved) for one in bad if (moved := self._moved(one)) is not None]
        bad = [one for one in bad if self._moved(one) is None] + await self._find_bad(again)
        for chunk, (location, _) in batch.items():
            self.verdict.chunks += 1
            self.verdict.checked_bytes += location.length
            if self._segments.locate(chunk) == location:
                self._segments.note_good(location)
        for one in bad:
            self._segments.note_bad(one)
            self._blame(batch[one.chunk][1], one.chunk, str(place_of(one.location)))
        self._report(Progress(done=self._walked_bytes))

    async def _find_bad(self, suspects: Iterable[tuple[ChunkId, Location]]) -> list[Bad]:
        suspects = sorted(suspects, key=lambda pair: (pair[1].segment, pair[1].offset))
        if not suspects:
            return []
        return await trio.to_thread.run_sync(
            find_bad, self._disk, suspects, limiter=self._limiter, abandon_on_cancel=True
        )

    def _moved(self, bad: Bad) -> Location | None:
        """Where the chunk lies by now, if that is elsewhere."""
        location = self._segments.locate(bad.chunk)
        return location if location != bad.location else None

    def _blame(self, use: _Use, chunk: ChunkId, place: str) -> None:
        self.verdict.corrupt.append(
            {
                "path": os.fsdecode(use.path),
                "tensor": self._tensor_at(use),
                "chunk": cid_text(chunk, use.codec),
                "place": place,
            }
        )

    def _tensor_at(self, use: _Use) -> str | None:
        """The tensor that the place belongs to; None where that cannot be told any more."""
        if use.recipe is None:
            return None
        if use.recipe not in self._layouts:
            self._layouts[use.recipe] = self._layout(use.path, use.recipe)
        layout = self._layouts[use.recipe]
        tensors = () if layout is None else layout.tensors
        return next((t.name for t in tensors if t.offset <= use.offset < t.end), None)

    def _layout(self, path: bytes, identity: RecipeId) -> Layout | None:
        folder, _, name = path.rpartition(b"/")
        try:
            reader = self._segments.file_reader(self._segments.read_recipe(identity))
            return parse(reader, os.fsdecode(name), lambda other: self._sibling(folder, os.fsencode(other)))
        except CkptfsError:
            return None

    def _sibling(self, folder: bytes, name: bytes) -> Reader | None:
        inner = (*folder.split(b"/"), name) if folder else (name,)
        way = way_into(self._segments, self._top, inner) if self._top is not None else []
        recipe = way[-1].recipe if len(way) > len(inner) else None
        return None if recipe is None else self._segments.file_reader(self._segments.read_recipe(recipe))


def worker_limiter() -> trio.CapacityLimiter:
    """The bound on threads that read and hash at once."""
    return trio.CapacityLimiter(_WORKERS)
