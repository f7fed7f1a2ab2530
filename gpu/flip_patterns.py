"""Damage that is done to a chunk for the study of what checks miss.

One rule: a pattern says which bits it flips and nothing of their values, so that it can be done to a copy
and undone; bit n of a chunk is bit n % 8, counted from the least significant, of byte n // 8, which is the
order in which a reflected CRC takes them.

Sources: Koopman, Driscoll, Hall, "Selection of Cyclic Redundancy Code and Checksum Algorithms to Ensure
Critical Data Integrity" (DOT/FAA/TC-14/49) for random bits, bursts and what each check is weak at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bits = list[int]
Bytes = NDArray[np.uint8]
CRC32C: Final = 0x1EDC6F41
"""The generator of CRC-32C (RFC 3720), the term x^32 left out."""
CRC64: Final = 0xAD93D23594C93659
"""That of CRC-64/NVME, x^64 left out."""
_WORD_BITS: Final = 64
_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Pattern:
    """A kind of damage. `bits(chunk, rng)` are the bits that it flips in a chunk: at least one."""

    name: str
    bits: Callable[[Bytes, Random], Bits]


def patterns(element_bits: int, exponent_bits: int) -> list[Pattern]:
    """All of them, for chunks of floats of so many bits."""
    return [
        *(
            Pattern(f"{count} bit{'s' * (count > 1)}, anywhere", _anywhere(count))
            for count in (1, 2, 3, 4, 8, 64)
        ),
        Pattern("1 bit, highest of an exponent", _in_element(element_bits, element_bits - 2)),
        Pattern("1 bit, lowest of an exponent", _in_element(element_bits, element_bits - 1 - exponent_bits)),
        Pattern("1 bit, lowest of a mantissa", _in_element(element_bits, 0)),
        Pattern("1 bit, a sign", _in_element(element_bits, element_bits - 1)),
        Pattern("1 bit, the chunk's first or last", _edge),
        Pattern("2 bits, the chunk's first and last", lambda chunk, _: [0, 8 * len(chunk) - 1]),
        Pattern("2 bits, one place of two words", _column(1)),
        Pattern("4 bits, two places of two words", _column(2)),
        *(Pattern(f"burst of {length} bits", _burst(length)) for length in (8, 32, 33, 64, 65, 512)),
        Pattern("word of 8 bytes, random", _random_word),
        Pattern("word of 8 bytes, all ones instead", _stuck_word),
        Pattern("two words of 8 bytes, exchanged", _exchanged(8)),
        Pattern("page of 4 KiB, zeros instead", _zeroed_page),
        Pattern("two pages of 4 KiB, exchanged", _exchanged(_PAGE_BYTES)),
        Pattern("33 bits, made to fool CRC-32C", _generator(CRC32C, 32)),
        Pattern("65 bits, made to fool CRC-64", _generator(CRC64, 64)),
    ]


def flip(chunk: Bytes, bits: Bits) -> None:
    """Do a pattern to a chunk, or undo it."""
    at = np.array(bits, np.int64)
    np.bitwise_xor.at(chunk, at >> 3, (1 << (at & 7)).astype(np.uint8))


def _anywhere(count: int) -> Callable[[Bytes, Random], Bits]:
    return lambda chunk, rng: rng.sample(range(8 * len(chunk)), count)


def _in_element(element_bits: int, bit: int) -> Callable[[Bytes, Random], Bits]:
    return lambda chunk, rng: [rng.randrange(8 * len(chunk) // element_bits) * element_bits + bit]


def _edge(chunk: Bytes, rng: Random) -> Bits:
    return [rng.choice((0, 8 * len(chunk) - 1))]


def _column(places: int) -> Callable[[Bytes, Random], Bits]:
    def bits(chunk: Bytes, rng: Random) -> Bits:
        words = rng.sample(range(8 * len(chunk) // _WORD_BITS), 2)
        chosen = rng.sample(range(_WORD_BITS), places)
        return [word * _WORD_BITS + place for word in words for place in chosen]

    return bits


def _burst(length: int) -> Callable[[Bytes, Random], Bits]:
    """The first and the last bit flip, those between them or not."""

    def bits(chunk: Bytes, rng: Random) -> Bits:
        start = rng.randrange(8 * len(chunk) - length + 1)
        inner = [start + n for n in range(1, length - 1) if rng.random() < 0.5]
        return [start, *inner, start + length - 1]

    return bits


def _random_word(chunk: Bytes, rng: Random) -> Bits:
    word = 8 * rng.randrange(len(chunk) // 8)
    return _difference(chunk, word, np.frombuffer(rng.randbytes(8), np.uint8)) or [8 * word]


def _stuck_word(chunk: Bytes, rng: Random) -> Bits:
    word = 8 * rng.randrange(len(chunk) // 8)
    return _difference(chunk, word, np.full(8, 0xFF, np.uint8)) or [8 * word]


def _zeroed_page(chunk: Bytes, rng: Random) -> Bits:
    page = _PAGE_BYTES * rng.randrange(len(chunk) // _PAGE_BYTES)
    return _difference(chunk, page, np.zeros(_PAGE_BYTES, np.uint8)) or [8 * page]


def _exchanged(size: int) -> Callable[[Bytes, Random], Bits]:
    def bits(chunk: Bytes, rng: Random) -> Bits:
        one, other = (size * n for n in rng.sample(range(len(chunk) // size), 2))
        found = _difference(chunk, one, chunk[other : other + size])
        return found + [bit - 8 * one + 8 * other for bit in found] or [8 * one]

    return bits


def _difference(chunk: Bytes, at: int, new: Bytes) -> Bits:
    """The bits in which the bytes from `at` on differ from `new`."""
    changed = np.unpackbits(chunk[at : at + len(new)] ^ new, bitorder="little")
    return [8 * at + int(bit) for bit in np.flatnonzero(changed)]


def _generator(polynomial: int, width: int) -> Callable[[Bytes, Random], Bits]:
    """A multiple of a CRC's generator: the shortest error that the CRC cannot see."""
    terms = [0, *(width - bit for bit in range(width) if polynomial >> bit & 1)]

    def bits(chunk: Bytes, rng: Random) -> Bits:
        start = rng.randrange(8 * len(chunk) - width)
        return [start + term for term in terms]

    return bits
