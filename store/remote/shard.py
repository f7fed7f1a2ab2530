"""Shards: which chunks lie where in a few packs, as columns. Pure.

One rule: the rows are sorted by chunk id, so a chunk is found without a table of Python objects: a row
takes 52 bytes, on the remote as in memory.

Source: FORMAT.md, "Remotes", "Shard".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptfs.store.bucket import Payload
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import crc64
from ckptfs.store.ids import ChunkId
from ckptfs.store.remote.box import NAME_BYTES
from ckptfs.store.remote.pack import MOST_BYTES, check_codec

_HEADER = struct.Struct("<4sHHII")
_PACK = struct.Struct(f"<{NAME_BYTES}sII")
_TRAILER = struct.Struct("<Q")
_MAGIC = b"CKRS"
_VERSION = 1
ROW = np.dtype(
    [
        ("chunk", "V32"),
        ("pack", "<u4"),
        ("offset", "<u4"),
        ("stored", "<u4"),
        ("length", "<u4"),
        ("codec", "u1"),
        ("reserved", "V3"),
    ]
)
Rows = npt.NDArray[np.void]
Keys = npt.NDArray[np.bytes_]


@dataclass(frozen=True, slots=True)
class PackFacts:
    """A pack: its name, the length of its content, and its generation (kept.py)."""

    name: bytes
    size: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """Packs, and the rows of their chunks (dtype ROW), sorted; `pack` is a number in `packs`."""

    packs: tuple[PackFacts, ...]
    rows: Rows


def encode_shard(packs: Sequence[tuple[PackFacts, Sequence[tuple[ChunkId, int, int]]]]) -> bytes:
    """A shard of packs with their rows, as pack_rows gives them."""
    rows = np.zeros(sum(len(listed) for _, listed in packs), ROW)
    flat = [(number, *row) for number, (_, listed) in enumerate(packs) for row in listed]
    rows["pack"] = [number for number, _, _, _ in flat]
    rows["chunk"] = np.frombuffer(b"".join(chunk for _, chunk, _, _ in flat), "V32")
    rows["offset"] = [offset for _, _, offset, _ in flat]
    rows["length"] = rows["stored"] = [length for _, _, _, length in flat]
    rows = sorted_rows(rows)
    body = _HEADER.pack(_MAGIC, _VERSION, 0, len(packs), len(rows))
    body += b"".join(_PACK.pack(pack.name, pack.size, pack.generation) for pack, _ in packs) + rows.tobytes()
    return body + _TRAILER.pack(crc64(body))


def decode_shard(encoded: Payload) -> Shard:
    """The shard in `encoded`; Corrupt unless it is whole and makes sense, Unsupported if it lists chunks of a
    later program's codec."""
    view = memoryview(encoded)
    if len(view) < _HEADER.size + _TRAILER.size:
        raise Corrupt("a shard is shorter than its header")
    magic, version, reserved, pack_count, row_count = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION or reserved or not pack_count or not row_count:
        raise Corrupt(f"not a shard of version {_VERSION}")
    start = _HEADER.size + pack_count * _PACK.size
    end = start + row_count * ROW.itemsize
    if len(view) != end + _TRAILER.size or crc64(view[:end]) != _TRAILER.unpack_from(view, end)[0]:
        raise Corrupt("a shard does not match its length or its CRC-64")
    packs = tuple(PackFacts(*row) for row in _PACK.iter_unpack(view[_HEADER.size : start]))
    # A copy: what it was read from would stay in memory with it.
    rows = np.frombuffer(view[start:end], ROW).copy()
    _check(packs, rows)
    return Shard(packs, rows)


def _check(packs: Sequence[PackFacts], rows: Rows) -> None:
    codecs: list[int] = np.unique(rows["codec"]).tolist()
    for codec in codecs:
        check_codec(codec)
    sizes = np.array([pack.size for pack in packs], np.uint64)
    if (sizes > MOST_BYTES).any() or (rows["pack"] >= len(packs)).any():
        raise Corrupt("a shard lists a chunk of no pack, or a pack that is too long")
    ends = rows["offset"].astype(np.uint64) + rows["stored"]
    if (ends > sizes[rows["pack"]]).any() or (rows["stored"] != rows["length"]).any():
        raise Corrupt("a shard lists a chunk outside of its pack, or of two lengths")
    ids = keys(rows)
    if rows["reserved"].tobytes().strip(b"\0") or (ids[1:] <= ids[:-1]).any():
        raise Corrupt("the rows of a shard are not in order")


def keys(rows: Rows) -> Keys:
    """The chunk ids as what numpy compares. (Without zeros at their ends: but all are equally long.)"""
    return np.ascontiguousarray(rows["chunk"]).view("S32")


def sorted_rows(rows: Rows) -> Rows:
    """The rows in the order of their chunks, of each chunk one."""
    return rows[np.unique(keys(rows), return_index=True)[1]]


def keys_of(chunks: Iterable[ChunkId]) -> Keys:
    """The same of chunk ids."""
    return np.frombuffer(b"".join(chunks), "S32")


def chunk_of_key(key: bytes) -> ChunkId:
    """The chunk id of a key as numpy gives it, without the zeros at its end."""
    return ChunkId(key.ljust(32, b"\0"))


def find_rows(rows: Rows, wanted: Keys) -> npt.NDArray[np.intp]:
    """The number of each chunk's row among sorted rows; -1 where there is none."""
    if not len(rows) or not len(wanted):
        return np.full(len(wanted), -1, np.intp)
    have = keys(rows)
    at = np.minimum(np.searchsorted(have, wanted), len(have) - 1)
    return np.where(have[at] == wanted, at, -1)
