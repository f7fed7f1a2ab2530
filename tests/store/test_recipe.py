"""Recipes: one byte string for one list of pieces, a valid recipe or Corrupt for any bytes."""

from __future__ import annotations

import tracemalloc

import pytest
from golden import broken, plain, vectors
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import EMPTY, HOLE, Piece, Recipe, decode_recipe

CHUNKS = st.binary(min_size=32, max_size=32).filter(lambda b: b != HOLE).map(ChunkId)
PIECES = st.builds(Piece, st.integers(1, 1 << 40), st.one_of(st.none(), CHUNKS))
LISTS = st.lists(PIECES, max_size=20)
ENCODED = LISTS.map(lambda pieces: Recipe(pieces).encode())


@pytest.mark.parametrize("vector", vectors("recipe"), ids=lambda v: v["name"])
def test_golden_recipes(vector: dict[str, object]) -> None:
    encoded = bytes.fromhex(str(vector["hex"]))
    recipe = decode_recipe(encoded)
    assert [plain(piece) for piece in recipe.pieces()] == vector["pieces"]
    assert recipe.size == vector["size"]
    assert recipe.encode() == encoded
    assert recipe.identity().hex() == vector["id"]


@given(LISTS)
def test_what_is_encoded_is_decoded(pieces: list[Piece]) -> None:
    recipe = Recipe(pieces)
    again = decode_recipe(recipe.encode())
    assert list(again.pieces()) == pieces and len(again) == len(pieces)
    assert again.size == recipe.size == sum(piece.length for piece in pieces)
    assert again.identity() == recipe.identity() == chunk_id(recipe.encode())
    assert list(recipe.chunks()) == [piece.chunk for piece in pieces if piece.chunk is not None]
    assert list(recipe.root_leaves()) == [piece.chunk or HOLE for piece in pieces]
    assert recipe.data_bytes() == sum(piece.length for piece in pieces if piece.chunk is not None)


@given(st.lists(PIECES, min_size=1, max_size=20), st.data())
def test_every_offset_is_in_one_piece(pieces: list[Piece], data: st.DataObject) -> None:
    recipe = Recipe(pieces)
    offset = data.draw(st.integers(0, recipe.size - 1))
    index = recipe.index_at(offset)
    assert recipe.start(index) <= offset < recipe.start(index) + recipe.piece(index).length
    assert recipe.start(len(recipe)) == recipe.size


@given(broken(ENCODED))
def test_any_bytes_are_a_recipe_or_corrupt(encoded: bytes) -> None:
    try:
        recipe = decode_recipe(encoded)
    except Corrupt:
        return
    assert recipe.encode() == encoded


@pytest.mark.parametrize("count", [1 << 62, (1 << 64) - 1, 2])
def test_a_claimed_length_costs_no_memory(count: int) -> None:
    encoded = EMPTY.encode()[:16] + count.to_bytes(8, "little") + bytes(40)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode_recipe(encoded)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_sizes_that_overflow_are_corrupt() -> None:
    row = ((1 << 62) - 1).to_bytes(8, "little") + bytes([1]) * 32
    for count in (3, 5, 9):
        size = count * ((1 << 62) - 1) % (1 << 64)
        header = EMPTY.encode()[:8] + size.to_bytes(8, "little") + count.to_bytes(8, "little")
        with pytest.raises(Corrupt):
            decode_recipe(header + row * count)
