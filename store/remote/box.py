"""Encryption of a remote's objects, and the names that their content gets. Pure; salts are passed in.

One rule: a key of AES-GCM is used for one object only (it comes from a fresh salt and the object's name),
so its nonces are just the numbers of the blocks, and no block fits anywhere else.

Source: FORMAT.md, "Remotes", "Encryption"; the STREAM construction (Hoang, Reyhanitabar, Rogaway and Vizár,
2015); NIST SP 800-38D.
"""

from __future__ import annotations

import struct

from blake3 import blake3
from Crypto.Cipher import AES

from ckptfs.store.bucket import Payload
from ckptfs.store.errors import Corrupt, InvalidRequest

KEY_BYTES = 32
SALT_BYTES = 24
CHECK_BYTES = 16
NAME_BYTES = 32
TAG_BYTES = 16
_BLOCK_BITS = 18
BLOCK_BYTES = 1 << _BLOCK_BITS
_HEADER = struct.Struct(f"<4sBBH{SALT_BYTES}s")
HEADER_BYTES = _HEADER.size
_NONCE = struct.Struct("<QB3x")
MAGIC = b"CKBX"
_VERSION = 1


class RemoteKey:
    """The key of a remote, and what follows from it. Not changed once made; any thread may use it."""

    __slots__ = ("_names", "_objects", "check")

    def __init__(self, secret: bytes) -> None:
        """`secret` is KEY_BYTES of randomness."""
        assert len(secret) == KEY_BYTES
        self._objects = _derived(secret, "ckptfs remote 1 objects")
        self._names = _derived(secret, "ckptfs remote 1 names")
        self.check = _derived(secret, "ckptfs remote 1 check")[:CHECK_BYTES].hex()

    def name(self, content: Payload) -> bytes:
        """The name of an object with this content."""
        return blake3(content, key=self._names).digest()

    def enclose(self, key: str, content: Payload, salt: bytes) -> bytes:
        """The object `key` with this content; `salt` is SALT_BYTES that were never used before."""
        header = _HEADER.pack(MAGIC, _VERSION, _BLOCK_BITS, 0, salt)
        parts, cipher_key, view = [header], self._key_of(header, key), memoryview(content)
        last = max(0, len(view) - 1) // BLOCK_BYTES
        for number in range(last + 1):
            cipher = AES.new(cipher_key, AES.MODE_GCM, nonce=_NONCE.pack(number, number == last))
            start = number * BLOCK_BYTES
            parts += cipher.encrypt_and_digest(view[start : start + BLOCK_BYTES])
        return b"".join(parts)

    def disclose(self, key: str, enclosed: Payload) -> bytes:
        """The content of the object `key`; Corrupt if it is not what `enclose` made, whole."""
        header, view = self._header(key, enclosed), memoryview(enclosed)[HEADER_BYTES:]
        last = max(0, len(view) - 1) // (BLOCK_BYTES + TAG_BYTES)
        return self.disclose_blocks(key, header, view, 0, last)

    def disclose_blocks(self, key: str, header: bytes, blocks: Payload, first: int, last: int) -> bytes:
        """The content of `blocks`, of which the first has the number `first`; `last` is that of the object's
        last block. `header`: the first HEADER_BYTES of the object. Corrupt as `disclose`."""
        self._header(key, header)
        cipher_key, view, parts = self._key_of(header, key), memoryview(blocks), []
        step = BLOCK_BYTES + TAG_BYTES
        for number, start in enumerate(range(0, max(1, len(view)), step), first):
            block = view[start : start + step]
            if len(block) < TAG_BYTES:
                raise _wrong(key)
            cipher = AES.new(cipher_key, AES.MODE_GCM, nonce=_NONCE.pack(number, number == last))
            try:
                parts.append(cipher.decrypt_and_verify(block[:-TAG_BYTES], block[-TAG_BYTES:]))
            except ValueError:
                raise _wrong(key) from None
        return b"".join(parts)

    def _header(self, key: str, enclosed: Payload) -> bytes:
        header = bytes(memoryview(enclosed)[:HEADER_BYTES])
        if len(header) < HEADER_BYTES or header[:8] != _HEADER.pack(MAGIC, _VERSION, _BLOCK_BITS, 0, b"")[:8]:
            raise Corrupt(f"{key} is not an encrypted object of version {_VERSION}")
        return header

    def _key_of(self, header: bytes, key: str) -> bytes:
        return blake3(header + key.encode(), key=self._objects).digest()


def plain_name(content: Payload) -> bytes:
    """The name of an object with this content on a remote without encryption."""
    return blake3(content).digest()


def enclosed_size(content_bytes: int) -> int:
    """The length of an object with so much content."""
    return HEADER_BYTES + content_bytes + TAG_BYTES * (max(0, content_bytes - 1) // BLOCK_BYTES + 1)


def remote_key_of(text: str) -> RemoteKey:
    """The key in a key file; InvalidRequest if it is none."""
    digits = text.strip()
    if len(digits) != 2 * KEY_BYTES or not digits.isascii():
        raise InvalidRequest(
            f"not the key of a remote: it has {2 * KEY_BYTES} hex digits (`openssl rand -hex 32`)"
        )
    try:
        return RemoteKey(bytes.fromhex(digits))
    except ValueError:
        raise InvalidRequest("not the key of a remote: it is not in hex digits") from None


def _derived(secret: bytes, context: str) -> bytes:
    return blake3(secret, derive_key_context=context).digest()


def _wrong(key: str) -> Corrupt:
    return Corrupt(f"{key} was changed, cut or exchanged, or is encrypted with another key")
