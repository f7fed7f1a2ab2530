"""What a version says of its tensors: where each lies in which file, and what its bytes hash to.

One rule: this is a value that travels as JSON. Whoever has it can verify memory with neither mount, nor
daemon, nor store at hand; so verification needs none of them, and the daemon needs no GPU.

The digest of a part is the id of its chunk wherever a chunk lies in one tensor. Small tensors share
chunks with what is around them, and an edge of a tensor may lie within a hole: the digests of such parts
are made by whoever describes the version, from chunks that were verified on the way.

Source: FORMAT.md, "Recipes", for the packed recipes; `ckptfs expect` prints the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import cast

import msgspec

from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import DIGEST_BYTES, ChunkId
from ckptfs.store.recipe import Recipe, decode_recipe
from ckptfs.store.regions import CHUNK_BYTES

KIND = "ckptfs expectation"
FORMAT = 1


class Part(msgspec.Struct, frozen=True):
    """`length` bytes from byte `offset` of a file that must have the BLAKE3-256 `digest`.

    They are a part, or all, of the stored chunk `chunk`, or zeros of a hole (None).
    """

    offset: int
    length: int
    digest: ChunkId
    chunk: ChunkId | None


class ExpectedTensor(msgspec.Struct, frozen=True):
    """A tensor in a file: `length` bytes from `offset`; dtype and shape as in store/formats/layout.py.

    `edges`: 32 bytes each, the digests of its first and last part where these do not fill their chunks.
    """

    name: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]
    edges: bytes = b""

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor."""
        return self.offset + self.length


class ExpectedFile(msgspec.Struct, frozen=True):
    """A file with tensors; `path` counts from the unit's directory, `recipe` is encoded canonically."""

    path: str
    format: str
    recipe: bytes
    tensors: tuple[ExpectedTensor, ...]
    damage: str | None = None

    def pieces(self) -> Recipe:
        """The file's recipe. Corrupt if these bytes are not one."""
        return _decoded(self.recipe)

    def parts(self) -> Iterator[Part]:
        """All of the file, in order."""
        recipe = self.pieces()
        for index in range(len(recipe)):
            piece, start = recipe.piece(index), recipe.start(index)
            if piece.chunk is None:
                yield from _zeros(start, piece.length)
            else:
                yield Part(start, piece.length, piece.chunk, piece.chunk)

    def parts_of(self, tensor: ExpectedTensor) -> Iterator[Part]:
        """What one of its tensors is made of, in order. Corrupt if that does not lie in the file."""
        recipe = self.pieces()
        if tensor.length <= 0 or tensor.offset < 0 or tensor.end > recipe.size:
            raise Corrupt(f"tensor {tensor.name!r} does not lie in {self.path}")
        edges = (ChunkId(one) for one in _digests(tensor.edges))
        at, index = tensor.offset, recipe.index_at(tensor.offset)
        while at < tensor.end:
            piece, start = recipe.piece(index), recipe.start(index)
            stop = min(tensor.end, start + piece.length)
            if piece.chunk is None:
                yield from _zeros(at, stop - at)
            else:
                digest = piece.chunk if stop - at == piece.length else next(edges, None)
                if digest is None:
                    raise Corrupt(f"tensor {tensor.name!r} of {self.path} lacks the digest of an edge")
                yield Part(at, stop - at, digest, piece.chunk)
            at, index = stop, index + 1


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """One version, or a place in it.

    `path` leads from the mount to the version's top directory (None: it is not to be had through a
    mount). `others` are the regular files that hold no tensors.
    """

    unit: str
    number: int
    name: str
    path: str | None
    files: tuple[ExpectedFile, ...]
    others: tuple[str, ...] = ()
    kind: str = KIND
    format: int = FORMAT

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.length for file in self.files for tensor in file.tensors)


def edges_of(recipe: Recipe, offset: int, end: int) -> list[tuple[int, int]]:
    """(offset, length) of the parts of [offset, end) that do not fill their chunks: at most two."""
    found = []
    for index in sorted({recipe.index_at(offset), recipe.index_at(end - 1)}):
        piece, start = recipe.piece(index), recipe.start(index)
        first, last = max(offset, start), min(end, start + piece.length)
        if piece.chunk is not None and last - first < piece.length:
            found.append((first, last - first))
    return found


def encode_expectation(expectation: Expectation) -> dict[str, object]:
    """As plain values that JSON takes; bytes become base64."""
    return cast("dict[str, object]", msgspec.to_builtins(expectation))


def decode_expectation(plain: object) -> Expectation:
    """From such plain values; InvalidRequest if they are none, or of a format that is not known."""
    try:
        decoded = msgspec.convert(plain, Expectation)
    except msgspec.ValidationError as e:
        raise InvalidRequest(f"this does not say what to expect of a version: {e}") from None
    if decoded.kind != KIND or decoded.format != FORMAT:
        raise InvalidRequest("this expectation was made by another release; make it again")
    return decoded


def parse_expectation(text: str | bytes) -> Expectation:
    """From the JSON that `ckptfs expect` printed; InvalidRequest if it is none."""
    try:
        plain: object = json.loads(text)
    except ValueError:
        raise InvalidRequest("this is not the JSON that `ckptfs expect` prints") from None
    return decode_expectation(plain)


# A model's tensors are asked for one after the other, and a file's recipe is the same for all of them.
@lru_cache(maxsize=8)
def _decoded(encoded: bytes) -> Recipe:
    return decode_recipe(encoded)


def _digests(joined: bytes) -> Iterator[bytes]:
    if len(joined) % DIGEST_BYTES:
        raise Corrupt("digests of 32 bytes each do not end half way")
    return (joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))


def _zeros(offset: int, length: int) -> Iterator[Part]:
    """The parts of a hole: as long as chunks are, so that many can be hashed at once."""
    for at in range(offset, offset + length, CHUNK_BYTES):
        part = min(CHUNK_BYTES, offset + length - at)
        yield Part(at, part, _digest_of_zeros(part), None)


@lru_cache(maxsize=1024)
def _digest_of_zeros(length: int) -> ChunkId:
    return chunk_id(bytes(length))
