"""Tensors of saved files as a file of their own: every byte right, and nothing copied that need not be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from bytes_reader import BytesReader
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.errors import InvalidRequest
from ckptfs.store.formats import parse
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Piece, Recipe, decode_recipe
from ckptfs.store.tensor_file import TensorPart, make_tensor_file

CONTENTS = st.lists(st.sampled_from([0, 0, 0, 7]), min_size=1, max_size=40).map(bytes)


class Files:
    """Chunks by id, and reading through recipes."""

    def __init__(self) -> None:
        self.chunks: dict[ChunkId, bytes] = {}

    def cut(self, content: bytes, at: Sequence[int]) -> Recipe:
        edges = sorted({0, len(content), *(one for one in at if one < len(content))})
        pieces = []
        for start, end in pairwise(edges):
            part = content[start:end]
            hole = not any(part) and len(part) > 2 and (not pieces or pieces[-1].chunk is not None)
            pieces.append(Piece(len(part), None if hole else chunk_id(part)))
            if not hole:
                self.chunks[chunk_id(part)] = part
        return Recipe(pieces)

    def read(self, recipe: Recipe, offset: int, length: int) -> bytes:
        whole = b"".join(
            self.chunks[piece.chunk] if piece.chunk is not None else bytes(piece.length)
            for piece in recipe.pieces()
        )
        return whole[offset : offset + length]


@given(st.lists(st.tuples(CONTENTS, st.sets(st.integers(1, 39)), st.data()), min_size=1, max_size=4))
def test_any_tensors_of_any_files(drawn: list[tuple[bytes, set[int], st.DataObject]]) -> None:
    files, parts, expected = Files(), [], []
    for number, (content, cuts, data) in enumerate(drawn):
        recipe = files.cut(content, sorted(cuts))
        start = data.draw(st.integers(0, len(content) - 1))
        end = data.draw(st.integers(start + 1, len(content)))
        parts.append(TensorPart(f"t{number}", "U8", (end - start,), recipe, start, end - start))
        expected.append(content[start:end])
    before = {*files.chunks}
    made = make_tensor_file(parts, {"from": "here"}, files.read)
    files.chunks |= dict(made.fresh)
    assert all(chunk_id(content) == chunk for chunk, content in made.fresh)
    assert decode_recipe(made.recipe.encode()).encode() == made.recipe.encode()
    whole = files.read(made.recipe, 0, made.recipe.size)
    layout = parse(BytesReader(whole), "x.safetensors")
    assert layout is not None and layout.damage is None
    assert [(one.name, one.dtype) for one in layout.tensors] == [(one.name, "U8") for one in parts]
    assert [whole[one.offset : one.end] for one in layout.tensors] == expected
    # What lies wholly in a tensor is taken over.
    inside = {
        piece.chunk
        for part in parts
        for at, piece in enumerate(part.recipe.pieces())
        if part.offset <= part.recipe.start(at) and part.recipe.start(at + 1) <= part.offset + part.length
    }
    assert inside - {None} <= {piece.chunk for piece in made.recipe.pieces()}
    assert {chunk for part in parts for chunk in part.chunks()} <= before
    holes = [piece.chunk is None for piece in made.recipe.pieces()]
    assert not any(one and other for one, other in pairwise(holes))


def test_the_header() -> None:
    files = Files()
    recipe = files.cut(bytes(range(16)), [8])
    parts = [TensorPart("a", "F32", (2, 1), recipe, 0, 8), TensorPart("b", "I64", (), recipe, 8, 8)]
    made = make_tensor_file(parts, {"k": "ä"}, files.read)
    files.chunks |= dict(made.fresh)
    whole = files.read(made.recipe, 0, made.recipe.size)
    length = int.from_bytes(whole[:8], "little")
    assert length % 8 == 0 and len(made.fresh) == 1
    assert json.loads(whole[8 : 8 + length]) == {
        "__metadata__": {"k": "ä"},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
        "b": {"dtype": "I64", "shape": [], "data_offsets": [8, 16]},
    }


def test_many_small_ones_do_not_become_one_large_chunk() -> None:
    files = Files()
    content = b"\1" * 300_000
    recipe = files.cut(content, ())
    parts = [TensorPart(f"t{at}", "U8", (1000,), recipe, at * 1000, 1000) for at in range(299)]
    made = make_tensor_file(parts, {}, files.read)
    assert max(len(content) for _, content in made.fresh) == 256 << 10
    files.chunks |= dict(made.fresh)
    assert files.read(made.recipe, 0, made.recipe.size).endswith(content[: 299 * 1000])


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_names_that_a_file_cannot_hold(names: tuple[str, ...]) -> None:
    files = Files()
    recipe = files.cut(b"12345678", ())
    parts = [TensorPart(name, "U8", (8,), recipe, 0, 8) for name in names]
    with pytest.raises(InvalidRequest, match="cannot hold a second"):
        make_tensor_file(parts, {}, files.read)
