"""The collector: takes out what nothing reaches, and lets versions go when room is short.

One rule: a chunk leaves the index only in a step in which no record leads to it and no pin holds
it; its bytes go after that is committed and synced.

Source: FORMAT.md, "Collection".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import trio

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Conflict, NoSpace, NotFound, ReadOnly
from ckptfs.store.gc import UNREACHED, Census, GcPlan, going_stage, stage_of
from ckptfs.store.gc_report import GcReport, Why, reasons, report
from ckptfs.store.histories import Histories
from ckptfs.store.history_mirror import version_key
from ckptfs.store.ids import RecipeId, UnitId
from ckptfs.store.index import Change, Index
from ckptfs.store.marking import Marking
from ckptfs.store.reclaim import Reclaim
from ckptfs.store.retention import Candidate, Retention, VersionKey, plan_retention
from ckptfs.store.segments import Segments

_SEGMENTS_A_COMMIT = 64
_CHUNKS_A_CHANGE = 2048
_FORGET_AT_ONCE = 16


class Sweeper:
    """Collects, one run at a time. Belongs to the index thread.

    `open_recipes` tells which contents somebody has open without a record of the live tree naming
    them (files of old versions). `reclaimable_bytes`: what the last run found could be freed,
    history included, for statfs.
    """

    def __init__(
        self,
        disk: Disk,
        index: Index,
        segments: Segments,
        histories: Histories,
        reclaim: Reclaim,
        open_recipes: Callable[[], Iterable[RecipeId]],
    ) -> None:
        self._disk, self._index, self._segments = disk, index, segments
        self._histories, self._reclaim = histories, reclaim
        self._open_recipes = open_recipes
        self._lock = trio.Lock()
        self.reclaimable_bytes = 0

    async def collect(self, *, dry_run: bool = False) -> GcPlan:
        """Take out what nothing reaches; returns what that was, or would be.

        Corrupt, naming it, if a tree or recipe cannot be read: then nothing is taken, because what
        it leads to is not known. NoSpace or OSError: the rest is taken by the next run.
        Durable when: this returned.
        """
        async with self._lock:
            with self._marking(()) as marking:
                await marking.run()
                plan = await marking.plan(going_stage(0, 0))
                if not dry_run:
                    await self._execute(marking, plan, going_stage(0, 0))
                return plan

    async def explain(
        self, plan: Callable[[], Retention], *, dry_run: bool
    ) -> tuple[GcReport, tuple[VersionKey, ...]]:
        """Let the versions go that `plan` does not keep, take out what nothing reaches then, and say
        what holds the rest; (the report, the versions that went). With `dry_run` nothing changes, and
        the report says what would go. Raises as `collect`. Durable when: this returned.
        """
        async with self._lock:
            gone = () if dry_run else await self._let_go(plan)
            versions = list(candidates(self._histories))
            why = reasons(versions, plan())
            stages = {version_key(*key): reason.stage for key, reason in why.items()}
            marking = Marking(self._index, self._segments, stages, Why.PREIMAGE.stage)
            marking.keep_recipes(self._open_recipes(), Why.OPEN.stage)
            with self._index.watch(marking.watch):
                await marking.run()
                found = report(why, await marking.census(), self._segments.payload_bytes())
                if not dry_run:
                    await self._execute(marking, await marking.plan(UNREACHED), UNREACHED)
            return found, gone

    async def expire(self, plan: Callable[[], Retention]) -> tuple[VersionKey, ...]:
        """Let the versions go that `plan`, asked anew for every few of them, does not keep; returns
        them. What they alone held goes with the next `collect`. Durable when: this returned."""
        async with self._lock:
            return await self._let_go(plan)

    async def _let_go(self, plan: Callable[[], Retention]) -> tuple[VersionKey, ...]:
        expired = plan().order
        try:
            kept = await self._forget(expired, lambda: plan().order)
        finally:
            self._index.ensure_reserve()
        return tuple(key for key in expired if key not in set(kept))

    async def survey(self) -> Census:
        """What could be freed, by the versions that would have to go. Changes nothing."""
        async with self._lock:
            with self._marking(self._order()) as marking:
                await marking.run()
                return self._noted(await marking.census())

    async def make_room(self, free_bytes: int) -> int:
        """Let history go until `free_bytes` are available on the disk; returns the bytes gained.

        Garbage goes first, then the oldest versions that retention does not hold, as few as are
        needed. Less may be gained than asked for. Raises as `collect`.
        """
        async with self._lock:
            before = self._disk.space().available
            try:
                if before < free_bytes:
                    await self._give_back()
                while (short := free_bytes - self._disk.space().available) > 0:
                    if not await self._free(short):
                        break
            finally:
                self._index.ensure_reserve()
            return max(0, self._disk.space().available - before)

    async def _free(self, wanted_bytes: int) -> bool:
        """One run; False if there was nothing left to let go."""
        order = self._order()
        with self._marking(order) as marking:
            await marking.run()
            census = self._noted(await marking.census())
            count = census.versions_to_forget(wanted_bytes, len(order))
            kept = await self._forget(order[:count], self._order)
            for key in kept:
                marking.keep_version(version_key(*key))
            await marking.finish()
            lowest = going_stage(count, len(order))
            freed = await self._execute(marking, await marking.plan(lowest), lowest)
        return freed > 0 or count > len(kept)

    async def _execute(self, marking: Marking, plan: GcPlan, lowest_stage: int) -> int:
        """Take a plan's chunks out, as far as they are still dead; returns the bytes given back."""
        # Again, because files of a version may have been opened before it was forgotten just now.
        marking.keep_recipes(self._open_recipes())
        freed = 0
        for segments, chunks in enumerate(plan.dead.values(), 1):
            for start in range(0, len(chunks), _CHUNKS_A_CHANGE):
                await self._catch_up(marking)
                # From here to the applied change nothing else runs.
                change = Change()
                part = chunks[start : start + _CHUNKS_A_CHANGE]
                self._reclaim.stage_removal(change, marking.still_dead(part, lowest_stage))
                self._index.apply(change)
                await trio.lowlevel.checkpoint()
            if segments % _SEGMENTS_A_COMMIT == 0:
                freed += await self._give_back()
        return freed + await self._give_back()

    async def _catch_up(self, marking: Marking) -> None:
        """Take into account all that happened; true until the caller awaits."""
        while True:
            await self._index.removals.opened()
            marking.keep_records(self._histories.unlisted())
            await marking.finish()
            if not self._index.removals.is_held:
                return

    async def _give_back(self) -> int:
        """Commit, and return to the disk what only waited for it."""
        self._index.commit()
        return await self._reclaim.execute()

    @contextmanager
    def _marking(self, order: tuple[VersionKey, ...]) -> Iterator[Marking]:
        stages = {version_key(*key): stage_of(at, len(order)) for at, key in enumerate(order)}
        marking = Marking(self._index, self._segments, stages)
        marking.keep_recipes(self._open_recipes())
        marking.keep_records(self._histories.unlisted())
        with self._index.watch(marking.watch):
            yield marking

    def _noted(self, census: Census) -> Census:
        self.reclaimable_bytes = census.garbage_bytes + sum(census.stage_bytes.values())
        return census

    def _order(self) -> tuple[VersionKey, ...]:
        return plan_retention(candidates(self._histories)).order

    async def _forget(
        self, keys: tuple[VersionKey, ...], may_go: Callable[[], Iterable[VersionKey]]
    ) -> list[VersionKey]:
        """Let versions go, as long as `may_go` has them; returns those that somebody came to need
        meanwhile, or that are in a history that can no longer be written."""
        kept: list[VersionKey] = []
        for start in range(0, len(keys), _FORGET_AT_ONCE):
            still = set(may_go())
            for key in keys[start : start + _FORGET_AT_ONCE]:
                try:
                    if key in still:
                        self._forget_one(*key)
                    elif self._histories.version(*key) is not None:
                        kept.append(key)
                except (Conflict, ReadOnly):
                    kept.append(key)
            await trio.lowlevel.checkpoint()
        return kept

    def _forget_one(self, unit: UnitId, number: int) -> None:
        try:
            self._histories.forget(unit, number)
        except NotFound:
            pass
        except NoSpace:
            if not self._index.free_reserve():
                raise
            self._histories.forget(unit, number)


def candidates(histories: Histories) -> Iterator[Candidate]:
    """Every version of every unit, as retention sees it."""
    for unit in histories.units():
        tags: dict[int, list[str]] = {}
        for tag, number in histories.tags(unit.unit).items():
            tags.setdefault(number, []).append(tag)
        pins = histories.pins(unit.unit)
        for record in histories.versions(unit.unit):
            yield Candidate(
                unit=record.unit,
                number=record.number,
                time_ns=record.time_ns,
                state=record.state,
                step=record.step,
                logical_bytes=record.logical_bytes,
                pinned=record.number in pins,
                tags=tuple(tags.get(record.number, ())),
                mirrors_live=unit.ino != 0 and record.origin != "pre-image",
                is_preimage=record.origin == "pre-image",
                steps=record.steps,
            )


def listed(histories: Histories) -> tuple[int, int]:
    """A value that changes whenever a version comes: (numbers given, time of the newest)."""
    units = histories.units()
    return sum(unit.next_number for unit in units), max((unit.newest_ns for unit in units), default=0)
