"""Hashing and decoding ahead of a reader: what it will want next is made ready on other cores.

One rule: this only ever marks a chunk as good. What is not found good here is left to the reader, who
hashes it again and is told what is wrong with it.

Without it a first read is one core's work: reading, hashing and answering, one after the other. Encoded
chunks that a reader wants now are decoded here too, and wait for nothing that anybody will want later.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import trio

from ckptfs.store.bad_chunks import NO_HASHERS, Hashers, PlaceHasher, find_bad_places
from ckptfs.store.chunk_files import ChunkFiles
from ckptfs.store.codecs import Plain
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.ids import ChunkId
from ckptfs.store.lru import Lru
from ckptfs.store.places import Suspect, places_of
from ckptfs.store.read_plan import Part, ReadPlan, Unverified
from ckptfs.store.recipe import Recipe
from ckptfs.store.segment_files import SegmentFiles
from ckptfs.store.segment_format import Codec, Location
from ckptfs.store.segments import Segments

_AHEAD_BYTES = 32 << 20
_BATCH_BYTES = 4 << 20
_MOST_BATCHES = 24
_MOST_WORKERS = 4
_STREAMS = 64
_BUSY_S = 1.0
# The kernel has several requests of one read-ahead on their way at once, in any order.
_NEAR_BYTES = 8 << 20


@dataclass(slots=True)
class _Stream:
    """Where the readers of a file are: `reached` by a request, `planned` for hashing."""

    recipe: Recipe
    reached: int
    planned: int


@dataclass(slots=True)
class _Batch:
    """Chunks that one worker hashes, or decodes, together. `is_begun`: it does not wait for its turn."""

    suspects: list[Suspect]
    done: trio.Event = field(default_factory=trio.Event)
    is_begun: bool = False


class ReadingAhead:
    """Belongs to the trio thread. Does nothing while `run` does not run."""

    def __init__(self, disk: Disk, segments: Segments, hashers: Hashers = NO_HASHERS) -> None:
        self._disk = disk
        self._hashers = hashers
        self._segments = segments
        self._streams: Lru[int, _Stream] = Lru(_STREAMS)
        self._batches: dict[ChunkId, _Batch] = {}
        self._queue: trio.MemorySendChannel[_Batch] | None = None
        self._used_at = -math.inf
        cores = len(os.sched_getaffinity(0))
        # Whoever reads raw bytes needs a core to himself; who waits for decoding does nothing else meanwhile
        # (torch.load of differences on two busy cores: 0.41 s instead of 0.47).
        self.workers = max(1, min(_MOST_WORKERS, cores))
        self._hashing = trio.CapacityLimiter(max(1, min(_MOST_WORKERS, cores - 1)))
        self._ahead = trio.CapacityLimiter(self.workers)
        self._wanted_now = trio.CapacityLimiter(2 * self.workers)

    @property
    def is_busy(self) -> bool:
        """Whether somebody reads stored files through the daemon, or did in the last second."""
        return time.monotonic() - self._used_at < _BUSY_S

    def note_use(self) -> None:
        """Somebody reads a stored file through the daemon."""
        self._used_at = time.monotonic()

    async def run(self) -> None:
        """Hash what is planned, until cancelled. At the end nobody waits for it any more."""
        self._queue, batches = trio.open_memory_channel[_Batch](_MOST_BATCHES)
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(self.workers):
                    nursery.start_soon(self._work, batches.clone())
        finally:
            self._queue = None
            for batch in list(self._batches.values()):
                self._end(batch)

    async def prepare(self, recipe: Recipe, offset: int, plan: ReadPlan) -> bool:
        """Plan what follows a read that met chunks nobody has hashed, and wait for those of them that
        are being hashed. True if it waited: then the read has to be planned anew.
        """
        if self._queue is None:
            return False
        self.note_use()
        self._extend(recipe, offset, plan)
        is_decoded = await self._decode_now(plan)
        return await self.wait(plan) or is_decoded

    async def wait(self, plan: ReadPlan) -> bool:
        """Wait for the chunks of a plan that are being hashed; False if none were."""
        waited = False
        for chunk in plan.unverified:
            batch = self._batches.get(chunk)
            if batch is not None:
                await batch.done.wait()
                waited = True
        return waited

    async def _decode_now(self, plan: ReadPlan) -> bool:
        """Decode the chunks of a plan that nobody is decoding: a small read waits for its own chain, not
        for what is planned ahead. False if there are none."""
        places = {
            one.chunk: one.location for one in plan.parts if isinstance(one, Unverified) and one.is_encoded
        }
        for chunk in list(places):
            batch = self._batches.pop(chunk, None)
            if batch is not None and batch.is_begun:
                self._batches[chunk] = batch
                del places[chunk]
        suspects = [*places.items()]
        if not suspects:
            return False
        each = -(-len(suspects) // self.workers)
        shares = [_Batch(suspects[at : at + each], is_begun=True) for at in range(0, len(suspects), each)]
        async with trio.open_nursery() as nursery:
            for share in shares:
                self._batches.update((chunk, share) for chunk, _ in share.suspects)
                nursery.start_soon(self._check, share, self._wanted_now)
        return True

    def _extend(self, recipe: Recipe, offset: int, plan: ReadPlan) -> None:
        end = offset + plan.length
        stream = self._streams.get(id(recipe))
        if stream is None or stream.recipe is not recipe:
            stream = _Stream(recipe, 0, 0)
            self._streams.put(id(recipe), stream, 1)
        is_near = abs(offset - stream.reached) <= _NEAR_BYTES
        stream.reached = end
        if not is_near:
            stream.planned = end
            return
        start = max(stream.planned, end)
        if start - end > _AHEAD_BYTES // 2:
            return
        stream.planned = self._plan(recipe, start, end + _AHEAD_BYTES, set(plan.unverified))

    def _plan(self, recipe: Recipe, start: int, stop: int, own: set[ChunkId]) -> int:
        """Queue the unverified chunks in [start, stop) but those that the reader hashes himself, because
        he wants them now; returns how far that went."""
        while start < min(stop, recipe.size):
            upto = min(start + _BATCH_BYTES, recipe.size)
            try:
                plan = self._segments.plan_read(recipe, start, upto - start)
            except CkptfsError:
                return recipe.size  # the reader will be told, when he gets there
            if not self._queue_batch(plan.parts, own):
                return start
            start = upto
        return start

    def _queue_batch(self, parts: Sequence[Part], own: set[ChunkId]) -> bool:
        assert self._queue is not None
        places = {part.chunk: part.location for part in parts if isinstance(part, Unverified)}
        suspects = [pair for pair in places.items() if pair[0] not in own and pair[0] not in self._batches]
        if not suspects:
            return True
        batch = _Batch(suspects)
        try:
            self._queue.send_nowait(batch)
        except trio.WouldBlock:
            return False
        self._batches.update((chunk, batch) for chunk, _ in suspects)
        return True

    async def _work(self, batches: trio.MemoryReceiveChannel[_Batch]) -> None:
        async for batch in batches:
            if all(location.codec == Codec.RAW for _, location in batch.suspects):
                async with self._hashing:
                    await self._begin(batch)
            else:
                await self._begin(batch)

    async def _begin(self, batch: _Batch) -> None:
        """Until here readers may take from it what they want now."""
        batch.suspects = [one for one in batch.suspects if self._batches.get(one[0]) is batch]
        batch.is_begun = True
        await self._check(batch, self._ahead)

    async def _check(self, batch: _Batch, limiter: trio.CapacityLimiter) -> None:
        parents = self._segments.parents_of(batch.suspects)
        try:
            with self._hashers.lent() as hasher:
                bad, decoded = await trio.to_thread.run_sync(
                    _hash_or_decode,
                    self._disk,
                    batch.suspects,
                    parents,
                    hasher,
                    limiter=limiter,
                    abandon_on_cancel=True,
                )
            self._note_good(batch, bad, decoded)
        except (CkptfsError, OSError):
            pass  # the reader meets it again, and says it
        finally:
            self._end(batch)

    def _note_good(self, batch: _Batch, bad: set[ChunkId], decoded: Mapping[ChunkId, Plain]) -> None:
        for chunk, location in batch.suspects:
            if chunk not in bad and self._segments.locate(chunk) == location:
                self._segments.note_good(location)
        self._segments.keep_decoded(decoded)

    def _end(self, batch: _Batch) -> None:
        for chunk, _ in batch.suspects:
            if self._batches.get(chunk) is batch:
                del self._batches[chunk]
        batch.done.set()


def _hash_or_decode(
    disk: Disk,
    suspects: Sequence[Suspect],
    parents: Mapping[ChunkId, Location],
    hasher: PlaceHasher | None,
) -> tuple[set[ChunkId], dict[ChunkId, Plain]]:
    """The chunks that are wrong, and the plain bytes of the encoded ones that are right. Any thread."""
    raw = [one for one in suspects if one[1].codec == Codec.RAW]
    bad = {one.chunk for one in find_bad_places(disk, places_of(raw), hasher)} if raw else set()
    encoded = {chunk: location for chunk, location in suspects if location.codec != Codec.RAW}
    if not encoded:
        return bad, {}
    files = SegmentFiles(disk)
    try:
        decoded = ChunkFiles(files, parents.get).read_together(encoded, parents)
    finally:
        files.close()
    return bad | (encoded.keys() - decoded.keys()), decoded
