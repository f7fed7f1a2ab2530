"""Verify: read every chunk of a version again, whatever is known of it, and hash it.

One rule: the index thread finds out what to read, worker threads (hashing_threads.py) read and hash it;
and a chunk counts as corrupt only if the index still says that its bytes are where they were
read.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import trio

from ckptfs.daemon.hashing_threads import Hashed, HashingThreads
from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.daemon.tensor_names import TensorNames
from ckptfs.store.bad_chunks import NO_HASHERS, Hashers
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.ids import ChunkId, CidCodec, RecipeId, cid_text
from ckptfs.store.places import places_of
from ckptfs.store.recipe import HOLE
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

# By CPU time beside BLAKE3 alone: 16 MiB 0.82, 64 MiB 0.89, 128 MiB 0.91 (measured, two threads).
_BATCH_BYTES = 128 << 20
_BATCH_CHUNKS = 4096
_SLICE_PIECES = 128
_MOST_WORKERS = 8
Report = Callable[[Progress], None]


class Use(NamedTuple):
    """Where a chunk was met: in the file (or directory) `path`, at byte `offset` of the file."""

    path: bytes
    recipe: RecipeId | None
    offset: int
    codec: CidCodec = CidCodec.RAW


class _Part(NamedTuple):
    """The chunks of a batch from number `start` on are those of the pieces `pieces` of a file."""

    start: int
    path: bytes
    recipe: RecipeId
    pieces: Sequence[int]


class _Batch:
    """Chunks that are checked together. `objects`: those that are trees and recipes."""

    __slots__ = ("bytes", "chunks", "objects", "parts")

    def __init__(self) -> None:
        self.bytes = 0
        self.chunks: list[ChunkId] = []
        self.objects: dict[ChunkId, Use] = {}
        self.parts: list[_Part] = []

    @property
    def is_full(self) -> bool:
        """Whether it is time to have it checked."""
        return self.bytes >= _BATCH_BYTES or len(self.chunks) >= _BATCH_CHUNKS

    def use_of(self, chunk: ChunkId, segments: Segments) -> Use:
        """Where a chunk of the batch was met."""
        if chunk in self.objects:
            return self.objects[chunk]
        at = self.chunks.index(chunk)
        part = self.parts[bisect_right(self.parts, at, key=attrgetter("start")) - 1]
        recipe = segments.read_recipe(part.recipe)
        return Use(part.path, part.recipe, recipe.start(part.pieces[at - part.start]))


@dataclass(frozen=True, slots=True)
class _Job:
    """A batch that was located when the epoch of what is verified was `since`."""

    batch: _Batch
    since: int
    is_again: bool = False


@dataclass(slots=True)
class Verdict:
    """What was found: `corrupt` are the JSON rows of ARCHITECTURE.md, section 8."""

    checked_bytes: int = 0
    chunks: int = 0
    elapsed_s: float = 0.0
    corrupt: list[Json] = field(default_factory=list)


class Verifier:
    """One verification. Its tasks belong to the index thread, and only `check` waits for them."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        limiter: trio.CapacityLimiter,
        report: Report,
        hashers: Hashers = NO_HASHERS,
    ) -> None:
        """`limiter` bounds the worker threads of all verifications together; `hashers` take part."""
        self._top: Entry | None = None
        self._disk = disk
        self._segments = segments
        self._limiter = limiter
        self._hashers = hashers
        self._report = report
        self._most_in_flight = 2 * int(limiter.total_tokens)
        self._in_flight = trio.Semaphore(self._most_in_flight)
        self._threads: HashingThreads[_Job]
        self._seen = {hash(HOLE)}
        self._batch = _Batch()
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
            self._threads = HashingThreads(self._disk, self._limiter, nursery, self._hashers)
            nursery.start_soon(self._take_results, self._threads.results)
            try:
                await self._walk(Saved(b"/".join(inner), way[-1]))
            except (CkptfsError, OSError) as e:
                self._failure = e
            for _ in range(self._most_in_flight):
                await self._in_flight.acquire()
            self._threads.close()
        if self._failure is not None:
            raise self._failure
        self.verdict.elapsed_s = time.monotonic() - started
        return self.verdict

    async def _walk(self, start: Saved) -> None:
        for saved in walk(self._segments, start, lambda *_: None):
            if saved.entry.tree is not None:
                self._add_object(saved.entry.tree, Use(saved.path, None, 0, CidCodec.DAG_CBOR))
            if saved.entry.recipe is not None:
                await self._add_file(saved.path, saved.entry.recipe)
            if self._failure is not None:
                return
            await self._flush()
            await trio.lowlevel.checkpoint()
        await self._flush(is_end=True)

    def _add_object(self, chunk: ChunkId, use: Use) -> bool:
        if not self._unseen([chunk]):
            return False
        self._batch.chunks.append(chunk)
        self._batch.objects[chunk] = use
        return True

    async def _add_file(self, path: bytes, identity: RecipeId) -> None:
        if not self._add_object(identity, Use(path, None, 0)):
            return
        try:
            recipe = self._segments.read_recipe(identity)
        except Corrupt:
            return  # its own chunk is in the batch and will say so
        for start in range(0, len(recipe), _SLICE_PIECES):
            ids = recipe.ids(start, start + _SLICE_PIECES)
            fresh = self._unseen(ids)
            batch = self._batch
            pieces = [start + at for at in fresh]
            batch.parts.append(_Part(len(batch.chunks), path, identity, pieces))
            batch.chunks += [ids[at] for at in fresh]
            batch.bytes += recipe.length_of(pieces)
            await self._flush()

    def _unseen(self, ids: Sequence[ChunkId]) -> list[int]:
        """The numbers of those that no batch has had."""
        seen, add = self._seen, self._seen.add
        # 64 bits tell chunks apart well enough for not reading one twice.
        return [at for at, short in enumerate(map(hash, ids)) if short not in seen and not add(short)]

    async def _flush(self, *, is_end: bool = False) -> None:
        """Have a full batch checked beside what goes on; waits while enough are being checked."""
        batch = self._batch
        if batch.is_full or (is_end and batch.chunks):
            self._batch = _Batch()
            await self._in_flight.acquire()
            places = self._segments.locate_many(batch.chunks)
            for chunk in set(batch.chunks).difference(places.chunks):
                self._blame(batch, chunk, "no place: the index does not know it")
            self._threads.add(_Job(batch, self._segments.verified.epoch), places)

    async def _take_results(self, results: trio.MemoryReceiveChannel[Hashed[_Job]]) -> None:
        async for one in results:
            try:
                is_done = self._take(one)
            except (CkptfsError, OSError) as e:
                self._failure, is_done = e, True
            if is_done:
                self._in_flight.release()
                self._report(Progress(done=self.verdict.checked_bytes, total=self._total_bytes))

    def _take(self, one: Hashed[_Job]) -> bool:
        """What was found of a batch; False if some of it is looked at once more, where it lies by now."""
        if one.failure is not None:
            raise one.failure
        job, places = one.job, one.places
        if not job.is_again:
            self._segments.note_all_good(places.without({bad.chunk for bad in one.bad}), job.since)
            self.verdict.chunks += len(places)
            self.verdict.checked_bytes += int(places.rows["length"].sum(dtype=int))
        moved = []
        for bad in one.bad:
            location = self._segments.locate(bad.chunk)
            if location is not None and location != bad.location and not job.is_again:
                moved.append((bad.chunk, location))
                continue
            if location is not None and location == bad.location:
                still = self._segments.still_bad(bad)
                if still is None:
                    continue
                bad = still
            self._segments.note_bad(bad)
            self._blame(job.batch, bad.chunk, str(bad.place))
        if moved:
            again = places_of(moved, self._segments.parents_of(moved))
            self._threads.add(_Job(job.batch, job.since, is_again=True), again)
        return not moved

    def _blame(self, batch: _Batch, chunk: ChunkId, place: str) -> None:
        use, tensor = batch.use_of(chunk, self._segments), None
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
