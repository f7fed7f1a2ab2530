"""Digests of whole files, as others compute them: SHA-256, BLAKE3, CRC-64/NVME. Pure.

One rule: digests belong to a content (a recipe id), whatever files and versions have it; they are made
of bytes that were found right just then, so they say what was saved and not what the disk has become.

Source: FORMAT.md, "Digests".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from ckptfs.store.content_rows import rows_by_content
from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import WholeHash
from ckptfs.store.ids import DIGEST_BYTES, ChunkId, RecipeId

_ROW = struct.Struct(f"<Q{DIGEST_BYTES}s{DIGEST_BYTES}sQ")
_SIZES = range(1 << 63)
_CRCS = range(1 << 64)
_ROW_TYPES = (bytes, int, bytes, bytes, int)
# A record stays below 64 KiB: what one damaged sector can take is little.
MOST_CONTENTS = 512


@dataclass(frozen=True, slots=True)
class FileDigests:
    """What a file of `size` bytes is: 32-byte SHA-256 and BLAKE3, and CRC-64/NVME as a number."""

    size: int
    sha256: bytes
    blake3: bytes
    crc64: int


def digests_of(whole: WholeHash) -> FileDigests:
    """The digests of all that was fed to a hash."""
    return FileDigests(whole.size, whole.sha256(), whole.blake3(), whole.crc64)


def encode_digests(digests: FileDigests) -> bytes:
    """A row of the table DIGEST, 80 bytes."""
    return _ROW.pack(digests.size, digests.sha256, digests.blake3, digests.crc64)


def decode_digests(encoded: bytes) -> FileDigests:
    """The digests in a row, or Corrupt."""
    if len(encoded) != _ROW.size:
        raise Corrupt(f"a row of digests has {len(encoded)} bytes")
    digests = FileDigests(*_ROW.unpack(encoded))
    if digests.size not in _SIZES:
        raise Corrupt("a row of digests has a size out of range")
    return digests


@dataclass(frozen=True, slots=True)
class DigestsRecord:
    """The payload of a DIGESTS frame: the digests of 1 to MOST_CONTENTS contents."""

    contents: Mapping[RecipeId, FileDigests]

    def encode(self) -> bytes:
        """Canonical bytes."""
        assert 0 < len(self.contents) <= MOST_CONTENTS
        rows: list[Node] = [
            [recipe, one.size, one.sha256, one.blake3, one.crc64]
            for recipe, one in sorted(self.contents.items())
        ]
        return encode_node({"digests": rows})


def decode_digests_record(encoded: bytes) -> DigestsRecord:
    """The record in `encoded`; Corrupt unless it is one, canonical, its contents rising."""
    return DigestsRecord(rows_by_content(encoded, "digests", MOST_CONTENTS, _content_of))


def _content_of(row: Node) -> tuple[RecipeId, FileDigests]:
    if not isinstance(row, list) or tuple(map(type, row)) != _ROW_TYPES:
        raise Corrupt("a digests record has a row of other fields")
    recipe, size, sha256, blake3, crc64 = cast("tuple[bytes, int, bytes, bytes, int]", tuple(row))
    if {len(recipe), len(sha256), len(blake3)} != {DIGEST_BYTES}:
        raise Corrupt("a digests record has a digest of another length")
    if size not in _SIZES or crc64 not in _CRCS:
        raise Corrupt("a digests record has a size or checksum out of range")
    return RecipeId(ChunkId(recipe)), FileDigests(size, sha256, blake3, crc64)
