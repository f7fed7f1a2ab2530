"""Encode and decode: the chunk comes back, and a parent is used if less is stored with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptfs.store.codecs import (
    MAX_DEPTH,
    Coder,
    Encoded,
    Parent,
    Stored,
    context,
    decode_chunk,
    decoding,
    encode,
    encoding,
    entropy,
)
from ckptfs.store.codecs.kernels import CONTEXT_TWIN, TWIN
from ckptfs.store.codecs.planes_twin import cast
from ckptfs.store.encoding_level import Level
from ckptfs.store.errors import Corrupt
from ckptfs.store.formats.layout import DTYPE_BITS
from ckptfs.store.hashing import Buffer, chunk_id
from ckptfs.store.segment_format import Codec

CODER = Coder()
LEVELS: tuple[Level, ...] = ("fast", "small")
CHUNK_BYTES = 256 << 10


def parent_of(payload: Buffer, depth: int = 0) -> Parent:
    return Parent(chunk_id(payload), payload, depth)


def decoded(payload: Buffer, encoded: Encoded, parents: Sequence[Parent]) -> bytes:
    """What a reader gets; each parent as the raw chunk that it is."""
    rows = {one.chunk: Stored(Codec.RAW, len(one.payload), one.payload) for one in parents}
    own = chunk_id(payload)
    rows[own] = Stored(encoded.codec, len(payload), encoded.stored)
    return decode_chunk(own, rows.__getitem__, CODER)


def weights(seed: int, count: int = CHUNK_BYTES // 4, spread: float = 0.02) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(count) * spread).astype("<f4")


def kinds_of_input() -> dict[str, tuple[bytes, bytes]]:
    """(chunk, parent) of every sort."""
    rng = Random(1)
    first = weights(1)
    second = first + weights(2, spread=1e-5)
    noise = rng.randbytes(CHUNK_BYTES)
    return {
        "random": (noise, rng.randbytes(CHUNK_BYTES)),
        "equal": (noise, noise),
        "all but equal": (noise, noise[:-1] + bytes([noise[-1] ^ 1])),
        "zeros": (bytes(CHUNK_BYTES), noise),
        "constant": (b"\x3f\x80\x12\x34" * (CHUNK_BYTES // 4), bytes(CHUNK_BYTES)),
        "NaN": (b"\x00\x00\xc0\x7f" * (CHUNK_BYTES // 4), first.tobytes()),
        "weights": (second.tobytes(), first.tobytes()),
        "odd": (second.tobytes()[:-3], first.tobytes()[3:]),
        "one byte": (b"x", b"y"),
        "text": (b"the same words again, " * 900, noise[: 22 * 900]),
        "repeated rows": (first.tobytes()[:4096] * 64, noise),
    }


@pytest.mark.parametrize("dtype", [*sorted(DTYPE_BITS), None])
@pytest.mark.parametrize("kind", kinds_of_input())
def test_every_dtype_comes_back(kind: str, dtype: str | None) -> None:
    payload, other = kinds_of_input()[kind]
    for parent, level in product((None, parent_of(other, 2)), LEVELS):
        encoded = encode(payload, dtype, parent, (), CODER, level)
        assert len(encoded.stored) <= len(payload)
        assert encoded.depth == (3 if encoded.parents else 0)
        assert decoded(payload, encoded, () if parent is None else (parent,)) == payload
        if kind in ("zeros", "constant", "NaN", "repeated rows", "text"):
            assert len(encoded.stored) < len(payload) / 10, encoded.codec


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "I8", "I64", "F64"])
def test_whichever_loops_what_is_stored_is_read(
    dtype: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a compiler reads what another has stored, and the other way round.

    With zstd's own frames on both, the stored bytes are the same.
    """
    kinds = {kind: (payload, parent_of(other)) for kind, (payload, other) in kinds_of_input().items()}

    def encoded() -> dict[str, Encoded]:
        return {
            kind: encode(payload, dtype, parent, (), CODER, level)
            for kind, (payload, parent) in kinds.items()
        }

    native = encoded()
    monkeypatch.setattr(entropy, "huffman_frame", lambda plain: b"")
    slower = encoded()
    monkeypatch.setattr(encoding, "KERNELS", TWIN)
    monkeypatch.setattr(context, "CONTEXT_KERNELS", CONTEXT_TWIN)
    assert encoded() == slower
    for kind, (payload, parent) in kinds.items():
        assert decoded(payload, slower[kind], (parent,)) == payload
    monkeypatch.setattr(decoding, "KERNELS", TWIN)
    for kind, (payload, parent) in kinds.items():
        assert decoded(payload, native[kind], (parent,)) == payload


