"""Extents as columns of numbers, for a Hasher that packs them and never looks at one.

One rule: it is the same sequence of Extents for whoever does look at one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ckptfs.gpu.extents import Extent
from ckptfs.store.ids import DIGEST_BYTES, ChunkId


@dataclass(frozen=True, slots=True, eq=False)
class ExtentTable(Sequence[Extent]):
    """`addresses` and `lengths` are u64, `expected` has 32 bytes a row."""

    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    expected: NDArray[np.uint8]

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> ExtentTable:
        """Any extents as such a table."""
        if isinstance(extents, ExtentTable):
            return extents
        count = len(extents)
        digests = b"".join(one.expected for one in extents)
        assert len(digests) == DIGEST_BYTES * count, "a digest is 32 bytes"
        return cls(
            np.fromiter((one.address for one in extents), np.uint64, count),
            np.fromiter((one.length for one in extents), np.uint64, count),
            np.frombuffer(digests, np.uint8).reshape(count, DIGEST_BYTES),
        )

    def __len__(self) -> int:
        return len(self.addresses)

    @overload
    def __getitem__(self, index: int) -> Extent: ...
    @overload
    def __getitem__(self, index: slice) -> ExtentTable: ...
    def __getitem__(self, index: int | slice) -> Extent | ExtentTable:
        if isinstance(index, slice):
            return ExtentTable(self.addresses[index], self.lengths[index], self.expected[index])
        expected = ChunkId(self.expected[index].tobytes())
        return Extent(int(self.addresses[index]), int(self.lengths[index]), expected)
