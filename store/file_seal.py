"""The seal of one file: 80 bytes with which anybody who has the file and the public key can check it. Pure.

One rule: what is signed is what the file is as a whole, so a stranger needs to know nothing of chunks,
versions or stores.

Source: FORMAT.md, "Seals of files".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import StrEnum

from ckptfs.store.digests import FileDigests
from ckptfs.store.errors import InvalidRequest
from ckptfs.store.hashing import crc64
from ckptfs.store.seal import SEAL_BYTES
from ckptfs.store.signing import SIGNATURE_BYTES, PublicKey, SigningKey

_SEAL = struct.Struct(f"<Q{SIGNATURE_BYTES}s8s")
_CONTEXT = b"ckptfs file seal 1\0"
_RESERVED = bytes(8)


class Judgement(StrEnum):
    """What a seal says of a file."""

    GOOD = "good"
    OTHER_KEY = "this is the file that was sealed, but with another key (or the seal was forged)"
    OTHER_FILE = "this is not the file that was sealed"
    DAMAGED = "the signature is right, but the rest of the seal is damaged"


def seal_file(key: SigningKey, digests: FileDigests) -> bytes:
    """The seal of a file with these digests: CRC, signature, reserved. About 0.1 ms."""
    message = _signed(digests)
    return _SEAL.pack(crc64(message), key.sign(message), _RESERVED)


def judge_file(seal: bytes, digests: FileDigests, keys: Iterable[PublicKey]) -> Judgement:
    """Whether one of `keys` has sealed the file with these digests, in a seal of SEAL_BYTES."""
    crc, signature, reserved = _SEAL.unpack(seal)
    message = _signed(digests)
    is_whole = crc == crc64(message) and reserved == _RESERVED
    if any(key.has_signed(message, signature) for key in keys):
        return Judgement.GOOD if is_whole else Judgement.DAMAGED
    return Judgement.OTHER_KEY if is_whole else Judgement.OTHER_FILE


def decode_file_seal(encoded: bytes) -> bytes:
    """The seal in a file's bytes: the 80 bytes themselves, or their 160 hex digits in one line;
    InvalidRequest if it is neither."""
    if len(encoded) == SEAL_BYTES:
        return encoded
    digits = encoded.strip()
    try:
        seal = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        seal = b""
    if len(seal) != SEAL_BYTES or len(digits) != 2 * SEAL_BYTES:
        raise InvalidRequest("that is not the seal of a file (80 bytes, or 160 hex digits)")
    return seal


def _signed(digests: FileDigests) -> bytes:
    return _CONTEXT + digests.size.to_bytes(8, "little") + digests.sha256 + digests.blake3
