"""store/segment_format.py: the invariants are "decodes to what was encoded, or Corrupt" and
"no byte that a row names is ever in a range that may be punched"."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import (
    BLOCK_BYTES,
    INLINE_START,
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


@st.composite
def indexes(draw: st.DrawFn) -> SegmentIndex:
    """Any description of a segment whose payloads do not overlap."""
    rows, at = [], 0
    for number in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 3 * BLOCK_BYTES))
        length = draw(st.integers(0, 3 * BLOCK_BYTES))
        rows.append(Row(ChunkId(bytes([number]) * 32), at, length, length))
        at += length
    inline = draw(st.binary(max_size=20))
    if inline:
        rows.append(Row(ChunkId(b"\xff" * 32), INLINE_START, len(inline), len(inline), 0, 1))
    size = at + draw(st.integers(0, 3 * BLOCK_BYTES))
    kind = draw(st.sampled_from(SegmentKind))
    return SegmentIndex(draw(st.integers(0, 2**64 - 1)), kind, 7, size, tuple(rows), inline)


def test_golden_idx() -> None:
    assert encode_idx(golden()).hex() == GOLDEN_IDX.hex()
    assert decode_idx(GOLDEN_IDX) == golden()


@given(indexes())
def test_idx_round_trip(index: SegmentIndex) -> None:
    assert decode_idx(encode_idx(index)) == index


@given(st.integers(0, len(GOLDEN_IDX) * 8 - 1))
def test_one_flipped_bit_is_corrupt(bit: int) -> None:
    damaged = bytearray(GOLDEN_IDX)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        decode_idx(bytes(damaged))


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
