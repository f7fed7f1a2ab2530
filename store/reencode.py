"""Re-encoding: raw chunks get smaller, tensor by tensor, and their raw bytes go when nothing can lose them.

One rule: between the last look into the chunk table and the applied change nothing else runs; a chunk that
moved, or that somebody relies on just now, meanwhile stays as it is, and so does one whose parents changed.

Step by step: one segment after the other, each whole or not at all, so that it may be interrupted anywhere.

Everything belongs to the index thread; reading, encoding and writing is done elsewhere (encoding_batch.py).
Source: FORMAT.md, "Encoded segments", write order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio
from msgspec.structs import replace

from ckptfs.store.chain_shape import SHAPE, ChainShape, Standing, choose_parent
from ckptfs.store.chunk_table import NEXT_SEGMENT
from ckptfs.store.disk import Disk
from ckptfs.store.encoding_batch import EncodingBatch, Wanted, encode_batch
from ckptfs.store.encoding_level import Level
from ckptfs.store.encoding_plan import PlannedChunk
from ckptfs.store.errors import Corrupt, NoSpace, ReadOnly
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.ingest_commit import Committer
from ckptfs.store.layout import CONTEXTS, ENCODED, add_incompat
from ckptfs.store.packing import Built, remove_segment_files
from ckptfs.store.parent_table import Lineage
from ckptfs.store.segment_counts import Counts, counts_of, moved_by, with_counts
from ckptfs.store.segment_format import (
    DIFFERENCES,
    MAX_DEPTH,
    Codec,
    Location,
    Row,
    encode_facts,
    encode_location,
    segment_key,
)
from ckptfs.store.segments import Segments

BATCH_BYTES = 64 << 20
BATCH_CHUNKS = 512
_LOOKUPS_AT_ONCE = 128

EncodeBatch = Callable[[EncodingBatch], Awaitable[Built | None]]
"""Runs `encode_batch` somewhere."""


@dataclass(slots=True)
class Encoding:
    """What a re-encoding has come to: chunks and plain bytes that were looked at, and what became smaller.
    `passed_over` are the chunks that stayed as they are only because of what went on meanwhile."""

    chunks: int = 0
    plain_bytes: int = 0
    encoded_chunks: int = 0
    encoded_plain_bytes: int = 0
    encoded_bytes: int = 0
    passed_over: set[ChunkId] = field(default_factory=set)

    def add(self, other: Encoding) -> None:
        """Count what another one has done."""
        self.chunks += other.chunks
        self.plain_bytes += other.plain_bytes
        self.encoded_chunks += other.encoded_chunks
        self.encoded_plain_bytes += other.encoded_plain_bytes
        self.encoded_bytes += other.encoded_bytes
        self.passed_over |= other.passed_over


@dataclass(slots=True)
class _Moving:
    """What one change moves: rows of the new segment by chunk, and the chunks that each old segment loses;
    `surplus` are those of the new one that stay where they are; `child_depths` the least depth of what is
    encoded against a chunk, of those that move."""

    rows: dict[ChunkId, Row] = field(default_factory=dict)
    left: dict[int, list[ChunkId]] = field(default_factory=dict)
    surplus: list[ChunkId] = field(default_factory=list)
    child_depths: dict[ChunkId, int] = field(default_factory=dict)


class Reencoder:
    """Encodes chunks of the store, one batch at a time."""

    def __init__(
        self,
        disk: Disk,
        index: Index,
        segments: Segments,
        committer: Committer,
        run_batch: EncodeBatch | None = None,
        shape: ChainShape = SHAPE,
    ) -> None:
        """Without `run_batch` a worker thread does it. `shape` is that of the chains it makes."""
        self._disk = disk
        self._index = index
        self._segments = segments
        self._committer = committer
        self._run_batch = run_batch if run_batch is not None else self._in_thread
        self._shape = shape
        self._lock = trio.Lock()
        self._flagged: set[str] = set()

    async def encode(self, planned: Sequence[PlannedChunk], level: Level = "fast") -> Encoding:
        """Encode those of BATCH_BYTES and BATCH_CHUNKS of chunks that become smaller; what came of it.
        What is encoded already stays as it is, at whatever level that was.

        Raises NoSpace, OSError, or Corrupt if the disk does not keep what is written; then nothing is
        changed. Durable when: this returned. The raw bytes go later, once that is committed (Reclaim).
        """
        async with self._lock:
            with self._segments.pins.hold() as held:
                batch, done = await self._prepare(planned, held, level)
                if not batch.wanted:
                    return done
                self._keep_others_out(level)
                built = await self._run_batch(batch)
            # Nothing runs between the end of the pins and the change.
            if built is not None:
                self._commit(batch, built, done)
            return done

    async def _prepare(
        self, planned: Sequence[PlannedChunk], held: set[ChunkId], level: Level
    ) -> tuple[EncodingBatch, Encoding]:
        """Look up and pin what a batch takes."""
        done, wanted = Encoding(), dict[ChunkId, Wanted]()
        for start in range(0, len(planned), _LOOKUPS_AT_ONCE):
            for one in planned[start : start + _LOOKUPS_AT_ONCE]:
                location = self._segments.locate(one.chunk)
                if location is None or one.chunk in wanted:
                    continue
                done.chunks += 1
                done.plain_bytes += one.length
                most = min(MAX_DEPTH, self._segments.parents.least_child_depth(one.chunk) - 1)
                if location.codec == Codec.RAW and not location.in_idx and most >= 0:
                    parent = None if one.parent is None else self._parent_in_shape(one.parent)
                    wanted[one.chunk] = Wanted(one.chunk, location, one.dtype, parent, one.cast_of, most)
            await trio.lowlevel.checkpoint()
        parents = {parent for one in wanted.values() for parent in _parents_of(one)}
        held |= wanted.keys() | parents
        # From here on they stay; where they are is looked up in one step.
        places = self._segments.ways_to([tuple(parents)])
        depths = {parent: depth for parent in parents if (depth := self._segments.parents.depth(parent))}
        still = tuple(one for one in wanted.values() if self._segments.locate(one.chunk) == one.location)
        done.passed_over = wanted.keys() - {one.chunk for one in still}
        number = self._committer.take_number()
        return EncodingBatch(number, self._committer.now_ns(), still, places, depths, level), done

    def _parent_in_shape(self, nearest: ChunkId) -> ChunkId | None:
        return choose_parent(nearest, self._standing, self._shape)

    def _standing(self, chunk: ChunkId) -> Standing | None:
        parents = self._segments.parents
        try:
            location, lineage = self._segments.locate(chunk), parents.lineage(chunk)
        except Corrupt:
            return None  # A scrub puts it right.
        if location is None:
            return None
        base = lineage.parents[0] if lineage is not None and location.codec in DIFFERENCES else None
        depth = 0 if lineage is None else lineage.depth
        return Standing(depth, parents.count_children(chunk, self._shape.children), base)

    def _keep_others_out(self, level: Level) -> None:
        """Before the first encoded segment: programs that do not know what may be in it must not open this
        store."""
        for flag in (ENCODED, CONTEXTS) if level == "small" else (ENCODED,):
            if flag not in self._flagged:
                add_incompat(self._disk, flag)
                self._flagged.add(flag)

    async def _in_thread(self, batch: EncodingBatch) -> Built | None:
        return await trio.to_thread.run_sync(encode_batch, self._disk, batch)

    def _commit(self, batch: EncodingBatch, built: Built, done: Encoding) -> None:
        """Enter a durable segment. Durable when: this returned."""
        moving = self._moving({one.chunk: one.location for one in batch.wanted}, built.index.rows)
        done.passed_over |= set(moving.surplus)
        if not moving.rows:
            remove_segment_files(self._disk, batch.number)
            return
        change = Change()
        try:
            self._fill(change, built, moving)
        except BaseException:
            remove_segment_files(self._disk, batch.number)
            raise
        change.after_commit(partial(self._reclaim_later, batch.number, moving))
        try:
            self._index.apply(change, sync=True)
        except (NoSpace, ReadOnly):
            # Refused before the journal had it. Whatever else it was (the sync failed, memory ran out): the
            # journal may have the change, so its bytes have to stay; recovery decides.
            remove_segment_files(self._disk, batch.number)
            raise
        for segment in moving.left:
            # Marks of what has left would be counted for what stays.
            self._segments.verified.remove_segment(segment)
        self._segments.mark_verified(batch.number)
        counts = counts_of(moving.rows.values())
        done.encoded_chunks, done.encoded_bytes = counts.chunks, counts.payload_bytes
        done.encoded_plain_bytes = counts.payload_bytes + counts.spared_bytes

    def _moving(self, where: Mapping[ChunkId, Location], rows: Iterable[Row]) -> _Moving:
        moving = _Moving()
        for row in rows:
            before = where[row.chunk]
            if self._may_move(row, before, moving):
                moving.rows[row.chunk] = row
                for parent in row.parents:
                    depth = moving.child_depths.get(parent, row.depth)
                    moving.child_depths[parent] = min(depth, row.depth)
                moving.left.setdefault(before.segment, []).append(row.chunk)
            else:
                moving.surplus.append(row.chunk)
        return moving

    def _may_move(self, row: Row, before: Location, moving: _Moving) -> bool:
        if self._segments.locate(row.chunk) != before or row.chunk in self._segments.pins:
            return False
        if row.depth >= moving.child_depths.get(row.chunk, row.depth + 1):
            return False  # what was encoded against it in this very batch must stay deeper than it is
        lineage = Lineage(row.depth, row.parents)
        depths = {parent: moving.rows[parent].depth for parent in row.parents if parent in moving.rows}
        return self._segments.parents.may_put(row.chunk, lineage, depths)

    def _fill(self, change: Change, built: Built, moving: _Moving) -> None:
        number = built.index.number
        for chunk, row in moving.rows.items():
            change.put(Table.CHUNK, chunk, encode_location(row.location(number)))
            if row.parents:
                self._segments.parents.put(change, chunk, Lineage(row.depth, row.parents))
        for segment, chunks in moving.left.items():
            facts = self._segments.facts(segment)
            if facts is not None:
                # They were raw there: as long as they are.
                lengths = sum(moving.rows[chunk].length for chunk in chunks)
                left = replace(moved_by(facts, Counts(-len(chunks), -lengths)), punch_due=True)
                change.put(Table.SEGMENT, segment_key(segment), encode_facts(left))
        new = replace(built.facts(), punch_due=bool(moving.surplus))
        new = with_counts(new, counts_of(moving.rows.values()))
        change.put(Table.SEGMENT, segment_key(number), encode_facts(new))
        change.put(Table.META, NEXT_SEGMENT, self._committer.next_number.to_bytes(8, "big"))

    def _reclaim_later(self, number: int, moving: _Moving) -> None:
        reclaim = self._committer.reclaim
        for chunk in moving.surplus:
            reclaim.superseded(number, chunk)
        for segment, chunks in moving.left.items():
            for chunk in chunks:
                reclaim.superseded(segment, chunk)


def _parents_of(one: Wanted) -> tuple[ChunkId, ...]:
    return one.cast_of if one.parent is None else (one.parent, *one.cast_of)
