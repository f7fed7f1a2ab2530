"""Retention by policy: versions that no policy wants go, and `gc` says what holds the rest.

One rule: what goes is decided by store/retention.py alone, on what is listed at that moment; a unit
without a policy loses nothing here (SpaceKeeper sees to full disks).

Source: ARCHITECTURE.md, sections 1 (promise 6) and 8; FORMAT.md, "Collection".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence

import trio

from ckptfs.daemon.config import UnitPolicy
from ckptfs.daemon.messages import Json
from ckptfs.store.errors import CkptfsError
from ckptfs.store.gc_report import GcReport
from ckptfs.store.histories import Histories
from ckptfs.store.ids import UnitId
from ckptfs.store.retention import Policy, Retention, VersionKey, plan_expiry
from ckptfs.store.sweep import Sweeper, candidates, listed

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
_AT_LATEST_S = 60.0
_COLLECT_EVERY_S = 10.0
_COLLECT_SHARE = 30


class Policies:
    """Which policy a unit has: the first in the configuration whose glob matches its name."""

    def __init__(self, configured: Sequence[UnitPolicy]) -> None:
        self.configure(configured)

    def configure(self, configured: Sequence[UnitPolicy]) -> None:
        """Other policies, from now on."""
        self._configured = [(one.retention, one.versions) for one in configured]
        self._encode_after_s = [(one.retention, one.encode_after_s) for one in configured]

    @property
    def let_go(self) -> bool:
        """Whether any of them lets a version go."""
        return any(policy.is_limit for policy, _ in self._configured)

    def of(self, unit_name: bytes) -> Policy | None:
        """The policy of a unit, if it has one."""
        return next((policy for policy, _ in self._configured if policy.covers(unit_name)), None)

    def encode_after_s(self, unit_name: bytes, default: float | str) -> float | None:
        """How long after its version a save of a unit is encoded; None: never."""
        said = next((after for policy, after in self._encode_after_s if policy.covers(unit_name)), None)
        after_s = default if said is None else said
        return after_s if isinstance(after_s, float) else None

    def is_off(self, unit_name: bytes) -> bool:
        """Whether no versions are wanted of a unit."""
        return not next((on for policy, on in self._configured if policy.covers(unit_name)), True)


class Retainer:
    """Applies the policies. Belongs to the trio thread."""

    def __init__(
        self,
        histories: Histories,
        sweeper: Sweeper,
        policies: Policies,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._histories = histories
        self._sweeper = sweeper
        self._policies = policies
        self._clock_ns = clock_ns

    def plan(self) -> Retention:
        """What the policies say of all versions that are listed now."""
        return plan_expiry(candidates(self._histories), self._policy_of, self._clock_ns())

    async def apply(self) -> int:
        """Let go what no policy wants; how many versions that was. Durable when: this returned."""
        gone = await self._sweeper.expire(self.plan)
        for unit, number in gone:
            log.info("forgot version %d of %s: no policy keeps it", number, self._name(unit))
        return len(gone)

    async def collect(self, dry_run: bool) -> Json:
        """`ckptfs gc`: apply the policies, give room back, and say what holds the rest."""
        names = {unit.unit: os.fsdecode(unit.name) for unit in self._histories.units()}
        found, gone = await self._sweeper.explain(self.plan, dry_run=dry_run)
        return _row(found, found.expired if dry_run else gone, names, dry_run=dry_run)

    async def run(self) -> None:
        """Apply the policies after each publish and once a minute, for ever; cancelled at shutdown."""
        if not self._policies.let_go:
            return
        seen: tuple[int, int] | None = None
        applied = collect_due = float("-inf")
        owed = True  # an earlier run may have let versions go and died
        while True:
            now = time.monotonic()
            if (state := listed(self._histories)) != seen or now - applied >= _AT_LATEST_S:
                seen, applied = state, now
                owed |= await self._tried(self.apply) > 0
            if owed and now >= collect_due:
                owed = await self._tried(self._collect) < 0
                finished = time.monotonic()
                collect_due = finished + max(_COLLECT_EVERY_S, _COLLECT_SHARE * (finished - now))
            await trio.sleep(LOOK_EVERY_S)

    async def _collect(self) -> int:
        return (await self._sweeper.collect()).chunks

    async def _tried(self, work: Callable[[], Awaitable[int]]) -> int:
        """What `work` returned; -1, and a line in the log, if it could not be done now."""
        try:
            return await work()
        except (CkptfsError, OSError) as e:
            log.error("retention goes on later: %s", e)
            return -1

    def _policy_of(self, unit_id: UnitId) -> Policy | None:
        unit = self._histories.unit(unit_id)
        return None if unit is None else self._policies.of(unit.name)

    def _name(self, unit_id: UnitId) -> str:
        unit = self._histories.unit(unit_id)
        return unit.text if unit is not None else unit_id.hex()


def _row(
    found: GcReport, gone: Sequence[VersionKey], names: dict[UnitId, str], *, dry_run: bool
) -> dict[str, Json]:
    """What scripts get: keys as in the command line's help."""
    freed = found.garbage_bytes + (found.expired_bytes if dry_run else 0)
    kept: dict[str, Json] = {
        why.value: {"versions": one.versions, "stored_bytes": one.stored_bytes}
        for why, one in found.kept.items()
    }
    forgotten: list[Json] = [{"unit": names.get(unit, ""), "number": number} for unit, number in gone]
    return {"dry_run": dry_run, "freed_bytes": freed, "forgotten": forgotten, "kept": kept}
