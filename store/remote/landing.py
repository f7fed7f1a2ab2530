"""What all pulls have in common: they fetch, and what came becomes a version here.

One rule: a version is listed here only after everything that it leads to is stored and durable.

Source: FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckptfs.store.errors import Conflict, Corrupt, InvalidRequest, NotFound
from ckptfs.store.histories import Histories, Unit
from ckptfs.store.history import PULLED, VersionRecord
from ckptfs.store.ids import UNIT_ID_BYTES, ChunkId, UnitId
from ckptfs.store.index import Change, Index
from ckptfs.store.ingest import Ingest
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.heads import newest_head
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.log import RemoteLog
from ckptfs.store.remote.objects import Random, Remote
from ckptfs.store.segments import Segments
from ckptfs.store.version_names import version_name

T = TypeVar("T")
Work = Callable[[Fetcher, set[ChunkId]], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that is here now, and what had to be fetched for it."""

    record: VersionRecord
    fetched_chunks: int
    fetched_bytes: int


class Landing:
    """Of one remote, in one store. Belongs to the index thread; one pull at a time."""

    def __init__(
        self,
        remote: Remote,
        index: Index,
        segments: Segments,
        ingest: Ingest,
        histories: Histories,
        random: Random,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """`random(n)` gives n unpredictable bytes; `on_progress` is told how many bytes were fetched."""
        self.segments = segments
        self.ingest = ingest
        self._remote = remote
        self._index = index
        self._histories = histories
        self._random = random
        self._on_progress = on_progress
        self._log = RemoteLog(remote)
        self._known = KnownChunks(remote)
        self._claim = 0

    async def attempt(self, sources: Sequence[VersionRecord], work: Work[T]) -> T:
        """What `work(fetcher, pinned chunks)` returns, which fetches of these versions; it is done once more
        if a collector of the remote was at work meanwhile. NotFound: a collection has let a version go."""
        for last in (False, True):
            known_as_of = await self._look()
            try:
                with self.segments.pins.hold() as held:
                    return await work(self._fetcher(held), held)
            except (NotFound, Corrupt):
                if last or await self._look() == known_as_of:
                    for source in sources:
                        await self._check_listed(source)
                    raise  # else packs were taken, or copied over, by a collector meanwhile
        raise AssertionError("unreachable")

    def _fetcher(self, held: set[ChunkId]) -> Fetcher:
        return Fetcher(self._remote, self._known, self.segments, self.ingest, held, self._on_progress)

    async def _check_listed(self, source: VersionRecord) -> None:
        """NotFound if the version is not on the remote any more."""
        head = (await newest_head(self._remote, source.unit)).head
        if head is not None and source.number not in head.versions:
            raise NotFound(
                f"version {source.number} was let go from {self._remote.url} by a collection meanwhile; "
                "`ckptfs pull` of the mount point lists what is there"
            )

    async def _look(self) -> int:
        """Know what the remote has, as of its newest decision; the number of that."""
        await self._log.refresh()
        kept = await self._log.kept()
        if kept.claim != self._claim:
            self._claim, self._known = kept.claim, KnownChunks(self._remote, kept)
        await self._known.refresh()
        return self._claim

    # ---- the version here -------------------------------------------------------------------

    def check_free(self, name: bytes) -> None:
        """InvalidRequest if that is no name for a unit, Conflict if a live directory has it."""
        if not name or b"\0" in name or {b"", b".", b".."} & {*name.split(b"/")}:
            raise InvalidRequest(f"{os.fsdecode(name)!r} is no name for a unit; give another")
        unit = self._histories.unit_named(name)
        if unit is not None and unit.ino:
            raise Conflict(f"{unit.text} is live here; give the copy another name, or move that away first")

    def list_version(
        self,
        source: VersionRecord,
        name: bytes,
        before_listing: Callable[[VersionRecord], None] = lambda record: None,
    ) -> VersionRecord:
        """Append the version; the unit's newest if that is the same already. `before_listing` is shown the
        record that will be appended. One step of this thread. Durable when: this returned."""
        self.check_free(name)
        unit = self._histories.unit_named(name)
        if unit is None:
            unit_id = UnitId(self._random(UNIT_ID_BYTES))
            unit = self._histories.new_unit(unit_id, name, 0, source.time_ns)
        newest = self._histories.newest(unit.unit)
        if newest is not None and (newest.top, newest.state) == (source.top, source.state):
            return newest
        record = self._record(source, unit)
        before_listing(record)
        change = Change()
        self._histories.append_version(record, change)
        self._index.apply(change, sync=True)
        return record

    def _record(self, source: VersionRecord, unit: Unit) -> VersionRecord:
        return replace(
            source,
            unit=unit.unit,
            number=unit.next_number,
            name=version_name(unit.next_number, source.time_ns),
            origin=PULLED,
            before=unit.head,
        )
