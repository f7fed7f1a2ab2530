"""The chunk table as a whole, in a scrub: every row belongs to a segment, and the segments' counts are right.

One rule: counts are set only where nothing changed while they were taken.

Everything belongs to the index thread; reading and hashing is done in worker threads.
Source: FORMAT.md, "Scrub".
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace

from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.journal import Op
from ckptfs.store.places import Suspect
from ckptfs.store.scrub_run import Found
from ckptfs.store.scrub_state import Finding
from ckptfs.store.segment_check import is_right
from ckptfs.store.segment_counts import Counts, with_counts
from ckptfs.store.segment_files import read_idx_bytes
from ckptfs.store.segment_format import (
    Location,
    Row,
    SegmentFacts,
    decode_location,
    encode_facts,
    segment_key,
)
from ckptfs.store.segments import Segments

_SLICE_ROWS = 512


@dataclass(slots=True)
class _Tally:
    """What the chunk table has in each segment; `touched` are those that changed meanwhile."""

    counts: dict[int, Counts] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)

    def watch(self, operations: list[Op]) -> None:
        """Called with every change of the index."""
        for table, key, value in operations:
            if table == Table.SEGMENT:
                self.touched.add(int.from_bytes(key, "big"))
            elif table == Table.CHUNK and value is not None:
                self.touched.add(decode_location(value).segment)


class TableScrub:
    """Checks the chunk table, and the counts of the segment table by it."""

    def __init__(self, disk: Disk, index: Index, segments: Segments) -> None:
        self._disk = disk
        self._index = index
        self._segments = segments

    async def check(self, found: Found) -> None:
        """Put the counts right; a chunk that lies in no segment, or nobody knows where, is bad."""
        tally = _Tally()
        with self._index.watch(tally.watch):
            async for key, value in scan_slowly(self._index, Table.CHUNK):
                try:
                    location = decode_location(value)
                except Corrupt:
                    self._take_out(ChunkId(key), found)
                    continue
                tally.counts.setdefault(location.segment, Counts()).add(location)
            for number in sorted(tally.counts.keys() | found.miscounted):
                if number not in tally.touched:
                    await self._check_counts(number, tally, found)

    async def _check_counts(self, number: int, tally: _Tally, found: Found) -> None:
        facts, counts = facts_or_none(self._segments, number), tally.counts.get(number, Counts())
        if facts is not None:
            right = with_counts(facts, counts)
            if facts == right:
                return
            if facts == replace(right, spared_bytes=0):
                # From before there was the field: nothing was wrong, so nothing is found.
                put_facts(self._index, number, right)
                return
        await self._recount(number, facts, counts, tally.touched, found)

    def _take_out(self, chunk: ChunkId, found: Found) -> None:
        """A chunk of which nobody can tell where it lies is missing."""
        change = Change()
        change.delete(Table.CHUNK, chunk)
        self._segments.parents.remove(change, chunk)
        self._index.apply(change)
        found.bad.setdefault(chunk, None)

    async def _recount(
        self, number: int, facts: SegmentFacts | None, counts: Counts, touched: set[int], found: Found
    ) -> None:
        """Put a segment's counts right, or its whole row; what lies in no segment is bad."""
        try:
            index = (await trio.to_thread.run_sync(read_idx_bytes, self._disk, number))[0]
        except (CkptfsError, OSError):
            for chunk, location in await rows_of(self._index, number):
                if not await is_here(self._disk, self._segments, chunk, location):
                    found.bad.setdefault(chunk, location)
            return
        if number in touched:
            return
        unlisted = {row.chunk for row in index.rows}
        for chunk, location in await rows_of(self._index, number):
            if chunk not in unlisted and not await is_here(self._disk, self._segments, chunk, location):
                found.bad.setdefault(chunk, location)
        if facts is None:
            facts = SegmentFacts(index.kind, index.file_bytes, 0, 0, index.created_ns)
        if number not in touched:
            put_facts(self._index, number, with_counts(facts, counts))
            what = f"the row of segment {number:016x} was wrong"
            found.add(Finding("index", what, healed=True))


async def is_here(
    disk: Disk, segments: Segments, chunk: ChunkId, place: Location, row: Row | None = None
) -> bool:
    """Whether a chunk lies in a place: where the index has it, or that of a row of an `.idx`."""
    parents = segments.ways_to([row.parents]) if row is not None else segments.parents_of([(chunk, place)])
    return await trio.to_thread.run_sync(is_right, disk, chunk, place, parents)


async def rows_of(index: Index, number: int) -> list[Suspect]:
    """What the chunk table says lies in a segment, by place."""
    rows: list[Suspect] = []
    async for key, value in scan_slowly(index, Table.CHUNK):
        with suppress(Corrupt):
            location = decode_location(value)
            if location.segment == number:
                rows.append((ChunkId(key), location))
    return sorted(rows, key=lambda row: (row[1].flags, row[1].offset))


def facts_or_none(segments: Segments, number: int) -> SegmentFacts | None:
    """A segment's row; None if there is none, or it is damaged: then it is made anew."""
    try:
        return segments.facts(number)
    except Corrupt:
        return None


def put_facts(index: Index, number: int, facts: SegmentFacts) -> None:
    """Replace a segment's row. Durable when: the index was committed."""
    change = Change()
    change.put(Table.SEGMENT, segment_key(number), encode_facts(facts))
    index.apply(change)


async def scan_slowly(index: Index, table: Table) -> AsyncIterator[tuple[bytes, bytes]]:
    """All rows of a table, a slice at a time; it may change meanwhile."""
    start: bytes | None = None
    while rows := index.scan(table, start=start, limit=_SLICE_ROWS):
        for row in rows:
            yield row
        start = rows[-1][0] + b"\0"
        await trio.lowlevel.checkpoint()
