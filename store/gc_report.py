"""What a collection frees, and what holds the rest: stored bytes by the strongest reason.

One rule: a chunk counts once, for the first of its reasons in the order of `Why`; so the bytes of all
reasons and the bytes that go add up to what is stored.

The reasons are stages of a marking (gc.py): a lower stage wins there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.store.gc import Census
from ckptfs.store.retention import Candidate, Reason, Retention, VersionKey


class Why(StrEnum):
    """Why something stays, the strongest reason first; EXPIRED is what goes with its version."""

    LIVE = "live tree"
    OPEN = "open"
    LAST_COMPLETE = "last complete"
    PINNED = "pinned"
    TAG = "tag"
    POLICY = "policy"
    VERSION = "version"
    PREIMAGE = "pre-image"
    EXPIRED = "expired"

    @property
    def stage(self) -> int:
        """Its stage in a marking; that of the live tree is KEPT."""
        return tuple(Why).index(self)


_WHY = {
    Reason.PINNED: Why.PINNED,
    Reason.TAGGED: Why.TAG,
    Reason.LAST_COMPLETE: Why.LAST_COMPLETE,
    Reason.NEWEST: Why.VERSION,
    Reason.POLICY: Why.POLICY,
    Reason.NO_POLICY: Why.VERSION,
}


@dataclass(frozen=True, slots=True)
class Holding:
    """What one reason holds: so many versions, and stored bytes that no stronger reason holds."""

    versions: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class GcReport:
    """`garbage_bytes` belong to nothing, `expired_bytes` only to the versions `expired`; `kept` says
    what holds the rest."""

    garbage_bytes: int
    expired_bytes: int
    expired: tuple[VersionKey, ...]
    kept: dict[Why, Holding]


def reasons(versions: Iterable[Candidate], plan: Retention) -> dict[VersionKey, Why]:
    """Why each version stays, or that it goes."""
    found: dict[VersionKey, Why] = dict.fromkeys(plan.order, Why.EXPIRED)
    for version in versions:
        if version.key in plan.keep:
            why = _WHY[plan.keep[version.key]]
            is_preimage = why is Why.VERSION and version.is_preimage
            found[version.key] = Why.PREIMAGE if is_preimage else why
    return found


def report(why: Mapping[VersionKey, Why], census: Census, stored_bytes: int) -> GcReport:
    """The report of a marking whose stages were those of `why`, over a store of `stored_bytes`."""
    counted = {reason: census.stage_bytes.get(reason.stage, 0) for reason in Why}
    counted[Why.LIVE] = max(0, stored_bytes - census.garbage_bytes - sum(census.stage_bytes.values()))
    versions = {reason: sum(one is reason for one in why.values()) for reason in Why}
    kept: dict[Why, Holding] = {r: Holding(versions[r], counted[r]) for r in Why if r is not Why.EXPIRED}
    expired = tuple(key for key, reason in why.items() if reason is Why.EXPIRED)
    return GcReport(census.garbage_bytes, counted[Why.EXPIRED], expired, kept)
