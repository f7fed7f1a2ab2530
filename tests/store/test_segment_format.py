"""store/segment_format.py: the invariants are "decodes to what was encoded, or Corrupt" and
"no byte that a row names is ever in a range that may be punched"."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import crc64
from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import (
    BLOCK_BYTES,
    INLINE_START,
    MAX_DEPTH,
    PARENTS_OF,
    Codec,
    Location,
    LocationFlag,
    Row,
    SegmentFacts,
    SegmentIndex,
    SegmentKind,
    decode_facts,
    decode_idx,
    decode_location,
    encode_facts,
    encode_idx,
    encode_location,
    segment_number,
    segment_paths,
    unnamed_ranges,
)

GOLDEN_IDX = bytes.fromhex(
    "434b495801000100"  # "CKIX", version 1, kind 1, flags 0
    "2a00000000000000"  # segment 42
    "0500000000000000"  # created 5 ns
    "0020000000000000"  # 8192 bytes
    "0300000002000000"  # 3 inline bytes, 2 rows
    "616263"
    + "11" * 32
    + "0010000000000000"
    + "0010000000100000"
    + "00000000"
    + "22" * 32
    + "2800000000000000"
    + "0300000003000000"
    + "00010000"
    + "f98bc4ffa5d93960"
)


def golden() -> SegmentIndex:
    rows = (
        Row(ChunkId(b"\x11" * 32), 4096, 4096, 4096),
        Row(ChunkId(b"\x22" * 32), INLINE_START, 3, 3, flags=LocationFlag.IN_IDX),
    )
    return SegmentIndex(42, SegmentKind.ADOPTED, 5, 8192, rows, b"abc")


GOLDEN_ENCODED_IDX = bytes.fromhex(
    "434b495802000300"  # "CKIX", version 2, kind 3, flags 0
    "2b00000000000000"  # segment 43
    "0600000000000000"  # created 6 ns
    "c800000000000000"  # 200 bytes
    "0000000003000000"  # no inline area, 3 rows
    + "11" * 32
    + "0000000000000000"
    + "2000000020000000"
    + "00000000"  # raw
    + "22" * 32
    + "2000000000000000"
    + "6400000000000400"
    + "03000000"  # delta
    + "33" * 32
    + "8400000000000000"
    + "4400000000000200"
    + "04000000"  # cast
    + "0300000000000000"  # 3 edges
    + "0100000002000000"  # row 1 at depth 2
    + "44" * 32
    + "0200000003000000"  # row 2 at depth 3
    + "22" * 32
    + "0200000003000000"
    + "11" * 32
    + "a3b3062dea1db170"
)


def golden_encoded() -> SegmentIndex:
    raw, delta, cast = (ChunkId(bytes([n]) * 32) for n in (0x11, 0x22, 0x33))
    rows = (
        Row(raw, 0, 32, 32),
        Row(delta, 32, 100, 1 << 18, Codec.DELTA, 0, 2, (ChunkId(b"\x44" * 32),)),
        Row(cast, 132, 68, 1 << 17, Codec.CAST, 0, 3, (delta, raw)),
    )
    return SegmentIndex(43, SegmentKind.ENCODED, 6, 200, rows)


@st.composite
def encoded_rows(draw: st.DrawFn, row: Row) -> Row:
    """The same row, of a payload that may be encoded against others."""
    codec = draw(st.sampled_from(Codec)) if row.stored else Codec.RAW
    if codec == Codec.RAW:
        return row
    least, most = PARENTS_OF[codec]
    parents = st.binary(min_size=32, max_size=32).filter(lambda one: one != row.chunk).map(ChunkId)
    found = draw(st.lists(parents, min_size=least, max_size=most))
    depth = draw(st.integers(1, MAX_DEPTH)) if found else 0
    length = row.stored + draw(st.integers(1, 100))
    return Row(row.chunk, row.offset, row.stored, length, codec, 0, depth, tuple(found))


@st.composite
def indexes(draw: st.DrawFn) -> SegmentIndex:
    """Any description of a segment whose payloads do not overlap."""
    rows, at = [], 0
    for number in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 3 * BLOCK_BYTES))
        length = draw(st.integers(0, 3 * BLOCK_BYTES))
        rows.append(Row(ChunkId(bytes([number]) * 32), at, length, length))
        at += length
    kind = draw(st.sampled_from(SegmentKind))
    if kind == SegmentKind.ENCODED:
        rows = [draw(encoded_rows(row)) for row in rows]
    inline = draw(st.binary(max_size=20)) if kind != SegmentKind.ENCODED else b""
    if inline:
        rows.append(Row(ChunkId(b"\xff" * 32), INLINE_START, len(inline), len(inline), 0, 1))
    size = at + draw(st.integers(0, 3 * BLOCK_BYTES))
    return SegmentIndex(draw(st.integers(0, 2**64 - 1)), kind, 7, size, tuple(rows), inline)


def test_golden_idx() -> None:
    assert encode_idx(golden()).hex() == GOLDEN_IDX.hex()
    assert decode_idx(GOLDEN_IDX) == golden()


def test_golden_idx_of_an_encoded_segment() -> None:
    assert encode_idx(golden_encoded()).hex() == GOLDEN_ENCODED_IDX.hex()
    assert decode_idx(GOLDEN_ENCODED_IDX) == golden_encoded()


@given(indexes())
def test_idx_round_trip(index: SegmentIndex) -> None:
    assert decode_idx(encode_idx(index)) == index


@given(st.integers(0, len(GOLDEN_IDX) * 8 - 1))
def test_one_flipped_bit_is_corrupt(bit: int) -> None:
    damaged = bytearray(GOLDEN_IDX)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        decode_idx(bytes(damaged))


@given(st.integers(0, len(GOLDEN_ENCODED_IDX) * 8 - 1))
def test_one_flipped_bit_of_an_encoded_one_is_corrupt(bit: int) -> None:
    damaged = bytearray(GOLDEN_ENCODED_IDX)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        decode_idx(bytes(damaged))


def changed(at: int, value: int) -> bytes:
    """The golden .idx of an encoded segment with one byte changed and its checksum made right again."""
    body = bytearray(GOLDEN_ENCODED_IDX[:-8])
    body[at] = value
    return bytes(body) + crc64(body).to_bytes(8, "little")


EDGES_AT = 40 + 3 * 52


@pytest.mark.parametrize(
    "at,value",
    [
        (4, 1),  # the version of other kinds
        (6, 1),  # another kind
        (40 + 52 + 48, 2),  # a codec without parents
        (40 + 48, 1),  # a raw row becomes an encoded one of the same length
        (40 + 52 + 49, 1),  # IN_IDX
        (40 + 2 * 52 + 46, 0),  # length below what is stored
        (EDGES_AT, 2),  # one edge less than there is
        (EDGES_AT + 4, 1),  # reserved
        (EDGES_AT + 8, 3),  # a row that is not there, and out of order
        (EDGES_AT + 8, 0),  # an edge of the raw row
        (EDGES_AT + 12, 0),  # depth 0
        (EDGES_AT + 12, 9),  # too deep
        (EDGES_AT + 13, 1),  # reserved
        (EDGES_AT + 8 + 2 * 40, 1),  # two parents of a delta
        (EDGES_AT + 12 + 2 * 40, 4),  # two depths of one row
    ],
)
def test_edges_that_do_not_fit_their_rows_are_corrupt(at: int, value: int) -> None:
    with pytest.raises(Corrupt):
        decode_idx(changed(at, value))


def test_a_chunk_is_not_its_own_parent() -> None:
    chunk = ChunkId(b"\x22" * 32)
    row = Row(chunk, 0, 10, 20, Codec.DELTA, 0, 1, (chunk,))
    with pytest.raises(Corrupt):
        encode_idx(SegmentIndex(1, SegmentKind.ENCODED, 0, 10, (row,)))


def test_only_encoded_segments_hold_encoded_chunks() -> None:
    row = Row(ChunkId(b"\x22" * 32), 0, 10, 20, Codec.ZSTD)
    decode_idx(encode_idx(SegmentIndex(1, SegmentKind.ENCODED, 0, 10, (row,))))
    for kind in (SegmentKind.ADOPTED, SegmentKind.PACKED):
        with pytest.raises(Corrupt):
            encode_idx(SegmentIndex(1, kind, 0, 10, (row,)))


@given(st.binary(max_size=400))
def test_idx_of_noise_is_corrupt(noise: bytes) -> None:
    cut = GOLDEN_IDX[: len(noise) // 3]
    for encoded in (noise, GOLDEN_IDX[:30] + noise, GOLDEN_IDX + noise + b"\0", cut):
        with pytest.raises(Corrupt):
            decode_idx(encoded)


@pytest.mark.parametrize(
    "row",
    [
        Row(ChunkId(bytes(32)), 5000, 4000, 4000),
        Row(ChunkId(bytes(32)), 0, 10, 11),
        Row(ChunkId(bytes(32)), 0, 10, 10, flags=2),
        Row(ChunkId(bytes(32)), INLINE_START - 1, 2, 2, flags=1),
        Row(ChunkId(bytes(32)), INLINE_START, 4, 4, flags=1),
    ],
)
def test_row_outside_of_its_segment_is_corrupt(row: Row) -> None:
    with pytest.raises(Corrupt):
        encode_idx(SegmentIndex(1, SegmentKind.ADOPTED, 0, 8192, (row,), b"abc"))


@given(indexes(), st.data())
def test_without_keeps_the_places_of_the_rest(index: SegmentIndex, data: st.DataObject) -> None:
    ids = [row.chunk for row in index.rows]
    dead = frozenset(data.draw(st.sets(st.sampled_from(ids)))) if ids else frozenset()
    left = decode_idx(encode_idx(index.without(dead)))
    assert left.rows == tuple(row for row in index.rows if row.chunk not in dead)
    if any(row.flags for row in left.rows):
        assert left.inline == index.inline


@given(indexes(), st.data())
def test_unnamed_ranges_are_all_blocks_without_a_payload(index: SegmentIndex, data: st.DataObject) -> None:
    blocks = -(-index.file_bytes // BLOCK_BYTES)
    named = set[int]()
    for row in index.rows:
        if not row.flags and row.stored:
            named.update(range(row.offset // BLOCK_BYTES, -(-(row.offset + row.stored) // BLOCK_BYTES)))
    allocated = data.draw(st.sets(st.integers(0, max(blocks - 1, 0)))) if blocks else set()
    extents = [
        (block * BLOCK_BYTES, min(BLOCK_BYTES, index.file_bytes - block * BLOCK_BYTES))
        for block in sorted(allocated)
    ]
    found = unnamed_ranges(index, extents)
    punched = {
        block
        for offset, length in found
        for block in range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES))
    }
    assert all(offset % BLOCK_BYTES == 0 and length > 0 for offset, length in found)
    assert punched == allocated - named


def test_location_round_trip() -> None:
    location = Location(2**64 - 1, 2**63, 2**32 - 1, 17, 3, 1)
    encoded = encode_location(location)
    assert len(encoded) == 26
    assert decode_location(encoded) == location
    assert location.in_idx and not Location(1, 2, 3, 3).in_idx
    with pytest.raises(Corrupt):
        decode_location(encoded + b"\0")


def test_facts_round_trip() -> None:
    facts = SegmentFacts(SegmentKind.PACKED, 10, 9, 8, 7, 6, True)
    assert decode_facts(encode_facts(facts)) == facts
    with pytest.raises(Corrupt):
        decode_facts(b"\xff")


def test_names() -> None:
    assert segment_paths(0x12AB) == ("segments/ab/00000000000012ab.seg", "segments/ab/00000000000012ab.idx")
    assert segment_number("00000000000012ab.seg") == 0x12AB
    for other in ("12ab.seg", "00000000000012AB.seg", "00000000000012ab.idx.tmp", "00000000000012ab", "x"):
        assert segment_number(other) is None
