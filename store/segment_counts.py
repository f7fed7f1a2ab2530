"""What lies in segments: the counts of each in its row of the segment table, and their sums over the store.

One rule: the sums follow the segment table itself, change by change, so they are what it says, whoever
wrote to it, and cost nobody a walk.

Source: FORMAT.md, "Segments", index tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from ckptfs.store.errors import Corrupt
from ckptfs.store.index import Index, Table
from ckptfs.store.journal import Op
from ckptfs.store.segment_format import Location, Row, SegmentFacts, SegmentKind, decode_facts


@dataclass(slots=True)
class Counts:
    """Chunks of a segment, their stored bytes, and by how many these are fewer than the chunks' own."""

    chunks: int = 0
    payload_bytes: int = 0
    spared_bytes: int = 0

    def add(self, one: Location | Row, times: int = 1) -> None:
        """Count a chunk that lies there; with -1 for `times` one that leaves."""
        self.chunks += times
        self.payload_bytes += times * one.stored
        self.spared_bytes += times * (one.length - one.stored)


def counts_of(rows: Iterable[Location | Row]) -> Counts:
    """The counts of these chunks."""
    counts = Counts()
    for one in rows:
        counts.add(one)
    return counts


def with_counts(facts: SegmentFacts, counts: Counts) -> SegmentFacts:
    """A segment's facts with these counts in the place of their own."""
    return replace(
        facts,
        chunks=counts.chunks,
        payload_bytes=counts.payload_bytes,
        spared_bytes=counts.spared_bytes,
    )


def moved_by(facts: SegmentFacts, moved: Counts) -> SegmentFacts:
    """A segment's facts after chunks came or, with negative counts, left. What was not counted yet, or wrong,
    stays at 0, for a scrub to put right."""
    counts = Counts(
        max(0, facts.chunks + moved.chunks),
        max(0, facts.payload_bytes + moved.payload_bytes),
        max(0, facts.spared_bytes + moved.spared_bytes),
    )
    return with_counts(facts, counts)


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of unique payload: those in segments of raw chunks; those in encoded segments, and how many bytes
    the chunks in these have."""

    raw_bytes: int = 0
    encoded_bytes: int = 0
    plain_bytes: int = 0

    def with_segment(self, facts: SegmentFacts, times: int = 1) -> Stored:
        """The same and a segment more; with -1 for `times` a segment less."""
        payload = times * facts.payload_bytes
        if facts.kind != SegmentKind.ENCODED:
            return Stored(self.raw_bytes + payload, self.encoded_bytes, self.plain_bytes)
        plain = payload + times * facts.spared_bytes
        return Stored(self.raw_bytes, self.encoded_bytes + payload, self.plain_bytes + plain)


class StoredSums:
    """Keeps `now` as the segment table has it. Belongs to the index thread."""

    def __init__(self, index: Index) -> None:
        """Corrupt if a row cannot be read."""
        self._index = index
        self.now = Stored()
        for _, facts in index.scan(Table.SEGMENT):
            self.now = self.now.with_segment(decode_facts(facts))

    def note(self, operations: list[Op]) -> None:
        """Watches the index: called with what a change is about to do (see Index.watch)."""
        put: dict[bytes, bytes | None] = {}
        for table, key, value in operations:
            if table == Table.SEGMENT:
                put[key] = value
        for key, value in put.items():
            self._count(self._index.get(Table.SEGMENT, key), -1)
            self._count(value, 1)

    def _count(self, row: bytes | None, times: int) -> None:
        with suppress(Corrupt):  # what was never counted
            if row is not None:
                self.now = self.now.with_segment(decode_facts(row), times)
