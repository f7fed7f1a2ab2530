"""gc, sweep: what anything reaches is never taken, also when it is reached while the collector runs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ckptfs.store.errors import Corrupt
from ckptfs.store.gc import (
    KEPT,
    UNREACHED,
    Census,
    Kind,
    Marker,
    Marks,
    Reference,
    going_stage,
    marks_of_chunks,
    marks_of_recipe,
    stage_of,
)
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import EMPTY, Piece, Recipe

A, B, C, D = (chunk_id(name) for name in (b"a", b"b", b"c", b"d"))


def stages(marks: Marks, *chunks: ChunkId) -> list[int]:
    return [int(stage) for stage in marks.stages_of(marks_of_chunks(chunks))]


def test_a_chunk_has_the_lowest_stage_that_reaches_it() -> None:
    marks = Marks()
    marks.add(marks_of_chunks([A, B]), 2)
    assert stages(marks, A, B, C) == [2, 2, UNREACHED]
    marks.add(marks_of_chunks([B, C]), 1)
    marks.add(marks_of_chunks([A]), 3)
    marks.add_one(C, KEPT)
    assert stages(marks, A, B, C, D) == [2, 1, KEPT, UNREACHED]
    assert len(marks) == 3


def test_no_marks_and_no_questions() -> None:
    assert stages(Marks(), A) == [UNREACHED]
    assert stages(Marks()) == []


def test_marks_agree_with_a_dict(rng: random.Random) -> None:
    chunks = [ChunkId(rng.randbytes(32)) for _ in range(300)]
    marks, twin = Marks(), dict[ChunkId, int]()
    for _ in range(40):
        some, stage = rng.sample(chunks, rng.randrange(60)), rng.randrange(9)
        if rng.random() < 0.5:
            marks.add(marks_of_chunks(some), stage)
        else:
            for chunk in some:
                marks.add_one(chunk, stage)
        for chunk in some:
            twin[chunk] = min(stage, twin.get(chunk, UNREACHED))
        if rng.random() < 0.3:
            marks.merge()
    assert stages(marks, *chunks) == [twin.get(chunk, UNREACHED) for chunk in chunks]


def test_the_marks_of_a_recipe_are_those_of_its_pieces() -> None:
    recipe = Recipe([Piece(5, A), Piece(7, None), Piece(9, B)])
    assert list(marks_of_recipe(recipe.encode())) == list(marks_of_chunks([A, bytes(32), B]))
    assert len(marks_of_recipe(EMPTY.encode())) == 0


@pytest.mark.parametrize("broken", [b"", b"CKRC", Recipe([Piece(5, A)]).encode()[:-1], bytes(64)])
def test_what_is_no_recipe_is_corrupt(broken: bytes) -> None:
    with pytest.raises(Corrupt):
        marks_of_recipe(broken)


def test_the_walk_visits_an_object_once_a_stage_and_lower_stages_win() -> None:
    marker = Marker()
    tree, recipe = Reference(Kind.TREE, A), Reference(Kind.RECIPE, B)
    marker.reach([tree, tree, recipe], 3)
    marker.reach([recipe], 5)
    visited = []
    while (found := marker.next()) is not None:
        visited.append(found)
    assert sorted(visited, key=str) == sorted([(tree, 3), (recipe, 3)], key=str)
    marker.reach([recipe], KEPT)
    assert marker.next() == (recipe, KEPT)
    assert marker.next() is None
    marker.take_recipe(Recipe([Piece(1, C)]).encode(), KEPT)
    assert stages(marker.marks, A, B, C, D) == [3, KEPT, KEPT, UNREACHED]


def test_a_pending_object_that_a_lower_stage_reaches_is_given_out_at_that_stage_only() -> None:
    marker = Marker()
    recipe = Reference(Kind.RECIPE, B)
    marker.reach([recipe], 3)
    marker.reach([recipe], 1)
    assert marker.next() == (recipe, 1)
    assert marker.next() is None


def test_versions_go_in_order_until_enough_is_free() -> None:
    census, count = Census(), 3
    census.add(UNREACHED, 10)
    for position, stored in enumerate([5, 0, 100]):
        census.add(stage_of(position, count), stored)
    assert [census.versions_to_forget(wanted, count) for wanted in (0, 10, 11, 15, 16, 115, 999)] == [
        0, 0, 1, 1, 3, 3, 3,
    ]  # fmt: skip
    assert going_stage(0, count) > stage_of(0, count)
    assert going_stage(1, count) == stage_of(0, count)
    assert going_stage(3, count) == stage_of(2, count)


def test_staged_bytes_are_what_forgetting_frees(rng: random.Random) -> None:
    """Against the definition: what the versions that are left reach, by sets."""
    for _ in range(50):
        chunks = [ChunkId(rng.randbytes(32)) for _ in range(30)]
        kept = set(rng.sample(chunks, 5))
        versions = [set(rng.sample(chunks, rng.randrange(12))) for _ in range(rng.randrange(1, 6))]
        marks, count = Marks(), len(versions)
        marks.add(marks_of_chunks(sorted(kept)), KEPT)
        for position, version in enumerate(versions):
            marks.add(marks_of_chunks(sorted(version)), stage_of(position, count))
        found = dict(zip(chunks, stages(marks, *chunks), strict=True))
        for going in range(count + 1):
            left = kept.union(*versions[going:])
            free = {chunk for chunk in chunks if found[chunk] >= going_stage(going, count)}
            assert free == set(chunks) - left


def test_marking_ten_million_chunks_costs_twelve_bytes_each() -> None:
    marks = Marks()
    marks.add(np.arange(1, 100_001, dtype=np.uint64), 1)
    marks.merge()
    assert marks._marks.nbytes + marks._stages.nbytes == 12 * 100_000
