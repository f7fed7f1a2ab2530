"""The segments' part of a scrub: `.idx` files, payloads, and the rows of the index about them.

One rule: a row is replaced only by one whose payload was hashed, in the step in which the old one is
still the wrong one that was found.

Everything belongs to the index thread; reading and hashing is done in worker threads.
Source: FORMAT.md, "Scrub".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import trio
from msgspec.structs import replace

from ckptfs.store.bad_chunks import find_bad
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Corrupt
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.parent_table import Lineage
from ckptfs.store.places import Suspect
from ckptfs.store.reclaim import Reclaim
from ckptfs.store.scrub_run import Found, Interrupted, Pace, Tell
from ckptfs.store.scrub_state import Finding
from ckptfs.store.scrub_table import facts_or_none, is_here, put_facts, rows_of
from ckptfs.store.segment_check import find_rows, header_of, mend_idx, remake_idx
from ckptfs.store.segment_counts import Counts, counts_of, moved_by
from ckptfs.store.segment_files import place_of, read_idx_bytes
from ckptfs.store.segment_format import (
    Location,
    Row,
    SegmentIndex,
    encode_facts,
    encode_location,
    segment_key,
    segment_paths,
)
from ckptfs.store.segments import Segments

_BATCH_BYTES = 8 << 20
_BATCH_CHUNKS = 1024
_SLICE_ROWS = 512
_NOTE_EVERY_S = 10.0


class SegmentScrub:
    """Checks all segments of a store, and heals chunks. One run at a time."""

    def __init__(
        self, disk: Disk, index: Index, segments: Segments, reclaim: Reclaim, now_ns: Callable[[], int]
    ) -> None:
        self._disk = disk
        self._index = index
        self._segments = segments
        self._reclaim = reclaim
        self._now_ns = now_ns

    # ---- segments ---------------------------------------------------------------------------

    async def check_all(
        self,
        found: Found,
        pace: Pace,
        tell: Tell,
        is_unwanted: Callable[[], bool],
        note: Callable[[], None],
    ) -> None:
        """Check every segment from `found.run.next_segment` on; `note` is called now and then.

        Interrupted as soon as `is_unwanted` says so.
        """
        noted_at = time.monotonic()
        start = segment_key(found.run.next_segment)
        while rows := self._index.scan(Table.SEGMENT, start=start, limit=1):
            key = rows[0][0]
            number = int.from_bytes(key, "big")
            await self._check_segment(number, found, pace, is_unwanted)
            found.run = replace(found.run, next_segment=number + 1)
            start = segment_key(number + 1)
            tell(found.run.checked_bytes, self._segments.payload_bytes())
            if time.monotonic() - noted_at >= _NOTE_EVERY_S:
                note()
                noted_at = time.monotonic()

    async def _check_segment(
        self, number: int, found: Found, pace: Pace, is_unwanted: Callable[[], bool]
    ) -> None:
        index = await self._check_idx(number, found)
        if index is None:
            return
        before = facts_or_none(self._segments, number)
        here, strays = await self._sorted_rows(number, index.rows, found)
        for batch in _batches(here):
            await self._check_batch(batch, found)
            read, run = sum(location.stored for _, location in batch), found.run
            found.run = replace(run, chunks=run.chunks + len(batch), checked_bytes=run.checked_bytes + read)
            await pace.spent(read)
            if is_unwanted():
                raise Interrupted
        await self._check_strays(number, strays, found)
        facts = facts_or_none(self._segments, number)
        if facts is None or facts != before:
            return
        if facts.chunks != len(here) or facts.payload_bytes != sum(one.stored for _, one in here):
            found.miscounted.add(number)
        elif any(chunk in found.bad for chunk, _ in here):
            # So every dedup hit in it is hashed, in later mounts too.
            put_facts(self._index, number, replace(facts, verified_ns=0))
        else:
            self._segments.mark_verified(number)
            self._segments.suspect.discard(number)
            put_facts(self._index, number, replace(facts, verified_ns=self._now_ns()))

    async def _check_idx(self, number: int, found: Found) -> SegmentIndex | None:
        """The `.idx`, made right if it was wrong; None if the segment is gone, or nothing helps."""
        path = segment_paths(number)[1]
        async with self._reclaim.paused():
            try:
                index, is_file_right = await trio.to_thread.run_sync(read_idx_bytes, self._disk, number)
                if is_file_right:
                    return index
                await trio.to_thread.run_sync(mend_idx, self._disk, number)
                what = "a bit of the .idx was flipped"
            except Corrupt as e:
                facts = facts_or_none(self._segments, number)
                if facts is None:
                    return None
                rows = await rows_of(self._index, number)
                parents = self._segments.parents_of(rows)
                try:
                    index = await trio.to_thread.run_sync(
                        remake_idx, self._disk, number, facts, rows, parents
                    )
                except (CkptfsError, OSError):
                    found.add(Finding(path, str(e)))
                    return None
                what = f"{e}; it was made anew from the index"
            self._segments.evict(number)
            self._reclaim.restored(number, ())
        found.add(Finding(path, what, healed=True))
        return index

    async def _sorted_rows(
        self, number: int, rows: Sequence[Row], found: Found
    ) -> tuple[list[Suspect], list[Row]]:
        """The rows that the chunk table has here, in the order of their places, and the others."""
        here: list[Suspect] = []
        strays: list[Row] = []
        for start in range(0, len(rows), _SLICE_ROWS):
            for row in rows[start : start + _SLICE_ROWS]:
                location = row.location(number)
                if await self._place_of(row, number, found) == location:
                    here.append((row.chunk, location))
                    self._check_lineage(row, found)
                else:
                    strays.append(row)
            await trio.lowlevel.checkpoint()
        here.sort(key=lambda pair: (pair[1].flags, pair[1].offset))
        return here, strays

    async def _place_of(self, row: Row, number: int, found: Found) -> Location | None:
        """Where the chunk table has the chunk of a row; if that cannot be told: here, if its bytes are."""
        try:
            return self._segments.locate(row.chunk)
        except Corrupt as e:
            error = e
        here = row.location(number)
        whole = await trio.to_thread.run_sync(header_of, self._disk, here)
        if whole is None and not await is_here(self._disk, self._segments, row.chunk, here, row):
            return None  # perhaps another segment has it; else TableScrub takes the row out
        change = Change()
        change.put(Table.CHUNK, row.chunk, encode_location(here))
        self._index.apply(change)
        found.add(Finding("index", f"{error}; it was taken from the .idx", row.chunk, healed=True))
        found.miscounted.add(number)
        return here

    async def _check_batch(self, batch: list[Suspect], found: Found) -> None:
        parents = self._segments.parents_of(batch)
        bad = await trio.to_thread.run_sync(find_bad, self._disk, batch, parents, abandon_on_cancel=True)
        for one in bad:
            still = self._segments.still_bad(one)
            if still is not None:
                self._segments.note_bad(still)
                found.bad[one.chunk] = one.location

    def _check_lineage(self, row: Row, found: Found) -> None:
        """Put right what the index says a chunk of this row is encoded against."""
        lineage = Lineage(row.depth, row.parents) if row.parents else None
        if self._segments.parents.agrees(row.chunk, lineage):
            return
        change = Change()
        self._segments.parents.remove(change, row.chunk)
        if lineage is not None:
            self._segments.parents.put(change, row.chunk, lineage)
        self._index.apply(change)
        what = f"what chunk {cid_text(row.chunk)} is encoded against was wrong in the index"
        found.add(Finding("index", what, healed=True))

    async def _check_strays(self, number: int, strays: list[Row], found: Found) -> None:
        """Rows of an `.idx` that the chunk table has elsewhere: a healed chunk, or a wrong row."""
        for row in strays:
            chunk, here = row.chunk, row.location(number)
            there = None
            with suppress(Corrupt):
                there = self._segments.locate(chunk)
            if there is None or there == here:
                continue
            if await is_here(self._disk, self._segments, chunk, there):
                continue
            if await is_here(self._disk, self._segments, chunk, here, row):
                async with self._reclaim.paused():
                    if self._move(chunk, there, number, row):
                        what = f"the chunk table had it wrong ({place_of(there)})"
                        found.add(Finding(str(place_of(here)), what, chunk, healed=True))
                        found.miscounted |= {number, there.segment}
                        found.bad.pop(chunk, None)
            elif self._segments.locate(chunk) == there:
                found.bad[chunk] = there

    # ---- healing ----

    async def heal(self, wanted: set[ChunkId]) -> dict[ChunkId, Location]:
        """Point the chunk table to good copies; where they are."""
        if not wanted:
            return {}
        moved: dict[ChunkId, Location] = {}
        async with self._reclaim.paused():
            copies = await trio.to_thread.run_sync(find_rows, self._disk, wanted)
            for chunk, rows in copies.items():
                for number, row in rows:
                    if facts_or_none(self._segments, number) is None:
                        continue  # somebody is about to commit it, or to take it back
                    there, place = self._segments.locate(chunk), row.location(number)
                    if await is_here(self._disk, self._segments, chunk, place, row) and (
                        there == place or self._move(chunk, there, number, row)
                    ):
                        moved[chunk] = place
                        break
        return moved

    def _move(self, chunk: ChunkId, there: Location | None, number: int, row: Row) -> bool:
        """Give a chunk its right place, which was hashed: that of a row in segment `number`; unless the table
        has changed meanwhile, or its children, or what it is encoded against, do not allow it."""
        parents, here = self._segments.parents, row.location(number)
        lineage = Lineage(row.depth, row.parents) if row.parents else None
        if self._segments.locate(chunk) != there or not parents.may_put(chunk, lineage):
            return False
        change = Change()
        change.put(Table.CHUNK, chunk, encode_location(here))
        parents.remove(change, chunk)
        if lineage is not None:
            parents.put(change, chunk, lineage)
        leaves = there is not None and there.segment != here.segment
        if there is None or leaves:
            self._count(change, here.segment, counts_of([here]))
        if there is not None and leaves:
            # Its row there must go, or a rebuild might take it for the better one.
            left = Counts()
            left.add(there, -1)
            self._count(change, there.segment, left)
            change.after_commit(lambda: self._reclaim.superseded(there.segment, chunk))
        self._index.apply(change, sync=True)
        self._reclaim.restored(here.segment, [chunk])
        return True

    def _count(self, change: Change, segment: int, moved: Counts) -> None:
        facts = facts_or_none(self._segments, segment)
        if facts is None:
            return
        leaves = moved.chunks < 0
        moved_facts = replace(moved_by(facts, moved), punch_due=facts.punch_due or leaves)
        change.put(Table.SEGMENT, segment_key(segment), encode_facts(moved_facts))
        if leaves:
            # Marks of what leaves would be counted for what stays.
            self._segments.verified.remove_segment(segment)


def _batches(rows: Iterable[Suspect]) -> Iterable[list[Suspect]]:
    """Rows in their order, about _BATCH_BYTES of payload at a time."""
    batch: list[Suspect] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row[1].stored
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_CHUNKS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
