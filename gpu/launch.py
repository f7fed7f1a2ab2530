"""What a launch of the kernels needs: extents cut into segments, and where everything lies on the device.

One rule: this is the twin of native/load.cuh. What the host packs here is read there byte for byte;
tests/gpu runs both together, and compares the constants with those of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptfs.gpu.extent_table import ExtentTable
from ckptfs.gpu.extents import Extent
from ckptfs.store.ids import DIGEST_BYTES

SEGMENT_BYTES = 128 << 10
SEGMENT_THREADS = 128
JOIN_THREADS = 32
_NODE_BYTES = DIGEST_BYTES
_MAX_BLOCKS = (1 << 31) - 1
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in one piece of device memory, in bytes. [0, `upload`) comes from the host."""

    bad_count: int
    extents: int
    expected: int
    extent_of: int
    upload: int
    nodes: int
    results: int
    size: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch over `count` extents (at least 1) in `segments` segments.

    `upload` holds a zero u32 (the count of bad extents), the extents (u64 address, length, first segment),
    the expected digests, and the extent of each segment (u32). On the device follow `nodes` (32 bytes for
    each segment) and `results` (8 bytes for each extent; the flags use the first `count` of them).
    """

    count: int
    segments: int
    upload: NDArray[np.uint8]
    layout: Layout


def plan(extents: Sequence[Extent]) -> Launch:
    """The launch that covers all of `extents`, of which there is at least one."""
    count = len(extents)
    given = ExtentTable.of(extents)
    table = np.empty((count, 3), np.uint64)
    table[:, 0] = given.addresses
    table[:, 1] = given.lengths
    # An empty extent has a segment too: it has a hash.
    pieces = np.maximum((table[:, 1] + np.uint64(SEGMENT_BYTES - 1)) // np.uint64(SEGMENT_BYTES), 1)
    ends = np.cumsum(pieces)
    table[:, 2] = ends - pieces
    segments = int(ends[-1])
    assert count <= segments <= _MAX_BLOCKS, "one launch reaches 256 TiB"

    layout = _layout(count, segments)
    upload = np.zeros(layout.upload, np.uint8)
    _put(upload, layout.extents, table)
    _put(upload, layout.expected, given.expected)
    _put(upload, layout.extent_of, np.repeat(np.arange(count, dtype=np.uint32), pieces.astype(np.int64)))
    return Launch(count, segments, upload, layout)


def _layout(count: int, segments: int) -> Layout:
    extents = _aligned(4)
    expected = _aligned(extents + 24 * count)
    extent_of = _aligned(expected + DIGEST_BYTES * count)
    upload = _aligned(extent_of + 4 * segments)
    results = _aligned(upload + _NODE_BYTES * segments)
    return Layout(0, extents, expected, extent_of, upload, upload, results, _aligned(results + 8 * count))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _put(upload: NDArray[np.uint8], offset: int, values: NDArray[np.generic]) -> None:
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    upload[offset : offset + raw.size] = raw
