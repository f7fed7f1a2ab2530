"""retention: a unit never loses its newest version, its last complete one, or what somebody asked to keep."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from ckptfs.store.history import State
from ckptfs.store.ids import UnitId
from ckptfs.store.retention import Candidate, Reason, default_min_free, plan_retention

A, B = UnitId(b"a" * 16), UnitId(b"b" * 16)
COMPLETE, PARTIAL, OPAQUE = State.COMPLETE, State.PARTIAL, State.OPAQUE


def version(
    number: int,
    state: State = COMPLETE,
    *,
    unit: UnitId = A,
    time_ns: int | None = None,
    pinned: bool = False,
    tags: tuple[str, ...] = (),
) -> Candidate:
    return Candidate(
        unit=unit,
        number=number,
        time_ns=number if time_ns is None else time_ns,
        state=state,
        step=None,
        logical_bytes=1,
        pinned=pinned,
        tags=tags,
    )


def test_the_newest_and_the_last_complete_stay_however_old_they_are() -> None:
    plan = plan_retention(
        [version(1), version(2), version(3, PARTIAL), version(4, PARTIAL), version(5, OPAQUE)]
    )
    assert plan.keep == {(A, 2): Reason.LAST_COMPLETE, (A, 5): Reason.NEWEST}
    assert plan.order == ((A, 1), (A, 3), (A, 4))


def test_pinned_and_tagged_versions_stay() -> None:
    plan = plan_retention([version(1, pinned=True), version(2, tags=("good",)), version(3), version(4)])
    assert plan.keep == {(A, 1): Reason.PINNED, (A, 2): Reason.TAGGED, (A, 4): Reason.LAST_COMPLETE}
    assert plan.order == ((A, 3),)


def test_a_single_version_stays_whatever_its_state() -> None:
    assert plan_retention([version(1, PARTIAL)]).order == ()


def test_the_oldest_goes_first_across_units() -> None:
    versions = [version(n, time_ns=10 * n) for n in (1, 2, 3)]
    versions += [version(n, unit=B, time_ns=10 * n + 5) for n in (1, 2, 3)]
    random.Random(0).shuffle(versions)
    assert plan_retention(versions).order == ((A, 1), (B, 1), (A, 2), (B, 2))


def test_numbers_decide_where_a_clock_was_set_back() -> None:
    versions = [version(1, time_ns=900), version(2, time_ns=100), version(3, time_ns=200)]
    plan = plan_retention([*versions, version(1, unit=B, time_ns=500), version(2, unit=B, time_ns=501)])
    assert (A, 3) in plan.keep
    assert plan.order == ((B, 1), (A, 1), (A, 2))


def test_a_policy_can_only_keep_more() -> None:
    def even_numbers(versions: Sequence[Candidate]) -> Iterable[tuple[int, Reason]]:
        return [(v.number, Reason.POLICY) for v in versions if v.number % 2 == 0]

    versions = [version(n) for n in range(1, 6)]
    plan = plan_retention(versions, [even_numbers])
    assert plan.order == ((A, 1), (A, 3))
    assert plan.keep[A, 4] is Reason.POLICY and plan.keep[A, 5] is Reason.LAST_COMPLETE


def test_nothing_to_do_for_no_versions() -> None:
    plan = plan_retention([])
    assert plan.keep == {} and plan.order == ()


def test_random_histories_keep_what_must_stay(rng: random.Random) -> None:
    for _ in range(200):
        versions = [
            version(
                number,
                rng.choice(list(State)),
                unit=unit,
                time_ns=rng.randrange(20),
                pinned=rng.random() < 0.1,
                tags=("t",) if rng.random() < 0.1 else (),
            )
            for unit in (A, B)
            for number in range(1, rng.randrange(1, 12))
        ]
        plan = plan_retention(versions)
        assert plan.keep.keys().isdisjoint(plan.order)
        assert {v.key for v in versions} == plan.keep.keys() | set(plan.order)
        for unit in (A, B):
            mine = [v for v in versions if v.unit == unit]
            assert all(v.key in plan.keep for v in mine if v.pinned or v.tags)
            complete = [v.number for v in mine if v.state is COMPLETE]
            assert not complete or (unit, max(complete)) in plan.keep
            assert not mine or (unit, max(v.number for v in mine)) in plan.keep


@pytest.mark.parametrize(
    ("save", "disk", "expected"), [(0, 1000, 0), (50, 1000, 100), (100, 1000, 200), (500, 1000, 200)]
)
def test_default_min_free(save: int, disk: int, expected: int) -> None:
    assert default_min_free(save, disk) == expected
