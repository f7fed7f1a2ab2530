"""Verify: read every chunk of a version again, whatever is known of it, and hash it.

One rule: the index thread finds out what to read, worker threads read and hash it, several batches at
a time; and a chunk counts as corrupt only if the index still says that its bytes are where they were
read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.daemon.tensor_names import TensorNames
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.ids import ChunkId, CidCodec, RecipeId, cid_text
from ckptfs.store.segment_files import Bad, Suspect, find_bad, place_of
from ckptfs.store.segment_format import Location
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

# Smaller ones leave a core idle at each handover (16 MiB: 0.72 of BLAKE3 alone, 64 MiB: 0.84).
_BATCH_BYTES = 64 << 20
_BATCH_CHUNKS = 4096
_MOST_WORKERS = 8
Report = Callable[[Progress], None]


class Use(NamedTuple):
    """Where a chunk was met: in the file (or directory) `path`, at byte `offset` of the file."""

    path: bytes
    recipe: RecipeId | None
    offset: int
    codec: CidCodec = CidCodec.RAW


_Batch = dict[ChunkId, tuple[Location, Use]]


@dataclass(slots=True)
class Verdict:
    """What was found: `corrupt` are the JSON rows of ARCHITECTURE.md, section 8."""

    checked_bytes: int = 0
    chunks: int = 0
    elapsed_s: float = 0.0
    corrupt: list[Json] = field(default_factory=list)


class Verifier:
    """One verification. Its tasks belong to the index thread, and only `check` waits for them."""

    def __init__(self, disk: Disk, segments: Segments, limiter: trio.CapacityLimiter, report: Report) -> None:
        """`limiter` bounds the worker threads of all verifications together."""
        self._top: Entry | None = None
        self._disk = disk
        self._segments = segments
        self._limiter = limiter
        self._report = report
        self._in_flight = trio.Semaphore(int(limiter.total_tokens) + 1)
        self._seen: set[int] = set()
        self._recipes: set[RecipeId] = set()
        self._batch: _Batch = {}
        self._batch_bytes = 0
        self._total_bytes = 0
        self._failure: Exception | None = None
        self._names = TensorNames(segments)
        self.verdict = Verdict()

    async def check(self, top: Entry, inner: tuple[bytes, ...], total_bytes: int = 0) -> Verdict:
        """Check everything at and below `inner` in the version whose top directory is `top`.

        `total_bytes`, for the progress, is how much that may be. NotFound if the version has nothing
        there.
        """
        self._top, self._total_bytes = top, total_bytes
        started = time.monotonic()
        way = way_into(self._segments, top, inner)
        if len(way) <= len(inner):
            raise NotFound(f"this version has no {os.fsdecode(b'/'.join(inner))}")
        async with trio.open_nursery() as nursery:
            try:
                await self._walk(Saved(b"/".join(inner), way[-1]), nursery)
            except (CkptfsError, OSError) as e:
                self._failure = e
        if self._failure is not None:
            raise self._failure
        self.verdict.elapsed_s = time.monotonic() - started
        return self.verdict

    async def _walk(self, start: Saved, nursery: trio.Nursery) -> None:
        for saved in walk(self._segments, start, lambda *_: None):
            if saved.entry.tree is not None:
                self._add(saved.entry.tree, Use(saved.path, None, 0, CidCodec.DAG_CBOR))
            if saved.entry.recipe is not None:
                await self._add_file(saved.path, saved.entry.recipe, nursery)
            if self._failure is not None:
                return
            await trio.lowlevel.checkpoint()
        await self._flush(nursery)

    async def _add_file(self, path: bytes, identity: RecipeId, nursery: trio.Nursery) -> None:
        if identity in self._recipes:
            return
        self._recipes.add(identity)
        self._add(identity, Use(path, None, 0))
        try:
            recipe = self._segments.read_recipe(identity)
        except Corrupt:
            return  # its own chunk is in the batch and will say so
        offset = 0
        for piece in recipe.pieces():
            if piece.chunk is not None:
                self._add(piece.chunk, Use(path, identity, offset))
            offset += piece.length
            if self._batch_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_CHUNKS:
                await self._flush(nursery)

    def _add(self, chunk: ChunkId, use: Use) -> None:
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

    async def _flush(self, nursery: trio.Nursery) -> None:
        """Have the batch checked beside what goes on; waits while enough are being checked."""
        batch, self._batch, self._batch_bytes = self._batch, {}, 0
        if batch:
            await self._in_flight.acquire()
            nursery.start_soon(self._check_batch, batch)

    async def _check_batch(self, batch: _Batch) -> None:
        try:
            bad = await self._find_bad([(chunk, location) for chunk, (location, _) in batch.items()])
            again = [(one.chunk, moved) for one in bad if (moved := self._moved(one)) is not None]
            bad = [one for one in bad if self._moved(one) is None] + await self._find_bad(again)
            self._note_good(batch, {one.chunk for one in bad})
            for one in bad:
                self._segments.note_bad(one)
                self._blame(batch[one.chunk][1], one.chunk, str(place_of(one.location)))
        except (CkptfsError, OSError) as e:
            self._failure = e
        finally:
            self._in_flight.release()
        self._report(Progress(done=self.verdict.checked_bytes, total=self._total_bytes))

    def _note_good(self, batch: _Batch, bad: set[ChunkId]) -> None:
        verified = self._segments.verified
        for chunk, (location, _) in batch.items():
            self.verdict.checked_bytes += location.length
            if location in verified or chunk in bad:
                continue
            if self._segments.locate(chunk) == location:
                self._segments.note_good(location)
        self.verdict.chunks += len(batch)

    async def _find_bad(self, suspects: list[Suspect]) -> list[Bad]:
        suspects.sort(key=lambda pair: (pair[1].segment, pair[1].flags, pair[1].offset))
        if not suspects:
            return []
        return await trio.to_thread.run_sync(
            find_bad, self._disk, suspects, limiter=self._limiter, abandon_on_cancel=True
        )

    def _moved(self, bad: Bad) -> Location | None:
        """Where the chunk lies by now, if that is elsewhere."""
        location = self._segments.locate(bad.chunk)
        return location if location != bad.location else None

    def _blame(self, use: Use, chunk: ChunkId, place: str) -> None:
        tensor = None
        if use.recipe is not None:
            tensor = self._names.tensor_at(self._top, use.path, use.recipe, use.offset)
        self.verdict.corrupt.append(
            {
                "path": os.fsdecode(use.path),
                "tensor": tensor,
                "chunk": cid_text(chunk, use.codec),
                "place": place,
            }
        )


def worker_limiter() -> trio.CapacityLimiter:
    """The bound on threads that read and hash at once."""
    return trio.CapacityLimiter(min(_MOST_WORKERS, len(os.sched_getaffinity(0))))
