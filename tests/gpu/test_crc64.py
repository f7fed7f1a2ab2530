"""Checksums of parts, joined, are those of the whole, as awscrt computes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.gpu.crc64 import combine, from_remainder
from ckptfs.store.hashing import crc64

_POLYNOMIAL = 0x9A6C9329AC4BC9B5


def remainder_of(payload: bytes) -> int:
    """Bit by bit, from a register of zero: what a device is to deliver."""
    register = 0
    for byte in payload:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
    return register


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_two_parts(first: bytes, second: bytes) -> None:
    assert combine(crc64(first), crc64(second), len(second)) == crc64(first + second)


@given(st.lists(st.binary(max_size=50), min_size=3, max_size=6), st.data())
def test_any_grouping(parts: list[bytes], data: st.DataObject) -> None:
    """Tensors of a rank first and then the ranks, or the other way round."""
    sums = [(crc64(part), len(part)) for part in parts]
    while len(sums) > 1:
        at = data.draw(st.integers(0, len(sums) - 2))
        (first, size), (second, more) = sums[at : at + 2]
        sums[at : at + 2] = [(combine(first, second, more), size + more)]
    assert sums == [(crc64(b"".join(parts)), sum(map(len, parts)))]


def test_parts_of_gigabytes() -> None:
    """Lengths that no test can hold: a run of zeros, doubled until it is 2^40 bytes long."""
    zeros, size = crc64(bytes(1 << 20)), 1 << 20
    while size < 1 << 40:
        zeros, size = combine(zeros, zeros, size), 2 * size
    halves = combine(combine(zeros, crc64(b"end"), 3), crc64(b""), 0)
    assert halves == combine(zeros, crc64(b"end"), 3)
    assert combine(crc64(b""), zeros, size) == zeros
    assert combine(crc64(bytes(5)), zeros, size) == combine(zeros, crc64(bytes(5)), 5)


@given(st.binary(max_size=300))
def test_from_remainder(payload: bytes) -> None:
    assert from_remainder(remainder_of(payload), len(payload)) == crc64(payload)
    assert remainder_of(bytes(9) + payload) == remainder_of(payload)
