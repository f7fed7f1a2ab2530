"""The loops: the numpy twin says what is right, native ones say the same of any bytes at any address."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.codecs import planes_twin as twin
from ckptfs.store.codecs.kernels import NATIVE, TWIN, Kernels
from ckptfs.store.codecs.planes_twin import ROTATED, SIGN_MAGNITUDE

WIDTHS = (1, 2, 4, 8)
PARAMETERS = (0, ROTATED, SIGN_MAGNITUDE, ROTATED | SIGN_MAGNITUDE)
NANS = {1: b"\x7f", 2: b"\xc0\x7f", 4: b"\x01\x00\xc0\x7f", 8: b"\x00\x00\x00\x00\x00\x00\xf8\xff"}

needs_native = pytest.mark.skipif(NATIVE is None, reason="store/native/planes.c is not built")


@pytest.fixture(params=["baseline", "avx2"])
def native(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The native loops, as this CPU and as an older one would run them."""
    from ckptfs.store import _planes

    if not _planes.use_loops(request.param):
        pytest.skip(f"this CPU lacks {request.param}")
    yield _planes
    _planes.use_loops("avx2")


def shapes_of_input(width: int) -> Iterator[tuple[bytes | memoryview, bytes | memoryview]]:
    """(source, parent): random, constant, filled with NaN, odd, misaligned, empty, of many blocks."""
    rng = Random(5)
    for length in (0, 1, width - 1, width, 3 * width + 1, 1023 * width, 1025 * width, 20_000 * width + 3):
        source, parent = rng.randbytes(length), rng.randbytes(length)
        yield source, parent
        yield source, source
        yield bytes(length), bytes([255]) * length
        filled = (NANS[width] * (length // width + 1))[:length]
        yield filled, source
        yield source, filled
        for shift in (1, 3, 7):
            yield memoryview(rng.randbytes(length + shift))[shift:], parent
            yield source, memoryview(rng.randbytes(length + shift))[shift:]


def parts(planes: bytes, width: int) -> list[bytes]:
    count = len(planes) // width
    return [planes[k * count : k * count + count] for k in range(width)]


@needs_native
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("width", WIDTHS)
def test_native_and_numpy_agree(native: Kernels, width: int, parameters: int) -> None:
    for source, parent in shapes_of_input(width):
        for beside in (None, parent):
            split = native.split(source, beside, width, parameters)
            assert split == TWIN.split(source, beside, width, parameters)
            assert native.sample(source, beside, width, parameters) == TWIN.sample(
                source, beside, width, parameters
            )
            tail = bytes(source)[len(split) :]
            planes = parts(split, width)
            assert native.join(planes, beside, width, parameters, tail) == source
            assert TWIN.join(planes, beside, width, parameters, tail) == source
        assert native.cast(source) == TWIN.cast(source)
        assert native.repeats(source) == TWIN.repeats(source)


@needs_native
@given(
    source=st.binary(max_size=300),
    seed=st.integers(0, 99),
    width=st.sampled_from(WIDTHS),
    parameters=st.sampled_from(PARAMETERS),
)
def test_native_and_numpy_agree_on_anything(source: bytes, seed: int, width: int, parameters: int) -> None:
    assert NATIVE is not None
    parent = Random(seed).randbytes(len(source))
    for beside in (None, parent):
        split = NATIVE.split(source, beside, width, parameters)
        assert split == TWIN.split(source, beside, width, parameters)
        tail = source[len(split) :]
        assert NATIVE.join(parts(split, width), beside, width, parameters, tail) == source


def test_bfloat16_bits_all_of_them() -> None:
    """Every pair of a value and a neighbour of 2^16 patterns comes back, NaN and both zeros included."""
    values = np.arange(1 << 16, dtype="<u2")
    for step in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        parent = (values + np.uint16(step)).astype("<u2").tobytes()
        source = values.tobytes()
        split = TWIN.split(source, parent, 2, SIGN_MAGNITUDE)
        assert TWIN.join(parts(split, 2), parent, 2, SIGN_MAGNITUDE, b"") == source


@pytest.mark.parametrize("kernels", [TWIN, pytest.param(NATIVE, marks=needs_native)], ids=["twin", "native"])
class TestMeaning:
    """What the loops compute, in numbers that a person can check."""

    def test_the_exponent_is_the_highest_plane(self, kernels: Kernels) -> None:
        source = struct.pack("<3f", 1.0, -1.0, 2.0)
        assert parts(kernels.split(source, None, 4, ROTATED), 4)[3] == bytes([127, 127, 128])
        assert parts(kernels.split(source, None, 4, 0), 4)[3] == b"\x3f\xbf\x40"

    def test_neighbours_differ_by_one(self, kernels: Kernels) -> None:
        def stored(value: float, parent: float) -> int:
            bits = np.array([value], "<f4").tobytes()
            split = kernels.split(bits, np.array([parent], "<f4").tobytes(), 4, SIGN_MAGNITUDE)
            return int.from_bytes(split, "little")

        above = float(np.nextafter(np.float32(1), np.float32(2)))
        assert stored(1.0, 1.0) == 0
        assert stored(above, 1.0) == 2 and stored(1.0, above) == 1
        assert stored(-above, -1.0) == 1 and stored(-1.0, -above) == 2
        assert stored(0.0, -0.0) == 2 and stored(-0.0, 0.0) == 1

    def test_integers_wrap_around(self, kernels: Kernels) -> None:
        assert kernels.split(b"\x00\xff\x80", b"\xff\x00\x7f", 1, 0) == bytes([2, 1, 2])

    def test_a_cast_rounds_to_nearest_and_ties_to_even(self, kernels: Kernels) -> None:
        bits = [
            0x3F800000,
            0x3F808000,
            0x3F808001,
            0x3F818000,
            0x7F7FFFFF,
            0xFF800000,
            0x7F800001,
            0xFFFFFFFF,
        ]
        found = struct.unpack("<8H", kernels.cast(struct.pack("<8I", *bits)))
        assert found == (0x3F80, 0x3F80, 0x3F81, 0x3F82, 0x7F80, 0xFF80, 0x7FC0, 0x7FC0)

    def test_a_cast_is_that_of_torch(self, kernels: Kernels) -> None:
        bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(3))
        values = bits.to(torch.int32).view(torch.float32)
        theirs = values[~values.isnan()].to(torch.bfloat16).view(torch.int16).numpy()
        assert kernels.cast(values[~values.isnan()].numpy().tobytes()) == theirs.astype("<i2").tobytes()

    def test_repeats_are_words_met_before(self, kernels: Kernels) -> None:
        stride = twin.WORD_STRIDE
        assert kernels.repeats(bytes(100 * stride)) == 99
        assert 90 <= kernels.repeats(Random(1).randbytes(100 * stride) * 2) <= 100
        assert kernels.repeats(Random(1).randbytes(200 * stride)) == 0
        assert kernels.repeats(bytes(7)) == 0 and kernels.repeats(bytes(stride + 8)) == 1

    def test_a_sample_counts_the_first_of_each_run(self, kernels: Kernels) -> None:
        counts = np.frombuffer(kernels.sample(bytes(20_000), None, 2, 0), np.uint32).reshape(2, 256)
        assert counts[:, 0].tolist() == [2 * twin.SAMPLE_RUN] * 2 and counts[:, 1:].sum() == 0

    @pytest.mark.parametrize("width", [0, 3, 16, -1])
    def test_an_unknown_width_is_refused(self, kernels: Kernels, width: int) -> None:
        with pytest.raises(ValueError):
            kernels.split(b"abcdefgh", None, width, 0)

    def test_lengths_that_do_not_fit_are_refused(self, kernels: Kernels) -> None:
        for call in (
            lambda: kernels.split(b"abcd", b"abc", 2, 0),
            lambda: kernels.sample(b"abcd", b"abcde", 2, 0),
            lambda: kernels.join([b"ab", b"c"], None, 2, 0, b""),
            lambda: kernels.join([b"ab"], None, 2, 0, b""),
            lambda: kernels.join([b"ab", b"cd"], b"abcd", 2, 0, b"e"),
        ):
            with pytest.raises(ValueError):
                call()


@needs_native
def test_threads_do_not_disturb_each_other() -> None:
    assert NATIVE is not None
    sources = [Random(seed).randbytes(1 << 18) for seed in range(4)]
    expected = [TWIN.split(source, sources[0], 4, SIGN_MAGNITUDE) for source in sources]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(8):
            found = pool.map(lambda source: NATIVE.split(source, sources[0], 4, SIGN_MAGNITUDE), sources)
            assert list(found) == expected
