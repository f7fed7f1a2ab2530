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
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, cast

import msgspec

from ckptfs.gpu.parts import Parts, decode_pieces
from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.recipe import Recipe

KIND = "ckptfs expectation"
FORMAT = 1
MOST_WAYS = 1 << 16


class ExpectedTensor(msgspec.Struct, frozen=True):
    """A tensor in a file: `length` bytes from `offset`; dtype and shape as in store/formats/layout.py.

    `edges`: 32 bytes each, in order, the digests of its parts that do not fill their chunks.
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

    def cuts(self, ways: int) -> list[int]:
        """Where its rows are divided among so many ranks: offsets in the file, its own edges left out."""
        rows = self.shape[0] if self.shape else 0
        if ways <= 1 or rows <= 1 or self.length % rows:
            return []
        block = -(-rows // ways)
        return [self.offset + row * (self.length // rows) for row in range(block, rows, block)]


class ExpectedFile(msgspec.Struct, frozen=True):
    """A file with tensors; `path` counts from the unit's directory, `recipe` is encoded canonically.

    Parts end where the rows of a tensor are divided among `ways` ranks.
    """

    path: str
    format: str
    recipe: bytes
    tensors: tuple[ExpectedTensor, ...]
    damage: str | None = None
    ways: Annotated[int, msgspec.Meta(ge=1, le=MOST_WAYS)] = 1

    @property
    def size_bytes(self) -> int:
        """The file's length. Corrupt if `recipe` is not one."""
        return decode_pieces(self.recipe).size

    def parts(self) -> Parts:
        """All of the file, in order. Corrupt if `recipe` is not one."""
        pieces = decode_pieces(self.recipe)
        return pieces.parts(0, pieces.size, b"")

    def parts_of(self, tensor: ExpectedTensor) -> Parts:
        """What one of its tensors is made of, in order. Corrupt if that does not lie in the file."""
        pieces = decode_pieces(self.recipe)
        if tensor.length <= 0 or tensor.offset < 0 or tensor.end > pieces.size:
            raise Corrupt(f"tensor {tensor.name!r} does not lie in {self.path}")
        return pieces.parts(tensor.offset, tensor.end, tensor.edges, tensor.cuts(self.ways))


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


def edges_of(recipe: Recipe, offset: int, end: int, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(offset, length) of the parts of [offset, end) that do not fill their chunks, where parts end at `cuts`
    too; in order."""
    found = []
    for index in sorted({recipe.index_at(at) for at in (offset, *cuts, end - 1)}):
        piece, start = recipe.piece(index), recipe.start(index)
        first, last = max(offset, start), min(end, start + piece.length)
        bounds = [first, *(cut for cut in cuts if first < cut < last), last]
        for at, stop in pairwise(bounds):
            if piece.chunk is not None and stop - at < piece.length:
                found.append((at, stop - at))
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
