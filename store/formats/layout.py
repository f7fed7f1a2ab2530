"""The value every format parser returns: which byte extents of a file are tensors.

One rule: whatever the input, a Layout holds only extents that lie inside the file, are not empty,
are sorted and do not overlap. `arrange` is the only place that fills one, so no parser can break it.

Source: dtype names are those of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

DTYPE_BITS: Final[dict[str, int]] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "C128": 128,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}

# A dimension or a count beyond this is not an array's; it also keeps products of hostile numbers small.
MAX_DIMENSION: Final = 1 << 62
MAX_DIMENSIONS: Final = 64
MAX_NAME: Final = 1024


class Reader(Protocol):
    """A file that can be read at any offset."""

    @property
    def size(self) -> int:
        """The file's length in bytes."""

    def pread(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer only where the file ends."""


@runtime_checkable
class BatchReader(Reader, Protocol):
    """One for which the way to the bytes takes longer than to read a few of them."""

    def pread_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return what `pread` would for each (offset, length), each of them short."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """The bytes of one tensor (or of one storage that several tensors share).

    `offset` and `length` are bytes in the file. `dtype` and `shape` describe exactly `length`
    bytes; where they are not known they are `"U8"` and `(length,)`.
    """

    name: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The offset of the first byte after the tensor."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of one file lie.

    `format` is `"safetensors"`, `"torch-zip"`, `"torch-legacy"`, `"dcp"` or `"gguf"`. `damage` is
    a sentence when the file is recognisably of that format but not whole (truncated, bytes too
    many, numbers that contradict each other); the tensors that are whole are listed all the same.
    """

    format: str
    tensors: tuple[Tensor, ...]
    damage: str | None = None


def read_exactly(reader: Reader, offset: int, length: int) -> bytes | None:
    """Return exactly `length` bytes, or None when the file does not hold them (nothing is read then)."""
    if offset < 0 or length < 0 or offset + length > reader.size:
        return None
    piece = reader.pread(offset, length) if length else b""
    return piece if len(piece) == length else None


def read_each(reader: Reader, places: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return what `pread` does for each of many short (offset, length), at once where that is faster."""
    if isinstance(reader, BatchReader):
        return reader.pread_many(places)
    return [reader.pread(offset, length) for offset, length in places]


def element_count(shape: Sequence[int]) -> int | None:
    """Return the number of elements of a shape, or None for a shape no array can have."""
    if len(shape) > MAX_DIMENSIONS:
        return None
    count = 1
    for dimension in shape:
        if not 0 <= dimension <= MAX_DIMENSION:
            return None
        count *= dimension
        # Zero dimensions may follow, but no real tensor reaches this before them.
        if count > MAX_DIMENSION:
            return None
    return count


def tensor(name: str, offset: int, length: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Build a Tensor whose dtype and shape are believed only if they account for every byte of it.

    The name becomes valid UTF-8 of a bounded length, for it goes into logs and stored records.
    """
    name = name[:MAX_NAME].encode("utf-8", "backslashreplace").decode()
    count = element_count(shape)
    bits = DTYPE_BITS.get(dtype)
    if count is None or bits is None or count * bits != length * 8:
        return Tensor(name, offset, length, "U8", (length,))
    return Tensor(name, offset, length, dtype, shape)


def shown(name: str) -> str:
    """Return a name from a file in the form that it has in a damage sentence."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def arrange(format_name: str, size: int, found: Iterable[Tensor], damage: str | None = None) -> Layout:
    """Sort `found` into a Layout of a file of `size` bytes.

    Empty tensors are left out (they have no bytes), and a name
    that occurs again gets its offset appended. One that does not fit into the file or overlaps the one
    before it is left out too and becomes the damage, unless the parser has already named some.
    """
    kept: list[Tensor] = []
    names: set[str] = set()
    end = 0
    for one in sorted(found, key=lambda t: (t.offset, t.length)):
        if one.length <= 0 or one.offset < 0:
            continue
        if one.end > size:
            damage = damage or f"truncated: tensor {shown(one.name)} ends at byte {one.end} of {size}"
        elif one.offset < end:
            damage = damage or f"tensor {shown(one.name)} overlaps the tensor before it"
        else:
            if one.name in names:
                one = replace(one, name=f"{one.name}@{one.offset}")
            names.add(one.name)
            kept.append(one)
            end = one.end
    return Layout(format_name, tuple(kept), damage)
