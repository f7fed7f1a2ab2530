"""store/one_bit.py: any one flipped bit is found, in bytes and in checksum; two are not guessed at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.hashing import crc64
from ckptfs.store.one_bit import flipped_bit, mended


def sealed(body: bytes) -> bytes:
    return body + crc64(body).to_bytes(8, "little")


@given(st.binary(max_size=600), st.data())
def test_one_flipped_bit_is_put_right(body: bytes, data: st.DataObject) -> None:
    whole = sealed(body)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    damaged = bytearray(whole)
    damaged[bit >> 3] ^= 1 << (bit & 7)
    found = flipped_bit(bytes(damaged[:-8]), int.from_bytes(damaged[-8:], "little"))
    assert found == bit
    assert mended(bytes(damaged)) == whole


@given(st.binary(max_size=300), st.data())
def test_nothing_else_is_changed(body: bytes, data: st.DataObject) -> None:
    whole = sealed(body)
    assert mended(whole) is None
    bits = data.draw(st.sets(st.integers(0, 8 * len(whole) - 1), min_size=2, max_size=5))
    damaged = bytearray(whole)
    for bit in bits:
        damaged[bit >> 3] ^= 1 << (bit & 7)
    assert mended(bytes(damaged)) is None


@given(st.binary(min_size=8, max_size=300))
def test_what_is_mended_has_its_checksum(noise: bytes) -> None:
    found = mended(noise)
    assert found is None or found == sealed(found[:-8])
