"""Chains of parents: the right bytes or Corrupt, and an end, whatever the rows and the stored bytes say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.codecs import MAX_DEPTH, Coder, Header, Parent, Stored, decode_chunk, decode_chunks, encode
from ckptfs.store.codecs import chain as chain_module
from ckptfs.store.codecs.chain import MAX_CHUNKS
from ckptfs.store.codecs.elements import Element
from ckptfs.store.codecs.encoded_chunk import encode_chunk
from ckptfs.store.codecs.planes_twin import cast
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.hashing import chunk_id, crc64
from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import Codec

CODER = Coder()
WITHOUT_NATIVE = Coder()
WITHOUT_NATIVE.unpacker = None
VALUES = 512


def series(length: int) -> tuple[list[bytes], dict[ChunkId, Stored]]:
    """`length` saves of a tensor, each encoded against the one before, and a bfloat16 export of the last."""
    rng = np.random.default_rng(4)
    values = (rng.standard_normal(VALUES) * 0.02).astype("<f4")
    saves: list[bytes] = []
    rows: dict[ChunkId, Stored] = {}
    parent: Parent | None = None
    for _ in range(length):
        save = values.tobytes()
        encoded = encode(save, "F32", parent, (), CODER)
        rows[chunk_id(save)] = Stored(encoded.codec, len(save), encoded.stored)
        parent = Parent(chunk_id(save), save, encoded.depth)
        saves.append(save)
        values = values + (rng.standard_normal(VALUES) * 1e-6).astype("<f4")
    assert parent is not None
    export = cast(saves[-1])
    encoded = encode(export, "BF16", None, (parent,), CODER)
    rows[chunk_id(export)] = Stored(encoded.codec, len(export), encoded.stored)
    return [*saves, export], rows


def delta(parent: ChunkId, depth: int, length: int = 4) -> bytes:
    """An int8 chunk of zero difference to its parent."""
    body = length.to_bytes(4, "little") + bytes(length)
    return encode_chunk(Header(Codec.DELTA, length, Element.INT8, depth, (parent,)), [body])


def test_a_chain_of_the_greatest_depth() -> None:
    saves, rows = series(MAX_DEPTH)
    assert rows[chunk_id(saves[-2])].codec == Codec.DELTA and rows[chunk_id(saves[-1])].codec == Codec.CAST
    for save in saves:
        assert decode_chunk(chunk_id(save), rows.__getitem__, CODER) == save


def test_a_chain_begins_anew_where_it_would_be_too_deep() -> None:
    saves, rows = series(2 * MAX_DEPTH + 3)
    codecs = [rows[chunk_id(save)].codec for save in saves[:-1]]
    assert codecs == ([Codec.PLANES] + [Codec.DELTA] * MAX_DEPTH) * 2 + [Codec.PLANES]
    for save in saves:
        assert decode_chunk(chunk_id(save), rows.__getitem__, CODER) == save


@given(st.integers(0, MAX_DEPTH), st.data())
def test_a_change_anywhere_in_a_chain_is_found(which: int, data: st.DataObject) -> None:
    saves, rows = series(MAX_DEPTH)
    damaged = list(rows)[which]
    stored = bytearray(rows[damaged].stored)
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    changed = rows | {damaged: Stored(rows[damaged].codec, rows[damaged].length, bytes(stored))}
    for number, save in enumerate(saves):
        if number < which:
            assert decode_chunk(chunk_id(save), changed.__getitem__, CODER) == save
        else:
            with pytest.raises(Corrupt):
                decode_chunk(chunk_id(save), changed.__getitem__, CODER)


@pytest.mark.parametrize("coder", [CODER, WITHOUT_NATIVE], ids=["native", "without"])
@pytest.mark.parametrize("together_bytes", [1, 5000, 1 << 30])
def test_chunks_that_are_decoded_together_are_those_decoded_alone(
    coder: Coder, together_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_module, "_TOGETHER_BYTES", together_bytes)
    saves, rows = series(MAX_DEPTH)
    wanted = [chunk_id(save) for save in saves]
    rows[chunk_id(b"plain")] = Stored(Codec.RAW, 5, b"plain")
    found = decode_chunks([*wanted, chunk_id(b"plain")], rows.__getitem__, coder)
    assert {chunk: bytes(plain.view) for chunk, plain in found.items()} == {
        chunk_id(plain): plain for plain in [*saves, b"plain"]
    }
    assert decode_chunks([], rows.__getitem__, coder) == {}


@pytest.mark.parametrize("coder", [CODER, WITHOUT_NATIVE], ids=["native", "without"])
@given(st.integers(0, MAX_DEPTH), st.data())
def test_a_change_in_one_chunk_is_none_in_those_beside_it(
    coder: Coder, which: int, data: st.DataObject
) -> None:
    saves, rows = series(MAX_DEPTH)
    damaged = list(rows)[which]
    stored = bytearray(rows[damaged].stored)
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        stored[-8:] = crc64(stored[:-8]).to_bytes(8, "little")
    changed = rows | {damaged: Stored(rows[damaged].codec, rows[damaged].length, bytes(stored))}

    def fetch(chunk: ChunkId) -> Stored:
        if chunk not in changed:
            raise NotFound("another parent")
        return changed[chunk]

    found = decode_chunks([chunk_id(save) for save in saves], fetch, coder)
    right = {chunk: bytes(plain.view) for chunk, plain in found.items()}
    assert right.items() <= {chunk_id(save): save for save in saves}.items()
    assert set(map(chunk_id, saves[:which])) <= right.keys()


def test_what_cannot_be_fetched_is_left_out() -> None:
    saves, rows = series(3)
    missing = chunk_id(saves[1])

    def fetch(chunk: ChunkId) -> Stored:
        if chunk == missing:
            raise NotFound("it is not there")
        return rows[chunk]

    assert [*decode_chunks([chunk_id(save) for save in saves], fetch, CODER)] == [chunk_id(saves[0])]


@given(st.permutations(range(MAX_DEPTH + 1)))
def test_chunks_in_each_others_places_are_found(order: list[int]) -> None:
    """Every chunk is right, and some answer to the id of another."""
    saves, rows = series(MAX_DEPTH)
    ids = list(rows)
    mixed = {chunk: rows[ids[other]] for chunk, other in zip(ids, order, strict=True)}
    for save in saves:
        try:
            assert decode_chunk(chunk_id(save), mixed.__getitem__, CODER) == save
        except Corrupt:
            pass


@pytest.mark.parametrize(("codec", "length"), [(Codec.ZSTD, 4), (Codec.RAW, 4), (Codec.DELTA, 5), (77, 4)])
def test_a_row_that_says_something_else_is_found(codec: int, length: int) -> None:
    parent = chunk_id(b"abcd")
    rows = {
        parent: Stored(Codec.RAW, 4, b"abcd"),
        ChunkId(bytes(32)): Stored(codec, length, delta(parent, 1)),
    }
    with pytest.raises(Corrupt):
        decode_chunk(ChunkId(bytes(32)), rows.__getitem__, CODER)


def test_circles_end() -> None:
    first, second = ChunkId(b"1" * 32), ChunkId(b"2" * 32)
    for depth in range(1, MAX_DEPTH + 1):
        rows = {
            first: Stored(Codec.DELTA, 4, delta(second, depth)),
            second: Stored(Codec.DELTA, 4, delta(first, MAX_DEPTH)),
        }
        with pytest.raises(Corrupt, match="depth"):
            decode_chunk(second, rows.__getitem__, CODER)
    rows = {first: Stored(Codec.DELTA, 4, delta(first, 1))}
    with pytest.raises(Corrupt, match="depth"):
        decode_chunk(first, rows.__getitem__, CODER)


def test_casts_of_casts_end() -> None:
    """A tree of parents that doubles at each depth would have 511 chunks."""
    taken: list[ChunkId] = []

    def fetch(chunk: ChunkId) -> Stored:
        taken.append(chunk)
        depth = chunk[0]
        if depth == 0:
            return Stored(Codec.RAW, 4, bytes(4))
        below = ChunkId(bytes([depth - 1]) * 32)
        header = Header(Codec.CAST, 4, None, depth, (below, below))
        return Stored(Codec.CAST, 4, encode_chunk(header, ()))

    with pytest.raises(Corrupt, match=f"more than {MAX_CHUNKS}"):
        decode_chunk(ChunkId(bytes([MAX_DEPTH]) * 32), fetch, CODER)
    assert len(taken) == MAX_CHUNKS


def test_a_parent_that_is_gone_is_told() -> None:
    def fetch(chunk: ChunkId) -> Stored:
        if chunk == bytes(32):
            return Stored(Codec.DELTA, 4, delta(ChunkId(b"g" * 32), 1))
        raise NotFound("chunk is not there")

    with pytest.raises(NotFound):
        decode_chunk(ChunkId(bytes(32)), fetch, CODER)


def test_a_parent_encoded_later_is_followed_as_long_as_it_is_less_deep() -> None:
    """A raw parent gets an encoding of its own: its child, whose depth left room, need not be touched."""
    old, new = b"abcd", b"abcd"
    oldest = ChunkId(b"o" * 32)
    child, parent = chunk_id(new), ChunkId(b"p" * 32)
    rows = {
        child: Stored(Codec.DELTA, 4, delta(parent, 5)),
        parent: Stored(Codec.RAW, 4, old),
        oldest: Stored(Codec.RAW, 4, old),
    }
    assert decode_chunk(child, rows.__getitem__, CODER) == new
    for depth in range(1, MAX_DEPTH + 1):
        rows[parent] = Stored(Codec.DELTA, 4, delta(oldest, depth))
        if depth < 5:
            assert decode_chunk(child, rows.__getitem__, CODER) == new
        else:
            with pytest.raises(Corrupt, match="depth"):
                decode_chunk(child, rows.__getitem__, CODER)
