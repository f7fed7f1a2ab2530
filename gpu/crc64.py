"""CRC-64/NVME of a whole from those of its parts, and from a device's remainder.

One rule: a checksum is the remainder of the bytes as a polynomial modulo the CRC's, with the register
started at all ones and inverted at the end; remainders add, and 8 n bits further on are times x^(8n).

Source: the NVM Express specification's 64-bit CRC. A polynomial is an int whose bit 63 is x^0 (reflected).
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0x9A6C9329AC4BC9B5
_ONES = (1 << 64) - 1
_ONE = 1 << 63


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC of what `first` is of, followed by the `second_bytes` bytes that `second` is of.

    Associative, so that the tensors of a shard, and the shards of ranks, may be joined in any grouping
    as long as their order is kept.
    """
    return _multiply(first, _power_of_x(8 * second_bytes)) ^ second


def from_remainder(remainder: int, size_bytes: int) -> int:
    """The CRC of `size_bytes` bytes, of which a register that began at zero holds `remainder`."""
    return combine(_ONES, remainder, size_bytes) ^ _ONES


def _multiply(left: int, right: int) -> int:
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & _ONES
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    """Cached, since most pieces of a checkpoint have one of a few lengths."""
    assert exponent >= 0, "no part has a negative length"
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return power
