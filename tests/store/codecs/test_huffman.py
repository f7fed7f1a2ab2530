"""The frames of literals: whatever they are made of, zstd's own decoder gives it back; and they are small."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.codecs import Coder
from ckptfs.store.codecs.kernels import NATIVE, huffman_frame

pytestmark = pytest.mark.skipif(NATIVE is None, reason="store/native/huffman.c is not built")

BLOCK = 128 << 10
REFEREE = zstandard.ZstdDecompressor()


def drawn(seed: int, length: int, symbols: int, skew: float, lowest: int = 0) -> bytes:
    """`length` bytes of `symbols` values from `lowest` on, the more uneven the higher `skew` is."""
    rng = np.random.default_rng(seed)
    shares = rng.random(symbols) ** skew
    values = rng.permutation(np.arange(lowest, lowest + symbols))
    return rng.choice(values, size=length, p=shares / shares.sum()).astype(np.uint8).tobytes()


def entropy_bytes(plain: bytes) -> float:
    """What an order-0 code takes at least."""
    counts = np.bincount(np.frombuffer(plain, np.uint8))
    counts = counts[counts > 0]
    return float((counts * np.log2(len(plain) / counts)).sum()) / 8


def check(plain: bytes) -> bytes:
    frame = huffman_frame(plain)
    if frame:
        assert REFEREE.decompress(frame, allow_extra_data=False) == plain
        assert Coder().plain(frame, len(plain)) == plain
        assert len(frame) < len(plain)
    return frame


@pytest.mark.parametrize("symbols", [150, 191, 201, 230, 256])
@pytest.mark.parametrize("length", [1024, 1025, 1500, BLOCK + 1024, BLOCK + 1100])
def test_a_code_whose_description_is_as_long_as_what_it_saves(symbols: int, length: int) -> None:
    for seed in range(20):
        check(drawn(seed, length, symbols, 0.0))


@given(
    seed=st.integers(0, 1 << 32),
    length=st.integers(1000, 3000)
    | st.integers(BLOCK - 3, BLOCK + 2000)
    | st.integers(2 * BLOCK, 2 * BLOCK + 9),
    symbols=st.integers(2, 256),
    skew=st.floats(0, 30),
)
def test_zstd_reads_every_frame(seed: int, length: int, symbols: int, skew: float) -> None:
    check(drawn(seed, length, symbols, skew))


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.binary(max_size=60), st.integers(30, 200))
def test_zstd_reads_frames_of_anything(few: list[int], more: bytes, repeat: int) -> None:
    check((bytes(few) * repeat)[: 40 * repeat] + more)


@pytest.mark.parametrize("symbols", [12, 16, 100, 129, 130, 200, 250])
@pytest.mark.parametrize("length", [4096, 65536, BLOCK, 2 * BLOCK])
def test_frames_are_near_what_is_possible(length: int, symbols: int) -> None:
    plain = drawn(symbols, length, symbols, 4)
    frame = check(plain)
    assert frame
    assert len(frame) <= 1.05 * entropy_bytes(plain) + 160 * -(-length // BLOCK)


def test_codes_that_would_be_too_long_are_shortened() -> None:
    """Counts like Fibonacci's numbers make a code as deep as it has symbols."""
    counts = [1, 1]
    while sum(counts) < 100_000:
        counts.append(counts[-1] + counts[-2])
    plain = b"".join(bytes([10 * number % 251]) * count for number, count in enumerate(counts))
    shuffled = np.random.default_rng(1).permutation(np.frombuffer(plain[:BLOCK], np.uint8)).tobytes()
    frame = check(shuffled)
    assert frame and len(frame) < 1.05 * entropy_bytes(shuffled) + 200


@pytest.mark.parametrize("lowest", [0, 100, 127, 128, 253])
def test_values_at_either_end(lowest: int) -> None:
    """The weights of a code are written in two ways, one of which has no room for values above 128."""
    for symbols in (2, 3):
        assert check(drawn(7, 20_000, symbols, 0.5, lowest))


@pytest.mark.parametrize("length", [0, 1, 1023, BLOCK + 1, BLOCK + 1023, 2 * BLOCK + 5])
def test_short_blocks_are_left_to_zstd(length: int) -> None:
    assert huffman_frame(drawn(1, length, 9, 1)) == b""


def test_what_zstd_does_better_is_left_to_it() -> None:
    rng = np.random.default_rng(3)
    assert huffman_frame(bytes(BLOCK)) == b""
    assert huffman_frame(rng.bytes(BLOCK)) == b""
    sparse = np.where(rng.random(BLOCK) < 0.95, 0, rng.integers(1, 256, BLOCK)).astype(np.uint8)
    assert huffman_frame(sparse.tobytes()) == b""
    half_noise = rng.bytes(BLOCK // 2) + bytes(range(64)) * (BLOCK // 128)
    check(half_noise)


def test_any_buffer_will_do() -> None:
    plain = drawn(4, 5003, 20, 2)
    assert (
        huffman_frame(memoryview(plain)[3:]) == huffman_frame(bytearray(plain[3:])) == check(plain[3:]) != b""
    )
