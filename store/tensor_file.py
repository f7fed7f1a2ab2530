"""Tensors of saved files as a safetensors file of their own, of the chunks that are there. Pure.

One rule: what lies wholly in a tensor is not copied: the new file's recipe takes the piece over, and only
header and edges are new bytes.

Source: FORMAT.md, "Fetching"; https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptfs.store.errors import InvalidRequest
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Piece, Recipe

_ALIGNED = 8
_MOST_CHUNK_BYTES = 256 << 10
_BLOCK_BYTES = 4096
_METADATA = "__metadata__"
ReadFile = Callable[[Recipe, int, int], bytes]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of the file that `recipe` makes: `length` bytes from `offset`, and what they are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    recipe: Recipe
    offset: int
    length: int

    def chunks(self) -> set[ChunkId]:
        """The chunks that hold a byte of it."""
        pieces = range(
            self.recipe.index_at(self.offset), self.recipe.index_at(self.offset + self.length - 1) + 1
        )
        return {chunk for at in pieces if (chunk := self.recipe.piece(at).chunk) is not None}


@dataclass(slots=True)
class TensorFile:
    """The recipe of the file, and the chunks in it that are new."""

    recipe: Recipe
    fresh: list[tuple[ChunkId, bytes]]

    @property
    def holes(self) -> int:
        """How many of its bytes no data stands for, in whole blocks."""
        pieces = (piece.length for piece in self.recipe.pieces() if piece.chunk is None)
        return sum(length // _BLOCK_BYTES * _BLOCK_BYTES for length in pieces)


def header_of(parts: Sequence[TensorPart], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file with these tensors, in this order. InvalidRequest if two of them have
    one name, or one has a name that none can have."""
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    at = 0
    for one in parts:
        if one.name in entries:
            raise InvalidRequest(f"a safetensors file cannot hold a second {one.name!r}; fetch it by itself")
        entries[one.name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [at, at + one.length],
        }
        at += one.length
    encoded = json.dumps(entries, separators=(",", ":")).encode("ascii")
    encoded += b" " * (-len(encoded) % _ALIGNED)
    return len(encoded).to_bytes(8, "little") + encoded


def make_tensor_file(
    parts: Sequence[TensorPart], metadata: Mapping[str, str], read_file: ReadFile
) -> TensorFile:
    """A safetensors file of these tensors, of which all chunks are there; `read_file` reads edges.

    InvalidRequest as header_of; errors as `read_file` raises.
    """
    made = _Made()
    made.add_bytes(header_of(parts, metadata))
    for one in parts:
        for piece, start, end in _pieces(one.recipe, one.offset, one.offset + one.length):
            if piece.chunk is None:
                made.add_hole(end - start)
            elif end - start == piece.length:
                made.add_piece(piece)
            else:
                made.add_bytes(read_file(one.recipe, start, end - start))
    return made.file()


def _pieces(recipe: Recipe, start: int, end: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces that [start, end) touches, each with the part of it that lies in there."""
    for at in range(recipe.index_at(start), recipe.index_at(end - 1) + 1):
        yield recipe.piece(at), max(start, recipe.start(at)), min(end, recipe.start(at + 1))


@dataclass(slots=True)
class _Made:
    pieces: list[Piece] = field(default_factory=list)
    fresh: dict[ChunkId, bytes] = field(default_factory=dict)
    waiting: bytearray = field(default_factory=bytearray)

    def add_bytes(self, part: bytes) -> None:
        self.waiting += part
        while len(self.waiting) > _MOST_CHUNK_BYTES:
            self._cut(_MOST_CHUNK_BYTES)

    def add_piece(self, piece: Piece) -> None:
        self._cut(len(self.waiting))
        self.pieces.append(piece)

    def add_hole(self, length: int) -> None:
        self._cut(len(self.waiting))
        if self.pieces and self.pieces[-1].chunk is None:
            length += self.pieces.pop().length
        self.pieces.append(Piece(length, None))

    def _cut(self, length: int) -> None:
        if length:
            chunk = bytes(self.waiting[:length])
            del self.waiting[:length]
            self.pieces.append(Piece(length, chunk_id(chunk)))
            self.fresh[chunk_id(chunk)] = chunk

    def file(self) -> TensorFile:
        self._cut(len(self.waiting))
        return TensorFile(Recipe(self.pieces), list(self.fresh.items()))


def chunks_of_parts(parts: Iterable[TensorPart]) -> set[ChunkId]:
    """The chunks that hold a byte of one of these tensors."""
    return set[ChunkId]().union(*(one.chunks() for one in parts))
