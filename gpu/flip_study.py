"""The study: what CRC-32C, CRC-64, XOR-64 and BLAKE3 miss of damage that is really done to a chunk.

One rule: every trial flips bits in a copy of a chunk, makes all four checks anew over all of it, and flips
the bits back; what a table says was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

from ckptfs.gpu.flip_patterns import Bits, Bytes, Pattern, flip
from ckptfs.store.difference import values
from ckptfs.store.hashing import chunk_id, crc32c, crc64

CHECKS: Final[Mapping[str, Callable[[Bytes], object]]] = {
    "CRC-32C": lambda chunk: crc32c(chunk.data),
    "CRC-64": lambda chunk: crc64(chunk.data),
    "XOR-64": lambda chunk: int(np.bitwise_xor.reduce(chunk.view(np.uint64))),
    "BLAKE3": lambda chunk: chunk_id(chunk.data),
}
FLOATS: Final = {"F64": (64, 11), "F32": (32, 8), "F16": (16, 5), "BF16": (16, 8)}
"""Bits of an element and of its exponent."""


@dataclass(frozen=True, slots=True)
class Row:
    """How often each check missed a pattern in `trials` trials."""

    pattern: str
    trials: int
    missed: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BitRow:
    """The same for one bit of an element, and what the flips did to the values: the median of
    |new - old| / |old| where both are finite and old is not zero, and the share that became NaN or Inf."""

    bit: int
    part: str
    trials: int
    missed: Mapping[str, int]
    median_change: float
    not_finite: float


def study(chunk: Bytes, patterns: list[Pattern], trials: int, rng: Random) -> Iterator[Row]:
    """One row for each pattern. `chunk` is a multiple of 4 KiB; it is as it was in the end."""
    right = _checked(chunk)
    for pattern in patterns:
        flips = (pattern.bits(chunk, rng) for _ in range(trials))
        yield Row(pattern.name, trials, _missed(chunk, flips, right))


def study_bits(chunk: Bytes, dtype: str, trials: int, rng: Random) -> Iterator[BitRow]:
    """One row for each bit of an element, the lowest first; FLOATS has the dtypes."""
    element_bits, exponent_bits = FLOATS[dtype]
    right = _checked(chunk)
    old = values(chunk.tobytes(), dtype).astype(np.float64)
    for bit in range(element_bits):
        chosen = [rng.randrange(old.size) for _ in range(trials)]
        missed = _missed(chunk, ([one * element_bits + bit] for one in chosen), right)
        flipped = chunk.copy()
        flip(flipped, [one * element_bits + bit for one in sorted(set(chosen))])
        new = values(flipped.tobytes(), dtype).astype(np.float64)[chosen]
        before = old[chosen]
        finite = np.isfinite(new) & np.isfinite(before) & (before != 0)
        change = np.abs(new[finite] - before[finite]) / np.abs(before[finite])
        median = float(np.median(change)) if change.size else 0.0
        share = float(np.mean(~np.isfinite(new)))
        yield BitRow(bit, _part(bit, element_bits, exponent_bits), trials, missed, median, share)


def _checked(chunk: Bytes) -> dict[str, object]:
    return {name: check(chunk) for name, check in CHECKS.items()}


def _missed(chunk: Bytes, flips: Iterator[Bits], right: Mapping[str, object]) -> dict[str, int]:
    missed = dict.fromkeys(CHECKS, 0)
    for bits in flips:
        flip(chunk, bits)
        for name, check in CHECKS.items():
            missed[name] += check(chunk) == right[name]
        flip(chunk, bits)
    return missed


def _part(bit: int, element_bits: int, exponent_bits: int) -> str:
    if bit == element_bits - 1:
        return "sign"
    return "exponent" if bit >= element_bits - 1 - exponent_bits else "mantissa"
