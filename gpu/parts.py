"""What a file, or a tensor in it, is made of: one row for each range that is hashed on its own.

One rule: rows are columns of numbers. A model has some hundred thousand of them, and an object for each takes
longer to make (measured: 4 to 10 µs) than a device takes to hash what it stands for.

Source: FORMAT.md, "Recipes", for the packed rows; store/recipe.py defines what is valid.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import DIGEST_BYTES, ChunkId
from ckptfs.store.regions import CHUNK_BYTES

_HEADER: Final = struct.Struct("<4sHHQQ")
_ROW: Final = np.dtype([("length", "<u8"), ("chunk", np.uint8, DIGEST_BYTES)])
_MAX_SIZE: Final = (1 << 63) - 1
Numbers = NDArray[np.int64]
Digests = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Part:
    """`length` bytes from byte `offset` of a file that must have the BLAKE3-256 `digest`.

    They are a part, or all, of the stored chunk `chunk`, or zeros of a hole (None).
    """

    offset: int
    length: int
    digest: ChunkId
    chunk: ChunkId | None


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts that follow one another. `digests` and `chunks` have 32 bytes a row; a hole's chunk is zeros."""

    offsets: Numbers
    lengths: Numbers
    digests: Digests
    chunks: Digests

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Part]:
        return map(self.part, range(len(self)))

    def part(self, index: int) -> Part:
        """One of them."""
        chunk = self.chunks[index].tobytes()
        return Part(
            int(self.offsets[index]),
            int(self.lengths[index]),
            ChunkId(self.digests[index].tobytes()),
            ChunkId(chunk) if any(chunk) else None,
        )

    def between(self, first: int, last: int) -> Parts:
        """Those from number `first` up to, not including, `last`."""
        rows = slice(first, last)
        return Parts(self.offsets[rows], self.lengths[rows], self.digests[rows], self.chunks[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A recipe's pieces: `starts` has one more than there are, the file's size."""

    starts: Numbers
    lengths: Numbers
    chunks: Digests
    is_hole: NDArray[np.bool_]

    @property
    def size(self) -> int:
        """The file's length in bytes."""
        return int(self.starts[-1])

    def parts(self, start: int, end: int, edges: bytes, cuts: Sequence[int] = ()) -> Parts:
        """The parts of [start, end), which is not empty and lies in the file; they end at `cuts` too.

        `edges` are the digests, in order, of those that do not fill a chunk. Corrupt if that is not how
        many there are.
        """
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        last = int(np.searchsorted(self.starts, end, "left"))
        bounds = np.concatenate(([start], self.starts[first + 1 : last], [end]))
        if len(cuts):
            bounds = np.union1d(bounds, np.array(cuts, np.int64))
        offsets, lengths = bounds[:-1], np.diff(bounds)
        piece = np.searchsorted(self.starts, offsets, "right") - 1 if len(cuts) else slice(first, last)
        chunks, holes = self.chunks[piece], self.is_hole[piece]
        partial = np.flatnonzero((lengths < self.lengths[piece]) & ~holes)
        digests = chunks
        if len(edges) != DIGEST_BYTES * partial.size:
            raise Corrupt("a tensor does not say what its edges are")
        if partial.size:
            digests = chunks.copy()
            digests[partial] = np.frombuffer(edges, np.uint8).reshape(-1, DIGEST_BYTES)
        found = Parts(offsets, lengths, digests, chunks)
        return _with_zeros(found, holes) if holes.any() else found


# A model's tensors are asked for one after the other, and a file's recipe is the same for all of them.
@lru_cache(maxsize=64)
def decode_pieces(encoded: bytes) -> Pieces:
    """The pieces in a recipe's canonical bytes; Corrupt exactly if decode_recipe says so."""
    if len(encoded) < _HEADER.size:
        raise Corrupt("a recipe is shorter than its header")
    magic, version, flags, size, count = _HEADER.unpack_from(encoded)
    if (magic, version, flags) != (b"CKRC", 1, 0) or len(encoded) != _HEADER.size + count * _ROW.itemsize:
        raise Corrupt("this is not a recipe")
    rows = np.frombuffer(encoded, _ROW, offset=_HEADER.size)
    lengths = rows["length"]
    # Each is checked before they are added up, so that no sum wraps around.
    total = sum(map(int, lengths)) if (lengths > _MAX_SIZE >> 24).any() else int(lengths.sum())
    if (lengths == 0).any() or total > _MAX_SIZE or total != size:
        raise Corrupt(f"a recipe claims {size} bytes and lists {total}")
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    chunks = np.ascontiguousarray(rows["chunk"])
    return Pieces(starts, np.diff(starts), chunks, np.equal(chunks.max(axis=1, initial=0), 0))


def _with_zeros(parts: Parts, holes: NDArray[np.bool_]) -> Parts:
    """Holes in parts as long as chunks are, so that many can be hashed at once."""
    counts = np.where(holes, -(-parts.lengths // CHUNK_BYTES), 1)
    rows = np.repeat(np.arange(len(parts)), counts)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = parts.offsets[rows] + numbers * CHUNK_BYTES
    is_zero = holes[rows]
    rest = parts.lengths[rows] - numbers * CHUNK_BYTES
    lengths = np.where(is_zero, np.minimum(rest, CHUNK_BYTES), parts.lengths[rows])
    digests = parts.digests[rows]
    for length in np.unique(lengths[is_zero]):
        digests[is_zero & (lengths == length)] = np.frombuffer(_digest_of_zeros(int(length)), np.uint8)
    return Parts(offsets, lengths, digests, parts.chunks[rows])


@lru_cache(maxsize=1024)
def _digest_of_zeros(length: int) -> ChunkId:
    return chunk_id(bytes(length))
