"""`python -m ckptfs.gpu.bitflips`: what checks miss of flipped bits, counted on a copy of a shard.

One rule: what is printed was counted here, or is said to be arithmetic.

A source of this project reports that CRC-64 misses 12.7 % of flips at some bit positions and 0.03 % at
others. A CRC of 64 bits cannot: it is linear and no power of x is a multiple of its generator, so it sees a
single flip wherever it is, every burst of up to 64 bits, and (by exhaustion, crc_distance.py) every two and
three flips in a chunk; of all else it misses one in 2^64. What depends on the bit position is what a flip
does to the value, which the second table shows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from random import Random

import numpy as np

from ckptfs.gpu.crc_distance import Missed, missed
from ckptfs.gpu.flip_patterns import CRC32C, CRC64, Bytes, patterns
from ckptfs.gpu.flip_study import CHECKS, FLOATS, BitRow, Row, study, study_bits
from ckptfs.store.errors import CkptfsError, InvalidRequest, NotFound
from ckptfs.store.formats import parse
from ckptfs.store.hashing import chunk_id
from ckptfs.store.regions import CHUNK_BYTES

_PAGE_BYTES = 4096
_WEIGHT_DEVIATION = 0.02
_CONCLUSION = """\
12.7 % and 0.03 %, which a source reports for CRC-64 by bit position, are no misses of a CRC-64: here it
missed {crc64} of {trials} flips of one bit, at whatever position. By arithmetic it misses no burst of up to
64 bits, and one in 1.8e19 of what is random and longer. 1/8 = 12.5 % of two flips is what a check misses that
folds a chunk to one byte, 1/64 = 1.6 % what XOR-64 misses; CRC-64 is fooled only by what was made to.
BLAKE3 is not fooled by that either, and only a cryptographic hash can name a chunk."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    options = _options(arguments)
    rng = Random(options.seed)
    try:
        chunk, dtype = _chunk_of(options.shard, rng) if options.shard else _synthetic(rng)
    except CkptfsError as e:
        print(f"bitflips: {e}", file=sys.stderr)
        return 1
    before = chunk_id(chunk.tobytes())
    rows = [*study(chunk, patterns(*FLOATS[dtype]), options.trials, rng)]
    bits = [*study_bits(chunk, dtype, max(1, options.trials // 4), rng)]
    certain = {} if options.no_proof else _certain(8 * len(chunk))
    assert chunk_id(chunk.tobytes()) == before, "every flip was undone"
    if options.json:
        print(json.dumps(_answer(options.seed, chunk, dtype, rows, bits, certain)))
    else:
        _show(len(chunk), dtype, rows, bits, certain)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ckptfs.gpu.bitflips", description="What checks miss of flipped bits in a chunk."
    )
    parser.add_argument("--shard", metavar="FILE", help="a file with tensors; without: made-up BF16 weights")
    parser.add_argument("--trials", type=_count, default=1000, help="for each pattern (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-proof", action="store_true", help="leave out what holds by exhaustion")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return count


class _File:
    """A file as the parsers of formats read it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the file ends."""
        return os.pread(self._fd, length, offset)


def _chunk_of(path: str, rng: Random) -> tuple[Bytes, str]:
    """A copy of one chunk of the largest tensor of floats in a file, and its dtype."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _copied(_File(fd), path, rng)
        finally:
            os.close(fd)
    except OSError as e:
        raise NotFound(f"{path}: {e.strerror}") from None


def _copied(file: _File, path: str, rng: Random) -> tuple[Bytes, str]:
    layout = parse(file, path)
    floats = [one for one in layout.tensors if one.dtype in FLOATS] if layout is not None else []
    largest = max(floats, key=lambda tensor: tensor.length, default=None)
    if largest is None or largest.length < 2 * _PAGE_BYTES:
        raise InvalidRequest(f"{path} has no tensor of floats with at least {2 * _PAGE_BYTES} bytes")
    size = min(largest.length // _PAGE_BYTES * _PAGE_BYTES, CHUNK_BYTES)
    start = largest.offset + size * rng.randrange(largest.length // size)
    return np.frombuffer(bytearray(file.pread(start, size)), np.uint8), largest.dtype


def _synthetic(rng: Random) -> tuple[Bytes, str]:
    """A chunk of BF16 numbers that are distributed as weights are."""
    numbers = np.random.default_rng(rng.getrandbits(64)).standard_normal(CHUNK_BYTES // 2, np.float32)
    halves = (numbers * np.float32(_WEIGHT_DEVIATION)).view(np.uint32) >> 16
    return halves.astype(np.uint16).view(np.uint8), "BF16"


def _certain(bits: int) -> dict[str, Missed]:
    return {"CRC-32C": missed(CRC32C, 32, bits), "CRC-64": missed(CRC64, 64, bits)}


def _answer(
    seed: int, chunk: Bytes, dtype: str, rows: list[Row], bits: list[BitRow], certain: Mapping[str, Missed]
) -> dict[str, object]:
    return {
        "seed": seed,
        "chunk_bytes": len(chunk),
        "dtype": dtype,
        "patterns": [asdict(row) for row in rows],
        "by_bit": [asdict(row) for row in bits],
        "up_to_three_bits": {name: asdict(one) for name, one in certain.items()},
    }


def _show(size: int, dtype: str, rows: list[Row], bits: list[BitRow], certain: Mapping[str, Missed]) -> None:
    print(
        f"One chunk of {size} bytes of {dtype}, {rows[0].trials} trials of each pattern; what was missed:\n"
    )
    for line in _table(("damage", *CHECKS), ((row.pattern, *_shares(row)) for row in rows)):
        print(line)
    print(f"\nOne flipped bit by its place in an element, {bits[0].trials} trials each:\n")
    heads = ("bit", "part", *CHECKS, "median change", "NaN or Inf")
    cells = (
        (str(one.bit), one.part, *_shares(one), f"{one.median_change:.3g}", f"{one.not_finite:.1%}")
        for one in reversed(bits)
    )
    for line in _table(heads, cells):
        print(line)
    if certain:
        print("\nEvery error of up to three bits in such a chunk, by exhaustion:\n")
    for name, one in certain.items():
        print(f"{name}: of one bit {one.single} missed, of two {one.double}, of three {one.triple}")
    print()
    single = sum(one.missed["CRC-64"] for one in bits)
    print(_CONCLUSION.format(crc64=single, trials=sum(one.trials for one in bits)))


def _shares(row: Row | BitRow) -> Iterator[str]:
    return ("0" if not (count := row.missed[name]) else f"{count / row.trials:.2%}" for name in CHECKS)


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    lines = [tuple(heads), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        yield "  ".join([line[0].ljust(widths[0]), *cells[1:]])


if __name__ == "__main__":
    sys.exit(main())
