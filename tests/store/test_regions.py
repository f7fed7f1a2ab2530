"""Regions cover a file exactly, and cut points never change."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store.formats import Layout, Tensor
from ckptfs.store.regions import (
    CHUNK_BYTES,
    CONTENT_MAX_BYTES,
    CONTENT_MIN_BYTES,
    MIN_TENSOR_BYTES,
    SHORT_RUN_BYTES,
    ContentCutter,
    Mode,
    Region,
    cut_content,
    cut_fixed,
    plan_regions,
)

MIB = 1 << 20


def layout_of(*extents: tuple[int, int]) -> Layout:
    tensors = tuple(Tensor(f"t{at}", at, length, "U8", (length,)) for at, length in extents)
    return Layout("safetensors", tensors)


def test_empty_file_has_no_region() -> None:
    assert plan_regions(0, None) == []
    assert plan_regions(0, layout_of()) == []


@pytest.mark.parametrize("layout", [None, layout_of()])
def test_unknown_content_is_one_region(layout: Layout | None) -> None:
    assert plan_regions(SHORT_RUN_BYTES, layout) == [Region(0, SHORT_RUN_BYTES, Mode.FIXED)]
    assert plan_regions(SHORT_RUN_BYTES + 1, layout) == [Region(0, SHORT_RUN_BYTES + 1, Mode.CONTENT)]


def test_tensors_are_cut_at_their_start_and_small_ones_join_the_run() -> None:
    layout = layout_of((100, MIB), (100 + MIB, MIN_TENSOR_BYTES - 1), (2 * MIB, MIN_TENSOR_BYTES))
    assert plan_regions(3 * MIB, layout) == [
        Region(0, 100, Mode.FIXED),
        Region(100, MIB, Mode.FIXED),
        Region(100 + MIB, MIB - 100, Mode.CONTENT),
        Region(2 * MIB, MIN_TENSOR_BYTES, Mode.FIXED),
        Region(2 * MIB + MIN_TENSOR_BYTES, MIB - MIN_TENSOR_BYTES, Mode.CONTENT),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 600_000)), max_size=30),
    st.integers(0, 200_000),
)
def test_regions_cover_the_file_exactly(gaps: list[tuple[int, int]], tail: int) -> None:
    extents, at = [], 0
    for gap, length in gaps:
        extents.append((at + gap, length))
        at += gap + length
    size = at + tail
    regions = plan_regions(size, layout_of(*extents))
    at = 0
    for region in regions:
        assert region.offset == at and region.length > 0
        assert region.mode is Mode.FIXED or region.length > SHORT_RUN_BYTES
        at += region.length
    assert at == size
    fixed = {(region.offset, region.length) for region in regions if region.mode is Mode.FIXED}
    assert all(extent in fixed for extent in extents if extent[1] >= MIN_TENSOR_BYTES)


@given(st.integers(0, 5 * CHUNK_BYTES))
def test_fixed_cuts_sum_up(length: int) -> None:
    lengths = cut_fixed(length)
    assert sum(lengths) == length
    assert all(one == CHUNK_BYTES for one in lengths[:-1])
    assert all(0 < one <= CHUNK_BYTES for one in lengths)


def test_content_cut_points_are_golden() -> None:
    """If this fails, new saves no longer share chunks with old ones: see the module's docstring."""
    sample = random.Random(20).randbytes(2 * MIB) + bytes(MIB) + random.Random(21).randbytes(MIB + 1)
    lengths = cut_content(sample)
    assert lengths[:6] == [80935, 47215, 29017, 78668, 73666, 69114]
    assert hashlib.sha256(repr(lengths).encode()).hexdigest() == (
        "45f25d0282b4db3938d514f4bf462531a84723a0c904c7cd5b2408a852a72c6c"
    )


def test_content_cut_lengths_are_bounded() -> None:
    lengths = cut_content(random.Random(1).randbytes(4 * MIB))
    assert sum(lengths) == 4 * MIB
    assert all(CONTENT_MIN_BYTES <= one <= CONTENT_MAX_BYTES for one in lengths[:-1])
    assert 60_000 < sum(lengths) / len(lengths) < 100_000
    assert cut_content(bytes(MIB)) == [CONTENT_MAX_BYTES] * 4
    assert cut_content(b"") == []
    assert cut_content(memoryview(bytearray(b"abc"))) == [3]


def _sample(seed: int, size: int, zeros: int) -> bytes:
    return random.Random(seed).randbytes(size) + bytes(zeros) + random.Random(seed + 1).randbytes(size // 3)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, MIB),
    zeros=st.sampled_from([0, 1, CONTENT_MAX_BYTES - 1, CONTENT_MAX_BYTES, 3 * CONTENT_MAX_BYTES + 1]),
    pieces=st.lists(st.integers(0, 700_000), min_size=1, max_size=12),
)
def test_streamed_cuts_equal_cuts_of_the_whole(seed: int, size: int, zeros: int, pieces: list[int]) -> None:
    whole = _sample(seed, size, zeros)
    cutter, lengths, at, turn = ContentCutter(), [], 0, 0
    while at < len(whole):
        step = pieces[turn % len(pieces)] or 1 + turn % 5000
        lengths += cutter.feed(memoryview(whole)[at : at + step])
        at, turn = at + step, turn + 1
        assert len(cutter._tail) < CONTENT_MAX_BYTES
    lengths += cutter.finish()
    assert lengths == cut_content(whole)


def test_tiny_pieces_equal_the_whole() -> None:
    whole = _sample(7, 900_000, 300_000)
    cutter = ContentCutter()
    lengths = [one for at in range(0, len(whole), 613) for one in cutter.feed(whole[at : at + 613])]
    assert lengths + cutter.finish() == cut_content(whole)
