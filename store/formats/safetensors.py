"""Tensors of a safetensors file, from its JSON header.

One rule: the header is believed only as far as it agrees with the file; what it says about bytes
that are not there, or about bytes said twice, becomes damage.

Source: https://github.com/huggingface/safetensors, section "Format": u64le N, N bytes of JSON that
begin with `{`, then the buffer, which the `data_offsets` cover without hole or overlap; N is at
most 100,000,000.
"""

from __future__ import annotations

from typing import Final, TypeGuard

from ckptfs.store.formats.bounded_json import MAX_JSON_BYTES, Members, TooLarge, members, parse_members
from ckptfs.store.formats.layout import (
    DTYPE_BITS,
    Layout,
    Reader,
    Tensor,
    arrange,
    element_count,
    read_exactly,
    shown,
    tensor,
)

NAME: Final = "safetensors"
MAX_HEADER_BYTES: Final = 100_000_000


class _Rejected(Exception):
    """The header breaks a rule; the message says which."""


def recognise(first_bytes: bytes) -> bool:
    """Tell whether a file that begins with `first_bytes` has a safetensors header."""
    if len(first_bytes) < 9 or first_bytes[8:9] != b"{":
        return False
    return 2 <= int.from_bytes(first_bytes[:8], "little") <= MAX_HEADER_BYTES


def parse(reader: Reader) -> Layout | None:
    """Return the layout; None when the file is of another format or its header is too large."""
    if not recognise(reader.pread(0, 16)):
        return None
    length = int.from_bytes(reader.pread(0, 8), "little")
    if length > MAX_JSON_BYTES and 8 + length <= reader.size:
        return None
    header = read_exactly(reader, 8, length)
    if header is None:
        return Layout(NAME, (), f"truncated: the header needs {8 + length} bytes, the file has {reader.size}")
    try:
        entries = _entries(header)
        tensors = [_tensor(name, entry, 8 + length) for name, entry in entries]
    except TooLarge:
        return None
    except _Rejected as why:
        return Layout(NAME, (), f"header: {why}")
    return arrange(NAME, reader.size, tensors, _coverage(tensors, 8 + length, reader.size))


def _entries(header: bytes) -> Members:
    try:
        top = parse_members(header)
    except ValueError as error:
        raise _Rejected(str(error)) from error
    if len({name for name, _ in top}) != len(top):
        raise _Rejected("names a tensor twice")
    return [(name, entry) for name, entry in top if name != "__metadata__"]


def _tensor(name: str, entry: object, buffer_start: int) -> Tensor:
    """Return the tensor of one header entry, an empty one included."""
    entries = members(entry)
    fields = dict(entries)
    if len(fields) != len(entries):
        raise _Rejected(f"entry {shown(name)} has a field twice")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _Rejected(f"entry {shown(name)} lacks dtype, shape or data_offsets")
    begin, end = offsets
    if end < begin:
        raise _Rejected(f"entry {shown(name)} ends before it begins")
    if dtype in DTYPE_BITS and (element_count(shape) or 0) * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise _Rejected(f"entry {shown(name)}: shape and dtype do not make {end - begin} bytes")
    return tensor(name, buffer_start + begin, end - begin, dtype, tuple(shape))


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    return all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _coverage(tensors: list[Tensor], start: int, size: int) -> str | None:
    """Return what is wrong with how the tensors cover the buffer, or None."""
    at = start
    for one in sorted(tensors, key=lambda t: (t.offset, t.length)):
        if one.offset > at:
            return f"no tensor covers bytes {at} to {one.offset}"
        if one.offset < at:
            return f"tensor {shown(one.name)} overlaps the tensor before it"
        at = one.end
    if at > size:
        return f"truncated: {size} bytes of {at}"
    if at < size:
        return f"{size - at} trailing bytes after the last tensor"
    return None
