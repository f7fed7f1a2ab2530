"""What a CRC detects for certain: every error of one, two or three bits in a chunk, by exhaustion.

One rule: nothing is sampled. A CRC is linear, so an error of some bits is missed exactly if the remainders
of these bits, x^n modulo the generator, add up to zero. Two bits: two remainders are equal. Three bits:
shifting an error does not change whether it is missed, so one of the three can be bit 0.

Source: Koopman, "32-bit cyclic redundancy codes for internet applications", DSN 2002.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Remainders = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Missed:
    """How many errors of one, two and three bits in `bits` bits a CRC misses; those of three are counted
    once for all their shifts."""

    bits: int
    single: int
    double: int
    triple: int

    @property
    def none(self) -> bool:
        """Whether it detects them all."""
        return self.single == self.double == self.triple == 0


def missed(polynomial: int, width: int, bits: int) -> Missed:
    """Look at all errors of up to three bits; the generator is x^width + `polynomial`.

    Takes 24 bytes of memory a bit and some seconds for the 2^21 bits of a chunk.
    """
    remainders = _remainders(polynomial, width, bits)
    ordered = np.sort(remainders)
    double = bits - np.unique(ordered).size
    sums = remainders[1:] ^ remainders[0]
    at = np.minimum(np.searchsorted(ordered, np.sort(sums)), bits - 1)
    # A sum that equals one of its own two bits would need the other one to be zero.
    triple = int(np.count_nonzero(ordered[at] == np.sort(sums)))
    return Missed(bits, int(np.count_nonzero(remainders == 0)), double, triple)


def _remainders(polynomial: int, width: int, bits: int) -> Remainders:
    """x^n modulo the generator for n in [0, bits): what is there times x^(how much is there), and so on."""
    found = np.zeros(bits, np.uint64)
    found[0] = 1
    done, power = 1, _times(2, 1, polynomial, width)
    while done < bits:
        count = min(done, bits - done)
        found[done : done + count] = _each_times(found[:count], power, polynomial, width)
        done, power = done + count, _times(power, power, polynomial, width)
    return found


def _each_times(values: Remainders, factor: int, polynomial: int, width: int) -> Remainders:
    """Each value times a factor, by tables over the bytes of a value."""
    product = np.zeros(values.size, np.uint64)
    for byte in range(width // 8):
        rows = (_times(factor, value << 8 * byte, polynomial, width) for value in range(256))
        table = np.array([*rows], np.uint64)
        product ^= table[(values >> np.uint64(8 * byte) & np.uint64(0xFF)).astype(np.int64)]
    return product


def _times(one: int, other: int, polynomial: int, width: int) -> int:
    """The product of two polynomials over GF(2) modulo the generator."""
    product = 0
    while other:
        if other & 1:
            product ^= one
        other >>= 1
        one <<= 1
        if one >> width & 1:
            one ^= 1 << width | polynomial
    return product
