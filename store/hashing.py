"""The digests that ckptfs relies on, each named once.

One rule: a chunk id is BLAKE3-256 over the chunk's plain bytes and nothing else; Merkle and
history hashes are SHA3-256 (FIPS 202, not Keccak-256); CRCs only detect torn records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from awscrt import checksums
from blake3 import blake3

from ckptfs.store.ids import ChunkId

Buffer = bytes | bytearray | memoryview


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


def crc64(payload: Buffer, previous: int = 0) -> int:
    """CRC-64/NVME (check value of b"123456789": 0xae8b14860a799888)."""
    return int(checksums.crc64nvme(bytes(payload), previous))
