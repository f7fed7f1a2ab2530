"""Tensors of a GGUF file (llama.cpp, ggml).

One rule: every count and length is held against the bytes that are left before it is used, so a
hostile header costs no more than reading the file's own bytes once.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the block sizes in ggml.h.
Little-endian versions 2 and 3; others are unknown here.
"""

from __future__ import annotations

import struct
from typing import Final

from ckptfs.store.formats.layout import (
    MAX_DIMENSIONS,
    Layout,
    Reader,
    Tensor,
    arrange,
    element_count,
    tensor,
)

NAME: Final = "gguf"
MAGIC: Final = b"GGUF"
MAX_HEADER_BYTES: Final = 256 * 1024 * 1024
MAX_HEADER_ITEMS: Final = 4_000_000
_MAX_NAME_BYTES: Final = 65535
_BLOCK_BYTES: Final = 256 * 1024
_DEFAULT_ALIGNMENT: Final = 32
_ALIGNMENT_KEY: Final = b"general.alignment"
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_VALUE_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_ARRAY_DEPTH: Final = 4

_PLAIN: Final = {
    0: "F32",
    1: "F16",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    30: "BF16",
}
# ggml type: elements of a block, bytes of a block.
_BLOCKS: Final = {
    **{0: (1, 4), 1: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2)},
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 20: (32, 18)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210)},
    **{15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 21: (256, 110)},
    **{22: (256, 82), 23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66), 39: (32, 17)},
}


class _Truncated(Exception):
    """The file ends inside the header."""


class _TooLarge(Exception):
    """The header has more than this reader takes."""


class _Rejected(Exception):
    """The header says something that cannot be; the message says what."""


def recognise(first_bytes: bytes) -> bool:
    """Tell whether a file that begins with `first_bytes` is a GGUF file of a known version."""
    return first_bytes.startswith(MAGIC) and first_bytes[4:8] in (b"\2\0\0\0", b"\3\0\0\0")


def parse(reader: Reader) -> Layout | None:
    """Return the layout; None when the file is of another format or its header is too large."""
    if not recognise(reader.pread(0, 8)):
        return None
    header = _Header(reader)
    try:
        tensors, alignment = _tensors(header)
    except _TooLarge:
        return None
    except _Truncated:
        return Layout(NAME, (), f"truncated: {reader.size} bytes end inside the header")
    except _Rejected as why:
        return Layout(NAME, (), f"header: {why}")
    end = max((one.end for one in tensors), default=header.at)
    damage = None
    # Writers pad the last tensor as well.
    if reader.size - end >= alignment and tensors:
        damage = f"{reader.size - end} trailing bytes after the last tensor"
    return arrange(NAME, reader.size, tensors, damage)


class _Header:
    """A cursor over the header, read in blocks; it counts what it takes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._block = b""
        self._block_start = 0
        self._items = 0
        self.at = 8

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        start = self.at
        self.skip(length)
        offset = start - self._block_start
        if offset < 0 or offset + length > len(self._block):
            self._block = self._reader.pread(start, max(length, _BLOCK_BYTES))
            self._block_start, offset = start, 0
        piece = self._block[offset : offset + length]
        if len(piece) != length:
            raise _Truncated
        return piece

    def skip(self, length: int) -> None:
        """Pass over `length` bytes unread."""
        self._items += 1
        if self._items > MAX_HEADER_ITEMS or self.at + length > MAX_HEADER_BYTES:
            raise _TooLarge if self.at + length <= self._reader.size else _Truncated
        if self.at + length > self._reader.size:
            raise _Truncated
        self.at += length

    def u32(self) -> int:
        """Return the next u32."""
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        """Return the next u64."""
        return int.from_bytes(self.take(8), "little")


def _tensors(header: _Header) -> tuple[list[Tensor], int]:
    tensor_count, pair_count = header.u64(), header.u64()
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(pair_count):
        key = header.take(_name_length(header))
        kind = header.u32()
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            alignment = header.u32()
        else:
            _skip_value(header, kind, _MAX_ARRAY_DEPTH)
    if alignment == 0 or alignment % 8:
        raise _Rejected(f"alignment {alignment}")
    rows = [_tensor_row(header) for _ in range(tensor_count)]
    start = -(-header.at // alignment) * alignment
    rows.sort(key=lambda row: row[3])
    tensors: list[Tensor] = []
    for index, (name, shape, kind, offset) in enumerate(rows):
        length = _length(shape, kind)
        if length is None:
            # A type newer than this table: it ends where the next tensor begins at the latest.
            following = rows[index + 1][3] if index + 1 < len(rows) else offset
            length = following - offset
        tensors.append(tensor(name, start + offset, length, _PLAIN.get(kind, "U8"), shape))
    return tensors, alignment


def _skip_value(header: _Header, kind: int, depth: int) -> None:
    if kind in _VALUE_BYTES:
        header.skip(_VALUE_BYTES[kind])
    elif kind == _STRING:
        header.skip(header.u64())
    elif kind == _ARRAY and depth > 0:
        element, count = header.u32(), header.u64()
        if element in _VALUE_BYTES:
            header.skip(_VALUE_BYTES[element] * count)
            return
        for _ in range(count):
            _skip_value(header, element, depth - 1)
    else:
        raise _Rejected(f"value type {kind}")


def _name_length(header: _Header) -> int:
    length = header.u64()
    if length > _MAX_NAME_BYTES:
        raise _Rejected(f"a name of {length} bytes")
    return length


def _tensor_row(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape (slowest dimension first, as in other formats), ggml type, offset."""
    name = header.take(_name_length(header)).decode("utf-8", "backslashreplace")
    dimensions = header.u32()
    if dimensions > MAX_DIMENSIONS:
        raise _Rejected(f"{dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}Q", header.take(8 * dimensions))
    return name, tuple(reversed(shape)), header.u32(), header.u64()


def _length(shape: tuple[int, ...], kind: int) -> int | None:
    count = element_count(shape)
    if count is None:
        raise _Rejected("a shape that no tensor can have")
    if kind not in _BLOCKS:
        return None
    elements, block_bytes = _BLOCKS[kind]
    return count // elements * block_bytes
