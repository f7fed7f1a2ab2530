"""A file's recipe: the ordered list of its pieces, packed.

One rule: the encoding is canonical (one byte string per list of pieces), so that the recipe's
BLAKE3 id is an identity of the file's content and of how it was cut.

Source: FORMAT.md, "Recipes".
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId

_HEADER = struct.Struct("<4sHHQQ")
_MAGIC = b"CKRC"
_VERSION = 1
_ROW = np.dtype([("length", "<u8"), ("id", "V32")])
_MAX_SIZE = (1 << 63) - 1
HOLE = bytes(32)


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes (at least 1): of one whole chunk, or of zeros where `chunk` is None."""

    length: int
    chunk: ChunkId | None


class Recipe:
    """An immutable list of pieces with their offsets. 48 bytes of memory a piece."""

    __slots__ = ("_ids", "_starts", "size")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        lengths = array("Q")
        ids = bytearray()
        for piece in pieces:
            lengths.append(piece.length)
            ids += HOLE if piece.chunk is None else piece.chunk
        self._set(lengths, bytes(ids))

    def _set(self, lengths: Sequence[int], ids: bytes) -> None:
        assert all(lengths), "a piece has at least one byte"
        self._ids = ids
        self._starts = array("Q", accumulate(lengths, initial=0))
        self.size = int(self._starts[-1])

    @classmethod
    def of_columns(cls, lengths: Sequence[int], ids: bytes) -> Recipe:
        """The recipe of pieces of these lengths; `ids` are their 32 bytes each, HOLE for a hole."""
        recipe = cls.__new__(cls)
        recipe._set(lengths, ids)
        return recipe

    def __len__(self) -> int:
        return len(self._starts) - 1

    def piece(self, index: int) -> Piece:
        """The piece number `index`."""
        identity = self._ids[32 * index : 32 * index + 32]
        length = self._starts[index + 1] - self._starts[index]
        return Piece(length, None if identity == HOLE else ChunkId(identity))

    def row(self, index: int) -> tuple[ChunkId | None, int, int]:
        """(chunk or None, first byte, end) of piece `index`."""
        identity = self._ids[32 * index : 32 * index + 32]
        chunk = None if identity == HOLE else ChunkId(identity)
        return chunk, self._starts[index], self._starts[index + 1]

    def start(self, index: int) -> int:
        """The file offset at which piece `index` begins."""
        return self._starts[index]

    def length_of(self, pieces: Iterable[int]) -> int:
        """The bytes of the pieces of these numbers together."""
        starts = self._starts
        return sum([starts[i + 1] - starts[i] for i in pieces])

    def pieces(self) -> Iterator[Piece]:
        """All pieces in order."""
        return (self.piece(i) for i in range(len(self)))

    def chunks(self) -> Iterator[ChunkId]:
        """The chunk ids in order, holes left out, repeats kept."""
        return (p.chunk for p in self.pieces() if p.chunk is not None)

    def root_leaves(self) -> Iterator[ChunkId]:
        """What the Merkle file root runs over: every piece, a hole as 32 zero bytes."""
        return iter(self.ids())

    def ids(self, start: int = 0, stop: int | None = None) -> list[ChunkId]:
        """What stands for each piece, or those from `start` to `stop`: its chunk, or HOLE."""
        packed = self._ids[32 * start : None if stop is None else 32 * stop]
        return [ChunkId(packed[at : at + 32]) for at in range(0, len(packed), 32)]

    def packed_ids(self) -> bytes:
        """The same of all pieces, 32 bytes each, one behind the other."""
        return self._ids

    def index_at(self, offset: int) -> int:
        """Which piece holds byte `offset` (0 <= offset < size)."""
        assert 0 <= offset < self.size, "offset outside of the recipe"
        return bisect_right(self._starts, offset) - 1

    def data_bytes(self) -> int:
        """Bytes that are not holes."""
        return sum(p.length for p in self.pieces() if p.chunk is not None)

    def encode(self) -> bytes:
        """The canonical bytes."""
        out = bytearray(_HEADER.pack(_MAGIC, _VERSION, 0, self.size, len(self)))
        for i in range(len(self)):
            out += (self._starts[i + 1] - self._starts[i]).to_bytes(8, "little")
            out += self._ids[32 * i : 32 * i + 32]
        return bytes(out)

    def identity(self) -> RecipeId:
        """The BLAKE3 id of the canonical bytes."""
        return RecipeId(chunk_id(self.encode()))


EMPTY = Recipe(())


def decode_recipe(encoded: bytes) -> Recipe:
    """The recipe in `encoded`; Corrupt if these are not the canonical bytes of one."""
    if len(encoded) < _HEADER.size:
        raise Corrupt("a recipe is shorter than its header")
    magic, version, flags, size, count = _HEADER.unpack_from(encoded)
    if magic != _MAGIC or version != _VERSION or flags != 0:
        raise Corrupt(f"not a recipe of version {_VERSION}")
    if len(encoded) != _HEADER.size + count * _ROW.itemsize:
        raise Corrupt(f"a recipe of {count} pieces has {len(encoded)} bytes")
    table = np.frombuffer(encoded, _ROW, count, _HEADER.size)
    lengths = array("Q", table["length"].astype("=u8").tobytes())
    listed = sum(lengths)
    if 0 in lengths or listed > _MAX_SIZE:
        raise Corrupt(f"a recipe lists an empty piece, or more than a file can hold: {listed} bytes")
    if listed != size:
        raise Corrupt(f"a recipe claims {size} bytes and lists {listed}")
    return Recipe.of_columns(lengths, table["id"].tobytes())
