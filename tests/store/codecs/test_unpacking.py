"""Chains unpacked in one native call: what `decode` makes of the chunks one by one, or left to it."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store.codecs import Coder, Header, Parent, encode
from ckptfs.store.codecs.decoding import Chain, decode, unpack_chain, unpack_chains
from ckptfs.store.codecs.elements import PARAMETERS, WIDTH, Element
from ckptfs.store.codecs.encoded_chunk import body_of, decode_header
from ckptfs.store.codecs.kernels import new_block, new_unpacker
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import Buffer, chunk_id
from ckptfs.store.segment_format import Codec

NATIVE_FOLDER = Path(__file__).parents[3] / "store" / "native"
DRIVER = Path(__file__).with_name("unpack_driver.c")
SOURCES = ("unpack.c", "zstd_frame.c", "loops.c")
CODER = Coder()
DTYPES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "F64": 8}

pytestmark = pytest.mark.skipif(new_unpacker() is None, reason="store/native is not built, or no libzstd")

Links = list[tuple[Buffer, Header]]


def content(rng: np.random.Generator, length: int, kind: str) -> bytes:
    match kind:
        case "random":
            return rng.bytes(length)
        case "constant":
            return bytes([int(rng.integers(256))]) * length
        case "skewed":
            return rng.geometric(0.3, length).astype(np.uint8).tobytes()
        case _:
            return (rng.standard_normal(length // 4 + 1) * 0.02).astype("<f4").tobytes()[:length]


def near(rng: np.random.Generator, plain: bytes, width: int) -> bytes:
    """The same values, some of them a little larger."""
    count = len(plain) // width
    values = np.frombuffer(plain, f"<u{width}", count)
    more = rng.integers(0, 3, count).astype(values.dtype)
    return (values + more).tobytes() + plain[count * width :]


def chain_of(
    seed: int, dtype: str, length: int, generations: int, kind: str
) -> tuple[Links, bytes | None, bytes]:
    """Some chunks of planes, the raw parent of the first if it has one, and the plain bytes of the last."""
    rng = np.random.default_rng(seed)
    plain = content(rng, length, kind)
    chain: Links = []
    first: bytes | None = None
    for _ in range(generations):
        parent = Parent(chunk_id(plain), plain, len(chain))
        after = near(rng, plain, DTYPES[dtype]) if chain or seed % 2 else plain
        encoded = encode(after, dtype, parent if after != plain else None, (), CODER)
        plain = after
        if encoded.codec is Codec.DELTA and not chain:
            first = bytes(parent.payload)
        if encoded.codec is Codec.PLANES:
            chain, first = [], None
        if encoded.codec in (Codec.PLANES, Codec.DELTA):
            chain.append((encoded.stored, decode_header(encoded.stored)))
        else:
            chain, first = [], None
    return chain, first, plain


def packed(chain: Links) -> list[tuple[Buffer, int, int]]:
    """The same as the native code takes it."""
    found: list[tuple[Buffer, int, int]] = []
    for encoded, header in chain:
        assert header.element is not None
        found.append((body_of(encoded, header), WIDTH[header.element], PARAMETERS[header.element]))
    return found


def one_by_one(chain: Links, parent: Buffer | None) -> Buffer | None:
    """What `decode` says, which has no native call for a chain; None: Corrupt."""
    for encoded, header in chain:
        try:
            parent = decode(encoded, header, [] if parent is None else [parent], CODER)
        except Corrupt:
            return None
    return parent


def unpacked(chunks: Sequence[tuple[Buffer, int, int]], parent: Buffer | None, length: int) -> bytes | None:
    assert CODER.unpacker is not None
    return CODER.unpacker.unpack(chunks, parent, length)


def with_body(header: Header, body: bytes) -> Buffer:
    """What stands around a body is not looked at by those who unpack it."""
    start = 12 + 32 * len(header.parents)
    return bytes(start) + body + bytes(8)


CHAINS = st.tuples(
    st.integers(0, 1 << 32),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 40) | st.integers(1000, 70_000) | st.just(262_144) | st.just(600_001),
    st.integers(1, 4),
    st.sampled_from(["random", "constant", "skewed", "floats"]),
)


@settings(deadline=None)
@given(CHAINS)
def test_a_chain_is_what_its_chunks_are_one_by_one(drawn: tuple[int, str, int, int, str]) -> None:
    chain, parent, plain = chain_of(*drawn)
    if chain:
        assert one_by_one(chain, parent) == plain
        assert unpacked(packed(chain), parent, len(plain)) == plain
        assert unpack_chain(Chain(chain, parent), CODER) == plain


def unpacked_together(chains: Sequence[tuple[Links, bytes | None, bytes]]) -> list[bytes | None]:
    """The same in one call; None: it says that the bytes are not there."""
    assert CODER.unpacker is not None
    target = memoryview(bytearray(sum(len(plain) for _, _, plain in chains) + 1))
    target[-1] = 77
    asked = [(packed(links), parent, len(plain)) for links, parent, plain in chains]
    are_there = CODER.unpacker.unpack_all(asked, target)
    assert target[-1] == 77, "what is behind them is not touched"
    found: list[bytes | None] = []
    at = 0
    for (_, _, plain), is_there in zip(chains, are_there, strict=True):
        found.append(bytes(target[at : at + len(plain)]) if is_there else None)
        at += len(plain)
    return found


@settings(deadline=None)
@given(st.lists(CHAINS, max_size=6), st.integers(0, 1 << 32))
def test_many_chains_are_unpacked_as_one_is(drawn: list[tuple[int, str, int, int, str]], seed: int) -> None:
    """Whether one of them is damaged or not."""
    chains = [one for one in (chain_of(*some) for some in drawn) if one[0]]
    assert unpacked_together(chains) == [plain for _, _, plain in chains]
    plains = unpack_chains([Chain(links, parent) for links, parent, _ in chains], CODER)
    assert [one and bytes(one.view) for one in plains] == [plain for _, _, plain in chains]
    rng = Random(seed)
    if not chains:
        return
    at = rng.randrange(len(chains))
    links, parent, plain = chains[at]
    (encoded, header), *rest = links
    broken = with_body(header, damaged(rng, bytes(body_of(encoded, header))))
    chains[at] = [(broken, header), *rest], parent, plain
    for number, found in enumerate(unpacked_together(chains)):
        assert found == unpacked(packed(chains[number][0]), chains[number][1], len(chains[number][2]))
        assert number == at or found == chains[number][2]


def damaged(rng: Random, body: bytes) -> bytes:
    match rng.randrange(4):
        case 0:
            return body[: rng.randrange(len(body) + 1)]
        case 1:
            return body + rng.randbytes(rng.randrange(1, 9))
        case 2:
            at = rng.randrange(min(len(body), 64))
        case _:
            at = rng.randrange(len(body))
    return body[:at] + bytes([body[at] ^ 1 << rng.randrange(8)]) + body[at + 1 :]


@settings(deadline=None)
@given(CHAINS, st.integers(0, 1 << 32))
def test_what_is_damaged_is_left_alone_or_becomes_as_many_bytes(
    drawn: tuple[int, str, int, int, str], seed: int
) -> None:
    """Which bytes a damaged stream of codes becomes differs between releases of zstd; the id tells them."""
    chain, parent, plain = chain_of(*drawn)
    rng = Random(seed)
    if not chain:
        return
    for _ in range(8):
        at = rng.randrange(len(chain))
        encoded, header = chain[at]
        body = damaged(rng, bytes(body_of(encoded, header)))
        broken = [*chain[:at], (with_body(header, body), header), *chain[at + 1 :]]
        found = unpacked(packed(broken), parent, len(plain))
        assert found is None or len(found) == len(plain)


def planes_of(frame: bytes, count: int) -> Links:
    """A chunk of one plane, stored as this frame."""
    assert len(frame) < count
    header = Header(Codec.PLANES, count, Element.INT8)
    return [(with_body(header, struct.pack("<I", len(frame)) + frame), header)]


def test_frames_that_the_format_does_not_have_are_left_alone() -> None:
    plain = bytes(range(16)) * 1000
    good = zstandard.ZstdCompressor(level=3).compress(plain)
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    assert unpacked(packed(planes_of(good, len(plain))), None, len(plain)) == plain
    with_checksum = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(plain)
    without_size = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(plain)
    wide = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=20)
    ).compressobj(size=len(plain))
    wide_frame = wide.compress(plain) + wide.flush()
    frames = [good + good, good + skipped, skipped + good, good + b"\0", good[:-1], b"", with_checksum]
    for frame in [*frames, without_size, zstandard.ZstdCompressor().compress(plain[1:]), wide_frame]:
        chain = planes_of(frame, len(plain))
        found = unpacked(packed(chain), None, len(plain))
        assert found == one_by_one(chain, None)
        assert found is None or frame is wide_frame


def test_what_cannot_be_is_refused() -> None:
    chain, _, plain = chain_of(1, "F32", 1000, 1, "floats")
    chunks = packed(chain)
    with pytest.raises(ValueError):
        unpacked([], None, 1000)
    with pytest.raises(ValueError):
        unpacked(chunks * 17, None, 1000)
    with pytest.raises(ValueError):
        unpacked([(b"", 3, 0)], None, 1000)
    with pytest.raises(ValueError):
        unpacked(chunks, plain[1:], 1000)
    assert CODER.unpacker is not None
    assert CODER.unpacker.unpack_all([], bytearray()) == ()
    for asked in ([(chunks, None, 1000)] * 2, [([], None, 1000)], [(chunks, plain[1:], 1000)]):
        with pytest.raises(ValueError):
            CODER.unpacker.unpack_all(asked, bytearray(1999))
    with pytest.raises(TypeError):
        CODER.unpacker.unpack_all([(chunks, None, 1000)], memoryview(bytes(1000)))
    with pytest.raises(MemoryError):
        CODER.unpacker.unpack_all([(chunks, None, 1000)] * 5000, bytearray(1000))


def test_memory_that_somebody_looks_at_is_not_used_again() -> None:
    seen = []
    for number in range(20):
        block = new_block(3 << 20)
        assert block.nbytes >= 3 << 20
        block[:] = bytes([number]) * block.nbytes
        seen.append((number, block[number << 10 :][: 1 << 20].toreadonly()))
        del block
        if number % 3 == 2:
            del seen[number % len(seen)]
        assert all(bytes(view) == bytes([value]) * (1 << 20) for value, view in seen)
    for length in (1, 5000, (1 << 20) + 1):
        assert new_block(length).nbytes >= length


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_no_byte_outside_is_touched_whatever_the_bodies_say(tmp_path: Path) -> None:
    """Under the sanitizers, each body and each target in memory of its own, which ends where they end."""
    rng = Random(11)
    cases = tmp_path / "cases"
    with cases.open("wb") as file:
        for seed in range(60):
            dtype = sorted(DTYPES)[seed % len(DTYPES)]
            kind = ("random", "constant", "skewed", "floats")[seed // 4 % 4]
            chain, parent, plain = chain_of(seed, dtype, (7, 1030, 5003, 70_001)[seed % 4], 3, kind)
            for number in range(25 if chain else 0):
                bodies = packed(chain)
                if number:
                    at = rng.randrange(len(bodies))
                    body, width, parameters = bodies[at]
                    bodies[at] = damaged(rng, bytes(body)), width, parameters
                file.write(struct.pack("<III", len(plain), len(bodies), parent is not None) + (parent or b""))
                for body, width, parameters in bodies:
                    file.write(struct.pack("<III", len(body), width.bit_length() - 1, parameters))
                    file.write(body)
    program = tmp_path / "driver"
    flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    sources = [str(NATIVE_FOLDER / name) for name in SOURCES]
    command = ["gcc", *flags, "-fno-sanitize-recover=all", f"-I{NATIVE_FOLDER}", str(DRIVER), *sources]
    made = subprocess.run(
        [*command, "-ldl", "-o", str(program)], check=False, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    done = subprocess.run(
        [str(program), str(cases)], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    read, unpacked_ones = map(int, done.stdout.split())
    assert read > 500 and 20 < unpacked_ones < read
