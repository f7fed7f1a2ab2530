"""Codec 5: the numpy twin says what is right, the native code says the same of any bytes at any address, and
a body that is not one is refused by both."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptfs.store import extract_codecs
from ckptfs.store.codecs import Coder, Header, context, decode_chunk
from ckptfs.store.codecs.chain import Stored
from ckptfs.store.codecs.context_twin import EXPONENTS, SCALE, SYMBOLS
from ckptfs.store.codecs.elements import FRACTION_BITS, WIDTH, Element
from ckptfs.store.codecs.encoded_chunk import encode_chunk
from ckptfs.store.codecs.kernels import CONTEXT_NATIVE, CONTEXT_TWIN, ContextKernels
from ckptfs.store.codecs.planes_twin import SIGN_MAGNITUDE, join
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import Buffer, chunk_id
from ckptfs.store.segment_format import Codec

NATIVE_FOLDER = Path(__file__).parents[3] / "store" / "native"
DRIVER = Path(__file__).with_name("context_driver.c")
ELEMENTS = [*FRACTION_BITS]
NANS = {Element.FLOAT16: b"\x01\x7e", Element.BFLOAT16: b"\xc0\x7f", Element.FLOAT32: b"\x01\x00\xc0\x7f"}

needs_native = pytest.mark.skipif(CONTEXT_NATIVE is None, reason="store/native/context.c is not built")
KERNELS = pytest.mark.parametrize(
    "kernels", [CONTEXT_TWIN, pytest.param(CONTEXT_NATIVE, marks=needs_native)], ids=["twin", "native"]
)


def packed(source: Buffer, parent: Buffer, element: Element, kernels: ContextKernels) -> bytes:
    before, context.CONTEXT_KERNELS = context.CONTEXT_KERNELS, kernels
    try:
        return b"".join(map(bytes, context.packed(source, parent, element)))
    finally:
        context.CONTEXT_KERNELS = before


def unpacked(body: Buffer, parent: Buffer, element: Element, kernels: ContextKernels) -> bytes | None:
    return kernels.context_unpack(body, parent, WIDTH[element], FRACTION_BITS[element])


def check(source: Buffer, parent: Buffer, element: Element) -> bytes:
    """Both make the same of it, both read it, and so does the reader that shares no code with them."""
    body = packed(source, parent, element, CONTEXT_TWIN)
    assert unpacked(body, parent, element, CONTEXT_TWIN) == source
    if CONTEXT_NATIVE is not None:
        assert packed(source, parent, element, CONTEXT_NATIVE) == body
        assert unpacked(body, parent, element, CONTEXT_NATIVE) == source
    if len(source):
        stored = encode_chunk(Header(Codec.CONTEXT, len(source), element, 1, (chunk_id(parent),)), [body])
        read = extract_codecs.decode(stored, Codec.CONTEXT, len(source), 9, lambda *_: bytes(parent))
        assert read == source
    return body


def values(seed: int, count: int, element: Element, spread: float = 1e-4) -> tuple[bytes, bytes]:
    """Weights, and the same a step later; (later, earlier)."""
    rng = np.random.default_rng(seed)
    first = (rng.standard_normal(count) * 0.02).astype("<f4")
    second = first + (rng.standard_normal(count) * spread).astype("<f4")

    def shown(floats: NDArray[np.float32]) -> bytes:
        if element is Element.FLOAT16:
            return floats.astype("<f2").tobytes()
        return CASTS[element](floats.view("<u4"))

    return shown(second), shown(first)


CASTS = {
    Element.FLOAT32: lambda bits: bits.tobytes(),
    Element.BFLOAT16: lambda bits: (bits >> 16).astype("<u2").tobytes(),
}


def with_differences(symbols: list[int], exponents: list[int], element: Element) -> tuple[bytes, bytes]:
    """A chunk and its parent with these symbols (low bits all set) beside these exponents."""
    width, kind = WIDTH[element], f"<u{WIDTH[element]}"
    parent = (np.array(exponents, np.uint64) << FRACTION_BITS[element]).astype(kind).tobytes()
    lows = [max(0, symbol // 4 - 1) for symbol in symbols]
    zigzag = [(symbol - 4 * low << low) + (1 << low) - 1 for symbol, low in zip(symbols, lows, strict=True)]
    planes = np.array(zigzag, np.uint64).astype(kind).view(np.uint8).reshape(-1, width).T
    source = join([plane.tobytes() for plane in planes], parent, width, SIGN_MAGNITUDE, b"")
    return source, parent


def shapes_of_input(element: Element) -> Iterator[tuple[Buffer, Buffer]]:
    """(source, parent): random, constant, filled with NaN, odd, misaligned, empty, of many blocks."""
    rng, width = Random(5), WIDTH[element]
    for length in (
        0,
        1,
        width,
        31 * width,
        32 * width + 1,
        1023 * width,
        1025 * width,
        5000 * width + width - 1,
    ):
        source, parent = rng.randbytes(length), rng.randbytes(length)
        yield source, parent
        yield source, source
        yield bytes(length), bytes([255]) * length
        filled = (NANS[element] * (length // width + 1))[:length]
        yield filled, source
        yield source, filled
        for shift in (1, 3):
            yield memoryview(rng.randbytes(length + shift))[shift:], parent
            yield source, memoryview(rng.randbytes(length + shift))[shift:]
        later, earlier = values(length, length // width + 1, element)
        yield later[:length], earlier[:length]


@pytest.mark.parametrize("element", ELEMENTS)
def test_native_and_numpy_agree(element: Element) -> None:
    for source, parent in shapes_of_input(element):
        check(source, parent, element)


@given(st.binary(max_size=400), st.integers(0, 99), st.sampled_from(ELEMENTS), st.integers(1, 9))
def test_native_and_numpy_agree_on_anything(few: bytes, seed: int, element: Element, repeat: int) -> None:
    source = few * repeat
    check(source, Random(seed).randbytes(len(source)), element)


@pytest.mark.parametrize("element", ELEMENTS)
def test_adversarial_frequencies(element: Element) -> None:
    most = 4 * 8 * WIDTH[element] - 4
    exponent_bits = 8 * WIDTH[element] - 1 - FRACTION_BITS[element]
    every = [*range(most)]
    rng = Random(3)
    cases = {
        "one symbol": ([0] * 5000, [9] * 5000),
        "the highest symbol alone": ([most - 1] * 100, [0] * 100),
        "once among many": ([*[1] * 70_000, most - 1], [3] * 70_001),
        "first, then many": ([most - 1, *[0] * 70_000], [3] * 70_001),
        "all as often": (every * 40, [7] * (most * 40)),
        "all, one of them nearly always": ([*every, *[5] * 50_000], [7] * (most + 50_000)),
        "all exponents": (
            [rng.randrange(most) for _ in range(20_000)],
            [rng.randrange(1 << exponent_bits) for _ in range(20_000)],
        ),
        "a symbol for each exponent": (
            [exponent % most for exponent in range(1 << exponent_bits)] * 200,
            [*range(1 << exponent_bits)] * 200,
        ),
        "one context of nearly all": ([*[0] * 60_000, *[most - 1] * 9], [*[20] * 60_000, *range(9)]),
    }
    for name, (symbols, exponents) in cases.items():
        source, parent = with_differences(symbols, exponents, element)
        body = check(source, parent, element)
        counts = np.frombuffer(
            CONTEXT_TWIN.context_counts(source, parent, WIDTH[element], FRACTION_BITS[element]), np.uint32
        ).reshape(EXPONENTS, SYMBOLS)
        assert [*np.bincount(symbols, minlength=SYMBOLS)] == [*counts.sum(axis=0)], name
        assert [*np.bincount(exponents, minlength=EXPONENTS)] == [*counts.sum(axis=1)], name
        assert 1 <= body[0] <= 16, name


def test_a_context_that_no_value_has_may_be_empty_but_for_its_table() -> None:
    source, parent = with_differences([0, 1, 2] * 100, [50] * 300, Element.FLOAT32)
    body = check(source, parent, Element.FLOAT32)
    table, streams = body[1:9], body[9:]
    assert body[0] == 1 and table[:2] == bytes([0, 2]) and all(byte >= 0x80 for byte in table[2::2])
    empty = bytes([7, 7, 0x80, 0x20])
    more = bytes([4, 40, 51, 52]) + empty + table + 2 * empty + streams
    for kernels in (CONTEXT_TWIN, CONTEXT_NATIVE or CONTEXT_TWIN):
        assert unpacked(more, parent, Element.FLOAT32, kernels) == source


# ---- what is wrong ------------------------------------------------------------------------------

TABLE = bytes([0, 1, 0x80, 0x10, 0x80, 0x10])  # 0 and 1, each 2048 of 4096
STATES = struct.pack("<I", 1 << 16) * 32


def body_of(*, contexts: bytes = b"\1", tables: bytes = TABLE, words: int = 0, rest: bytes = STATES) -> bytes:
    return contexts + tables + struct.pack("<I", words) + rest


WRONG = {
    "nothing": b"",
    "no context": body_of(contexts=b"\0", tables=b""),
    "17 contexts": body_of(contexts=bytes([17, *range(1, 17)]), tables=17 * TABLE),
    "contexts that do not ascend": body_of(contexts=bytes([3, 5, 5]), tables=3 * TABLE),
    "a second context from 0": body_of(contexts=bytes([2, 0]), tables=2 * TABLE),
    "fewer tables than contexts": body_of(contexts=bytes([2, 9])),
    "a table that ends before it begins": body_of(tables=bytes([1, 0])),
    "a symbol that no value has": body_of(tables=bytes([123, 124, 0x80, 0x10, 0x80, 0x10])),
    "a sum of less": body_of(tables=bytes([0, 1, 0x80, 0x10, 0xFF, 0x0F])),
    "a sum of more": body_of(tables=bytes([0, 1, 0x80, 0x10, 0x81, 0x10])),
    "a frequency beyond all": body_of(tables=bytes([0, 0, 0xFF, 0xFF])),
    "a lowest symbol of no frequency": body_of(tables=bytes([0, 1, 0, 0x80, 0x20])),
    "a highest symbol of no frequency": body_of(tables=bytes([0, 1, 0x80, 0x20, 0])),
    "a frequency longer than need be": body_of(tables=bytes([0, 2, 0x80, 0x10, 0x81, 0, 0xFF, 0x0F])),
    "a state too low": body_of(rest=struct.pack("<I", (1 << 16) - 1) + STATES[4:]),
    "a state that does not end where it began": body_of(rest=struct.pack("<I", (1 << 16) + 1) + STATES[4:]),
    "too few states": body_of(rest=STATES[:-1]),
    "a word that nobody takes": body_of(words=1, rest=STATES + b"\0\0"),
    "words that are not there": body_of(words=1),
    "words beyond all": body_of(words=(1 << 32) - 1),
    "a byte too many": body_of(rest=STATES + b"\0"),
}


@KERNELS
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_body_is_refused(kernels: ContextKernels, name: str) -> None:
    """Of an empty chunk, so that nothing but what is named is wrong."""
    assert unpacked(body_of(), b"", Element.FLOAT32, kernels) == b""
    assert unpacked(WRONG[name], b"", Element.FLOAT32, kernels) is None


@KERNELS
def test_low_bits_end_where_they_have_to(kernels: ContextKernels) -> None:
    source, parent = with_differences([9] * 5, [50] * 5, Element.FLOAT32)
    body = check(source, parent, Element.FLOAT32)
    assert body[-1] == 0b11111
    for wrong in (body[:-1], body + b"\0", body[:-1] + bytes([0b111111])):
        assert unpacked(wrong, parent, Element.FLOAT32, kernels) is None


@KERNELS
def test_arguments_that_do_not_fit_are_refused(kernels: ContextKernels) -> None:
    rows = np.zeros((1, SYMBOLS), np.uint16)
    rows[0, 0] = SCALE
    source, parent = with_differences([0] * 40, [5] * 40, Element.FLOAT32)
    context_of = bytes(EXPONENTS)
    assert kernels.context_pack(source, parent, 4, 23, context_of, rows.tobytes())
    with pytest.raises(ValueError):
        kernels.context_counts(source, parent[1:], 4, 23)
    for width, fraction_bits in ((3, 10), (8, 52), (4, 22), (2, 15)):
        with pytest.raises(ValueError):
            kernels.context_counts(source, parent, width, fraction_bits)
    with pytest.raises(ValueError):
        kernels.context_pack(source, parent, 4, 23, b"\1" * EXPONENTS, rows.tobytes())
    with pytest.raises(ValueError):
        kernels.context_pack(source, parent, 4, 23, context_of, (rows // 2).tobytes())
    other, _ = with_differences([1] * 40, [5] * 40, Element.FLOAT32)
    with pytest.raises(ValueError):
        kernels.context_pack(other, parent, 4, 23, context_of, rows.tobytes())


def damaged(rng: Random, body: bytes) -> bytes:
    match rng.randrange(5):
        case 0:
            return body[: rng.randrange(len(body) + 1)]
        case 1:
            return body + rng.randbytes(rng.randrange(1, 9))
        case 2:
            at = rng.randrange(min(len(body), 80))
        case 3:
            at = max(0, len(body) - rng.randrange(1, 300))
        case _:
            at = rng.randrange(len(body))
    return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]


@needs_native
@given(st.integers(0, 1 << 32), st.sampled_from(ELEMENTS), st.integers(1, 3000))
def test_whatever_is_damaged_both_read_the_same_or_nothing(seed: int, element: Element, count: int) -> None:
    assert CONTEXT_NATIVE is not None
    rng = Random(seed)
    source, parent = values(seed, count, element)
    body = packed(source, parent, element, CONTEXT_NATIVE)
    for _ in range(6):
        wrong = damaged(rng, body)
        found = unpacked(wrong, parent, element, CONTEXT_NATIVE)
        assert found == unpacked(wrong, parent, element, CONTEXT_TWIN)


def test_through_a_chain_damage_is_corrupt() -> None:
    source, parent = values(4, 4000, Element.BFLOAT16)
    body = packed(source, parent, Element.BFLOAT16, CONTEXT_TWIN)
    header = Header(Codec.CONTEXT, len(source), Element.BFLOAT16, 1, (chunk_id(parent),))
    rng, coder = Random(9), Coder()

    def read(body: bytes, parent: bytes) -> bytes:
        stored = encode_chunk(header, [body])
        rows = {chunk_id(source): Stored(Codec.CONTEXT, len(source), stored)}
        raw = Stored(Codec.RAW, len(parent), parent)
        return decode_chunk(chunk_id(source), lambda asked: rows.get(asked, raw), coder)

    assert read(body, parent) == source
    for _ in range(200):
        if (wrong := damaged(rng, body)) != body:
            with pytest.raises(Corrupt):
                read(wrong, parent)
    for other in (parent[:-2], source, bytes(len(parent))):
        with pytest.raises(Corrupt):
            read(body, other)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_no_byte_outside_is_touched_whatever_the_bodies_say(tmp_path: Path) -> None:
    """Under the sanitizers, each body, parent and target in memory of its own, which ends where they end."""
    rng = Random(11)
    cases = tmp_path / "cases"
    with cases.open("wb") as file:
        for seed in range(40):
            element = ELEMENTS[seed % 3]
            source, parent = values(seed, (1, 31, 33, 1500, 5003)[seed % 5], element)
            if seed % 7 == 0:
                source = rng.randbytes(len(source))
            tail = rng.randbytes(seed % WIDTH[element])
            source, parent = source + tail, parent + tail
            body = packed(source, parent, element, CONTEXT_TWIN)
            for number in range(40):
                wrong = body if number == 0 else damaged(rng, body)
                file.write(
                    struct.pack("<IIII", len(source), len(wrong), WIDTH[element], FRACTION_BITS[element])
                )
                file.write(source + parent + wrong)
    program = tmp_path / "driver"
    flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    sources = [str(DRIVER), str(NATIVE_FOLDER / "context.c")]
    command = ["gcc", *flags, "-fno-sanitize-recover=all", f"-I{NATIVE_FOLDER}", *sources, "-o", str(program)]
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    done = subprocess.run(
        [str(program), str(cases)], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    read, unpacked_ones, right_ones = map(int, done.stdout.split())
    assert read == 1600 and 40 <= right_ones <= unpacked_ones < read
