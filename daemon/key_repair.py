"""A signing key of which a bit has flipped: told by its public half, and put right.

One rule: a key is changed only into the one whose public half lies beside it. A flipped bit mostly makes
another valid key, with which new versions would be signed and old ones not be trusted.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator

from ckptfs.store.errors import InvalidRequest
from ckptfs.store.signing import PublicKey, SigningKey, public_key_of, signing_key_of

log = logging.getLogger(__name__)
_MOST_BYTES = 1024


def mend_key(path: str, public_path: str) -> None:
    """Put the key in `path`, or its public half, right, if they differ by one bit; else do nothing.

    OSError if a file cannot be read or written. Durable when: this returned.
    """
    if not os.path.isfile(path) or not os.path.isfile(public_path):
        return
    private, public = _read(path), _read(public_path)
    key, wanted = _key_in(private), _public_in(public)
    if key is not None and key.public.pem().encode() == public:
        return
    if key is not None and _differing_bits(key.public.pem().encode(), public) == 1:
        _replace(public_path, key.public.pem().encode())
    elif wanted is not None and (right := _mended(private, wanted)) is not None:
        _replace(path, right)


def _mended(private: bytes, wanted: PublicKey) -> bytes | None:
    if len(private) > _MOST_BYTES:
        return None
    keys = ((one, _key_in(one)) for one in _with_one_flip(private))
    return next((one for one, key in keys if key is not None and key.public == wanted), None)


def _with_one_flip(encoded: bytes) -> Iterator[bytes]:
    for at in range(len(encoded)):
        for bit in range(8):
            yield encoded[:at] + bytes([encoded[at] ^ 1 << bit]) + encoded[at + 1 :]


def _differing_bits(one: bytes, other: bytes) -> int | None:
    if len(one) != len(other):
        return None
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def _key_in(encoded: bytes) -> SigningKey | None:
    try:
        return signing_key_of(encoded.decode("ascii", "replace"))
    except InvalidRequest:
        return None


def _public_in(encoded: bytes) -> PublicKey | None:
    try:
        return public_key_of(encoded.decode("ascii", "replace"))
    except InvalidRequest:
        return None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MOST_BYTES + 1)


def _replace(path: str, content: bytes) -> None:
    """Replace a file whole, its mode kept."""
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    mode = os.stat(path).st_mode & 0o777
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, content)
        os.fchmod(fd, mode)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
    log.error("a bit of %s was flipped; it was put right", path)
