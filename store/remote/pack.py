"""Packs: many chunks as one object. Pure.

One rule: a pack says what is in it, and each chunk of it is checked against its id before it is handed out.

Source: FORMAT.md, "Remotes", "Pack".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from ckptfs.store.bucket import Payload
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.segment_format import Codec

_HEADER = struct.Struct("<4sHHII")
_ROW = struct.Struct("<32sIIB3s")
_MAGIC = b"CKPK"
_VERSION = 1
_RESERVED = bytes(3)
MOST_BYTES = (1 << 31) - 1


def encode_pack(chunks: Sequence[tuple[ChunkId, Payload]], generation: int = 0) -> bytes:
    """A pack of these chunks; at least one, none twice. `generation` is the newest claim in the log."""
    header = encode_pack_header([(chunk, len(payload)) for chunk, payload in chunks], generation)
    return b"".join([header, *(payload for _, payload in chunks)])


def encode_pack_header(chunks: Sequence[tuple[ChunkId, int]], generation: int = 0) -> bytes:
    """What stands in a pack before the payloads of these chunks, of which the lengths are given."""
    rows = [_ROW.pack(chunk, length, length, Codec.RAW, _RESERVED) for chunk, length in chunks]
    assert rows and len({chunk for chunk, _ in chunks}) == len(rows), "a pack has chunks, each once"
    return b"".join([_HEADER.pack(_MAGIC, _VERSION, 0, len(rows), generation), *rows])


def pack_rows(encoded: Payload) -> list[tuple[ChunkId, int, int]]:
    """(chunk, offset in the pack, length) of what is in a pack; Corrupt if it is not one, Unsupported if it
    was made by a later program. Nothing is hashed."""
    view = memoryview(encoded)
    if len(view) < _HEADER.size:
        raise Corrupt("a pack is shorter than its header")
    magic, version, reserved, count, _ = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION or reserved or not count:
        raise Corrupt(f"not a pack of version {_VERSION}")
    at = _HEADER.size + count * _ROW.size
    if at > len(view):
        raise Corrupt("a pack ends before its payloads")
    rows: list[tuple[ChunkId, int, int]] = []
    for chunk, stored, length, codec, unused in _ROW.iter_unpack(view[_HEADER.size : at]):
        check_codec(codec)
        if unused != _RESERVED or stored != length:
            raise Corrupt("a pack lists a chunk of two lengths")
        rows.append((ChunkId(chunk), at, length))
        at += stored
    if at != len(view) or len({chunk for chunk, _, _ in rows}) != count:
        raise Corrupt("a pack does not hold what it lists")
    return rows


def pack_chunks(encoded: Payload) -> Iterator[tuple[ChunkId, bytes]]:
    """Every chunk of a pack, hashed and found right; else as pack_rows."""
    view = memoryview(encoded)
    for chunk, offset, length in pack_rows(encoded):
        check_chunk(chunk, view[offset : offset + length])
        yield chunk, bytes(view[offset : offset + length])


def check_chunk(chunk: ChunkId, payload: Payload) -> None:
    """Corrupt unless the payload is that of the chunk."""
    got = chunk_id(payload)
    if got != chunk:
        raise Corrupt(f"chunk {cid_text(chunk)} has other bytes on the remote", expected=chunk, got=got)


def check_codec(codec: int) -> None:
    """Unsupported unless payloads of this codec can be read."""
    if codec != Codec.RAW:
        raise Unsupported(f"the remote holds chunks of codec {codec}, which this version does not read")


def payload_bytes(rows: Iterable[tuple[ChunkId, int, int]]) -> int:
    """The sum of the lengths."""
    return sum(length for _, _, length in rows)
