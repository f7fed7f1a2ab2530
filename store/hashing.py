"""The digests that ckptfs relies on, each named once.

One rule: a chunk id is BLAKE3-256 over the chunk's plain bytes and nothing else; Merkle and
history hashes are SHA3-256 (FIPS 202, not Keccak-256); CRCs only detect torn records; SHA-256 is made
of whole files only, for others to check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from awscrt import checksums
from blake3 import blake3

from ckptfs.store.ids import ChunkId

Buffer = bytes | bytearray | memoryview
_ZEROS = bytes(1 << 20)


def chunk_id(payload: Buffer) -> ChunkId:
    """BLAKE3-256 of `payload`. The GIL is released for payloads of more than about 2 KiB."""
    return ChunkId(blake3(payload).digest())


def chunk_id_of(parts: Iterable[Buffer]) -> ChunkId:
    """The same of the bytes of `parts`, one behind the other, of which one is in memory at a time."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return ChunkId(hasher.digest())


def sha3(payload: Buffer) -> bytes:
    """SHA3-256, 32 bytes."""
    return hashlib.sha3_256(payload).digest()


class WholeHash:
    """The three digests of a whole file, fed piece by piece; owned by one thread at a time.

    SHA-256 is what others ask for (`sha256sum`, model signing), BLAKE3 what is fast to check, and
    CRC-64/NVME what object stores compare. The GIL is released while a piece is hashed.
    """

    __slots__ = ("_blake3", "_sha256", "crc64", "size")

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._blake3 = blake3()
        self.crc64 = 0
        self.size = 0

    def update(self, payload: bytes) -> None:
        """The next bytes of the file."""
        self._sha256.update(payload)
        self._blake3.update(payload)
        self.crc64 = crc64(payload, self.crc64)
        self.size += len(payload)

    def update_zeros(self, length: int) -> None:
        """The next `length` bytes, all zero."""
        for start in range(0, length, len(_ZEROS)):
            self.update(_ZEROS[: length - start])

    def sha256(self) -> bytes:
        """32 bytes, of all so far."""
        return self._sha256.digest()

    def blake3(self) -> bytes:
        """32 bytes, of all so far; for the bytes of one chunk that is its id."""
        return self._blake3.digest()


def crc64(payload: Buffer, previous: int = 0) -> int:
    """CRC-64/NVME (check value of b"123456789": 0xae8b14860a799888)."""
    return int(checksums.crc64nvme(payload, previous))


def crc32c(payload: Buffer) -> int:
    """CRC-32C (check value of b"123456789": 0xe3069283). Nothing here relies on it; it is compared with."""
    return int(checksums.crc32c(payload))
