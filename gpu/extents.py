"""The seam of verification: ranges of memory, and who hashes them.

One rule: the CPU defines the answer. Every Hasher gives the same result for the same bytes, wherever the
bytes lie and whatever hashes them; tests/gpu holds each implementation to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptfs.store.ids import ChunkId


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes (0 or more, of any alignment) at `address`, which should hash to `expected`.

    The address is one of the memory that the Hasher reads: of this process for "cpu", of the device for
    "cuda:0". The caller owns the memory and keeps it alive and unchanged until the Hasher has answered.
    """

    address: int
    length: int
    expected: ChunkId


class Hasher(Protocol):
    """Hashes bytes where they lie. Unavailable if the device fails; what was asked may be asked again."""

    device: str
    """"cpu", "cuda:0", …"""

    def mismatches(self, extents: Sequence[Extent]) -> list[int]:
        """Indices of the extents whose BLAKE3-256 is not `expected`, ascending."""

    def crc64(self, extents: Sequence[Extent]) -> list[int]:
        """CRC-64/NVME of each extent."""
