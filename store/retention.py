"""Which versions must stay, and in which order the others may go.

One rule: rules only ever add reasons to keep. A version goes because no rule wants it, and because
either space is short (`plan_retention`, over all units) or its unit has a policy (`plan_expiry`); the
built-in rules hold in both, so a unit never loses its last complete version, nor a live one its newest.

A unit without a policy keeps everything as long as there is room. When space is short, what a policy
keeps gives way like any other version: it says how much history is wanted, a pin what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from ckptfs.store.history import State
from ckptfs.store.ids import UnitId

VersionKey = tuple[UnitId, int]
ROOT_UNIT_NAME = b"@root"
_DAY_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What retention needs to know of one version.

    `mirrors_live`: it was made of a live directory that is still there. Pre-images are not, and
    versions of removed units are not any more. `steps` are those that it holds intact.
    """

    unit: UnitId
    number: int
    time_ns: int
    state: State
    step: int | None
    logical_bytes: int
    pinned: bool = False
    tags: tuple[str, ...] = ()
    mirrors_live: bool = True
    is_preimage: bool = False
    steps: tuple[int, ...] = ()

    @property
    def key(self) -> VersionKey:
        """(unit, number): the version's identity."""
        return self.unit, self.number


class Reason(StrEnum):
    """Why a version stays."""

    PINNED = "pinned"
    TAGGED = "tagged"
    LAST_COMPLETE = "the last complete version"
    NEWEST = "the newest version"
    POLICY = "kept by a policy"
    NO_POLICY = "there is room, and no policy for its unit"


Rule = Callable[[Sequence[Candidate]], Iterable[tuple[int, Reason]]]
"""Takes all versions of one unit, oldest first; yields (number, reason) of those that must stay."""


@dataclass(frozen=True, slots=True)
class Retention:
    """`keep`: why each version that must stay does. `order`: the others, the first to go first."""

    keep: dict[VersionKey, Reason]
    order: tuple[VersionKey, ...]


def keep_pinned(versions: Sequence[Candidate]) -> Iterable[tuple[int, Reason]]:
    """Versions that somebody pinned or tagged."""
    for version in versions:
        if version.pinned:
            yield version.number, Reason.PINNED
        elif version.tags:
            yield version.number, Reason.TAGGED


def keep_last(versions: Sequence[Candidate]) -> Iterable[tuple[int, Reason]]:
    """The newest complete version, and the newest that mirrors the live tree."""
    complete = [version.number for version in versions if version.state is State.COMPLETE]
    if complete:
        yield complete[-1], Reason.LAST_COMPLETE
    mirrors = [version.number for version in versions if version.mirrors_live]
    if mirrors:
        yield mirrors[-1], Reason.NEWEST


BUILT_IN: tuple[Rule, ...] = (keep_pinned, keep_last)


@dataclass(frozen=True, slots=True)
class Policy:
    """What history is wanted of the units whose names match the glob `path` ("/*", "/group/*"; "/" is
    the root's own files). A version stays if one of the limits that are set wants it; without any,
    all stay.

    - `keep_last`: the last so many that are neither partial nor pre-images, and all that came since;
      where there are none but such, the last so many of them.
    - `keep_days`: those not older than so many days.
    - `keep_every`: of each step that is a multiple of it, the newest complete version that holds it.
    """

    path: str
    keep_last: int | None = None
    keep_days: float | None = None
    keep_every: int | None = None

    @property
    def is_limit(self) -> bool:
        """Whether it lets anything go."""
        return (self.keep_last, self.keep_days, self.keep_every) != (None, None, None)

    def covers(self, unit_name: bytes) -> bool:
        """Whether it is for the unit of this name."""
        return covers(self.path, unit_name)

    def rule(self, now_ns: int) -> Rule:
        """The policy as a rule at a moment (ns since the epoch)."""

        def keep(versions: Sequence[Candidate]) -> Iterable[tuple[int, Reason]]:
            kept: set[int] = set()
            if self.keep_last is not None:
                kept |= _last(versions, self.keep_last)
            if self.keep_days is not None:
                oldest_ns = now_ns - int(self.keep_days * _DAY_NS)
                kept |= {version.number for version in versions if version.time_ns >= oldest_ns}
            if self.keep_every is not None:
                kept |= _every(versions, self.keep_every)
            return [(number, Reason.POLICY) for number in sorted(kept)]

        return keep


def covers(path: str, unit_name: bytes) -> bool:
    """Whether a glob of directories, such as "/*/*", is for the unit of this name."""
    glob = path.strip("/").split("/")
    if unit_name == ROOT_UNIT_NAME:
        return glob in ([""], [ROOT_UNIT_NAME.decode()])
    parts = unit_name.decode("utf-8", "surrogateescape").split("/")
    return len(glob) == len(parts) and all(fnmatchcase(p, g) for p, g in zip(parts, glob, strict=True))


def _last(versions: Sequence[Candidate], count: int) -> set[int]:
    saves = [v.number for v in versions if v.state is not State.PARTIAL and not v.is_preimage]
    first = (saves or [version.number for version in versions])[-count:][0]
    return {version.number for version in versions if version.number >= first}


def _every(versions: Sequence[Candidate], every: int) -> set[int]:
    newest: dict[int, int] = {}
    for version in versions:
        held = {*version.steps, *([version.step] if version.step is not None else [])}
        if version.state is State.COMPLETE:
            newest.update({step: version.number for step in held if step % every == 0})
        elif version.state is State.OPAQUE and version.step is not None and version.step % every == 0:
            newest[version.step] = version.number
    return set(newest.values())


def plan_expiry(
    versions: Iterable[Candidate], policy_of: Callable[[UnitId], Policy | None], now_ns: int
) -> Retention:
    """What goes because its unit has a policy that does not want it (`order`), and why the rest stays."""
    units: dict[UnitId, list[Candidate]] = {}
    for version in versions:
        units.setdefault(version.unit, []).append(version)
    keep: dict[VersionKey, Reason] = {}
    expired: list[VersionKey] = []
    for unit, members in units.items():
        policy = policy_of(unit)
        rules = (policy.rule(now_ns),) if policy is not None and policy.is_limit else ()
        plan = plan_retention(members, rules)
        keep |= plan.keep
        if rules:
            expired += plan.order
        else:
            keep |= dict.fromkeys(plan.order, Reason.NO_POLICY)
    return Retention(keep, tuple(expired))


def plan_retention(versions: Iterable[Candidate], policies: Iterable[Rule] = ()) -> Retention:
    """What must stay and what may go, over the versions of all units.

    The order is by time across units, the oldest first. Numbers, not times, say what is newest
    within a unit: clocks are set back. A unit's versions therefore go in the order of their
    numbers, and one that claims a later time holds its successors back.
    """
    units: dict[UnitId, list[Candidate]] = {}
    for version in versions:
        units.setdefault(version.unit, []).append(version)
    rules = (*BUILT_IN, *policies)
    keep: dict[VersionKey, Reason] = {}
    loose: list[tuple[int, VersionKey]] = []
    for unit, members in units.items():
        members.sort(key=lambda version: version.number)
        for rule in rules:
            for number, reason in rule(members):
                keep.setdefault((unit, number), reason)
        latest = 0
        for version in members:
            if version.key not in keep:
                latest = max(latest, version.time_ns)
                loose.append((latest, version.key))
    return Retention(keep, tuple(key for _, key in sorted(loose)))


def default_min_free(last_save_bytes: int, disk_bytes: int) -> int:
    """Room that is kept free by default: twice the last save, at most a fifth of the disk."""
    return min(2 * last_save_bytes, disk_bytes // 5)
