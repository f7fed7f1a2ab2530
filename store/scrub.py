"""Scrub: everything that is stored is read again, and put right where a second copy exists.

One rule: a scrub never makes things worse. A row or file is replaced only by one whose payload was
hashed, in the step in which the old one is still the wrong one that was found; what has no second copy
is named and left.

Segments go first, at the wished rate, in ascending order, noted in the index so that a restart goes on
behind the last one. Then come the histories, the chunk table as a whole, the journal, and what refers
to a chunk that is bad or missing.

Everything belongs to the index thread; reading and hashing is done in worker threads.
Source: FORMAT.md, "Scrub".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import trio
from msgspec.structs import replace

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.histories import Histories
from ckptfs.store.history_repair import check_history_file, records_of, settle_history
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.journal import JOURNAL_PATH
from ckptfs.store.layout import FORMAT_PATH, mend_format
from ckptfs.store.reclaim import Reclaim
from ckptfs.store.scrub_run import Found, Met, Pace, Tell, Uses
from ckptfs.store.scrub_segments import SegmentScrub
from ckptfs.store.scrub_state import (
    LAST_KEY,
    MOST_FINDINGS,
    RUNNING_KEY,
    Finding,
    ScrubRun,
    decode_run,
    encode_run,
)
from ckptfs.store.scrub_table import TableScrub
from ckptfs.store.segment_check import is_right
from ckptfs.store.segment_files import place_of
from ckptfs.store.segment_format import Codec, Location
from ckptfs.store.segments import Segments

_MOST_ROUNDS = 8


class Scrubber:
    """Runs scrubs, one at a time."""

    def __init__(
        self,
        disk: Disk,
        index: Index,
        segments: Segments,
        reclaim: Reclaim,
        histories: Histories,
        uses: Uses,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._disk = disk
        self._index = index
        self._segments = segments
        self._of_segments = SegmentScrub(disk, index, segments, reclaim, now_ns)
        self._of_table = TableScrub(disk, index, segments)
        self._histories = histories
        self._uses = uses
        self._now_ns = now_ns
        self._lock = trio.Lock()
        self._waiting = 0

    def last(self) -> ScrubRun | None:
        """The last run that was finished."""
        return noted_run(self._index, LAST_KEY)

    def unfinished(self) -> ScrubRun | None:
        """The run that goes on, or was interrupted."""
        return noted_run(self._index, RUNNING_KEY)

    async def run_now(self, tell: Tell | None = None) -> ScrubRun:
        """Scrub the whole store, as fast as it goes; what was found.

        A run in the background ends with Interrupted, and its state is dropped when this one is done.
        Durable when: this returned, but for the time of the next commit of the index.
        """
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._run(Found(ScrubRun(self._now_ns())), Pace(0), tell or _silent, lambda: False)
        finally:
            self._lock.release()

    async def go_on(self, bytes_s: float) -> ScrubRun:
        """Go on with the interrupted run, or begin one, at a rate; Interrupted if somebody wants one now."""
        async with self._lock:
            run = self.unfinished() or ScrubRun(self._now_ns())
            found = Found(run, findings=[one for one in run.findings if one.chunk is None or one.healed])
            found.bad = {one.chunk: None for one in run.findings if one.chunk and not one.healed}
            return await self._run(found, Pace(bytes_s), _silent, lambda: self._waiting > 0)

    async def _run(self, found: Found, pace: Pace, tell: Tell, is_unwanted: Callable[[], bool]) -> ScrubRun:
        try:
            await self._of_segments.check_all(found, pace, tell, is_unwanted, lambda: self._note(found))
            await self._check_histories(found)
            await self._of_table.check(found)
            self._check_journal(found)
            self._check_format(found)
            await self._settle(found)
        finally:
            if not found.run.finished_ns:
                self._note(found)
        return found.run

    # ---- histories, journal, format ------------------------------------------------------------

    async def _check_histories(self, found: Found) -> None:
        for unit in self._histories.units():
            records = records_of(self._index, unit.unit)
            try:
                file = await trio.to_thread.run_sync(check_history_file, self._disk, unit, records)
            except OSError as e:
                found.add(Finding(f"history/{unit.unit.hex()}.log", f"cannot be read: {e.strerror}"))
                continue
            now = self._histories.unit(unit.unit)
            if now is not None and (now.file_bytes, now.frames) == (unit.file_bytes, unit.frames):
                for finding in settle_history(self._disk, self._index, unit.unit, file):
                    found.add(finding)

    def _check_journal(self, found: Found) -> None:
        error = self._index.check_journal()
        if error is not None:
            # What the journal tells is in the index, which a commit makes durable.
            self._index.commit()
            place = str(error.place or JOURNAL_PATH)
            found.add(Finding(place, "a record of the journal was damaged", healed=True))

    def _check_format(self, found: Found) -> None:
        what = mend_format(self._disk)
        if what is not None:
            found.add(Finding(FORMAT_PATH, what, healed=True))

    # ---- the end ---------------------------------------------------------------------------------

    async def _settle(self, found: Found) -> None:
        """Find out what refers to the bad chunks, heal what has a copy, note the result."""
        await self._drop_good(found)
        met: dict[ChunkId, Met] = {}
        healed: dict[ChunkId, Location] = {}
        for _ in range(_MOST_ROUNDS):
            met |= await self._uses(set(found.bad))
            found.bad |= {chunk: None for chunk in met if self._is_missing(chunk) and chunk not in found.bad}
            new = await self._of_segments.heal(found.bad.keys() - healed.keys())
            healed |= new
            if not new:
                break  # else there may be more to be met below a tree that can be read again
        healed |= await self._healed_with_parents(found.bad.keys() - healed.keys()) if healed else {}
        for chunk, was in found.bad.items():
            if chunk in met or not self._is_missing(chunk):
                found.add(self._finding(chunk, was, met.get(chunk), healed.get(chunk)))
        kept = tuple(found.findings[:MOST_FINDINGS])
        more = len(found.findings) - len(kept)
        found.run = replace(found.run, finished_ns=self._now_ns(), findings=kept, more_findings=more)
        change = Change()
        change.put(Table.META, LAST_KEY, encode_run(found.run))
        change.delete(Table.META, RUNNING_KEY)
        self._index.apply(change)

    async def _healed_with_parents(self, chunks: Iterable[ChunkId]) -> dict[ChunkId, Location]:
        """Those that are right again where they are, because what they are encoded against is."""
        right: dict[ChunkId, Location] = {}
        for chunk in chunks:
            place = self._segments.locate(chunk)
            if place is not None and place.codec != Codec.RAW and await self._is_right(chunk, place):
                right[chunk] = place
        return right

    async def _is_right(self, chunk: ChunkId, place: Location) -> bool:
        parents = self._segments.parents_of([(chunk, place)])
        return await trio.to_thread.run_sync(is_right, self._disk, chunk, place, parents)

    def _is_missing(self, chunk: ChunkId) -> bool:
        return self._segments.locate(chunk) is None

    def _finding(
        self, chunk: ChunkId, was: Location | None, met: Met | None, healed: Location | None
    ) -> Finding:
        location = was or self._segments.locate(chunk)
        place = "no place: the index does not know it" if location is None else str(place_of(location))
        what = f"chunk {cid_text(chunk)} is {'missing' if location is None else 'damaged'}"
        if healed is not None:
            what += f"; it was found at {place_of(healed)}"
        path, tensor = (met.path, met.tensor) if met is not None else (None, None)
        return Finding(place, what, chunk, healed is not None, path, tensor)

    async def _drop_good(self, found: Found) -> None:
        """Leave out what was healed by a writer meanwhile, or is not stored any more."""
        for chunk in list(found.bad):
            place = self._segments.locate(chunk)
            if place is not None and await self._is_right(chunk, place):
                del found.bad[chunk]
                what = f"chunk {cid_text(chunk)} was damaged; it was stored again since"
                found.add(Finding(str(place_of(place)), what, chunk, healed=True))

    # ---- notes -----------------------------------------------------------------------------------

    def _note(self, found: Found) -> None:
        """Note how far the run is."""
        bad = [Finding("", "", chunk) for chunk in found.bad]
        kept = tuple([*found.findings, *bad][:MOST_FINDINGS])
        change = Change()
        change.put(Table.META, RUNNING_KEY, encode_run(replace(found.run, findings=kept)))
        self._index.apply(change)


def noted_run(index: Index, key: bytes) -> ScrubRun | None:
    """The run that is noted under a key; None if there is none."""
    encoded = index.get(Table.META, key)
    try:
        return None if encoded is None else decode_run(encoded)
    except Corrupt:
        return None


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""
