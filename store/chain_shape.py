"""Which chunk of a line a new one is encoded against: how deep chains get, and how many share a base. Pure.

One rule: the nearest that is less deep than the shape allows and has room for one child more; if there is
none, the new chunk stands alone, and is the base of those that follow.

A reader decodes all that a chunk leads to, so depth is paid for by each read. Measured on the series of
tests/benchmarks/codecs.py, logical over stored, with at most eight children of a chunk:

    depth   AdamW .pt   HF directories   bf16 fine-tune   .pt + exports
    0           1.205            1.204            1.535           1.654
    1           1.316            1.366            4.163           1.806
    2           1.332            1.394            4.474           1.829
    8           1.367            1.421            4.895           1.877

The first step brings nearly all; each further one costs a load as much as the first. With one child for each
chunk, saves that stand alone alternate with others: 1.298, 1.297, 2.311, 1.782 at depth 1. And what is
encoded against one base lets go of the saves between them, which a longer chain would keep.

Source: FORMAT.md, "Encoded chunks": MAX_DEPTH bounds the format, this the writer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import MAX_DEPTH


@dataclass(frozen=True, slots=True)
class ChainShape:
    """The differences that lead to a chunk at most, and the children of one chunk. What is the cast of
    others lies one deeper, and takes no room but its header's."""

    depth: int
    children: int

    def __post_init__(self) -> None:
        assert 0 <= self.depth <= MAX_DEPTH and self.children >= 1


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a stored chunk stands: its depth, how many chunks are encoded against it (it need not be said
    beyond the children of the shape), and what it is the difference to."""

    depth: int = 0
    children: int = 0
    base: ChunkId | None = None


SHAPE: Final = ChainShape(depth=1, children=8)
"""What the encoder goes by."""


def choose_parent(
    nearest: ChunkId, standing_of: Callable[[ChunkId], Standing | None], shape: ChainShape = SHAPE
) -> ChunkId | None:
    """The chunk to encode one against whose nearest earlier one is `nearest`; None: it stands alone.

    `standing_of` gives None for what is not stored. It is asked for each chunk on the way: MAX_DEPTH + 2 at
    most, whatever it says.
    """
    chunk: ChunkId | None = nearest
    below = MAX_DEPTH + 1
    while chunk is not None:
        standing = standing_of(chunk)
        if standing is None or standing.depth >= below:
            return None
        if standing.depth < shape.depth and standing.children < shape.children:
            return chunk
        below, chunk = standing.depth, standing.base
    return None
