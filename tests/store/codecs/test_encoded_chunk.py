"""The bytes of an encoded chunk: golden ones are read for ever; any others are read rightly or refused."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import pytest
from golden import broken, vectors
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.codecs import Coder, Header, Stored, decode_chunk, decode_header
from ckptfs.store.codecs.decoding import decode
from ckptfs.store.codecs.elements import FRACTION_BITS, Element
from ckptfs.store.codecs.encoded_chunk import encode_chunk
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.hashing import chunk_id, crc64
from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import Codec

CODER = Coder()
GOLDEN = vectors("encoded_chunk")
IDS = st.binary(min_size=32, max_size=32).map(ChunkId)


def resealed(encoded: bytes) -> bytes:
    """The same with a right checksum."""
    return encoded[:-8] + crc64(encoded[:-8]).to_bytes(8, "little")


def stored_of(vector: dict[str, Any]) -> bytes:
    return bytes.fromhex(vector["hex"])


def fetched(vector: dict[str, Any], encoded: bytes) -> dict[ChunkId, Stored]:
    """The vector's chunk, stored as `encoded`, and its parents, raw."""
    rows = {}
    for parent in vector["parents"]:
        plain = bytes.fromhex(parent["hex"])
        rows[chunk_id(plain)] = Stored(Codec.RAW, len(plain), plain)
    rows[ChunkId(bytes.fromhex(vector["id"]))] = Stored(vector["codec"], vector["length"], encoded)
    return rows


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: v["name"])
def test_golden_chunks(vector: dict[str, Any]) -> None:
    encoded = stored_of(vector)
    header = decode_header(encoded)
    assert (header.codec, header.length, header.depth) == (vector["codec"], vector["length"], vector["depth"])
    assert [parent.hex() for parent in header.parents] == [parent["id"] for parent in vector["parents"]]
    plain = decode_chunk(ChunkId(bytes.fromhex(vector["id"])), fetched(vector, encoded).__getitem__, CODER)
    assert plain.hex() == vector["plain"]


def test_every_codec_has_a_golden_chunk() -> None:
    assert {vector["codec"] for vector in GOLDEN} == set(Codec) - {Codec.RAW}


@st.composite
def headers(draw: st.DrawFn) -> Header:
    codec = draw(st.sampled_from([Codec.ZSTD, Codec.PLANES, Codec.DELTA, Codec.CAST, Codec.CONTEXT]))
    elements = {Codec.PLANES: [*Element], Codec.DELTA: [*Element], Codec.CONTEXT: [*FRACTION_BITS]}.get(codec)
    element = draw(st.sampled_from(elements)) if elements is not None else None
    count = {Codec.DELTA: 1, Codec.CONTEXT: 1, Codec.CAST: draw(st.integers(1, 2))}.get(codec, 0)
    parents = tuple(draw(st.lists(IDS, min_size=count, max_size=count)))
    depth = draw(st.integers(1, 8)) if count else 0
    return Header(codec, draw(st.integers(1, (1 << 32) - 1)), element, depth, parents)


@given(headers(), st.binary(max_size=50))
def test_what_is_encoded_is_decoded(header: Header, body: bytes) -> None:
    encoded = encode_chunk(header, [body[:7], body[7:]])
    assert decode_header(encoded) == header
    assert encoded[12 + 32 * len(header.parents) : -8] == body


