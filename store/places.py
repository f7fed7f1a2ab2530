"""Where many chunks lie, as columns: so that looking after a thousand costs little more than after one.

One rule: row i of `rows` is the place of `chunks[i]`, byte for byte as the chunk table has it.

Source: FORMAT.md, "Index" (the 26 bytes of a place).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import Codec, Location, decode_location, encode_location

_ROW = np.dtype(
    [
        ("segment", "<u8"),
        ("offset", "<u8"),
        ("stored", "<u4"),
        ("length", "<u4"),
        ("codec", "u1"),
        ("flags", "u1"),
    ]
)
Suspect = tuple[ChunkId, Location]
NO_PARENTS: Final[Mapping[ChunkId, Location]] = MappingProxyType({})


class Places:
    """Chunks, and where each of them lies. Not changed once made; any thread may read it.

    `parents` are the places of all chunks that the encoded ones lead to.
    """

    __slots__ = ("chunks", "parents", "rows")

    def __init__(
        self,
        chunks: Sequence[ChunkId],
        rows: npt.NDArray[np.void],
        parents: Mapping[ChunkId, Location] = NO_PARENTS,
    ) -> None:
        assert len(chunks) == len(rows), "a place for each chunk"
        self.chunks = chunks
        self.rows = rows
        self.parents = parents

    def __len__(self) -> int:
        return len(self.chunks)

    def location(self, index: int) -> Location:
        """The place number `index`."""
        return Location(*self.rows[index].item())

    def by_place(self) -> Places:
        """The same in the order of segment, file and offset."""
        rows = self.rows
        order = np.lexsort((rows["offset"], rows["flags"], rows["segment"]))
        return self.taken(order)

    def taken(self, order: npt.NDArray[np.intp]) -> Places:
        """The places of these numbers, in this order."""
        chunks = self.chunks
        return Places([chunks[i] for i in order.tolist()], self.rows[order], self.parents)

    def with_parents(self, parents: Mapping[ChunkId, Location]) -> Places:
        """The same with other parents."""
        return Places(self.chunks, self.rows, parents)

    def encoded_ones(self) -> list[Suspect]:
        """Those that are not stored raw."""
        at = np.flatnonzero(self.rows["codec"] != Codec.RAW)
        return [(self.chunks[i], self.location(i)) for i in at.tolist()]

    def without(self, chunks: set[ChunkId]) -> Places:
        """The same, some chunks left out."""
        if not chunks:
            return self
        kept = [i for i, chunk in enumerate(self.chunks) if chunk not in chunks]
        return self.taken(np.array(kept, np.intp))

    def same_as(self, other: Places) -> Places:
        """Those that `other` has in the very same place."""
        there = dict(zip(other.chunks, other.encoded(), strict=True))
        rows = enumerate(zip(self.chunks, self.encoded(), strict=True))
        same = [i for i, (chunk, row) in rows if there.get(chunk) == row]
        return self.taken(np.array(same, np.intp))

    def encoded(self) -> list[bytes]:
        """The rows of the chunk table."""
        packed, size = self.rows.tobytes(), _ROW.itemsize
        return [packed[at : at + size] for at in range(0, len(packed), size)]

    def segments(self) -> list[int]:
        """The numbers of the segments in which there are some."""
        return sorted(set(self.rows["segment"].tolist()))

    def marks(self, segment: int) -> list[int]:
        """The places in a segment as Verified keeps them: offset x 2 + IN_IDX."""
        rows = self.rows[self.rows["segment"] == segment]
        marks: list[int] = (rows["offset"] << np.uint64(1) | (rows["flags"] & 1)).tolist()
        return marks


def decode_places(chunks: Sequence[ChunkId], encoded: Sequence[bytes]) -> Places:
    """The places of `chunks` from their rows of the chunk table; Corrupt if one is not a row."""
    if {*map(len, encoded)} - {_ROW.itemsize}:
        for row in encoded:
            decode_location(row)
    return Places(chunks, np.frombuffer(b"".join(encoded), _ROW))


def places_of(suspects: Iterable[Suspect], parents: Mapping[ChunkId, Location] = NO_PARENTS) -> Places:
    """The same of single locations."""
    pairs = list(suspects)
    rows = b"".join([encode_location(location) for _, location in pairs])
    return Places([chunk for chunk, _ in pairs], np.frombuffer(rows, _ROW), parents)
