"""Which versions must stay, and in which order the others may go.

One rule: this module only ever adds reasons to keep. A version goes because no rule wants it and
space is short, never because a rule asks for its removal; the built-in rules hold under every
policy, so a unit never loses its last complete version, nor a live one its newest.

A policy (keep_last, keep_days, every Nth step) is one more `Rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.store.history import State
from ckptfs.store.ids import UnitId

VersionKey = tuple[UnitId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What retention needs to know of one version.

    `mirrors_live`: it was made of a live directory that is still there. Pre-images are not, and
    versions of removed units are not any more.
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