@given(broken(st.sampled_from([stored_of(vector) for vector in GOLDEN])), st.booleans())
def test_any_header_is_one_that_is_written_or_refused(encoded: bytes, is_resealed: bool) -> None:
    try:
        header = decode_header(resealed(encoded) if is_resealed and len(encoded) >= 8 else encoded)
    except (Corrupt, Unsupported):
        return
    assert encode_chunk(header, [encoded[12 + 32 * len(header.parents) : -8]])[:-8] == encoded[:-8]


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: v["name"])
def test_each_flipped_bit_is_found(vector: dict[str, Any]) -> None:
    encoded = stored_of(vector)
    chunk = ChunkId(bytes.fromhex(vector["id"]))
    for bit in range(8 * len(encoded)):
        changed = bytearray(encoded)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode_chunk(chunk, fetched(vector, bytes(changed)).__getitem__, CODER)


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: v["name"])
def test_each_changed_byte_behind_a_right_checksum_is_found_or_harmless(vector: dict[str, Any]) -> None:
    encoded = stored_of(vector)
    chunk = ChunkId(bytes.fromhex(vector["id"]))
    for at in range(len(encoded) - 8):
        for change in (1, 0x80, 0xFF):
            changed = resealed(encoded[:at] + bytes([encoded[at] ^ change]) + encoded[at + 1 :])
            try:
                plain = decode_chunk(chunk, fetched(vector, changed).__getitem__, CODER)
            except (Corrupt, Unsupported, KeyError):
                continue
            assert plain.hex() == vector["plain"]


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: v["name"])
def test_each_cut_is_found(vector: dict[str, Any]) -> None:
    encoded = stored_of(vector)
    chunk = ChunkId(bytes.fromhex(vector["id"]))
    for length in range(len(encoded)):
        for short in (encoded[:length], resealed(encoded[:length] + bytes(8))):
            if short == encoded:
                continue
            with pytest.raises(Corrupt):
                decode_chunk(chunk, fetched(vector, short).__getitem__, CODER)


@pytest.mark.parametrize(("codec", "version"), [(6, 1), (5, 2), (0, 1), (2, 2), (255, 255)])
def test_a_later_codec_names_who_can_read_it(codec: int, version: int) -> None:
    encoded = resealed(bytes([codec, version, 3, 14]) + b"whatever follows" + bytes(8))
    with pytest.raises(Unsupported, match=rf"codec {codec} version {version}: ckptfs 3\.14 or later"):
        decode_header(encoded)
    with pytest.raises(Corrupt):
        decode_header(encoded[:-1] + b"\xff")


def test_lengths_that_lie_take_no_memory() -> None:
    """Every u32 of a planes chunk and of a zstd frame's header, made huge."""
    vector = next(v for v in GOLDEN if v["name"] == "float32")
    encoded = stored_of(vector)
    chunk = ChunkId(bytes.fromhex(vector["id"]))
    for at in range(8, 60):
        changed = resealed(encoded[:at] + struct.pack("<I", 0xFFFFFFF0) + encoded[at + 4 :])
        tracemalloc.start()
        try:
            with pytest.raises(Corrupt):
                decode_chunk(chunk, fetched(vector, changed).__getitem__, CODER)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("size", [1 << 31, (1 << 40) + 5])
def test_a_frame_of_another_size_is_not_decompressed(size: int) -> None:
    frame = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + bytes(20)
    header = Header(Codec.ZSTD, 1 << 20)
    with pytest.raises(Corrupt, match="stands for"):
        decode(encode_chunk(header, [frame]), header, (), CODER)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00abcde" + b"x",  # something behind it
        b"\x28\xb5\x2f\xfd\x24\x05\x29\x00\x00abcde\x00\x00\x00\x00",  # a checksum
        b"\x28\xb5\x2f\xfd\x00\x88\x29\x00\x00abcde",  # a window, and no size
        b"\x50\x2a\x4d\x18\x05\x00\x00\x00abcde",  # a skippable frame
        b"\x28\xb5\x2f\xfd\x20\x05\x31\x00\x00abcdef",  # more than its header says
        b"\x28\xb5\x2f\xfd\x20\x05\x21\x00\x00abcd",  # less
    ],
)
def test_other_frames_are_corrupt(frame: bytes) -> None:
    with pytest.raises(Corrupt):
        CODER.plain(frame, 5)
    assert CODER.plain(b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00abcde", 5) == b"abcde"
