"""chain_shape: chains and families are no larger than their shape, whatever is told of the chunks."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.chain_shape import SHAPE, ChainShape, Standing, choose_parent
from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import MAX_DEPTH

SHAPES = st.builds(ChainShape, st.integers(0, MAX_DEPTH), st.integers(1, 9))


def chunk(number: int) -> ChunkId:
    return ChunkId(hashlib.sha256(bytes([number])).digest())


def line_of(count: int, shape: ChainShape) -> list[int | None]:
    """For each of the saves the one that it is encoded against, each being offered the one before it."""
    bases: list[int | None] = []
    depths: list[int] = []
    children: Counter[int] = Counter()
    numbers = {chunk(number): number for number in range(count)}

    def standing_of(one: ChunkId) -> Standing | None:
        number = numbers[one]
        base = bases[number]
        return Standing(depths[number], children[number], None if base is None else chunk(base))

    for number in range(count):
        chosen = choose_parent(chunk(number - 1), standing_of, shape) if number else None
        base = None if chosen is None else numbers[chosen]
        bases.append(base)
        depths.append(0 if base is None else depths[base] + 1)
        if base is not None:
            children[base] += 1
    return bases


@given(st.integers(1, 60), SHAPES)
def test_no_chain_is_deeper_and_no_family_larger_than_the_shape(count: int, shape: ChainShape) -> None:
    bases = line_of(count, shape)
    depths: list[int] = []
    for base in bases:
        depths.append(0 if base is None else depths[base] + 1)
    assert max(depths) <= shape.depth
    assert all(
        number <= shape.children for number in Counter(base for base in bases if base is not None).values()
    )


@given(st.integers(1, 60), SHAPES)
def test_nothing_stands_alone_while_there_is_room_in_the_last_family(count: int, shape: ChainShape) -> None:
    whole = sum(shape.children**depth for depth in range(shape.depth + 1))
    alone = [number for number, base in enumerate(line_of(count, shape)) if base is None]
    assert alone == list(range(0, count, whole))


@pytest.mark.parametrize(
    ("shape", "bases"),
    [
        (ChainShape(0, 1), [None, None, None]),
        (ChainShape(1, 1), [None, 0, None, 2]),
        (ChainShape(1, 3), [None, 0, 0, 0, None, 4]),
        (ChainShape(3, 1), [None, 0, 1, 2, None]),
        (ChainShape(2, 2), [None, 0, 1, 1, 0, 4, 4, None]),
    ],
)
def test_the_nearest_with_room_is_taken(shape: ChainShape, bases: list[int | None]) -> None:
    assert line_of(len(bases), shape) == bases


def test_what_is_not_stored_or_no_difference_leads_nowhere() -> None:
    assert choose_parent(chunk(1), lambda _: None) is None
    assert choose_parent(chunk(1), lambda _: Standing(SHAPE.depth)) is None
    assert choose_parent(chunk(1), lambda _: Standing()) == chunk(1)


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 255), st.integers(0, 9), st.integers(0, 5)))
)
def test_whatever_is_said_it_ends(said: dict[int, tuple[int, int, int]]) -> None:
    asked = []

    def standing_of(one: ChunkId) -> Standing | None:
        asked.append(one)
        for number, (depth, children, base) in said.items():
            if chunk(number) == one:
                return Standing(depth, children, chunk(base))
        return None

    found = choose_parent(chunk(0), standing_of)
    assert len(asked) <= MAX_DEPTH + 2
    assert found is None or found in asked
