"""The chunk table as ingest uses it: what is stored already, and the rows of what is new.

One rule: a row is put only for bytes that are synced, and a hit is pinned in the same step in which
it was found; so a recipe never names a chunk that is not there.

A hit that was not verified in this mount is re-read and hashed: always when its segment was last
verified more than a week ago or had a bad chunk, else one in sixteen. A bad one counts as new, so
the bytes in hand heal it.

Touched only by the index thread; hashing is done in worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import trio

from ckptfs.store.bad_chunks import find_bad
from ckptfs.store.disk import Disk
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.packing import Built
from ckptfs.store.segment_counts import Counts, moved_by, with_counts
from ckptfs.store.segment_format import (
    Codec,
    Location,
    decode_location,
    encode_facts,
    encode_location,
    segment_key,
)
from ckptfs.store.segments import Segments

NEXT_SEGMENT = b"next_segment"
CHECK_AGE_NS = 7 * 24 * 3600 * 10**9
CHECK_ONE_IN = 16
_LOOKUPS_AT_ONCE = 512


class Identified(Protocol):
    """What has the id of a chunk."""

    @property
    def chunk(self) -> ChunkId:
        """The id."""


One = TypeVar("One", bound=Identified)


class Putting:
    """What `ChunkTable.put` put into a change, to be accounted for once the change is applied."""

    __slots__ = ("counts", "healed", "segment", "surplus")

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.counts = Counts()
        self.healed: dict[int, Counts] = {}
        self.surplus: list[ChunkId] = []


class ChunkTable:
    """Looks chunks up before they are stored, and enters them once they are."""

    def __init__(self, disk: Disk, index: Index, segments: Segments, now_ns: Callable[[], int]) -> None:
        self._disk = disk
        self._index = index
        self._segments = segments
        self._now_ns = now_ns
        self._unverified_hits = 0
        self._bad: set[ChunkId] = set()

    async def unknown(self, fresh: Sequence[One], held: set[ChunkId], seen: set[ChunkId]) -> list[One]:
        """Those of `fresh` that have to be stored, each once; they are added to `seen`.

        `seen` is what the caller has in hand and not committed yet. All ids are added to `held`,
        which is a pin. Other tasks run in between.
        """
        new: list[One] = []
        checks: list[tuple[One, Location]] = []
        for start in range(0, len(fresh), _LOOKUPS_AT_ONCE):
            await trio.lowlevel.checkpoint()
            self._look_up(fresh[start : start + _LOOKUPS_AT_ONCE], held, seen, new, checks)
        if checks:
            new += await self._bad_of(checks, seen)
        return new

    def put(self, change: Change, built: Built, next_segment: int) -> Putting:
        """Enter the rows of a durable segment, and the segment itself.

        A chunk that another ingest has committed meanwhile keeps its place; the copy here is
        surplus. A healed chunk moves here, and leaves the count of the segment where it was.
        If no row is left (no chunk is counted), nothing is put and the caller discards the segment.
        """
        putting = Putting(built.index.number)
        get, table = self._index.get, Table.CHUNK
        for row in built.index.rows:
            before = get(table, row.chunk)
            if before is not None and not self._moves(change, row.chunk, before, putting):
                continue
            change.put(table, row.chunk, encode_location(row.location(putting.segment)))
            putting.counts.add(row)
        if not putting.counts.chunks:
            return putting
        for segment, moved in putting.healed.items():
            self._reduce(change, segment, moved)
        facts = with_counts(built.facts(), putting.counts)
        change.put(Table.SEGMENT, segment_key(putting.segment), encode_facts(facts))
        change.put(Table.META, NEXT_SEGMENT, next_segment.to_bytes(8, "big"))
        return putting

    def committed(self, built: Built, putting: Putting) -> None:
        """The change is applied: what was put is verified."""
        self._segments.mark_verified(putting.segment)
        if self._bad:
            self._bad.difference_update(row.chunk for row in built.index.rows)

    def _look_up(
        self,
        fresh: Sequence[One],
        held: set[ChunkId],
        seen: set[ChunkId],
        new: list[One],
        checks: list[tuple[One, Location]],
    ) -> None:
        get, verified = self._index.get, self._segments.verified
        old: dict[int, bool] = {}
        for one in fresh:
            chunk = one.chunk
            if chunk in seen:
                continue
            held.add(chunk)
            encoded = get(Table.CHUNK, chunk)
            if encoded is None:
                seen.add(chunk)
                new.append(one)
                continue
            location = decode_location(encoded)
            if location not in verified and self._wants_check(location, old):
                checks.append((one, location))

    def _wants_check(self, location: Location, old: dict[int, bool]) -> bool:
        segment = location.segment
        # Of an encoded one the parents count, too, and they lie elsewhere.
        if segment in self._segments.suspect or location.codec != Codec.RAW:
            return True
        if segment not in old:
            facts = self._segments.facts(segment)
            old[segment] = facts is None or self._now_ns() - facts.verified_ns > CHECK_AGE_NS
        if old[segment]:
            return True
        self._unverified_hits += 1
        return self._unverified_hits % CHECK_ONE_IN == 1

    async def _bad_of(self, checks: list[tuple[One, Location]], seen: set[ChunkId]) -> list[One]:
        """Hash the stored chunks; returns, each once, the fresh ones that heal a bad one."""
        suspects = {one.chunk: location for one, location in checks}
        parents = self._segments.parents_of(suspects.items())
        bad = await trio.to_thread.run_sync(find_bad, self._disk, list(suspects.items()), parents)
        for one in bad:
            del suspects[one.chunk]
        bad = [still for one in bad if (still := self._segments.still_bad(one)) is not None]
        for one in bad:
            self._segments.note_bad(one)
        for location in suspects.values():
            self._segments.note_good(location)
        in_hand = {one.chunk: one for one, _ in checks}
        healing = [in_hand[one.chunk] for one in bad if one.chunk not in seen]
        self._bad.update(one.chunk for one in healing)
        seen.update(one.chunk for one in healing)
        return healing

    def _moves(self, change: Change, chunk: ChunkId, before: bytes, putting: Putting) -> bool:
        """Whether a chunk that is in the table already gets the new place, which is raw."""
        if chunk not in self._bad:
            putting.surplus.append(chunk)
            return False
        old = decode_location(before)
        if old.codec != Codec.RAW:
            self._segments.parents.remove(change, chunk)
        putting.healed.setdefault(old.segment, Counts()).add(old, -1)
        return True

    def _reduce(self, change: Change, segment: int, moved: Counts) -> None:
        facts = self._segments.facts(segment)
        if facts is not None:
            change.put(Table.SEGMENT, segment_key(segment), encode_facts(moved_by(facts, moved)))
