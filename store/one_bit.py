"""Finding the one flipped bit behind a wrong CRC-64, so that it can be put right.

One rule: a correction counts only if the corrected bytes have the right checksum; so it is either the
bytes that were written or, in one of about 10^12 cases of other damage, still refused by the decoder.

A CRC is linear: the checksum's error depends only on which bit flipped. Going backwards through the
bytes, the error is looked for among the errors that the last bit of each byte would make.

Source: Koopman, "32-bit cyclic redundancy codes for internet applications", DSN 2002 (all single-bit
errors of a CRC are distinct below its period); FORMAT.md, "Frames".
"""

from __future__ import annotations

from ckptfs.store.hashing import crc64

CHECKSUM_BYTES = 8
# Looking takes about 0.3 µs a byte; records are small, and what is larger has a second copy.
MAX_MENDED_BYTES = 32 << 20
_POLYNOMIAL = 0x9A6C9329AC4BC9B5


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_FORWARD = _table()
_BY_TOP_BYTE = {entry >> 56: index for index, entry in enumerate(_FORWARD)}
_OF_BIT = {_FORWARD[1 << bit]: bit for bit in range(8)}


def flipped_bit(body: bytes | memoryview, checksum: int) -> int | None:
    """The flipped bit's number in `body` ‖ checksum (little-endian), counted from byte 0, bit 0.

    None if the checksum is right, or if no single bit explains it.
    """
    error = crc64(body) ^ checksum
    if error.bit_count() == 1:
        return len(body) * 8 + error.bit_length() - 1
    if not error or len(body) > MAX_MENDED_BYTES:
        return None
    forward, by_top_byte, of_bit = _FORWARD, _BY_TOP_BYTE, _OF_BIT
    for at in range(len(body) - 1, -1, -1):
        bit = of_bit.get(error)
        if bit is not None:
            return at * 8 + bit
        index = by_top_byte[error >> 56]
        error = (error ^ forward[index]) << 8 | index
    return None


def mended(encoded: bytes | memoryview) -> bytes | None:
    """`encoded`, which ends with its CRC-64, with its one flipped bit put right; None: not one bit."""
    body = memoryview(encoded)[:-CHECKSUM_BYTES]
    checksum = int.from_bytes(encoded[len(body) :], "little")
    found = flipped_bit(body, checksum)
    if found is None:
        return None
    right = bytearray(encoded)
    right[found >> 3] ^= 1 << (found & 7)
    return bytes(right)
