"""Digests of whole files, made in the background: SHA-256, BLAKE3 and CRC-64/NVME of what versions hold; on
the way their tensors are looked at.

One rule: it is the last to get anything. One file at a time, of the newest version first; it rests while a
version is being made or the disk is nearly full, and never takes more than a quarter of one core. (A thread
of lower priority would not do: preempted while it holds the interpreter's lock, it would stop the mount.)

Source: ARCHITECTURE.md, section 6; FORMAT.md, "Digests".
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import trio

from ckptfs.daemon.health_making import HealthMaking
from ckptfs.daemon.saved_files import Saved, walk
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.digests import MOST_CONTENTS, FileDigests
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound, ReadOnly
from ckptfs.store.health_records import ContentHealth
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_mirror import version_key, version_of
from ckptfs.store.ids import ChunkId, RecipeId, TreeId, UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.segment_format import Location
from ckptfs.store.segments import Segments
from ckptfs.store.sweep import listed
from ckptfs.store.whole_files import WholeFiles

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
_RETRY_S = 60.0
_TRY_AGAIN_S = 3600.0
_SHARE = 4
_LEAST_PAUSE_S = 0.0005
_SLICE_ROWS = 256
_CONTENTS_AT_ONCE = 8192
_MOST_SEEN = 1 << 16
# A file that is nearly all hole takes minutes a TiB and tells nobody anything.
_MOST_HOLE_BYTES = 64 << 30
# What a death loses of work that is done.
_BYTES_A_RECORD = 4 << 30
# Rows of tensors, of some 500 bytes each in memory, that wait to be recorded.
_LISTED_A_RECORD = 8192
_DONE = b"digested:"


@dataclass(order=True, slots=True)
class _Due:
    """A version to go through; the newest is the least."""

    order: int
    unit: UnitId = field(compare=False)
    number: int = field(compare=False)
    size_bytes: int = field(compare=False)

    @property
    def key(self) -> tuple[UnitId, int]:
        """Which version it is."""
        return self.unit, self.number


@dataclass(slots=True)
class _Failed:
    """Content that no digest could be made of (or a directory of it): the chunk that was wrong, where that
    lay then, and the versions that hold the content."""

    chunk: ChunkId
    place: Location | None
    again_at: float
    versions: dict[tuple[UnitId, int], _Due]


@dataclass(slots=True)
class _Made:
    """What was made and is not recorded yet; `health` is None for a content without a float tensor, and
    `listed` counts the rows of tensors in it."""

    digests: dict[RecipeId, FileDigests] = field(default_factory=dict)
    health: dict[RecipeId, ContentHealth | None] = field(default_factory=dict)
    listed: int = 0
    read_bytes: int = 0

    def add_health(self, recipe: RecipeId, found: ContentHealth | None) -> None:
        """Note what was found in a content."""
        self.health[recipe] = found
        self.listed += 0 if found is None else len(found.listed)

    @property
    def is_enough(self) -> bool:
        """Whether it is time to record it."""
        most = max(len(self.digests), len(self.health))
        if most >= MOST_CONTENTS or self.listed >= _LISTED_A_RECORD:
            return True
        return self.read_bytes >= _BYTES_A_RECORD


class Digesting:
    """Goes through each version once, and again when what was wrong in it lies elsewhere by now (it was
    healed), or some time has passed. Belongs to the index thread, and only `run` changes its fields.

    META `digested:` ‖ unit id says up to which version a unit was gone through, with nothing left over.
    """

    def __init__(
        self,
        index: Index,
        segments: Segments,
        histories: Histories,
        digests: DigestLog,
        files: WholeFiles,
        may_work: Callable[[], bool],
        health: HealthMaking | None = None,
    ) -> None:
        """`may_work` says whether nothing more urgent goes on now; `health` looks at tensors on the way."""
        self._index = index
        self._segments = segments
        self._histories = histories
        self._digests = digests
        self._files = files
        self._may_work = may_work
        self._health = health
        self._due: list[_Due] = []
        self._known: dict[UnitId, int] = {}
        self._seen: set[tuple[bytes, TreeId]] = set()
        self._failed: dict[ChunkId, _Failed] = {}
        self._closed: set[UnitId] = set()
        self._state = (-1, -1)
        self._current_bytes = 0
        self._worked_at = 0.0

    @property
    def pending_bytes(self) -> int:
        """At most how many bytes are still to be read of the versions that `run` has taken up; what several
        share counts for each."""
        return max(0, self._current_bytes) + sum(due.size_bytes for due in self._due)

    async def waiting_bytes(self) -> int:
        """The same of all versions; found in steps."""
        waiting = 0
        if listed(self._histories) != self._state:
            for unit in self._histories.units():
                start: bytes | None = version_key(unit.unit, self._known_of(unit.unit) + 1)
                while rows := self._versions(unit.unit, start):
                    waiting += sum(version_of(value).logical_bytes for _, value in rows)
                    start = rows[-1][0] + b"\0"
                    await trio.lowlevel.checkpoint()
        return waiting + self.pending_bytes

    def _known_of(self, unit: UnitId) -> int:
        known = self._known.get(unit)
        return self._noted(unit) if known is None else known

    async def run(self) -> None:
        """Make digests of whatever has none, for ever; cancelled at shutdown."""
        while True:
            try:
                await self.catch_up()
                await trio.sleep(LOOK_EVERY_S)
            except (CkptfsError, OSError) as e:
                log.warning("digests are made later: %s", e)
                await trio.sleep(_RETRY_S)

    async def catch_up(self) -> None:
        """Go through all versions that are listed, the newest first; one that comes meanwhile goes before.

        NoSpace or OSError: what is left is still due. Durable when: this returned.
        """
        self._take_up_failed()
        while True:
            await self._gather()
            if not self._due:
                break
            due = heapq.heappop(self._due)
            try:
                await self._version(due)
            except ReadOnly as e:
                self._closed.add(due.unit)
                log.error("no more digests of a unit: %s", e)
            except BaseException:
                heapq.heappush(self._due, due)
                self._seen.clear()
                raise
            finally:
                self._current_bytes = 0
        self._note_done()

    def _take_up_failed(self) -> None:
        """Have another look at what was healed since, or failed long ago."""
        now, ripe = time.monotonic(), []
        for key in [*islice(self._failed, _SLICE_ROWS)]:
            one = self._failed[key] = self._failed.pop(key)  # The next look begins behind it.
            if now >= one.again_at or self._segments.locate(one.chunk) != one.place:
                ripe.append(key)
        if not ripe:
            return
        versions = {key: due for one in ripe for key, due in self._failed.pop(one).versions.items()}
        for due in versions.values():
            heapq.heappush(self._due, due)
        self._seen.clear()

    def _fail(self, due: _Due, content: ChunkId, error: Corrupt) -> None:
        """Note that something of a version cannot be read."""
        chunk = content if error.expected is None else ChunkId(error.expected)
        again_at = time.monotonic() + _TRY_AGAIN_S
        self._failed[content] = _Failed(chunk, self._segments.locate(chunk), again_at, {due.key: due})

    async def _gather(self) -> None:
        """Take up the versions that were listed since the last look."""
        if (state := listed(self._histories)) == self._state:
            return
        for unit in self._histories.units():
            newest = unit.next_number - 1
            known = self._known.setdefault(unit.unit, self._noted(unit.unit))
            start: bytes | None = version_key(unit.unit, known + 1)
            while newest > known and (rows := self._versions(unit.unit, start)):
                for _, value in rows:
                    record = version_of(value)
                    due = _Due(-record.time_ns, unit.unit, record.number, record.logical_bytes)
                    heapq.heappush(self._due, due)
                    self._known[unit.unit] = record.number
                start = rows[-1][0] + b"\0"
                await trio.lowlevel.checkpoint()
            self._known[unit.unit] = max(newest, known)
        self._state = state

    def _versions(self, unit: UnitId, start: bytes | None) -> list[tuple[bytes, bytes]]:
        return self._index.scan(Table.VERSION, unit, start=start, limit=_SLICE_ROWS)

    def _noted(self, unit: UnitId) -> int:
        return int.from_bytes(self._index.get(Table.META, _DONE + unit) or b"", "big")

    def _note_done(self) -> None:
        """Nothing is due: the next start need not look at these versions again."""
        change = Change()
        left = [key for one in self._failed.values() for key in one.versions]
        for unit, newest in self._known.items():
            number = min([newest, *(n - 1 for owner, n in left if owner == unit)])
            if number > self._noted(unit) and unit not in self._closed:
                change.put(Table.META, _DONE + unit, number.to_bytes(8, "big"))
        if change.operations:
            self._index.apply(change)

    async def _version(self, due: _Due) -> None:
        record = self._histories.version(due.unit, due.number)
        if record is None or due.unit in self._closed:
            return
        self._current_bytes = record.logical_bytes
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        contents: dict[RecipeId, Saved] = {}

        def pass_over(path: bytes, tree: TreeId, error: Corrupt) -> None:
            # A directory that cannot be read is for `verify` and `scrub` to name.
            self._fail(due, tree, error)

        for step, saved in enumerate(walk(self._segments, Saved(b"", record.top), pass_over, self._seen)):
            recipe = saved.entry.recipe
            if recipe in self._failed:
                self._failed[recipe].versions[due.key] = due
            if recipe is None or recipe in self._failed or recipe in contents or self._has(recipe):
                self._current_bytes -= saved.entry.size
            else:
                contents[recipe] = saved
            if len(contents) >= _CONTENTS_AT_ONCE:
                await self._make(due, record, contents)
                contents = {}
            if step % _SLICE_ROWS == 0:
                await trio.lowlevel.checkpoint()
        # What is left by now was in directories that were walked for another version.
        self._current_bytes = sum(saved.entry.size for saved in contents.values())
        await self._make(due, record, contents)
        if self._health is not None:
            await self._health.sum_up(record, self._rest)

    def _has(self, recipe: RecipeId) -> bool:
        lacks_health = self._health is not None and self._health.lacks(recipe)
        return self._digests.has(recipe) and not lacks_health

    async def _make(self, due: _Due, record: VersionRecord, contents: dict[RecipeId, Saved]) -> None:
        made = _Made()
        for saved in contents.values():
            await self._look_at(made, due, record, saved)
            self._current_bytes -= saved.entry.size
            if made.is_enough:
                await self._record(record.unit, made)
                made = _Made()
        await self._record(record.unit, made)

    async def _record(self, unit: UnitId, made: _Made) -> None:
        self._digests.record(unit, made.digests)
        if self._health is not None and made.health:
            await self._health.record(unit, made.health)

    async def _look_at(self, made: _Made, due: _Due, record: VersionRecord, saved: Saved) -> None:
        """Add to what was made what there is to know of one content."""
        recipe = saved.entry.recipe
        assert recipe is not None, "only regular files have contents"
        try:
            await self._rest(0)
            if saved.entry.size > _MOST_HOLE_BYTES:
                stored = self._segments.read_recipe(recipe)
                if stored.size - stored.data_bytes() > _MOST_HOLE_BYTES:
                    return
            tensors = None
            if self._health is not None and self._health.lacks(recipe):
                tensors = await self._health.begin(recipe)
            if not self._digests.has(recipe) or (tensors is not None and not tensors.is_empty):
                made.digests[recipe] = await self._files.digests(recipe, self._rest, tensors)
                made.read_bytes += saved.entry.size
            if tensors is not None:
                made.add_health(recipe, tensors.finish())
        except NotFound:
            return
        except Corrupt as e:
            if self._histories.version(record.unit, record.number) is None:
                return  # It was let go, and collected while it was being read.
            self._fail(due, recipe, e)
            path = os.fsdecode(saved.path)
            log.error("no digest of %s of %s in version %d: %s", path, self._name(record), record.number, e)

    async def _rest(self, _: int) -> None:
        """Pause as long as it takes to have worked a quarter of the time, and until nothing is urgent."""
        worked_s = time.monotonic() - self._worked_at
        await trio.sleep(max(_LEAST_PAUSE_S, min(LOOK_EVERY_S, (_SHARE - 1) * worked_s)))
        while not self._may_work():
            await trio.sleep(LOOK_EVERY_S)
        self._worked_at = time.monotonic()

    def _name(self, record: VersionRecord) -> str:
        unit = self._histories.unit(record.unit)
        return unit.text if unit is not None else record.unit.hex()
