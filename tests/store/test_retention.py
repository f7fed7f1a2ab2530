"""retention: a unit never loses its newest version, its last complete one, or what somebody asked to keep."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from ckptfs.store.history import State
from ckptfs.store.ids import UnitId
from ckptfs.store.retention import (
    Candidate,
    Policy,
    Reason,
    covers,
    default_min_free,
    plan_expiry,
    plan_retention,
)

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
    step: int | None = None,
    steps: tuple[int, ...] = (),
    is_preimage: bool = False,
) -> Candidate:
    return Candidate(
        unit=unit,
        number=number,
        time_ns=number if time_ns is None else time_ns,
        state=state,
        step=step,
        logical_bytes=1,
        pinned=pinned,
        tags=tags,
        steps=steps,
        is_preimage=is_preimage,
        mirrors_live=not is_preimage,
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


DAY_NS = 24 * 3600 * 10**9
NOW_NS = 1000 * DAY_NS


def kept(policy: Policy | None, versions: Sequence[Candidate]) -> list[int]:
    plan = plan_expiry(versions, lambda unit: policy, NOW_NS)
    assert plan.keep.keys() | set(plan.order) == {v.key for v in versions}
    assert plan.keep.keys().isdisjoint(plan.order)
    return sorted(number for _, number in plan.keep)


def test_without_a_policy_or_without_limits_all_stay() -> None:
    versions = [version(n) for n in range(1, 9)]
    for policy in (None, Policy("/*")):
        assert kept(policy, versions) == [*range(1, 9)]
    plan = plan_expiry(versions, lambda unit: None, NOW_NS)
    assert plan.keep[A, 1] is Reason.NO_POLICY and plan.keep[A, 8] is Reason.LAST_COMPLETE


def test_the_last_are_counted_without_partial_ones_and_pre_images() -> None:
    states = [COMPLETE, OPAQUE, PARTIAL, COMPLETE, PARTIAL, COMPLETE, PARTIAL]
    versions = [version(n, state) for n, state in enumerate(states, 1)]
    versions.append(version(8, is_preimage=True))
    assert kept(Policy("/*", keep_last=1), versions) == [6, 7, 8]
    assert kept(Policy("/*", keep_last=2), versions) == [4, 5, 6, 7, 8]
    assert kept(Policy("/*", keep_last=3), versions) == [2, 3, 4, 5, 6, 7, 8]
    assert kept(Policy("/*", keep_last=99), versions) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert kept(Policy("/*", keep_last=2), [version(n, PARTIAL) for n in (1, 2, 3)]) == [2, 3]


def test_days_are_counted_from_now_to_the_nanosecond() -> None:
    times = [NOW_NS - 2 * DAY_NS - 1, NOW_NS - 2 * DAY_NS, NOW_NS - 1, NOW_NS + DAY_NS]
    versions = [version(n, time_ns=time_ns) for n, time_ns in enumerate(times, 1)]
    assert kept(Policy("/*", keep_days=2), versions) == [2, 3, 4]
    assert kept(Policy("/*", keep_days=1e-9), versions) == [3, 4]


def test_of_every_nth_step_the_newest_complete_version_that_holds_it_stays() -> None:
    versions = [
        version(1, step=100, steps=(100,)),
        version(2, step=150, steps=(100, 150)),
        version(3, PARTIAL, step=200, steps=(150,)),
        version(4, step=200, steps=(150, 200)),
        version(5, step=250, steps=(200, 250)),
        version(6, OPAQUE, step=300),
        version(7, step=350, steps=(350,)),
    ]
    assert kept(Policy("/*", keep_every=100), versions) == [2, 5, 6, 7]
    assert kept(Policy("/*", keep_every=1000), versions) == [7]


def test_limits_add_up_and_what_is_asked_for_stays() -> None:
    versions = [
        version(
            n,
            time_ns=NOW_NS - (20 - n) * DAY_NS,
            step=n,
            steps=(n,),
            pinned=n == 2,
            tags=("t",) if n == 3 else (),
        )
        for n in range(1, 21)
    ]
    policy = Policy("/*", keep_last=2, keep_days=4, keep_every=10)
    assert kept(policy, versions) == [2, 3, 10, 16, 17, 18, 19, 20]
    plan = plan_expiry(versions, lambda unit: policy, NOW_NS)
    assert plan.order == tuple((A, n) for n in (1, *range(4, 10), *range(11, 16)))


def test_a_policy_takes_neither_the_last_complete_nor_the_newest() -> None:
    versions = [version(1), version(2, PARTIAL), version(3, PARTIAL)]
    assert kept(Policy("/*", keep_days=1), versions) == [1, 3]


def test_each_unit_has_its_own_policy() -> None:
    versions = [version(n, unit=unit) for unit in (A, B) for n in (1, 2, 3)]
    plan = plan_expiry(versions, lambda unit: Policy("/*", keep_last=1) if unit == A else None, NOW_NS)
    assert plan.order == ((A, 1), (A, 2))


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        ("/*", b"run1", True),
        ("/run*", b"run1", True),
        ("/run*", b"other", False),
        ("/*", b"a/b", False),
        ("/a/*", b"a/b", True),
        ("/*", b"@root", False),
        ("/", b"@root", True),
        ("/@root", b"@root", True),
        ("/", b"run1", False),
        ("/\udcff", b"\xff", True),
        ("/RUN", b"run", False),
    ],
)
def test_globs(path: str, name: bytes, expected: bool) -> None:
    assert covers(path, name) is expected
