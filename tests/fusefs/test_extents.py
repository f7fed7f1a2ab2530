"""Extents against a plain set of bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.fusefs.extents import Extents

LIMIT = 64
RANGES = st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "clip"]), RANGES), max_size=30)


@given(STEPS, RANGES)
def test_extents_are_a_set_of_bytes(steps: list[tuple[str, tuple[int, int]]], asked: tuple[int, int]) -> None:
    extents, model = Extents(), set[int]()
    for kind, (a, b) in steps:
        if kind == "add":
            extents.add(a, b)
            model |= set(range(a, b))
        else:
            extents.clip(a)
            model = {byte for byte in model if byte < a}
    held = list(extents)
    assert {byte for start, end in held for byte in range(start, end)} == model
    assert all(a[1] < b[0] for a, b in pairwise(held)), "disjoint, sorted and merged"
    assert all(extents.contains(byte) == (byte in model) for byte in range(LIMIT + 1))
    parts = list(extents.split(*asked))
    assert [byte for start, end, _ in parts for byte in range(start, end)] == list(range(*asked))
    assert all((byte in model) == inside for start, end, inside in parts for byte in range(start, end))


def test_a_start_can_be_given() -> None:
    assert list(Extents([(8, 4), (0, 4), (4, 4)])) == [(0, 12)]
