"""What to expect of a version: the parts of tensors, whatever they are cut into, and the way as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.gpu.expected import (
    Expectation,
    ExpectedFile,
    ExpectedTensor,
    edges_of,
    encode_expectation,
    parse_expectation,
)
from ckptfs.gpu.parts import decode_pieces
from ckptfs.store.errors import CkptfsError, Corrupt, InvalidRequest
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Piece, Recipe, decode_recipe
from ckptfs.store.regions import CHUNK_BYTES


def digest(content: bytes) -> ChunkId:
    return ChunkId(blake3(content).digest())


@dataclass(frozen=True)
class Case:
    content: bytes
    recipe: Recipe
    cuts: list[int]
    ways: int

    def file(self) -> ExpectedFile:
        """The content as one file, each stretch between two cuts a tensor."""
        tensors = []
        for start, end in zip(self.cuts, self.cuts[1:], strict=False):
            tensor = ExpectedTensor(f"t{start}", start, end - start, "U8", (end - start,))
            found = edges_of(self.recipe, start, end, tensor.cuts(self.ways))
            edges = b"".join(digest(self.content[at : at + n]) for at, n in found)
            tensors.append(msgspec.structs.replace(tensor, edges=edges))
        return ExpectedFile("a/model", "safetensors", self.recipe.encode(), tuple(tensors), ways=self.ways)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    content, pieces = b"", []
    for length, is_hole in draw(
        st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8)
    ):
        payload = bytes(length) if is_hole else draw(st.binary(min_size=length, max_size=length))
        content += payload
        pieces.append(Piece(length, None if is_hole else digest(payload)))
    cuts = draw(st.sets(st.integers(0, len(content)), min_size=2, max_size=6))
    return Case(content, Recipe(pieces), sorted(cuts), draw(st.integers(1, 5)))


@given(cases())
def test_parts_tile_a_tensor_and_hash_to_its_bytes(case: Case) -> None:
    file = case.file()
    for tensor in file.tensors:
        at = tensor.offset
        for part in file.parts_of(tensor):
            assert part.offset == at and part.length > 0
            at += part.length
            assert digest(case.content[part.offset : at]) == part.digest
            index = case.recipe.index_at(part.offset)
            piece = case.recipe.piece(index)
            assert part.chunk == piece.chunk
            assert at <= case.recipe.start(index) + piece.length
        assert at == tensor.end
        # Rows of one byte: the blocks of torch.chunk are made of whole parts.
        block = -(-tensor.length // case.ways)
        starts = {part.offset for part in file.parts_of(tensor)}
        assert starts >= set(range(tensor.offset, tensor.end, block))
    whole = [*file.parts()]
    assert sum(part.length for part in whole) == len(case.content)
    assert all(digest(case.content[p.offset : p.offset + p.length]) == p.digest for p in whole)


@given(cases(), st.data())
def test_pieces_are_those_of_the_recipe_or_both_are_refused(case: Case, data: st.DataObject) -> None:
    encoded = bytearray(case.recipe.encode())
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(encoded) - 1), st.integers(0, 255)), max_size=3)
    ):
        encoded[at] = value
    encoded = encoded[: len(encoded) - data.draw(st.sampled_from([0, 0, 0, 1, 40]))]
    try:
        recipe = decode_recipe(bytes(encoded))
    except Corrupt:
        with pytest.raises(Corrupt):
            decode_pieces(bytes(encoded))
        return
    pieces = decode_pieces(bytes(encoded))
    assert pieces.size == recipe.size and len(pieces.chunks) == len(recipe)
    for index, piece in enumerate(recipe.pieces()):
        assert int(pieces.starts[index]) == recipe.start(index)
        assert bool(pieces.is_hole[index]) == (piece.chunk is None)
        assert piece.chunk is None or pieces.chunks[index].tobytes() == piece.chunk


def test_lengths_that_wrap_around_are_refused() -> None:
    """Their sum, taken modulo 2^64, is the size that is claimed."""
    rows = b"".join(length.to_bytes(8, "little") + b"x" * 32 for length in (1 << 63, 1 << 63, 7))
    encoded = (
        b"CKRC" + (1).to_bytes(4, "little") + (7).to_bytes(8, "little") + (3).to_bytes(8, "little") + rows
    )
    for decode in (decode_recipe, decode_pieces):
        with pytest.raises(Corrupt):
            decode(encoded)


@given(cases(), st.text())
def test_it_comes_back_from_json(case: Case, name: str) -> None:
    expectation = Expectation(unit=name, number=3, name="v", path="/x", files=(case.file(),), others=(name,))
    assert parse_expectation(json.dumps(encode_expectation(expectation))) == expectation


def test_names_that_are_not_utf8_travel() -> None:
    file = ExpectedFile("\udcff", "dcp", Recipe([]).encode(), ())
    expectation = Expectation(unit="\udcfe", number=1, name="v", path=None, files=(file,))
    assert parse_expectation(json.dumps(encode_expectation(expectation))) == expectation


def test_a_long_hole_is_hashed_in_parts() -> None:
    recipe = Recipe([Piece(2 * CHUNK_BYTES + 5, None)])
    file = ExpectedFile(
        "m", "safetensors", recipe.encode(), (ExpectedTensor("t", 1, 2 * CHUNK_BYTES, "U8", ()),)
    )
    assert [part.length for part in file.parts_of(file.tensors[0])] == [CHUNK_BYTES, CHUNK_BYTES]
    assert [part.length for part in file.parts()] == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert {part.digest for part in file.parts()} == {digest(bytes(CHUNK_BYTES)), digest(bytes(5))}


@pytest.mark.parametrize(
    "tensor",
    [
        ExpectedTensor("t", 5, 6, "U8", (6,)),
        ExpectedTensor("t", -1, 3, "U8", (3,)),
        ExpectedTensor("t", 0, 0, "U8", (0,)),
        ExpectedTensor("t", 1, 5, "U8", (5,)),
        ExpectedTensor("t", 1, 5, "U8", (5,), b"half a digest"),
    ],
)
def test_what_contradicts_itself_is_corrupt(tensor: ExpectedTensor) -> None:
    recipe = Recipe([Piece(10, digest(b"x" * 10))])
    file = ExpectedFile("m", "safetensors", recipe.encode(), (tensor,))
    with pytest.raises(Corrupt):
        list(file.parts_of(tensor))


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_anything_else_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_expectation(text)


@given(cases(), st.data())
def test_an_altered_answer_is_a_value_or_an_error_of_ours(case: Case, data: st.DataObject) -> None:
    plain = encode_expectation(Expectation(unit="u", number=1, name="v", path=None, files=(case.file(),)))
    text = bytearray(json.dumps(plain).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(32, 126))
    try:
        expectation = parse_expectation(bytes(text))
        for file in expectation.files:
            list(file.parts())
            for tensor in file.tensors:
                list(file.parts_of(tensor))
    except CkptfsError:
        pass


@pytest.mark.parametrize("ways", [0, -1, 1 << 40])
def test_a_number_of_ranks_that_is_none_is_refused(ways: int) -> None:
    file = ExpectedFile("m", "safetensors", Recipe([]).encode(), (), ways=ways)
    plain = encode_expectation(Expectation(unit="u", number=1, name="v", path=None, files=(file,)))
    with pytest.raises(InvalidRequest):
        parse_expectation(json.dumps(plain))


def test_another_format_is_refused() -> None:
    plain = encode_expectation(Expectation(unit="u", number=1, name="v", path=None, files=()))
    assert isinstance(msgspec.json.encode(plain), bytes)
    for other in ({"format": 2}, {"kind": "something else"}):
        with pytest.raises(InvalidRequest, match="another release"):
            parse_expectation(json.dumps(plain | other))