@pytest.mark.parametrize("dtype", ["F32", "BF16", "I8", "I64", None])
def test_chunks_longer_than_a_tensors_come_back(dtype: str | None) -> None:
    """A recipe of many pieces is one chunk; zstd's window is shorter than it then."""
    payload = Random(2).choices(range(60), k=(3 << 20) + 5)
    long, before = bytes(payload), bytes(reversed(payload))
    for parent in (None, parent_of(long[:-1] + b"!"), parent_of(before)):
        encoded = encode(long, dtype, parent, (), CODER)
        assert encoded.codec is not Codec.RAW
        assert decoded(long, encoded, () if parent is None else (parent,)) == long


@given(
    payload=st.binary(min_size=1, max_size=200),
    repeat=st.integers(1, 30),
    dtype=st.sampled_from([*sorted(DTYPE_BITS), None]),
    data=st.data(),
)
def test_anything_comes_back(payload: bytes, repeat: int, dtype: str | None, data: st.DataObject) -> None:
    payload *= repeat
    other = data.draw(
        st.one_of(st.none(), st.just(payload), st.binary(max_size=200).map(lambda b: b * repeat))
    )
    parent = None if other is None else parent_of(other, data.draw(st.integers(0, MAX_DEPTH)))
    encoded = encode(payload, dtype, parent, (), CODER, data.draw(st.sampled_from(LEVELS)))
    assert len(encoded.stored) <= len(payload) and encoded.depth <= MAX_DEPTH
    assert decoded(payload, encoded, () if parent is None else (parent,)) == payload


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_buffer_will_do(kind: type[Buffer]) -> None:
    payload = weights(3).tobytes()
    encoded = encode(kind(payload), "F32", parent_of(kind(weights(4).tobytes())), (), CODER)
    assert decoded(payload, encoded, ()) == payload


@pytest.mark.parametrize(
    ("dtype", "least"), [("F32", 1.18), ("BF16", 1.45), ("F16", 1.12)], ids=["F32", "BF16", "F16"]
)
def test_weights_get_smaller(dtype: str, least: float) -> None:
    values = weights(5)
    payload = {
        "F32": values.tobytes(),
        "BF16": cast(values.tobytes()),
        "F16": values.astype("<f2").tobytes(),
    }[dtype]
    encoded = encode(payload, dtype, None, (), CODER)
    assert encoded.codec is Codec.PLANES
    assert len(payload) / len(encoded.stored) >= least


def test_a_parent_is_used_if_it_helps() -> None:
    first, second, other = weights(6), weights(6) + weights(7, spread=1e-5), weights(8)
    alone = encode(second.tobytes(), "F32", None, (), CODER)
    near = encode(second.tobytes(), "F32", parent_of(first.tobytes()), (), CODER)
    far = encode(second.tobytes(), "F32", parent_of(other.tobytes()), (), CODER)
    assert near.codec is Codec.DELTA and near.depth == 1 and near.parents == (chunk_id(first.tobytes()),)
    assert len(near.stored) < 0.8 * len(alone.stored)
    assert (far.codec, len(far.stored)) == (alone.codec, len(alone.stored)) and not far.parents


@pytest.mark.parametrize(("dtype", "least"), [("F32", 0.03), ("BF16", 0.1), ("F16", 0.05)])
def test_at_the_small_level_differences_take_less(dtype: str, least: float) -> None:
    first, second = weights(6, 1 << 17), weights(6, 1 << 17) + weights(7, 1 << 17, spread=1e-4)
    saves = {
        "F32": [first.tobytes(), second.tobytes()],
        "BF16": [cast(first.tobytes()), cast(second.tobytes())],
        "F16": [first.astype("<f2").tobytes(), second.astype("<f2").tobytes()],
    }[dtype]
    fast, small = (encode(saves[1], dtype, parent_of(saves[0]), (), CODER, level) for level in LEVELS)
    assert (fast.codec, small.codec) == (Codec.DELTA, Codec.CONTEXT)
    assert (fast.depth, fast.parents) == (small.depth, small.parents)
    assert len(fast.stored) / len(small.stored) > 1 + least
    assert decoded(saves[1], small, (parent_of(saves[0]),)) == saves[1]


def test_at_the_small_level_what_is_not_near_its_parent_is_as_at_the_fast_one() -> None:
    payload, other = weights(6).tobytes(), weights(8).tobytes()
    fast, small = (encode(payload, "F32", parent_of(other), (), CODER, level) for level in LEVELS)
    assert fast == small and fast.codec is Codec.PLANES


@pytest.mark.parametrize("wrong", ["too deep", "longer", "shorter"])
def test_a_parent_that_cannot_be_is_not_used(wrong: str) -> None:
    payload = weights(9).tobytes()
    other = {"too deep": payload, "longer": payload + b"x", "shorter": payload[:-4]}[wrong]
    parent = parent_of(other, MAX_DEPTH if wrong == "too deep" else 0)
    for level in LEVELS:
        assert encode(payload, "F32", parent, (), CODER, level).codec is Codec.PLANES


def test_the_deepest_parent_is_used() -> None:
    payload, before = weights(9).tobytes(), (weights(9) + weights(8, spread=1e-6)).tobytes()
    encoded = encode(payload, "F32", parent_of(before, MAX_DEPTH - 1), (), CODER)
    assert encoded.codec is Codec.DELTA and encoded.depth == MAX_DEPTH


def test_no_chunk_is_its_own_parent() -> None:
    """Two saves that share a chunk offer it as its own parent; zeros are the cast of themselves."""
    for payload in (weights(9).tobytes(), bytes(CHUNK_BYTES)):
        own = parent_of(payload)
        encoded = encode(payload, "BF16", own, (own, own), CODER)
        assert not encoded.parents
        assert decoded(payload, encoded, ()) == payload


@pytest.mark.parametrize("halves", [1, 2])
def test_a_cast_is_nothing_but_its_parents(halves: int) -> None:
    values = weights(10).tobytes()
    cut = len(values) // halves
    parents = [parent_of(values[at : at + cut], at and 4) for at in range(0, len(values), cut)]
    payload = cast(values)
    encoded = encode(payload, "BF16", None, parents, CODER)
    assert encoded.codec is Codec.CAST and len(encoded.stored) == 20 + 32 * halves
    assert encoded.depth == (5 if halves == 2 else 1)
    assert decoded(payload, encoded, parents) == payload


@pytest.mark.parametrize("wrong", ["another value", "a NaN of its own", "too deep", "half of it", "not BF16"])
def test_what_is_not_exactly_the_cast_is_no_cast(wrong: str) -> None:
    values = weights(11)
    payload = bytearray(cast(values.tobytes()))
    parents = [parent_of(values.tobytes(), MAX_DEPTH if wrong == "too deep" else 0)]
    if wrong == "another value":
        payload[1000] ^= 1
    elif wrong == "a NaN of its own":
        values[7] = np.nan
        parents = [parent_of(values.tobytes())]
        payload[14:16] = b"\xc1\x7f"
    elif wrong == "half of it":
        parents = [parent_of(values[: len(values) // 2].tobytes())]
    encoded = encode(payload, "F16" if wrong == "not BF16" else "BF16", None, parents, CODER)
    assert encoded.codec is not Codec.CAST
    assert decoded(payload, encoded, parents) == payload


@pytest.mark.parametrize("level", LEVELS)
def test_wrong_parents_are_found(level: Level) -> None:
    first, second = weights(12).tobytes(), (weights(12) + weights(13, spread=1e-5)).tobytes()
    encoded = encode(second, "F32", parent_of(first), (), CODER, level)
    rows = {
        chunk_id(second): Stored(encoded.codec, len(second), encoded.stored),
        chunk_id(first): Stored(Codec.RAW, len(first), first[:-1] + b"\0"),
    }
    # Its last value has another exponent now: at the small level no more than noise would come out.
    with pytest.raises(Corrupt, match={"fast": "other bytes", "small": "not those of 262144 bytes"}[level]):
        decode_chunk(chunk_id(second), rows.__getitem__, CODER)
    rows[chunk_id(first)] = Stored(Codec.RAW, len(first) - 4, first[:-4])
    with pytest.raises(Corrupt, match="parent of"):
        decode_chunk(chunk_id(second), rows.__getitem__, CODER)


def test_int64_ids_get_much_smaller() -> None:
    ids = np.random.default_rng(1).integers(0, 50_000, CHUNK_BYTES // 8).astype("<i8").tobytes()
    assert len(ids) / len(encode(ids, "I64", None, (), CODER).stored) > 3.9


def test_an_empty_chunk_is_itself() -> None:
    assert encode(b"", "F32", None, (), CODER) == Encoded(Codec.RAW, b"")
