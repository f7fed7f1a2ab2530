"""The bytes of an encoded chunk: its header, its parents, its checksum.

One rule: what `decode_header` returns fits together (codec, element, parents, depth) and matches its
checksum; what the body says is `decoding`'s to check.

Source: FORMAT.md, "Encoded chunks".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ckptfs.store.codecs.elements import FRACTION_BITS, Element
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.hashing import Buffer, crc64
from ckptfs.store.ids import DIGEST_BYTES, ChunkId
from ckptfs.store.segment_format import MAX_CHUNK_BYTES, MAX_DEPTH, PARENTS_OF, Codec

_HEADER = struct.Struct("<BBBBBBBBI")
_TRAILER = struct.Struct("<Q")
_VERSION: Final = 1
_RELEASE: Final = (0, 1)
_PARENTS: Final = {codec: count for codec, count in PARENTS_OF.items() if codec != Codec.RAW}
_HAS_ELEMENT: Final = frozenset({Codec.PLANES, Codec.DELTA, Codec.CONTEXT})


@dataclass(frozen=True, slots=True)
class Header:
    """What an encoded chunk says of itself. `length` counts the bytes of the chunk."""

    codec: Codec
    length: int
    element: Element | None = None
    depth: int = 0
    parents: tuple[ChunkId, ...] = ()


def encode_chunk(header: Header, body: Sequence[Buffer]) -> bytes:
    """The bytes that are stored for a chunk; `body` comes in parts."""
    least, most = _PARENTS[header.codec]
    assert least <= len(header.parents) <= most and 1 <= header.length <= MAX_CHUNK_BYTES
    assert bool(header.parents) == bool(header.depth) and header.depth <= MAX_DEPTH
    assert (header.element is not None) == (header.codec in _HAS_ELEMENT)
    head = _HEADER.pack(
        header.codec,
        _VERSION,
        *_RELEASE,
        header.element or 0,
        header.depth,
        len(header.parents),
        0,
        header.length,
    )
    # The checksum goes over the parts, so that they are copied once.
    parts = [b"".join((head, *header.parents)), *body]
    checksum = 0
    for part in parts:
        checksum = crc64(part, checksum)
    return b"".join((*parts, _TRAILER.pack(checksum)))


def decode_header(encoded: Buffer) -> Header:
    """The header of an encoded chunk, which is whole.

    Raises Corrupt if it is not what somebody stored, and Unsupported if a later release did.
    """
    if len(encoded) < _HEADER.size + _TRAILER.size:
        raise Corrupt("an encoded chunk is shorter than its header")
    end = len(encoded) - _TRAILER.size
    (checksum,) = _TRAILER.unpack_from(encoded, end)
    if crc64(memoryview(encoded)[:end]) != checksum:
        raise Corrupt("an encoded chunk does not match its CRC-64")
    number, version, major, minor, element, depth, count, reserved, length = _HEADER.unpack_from(encoded)
    if version != _VERSION or number not in _PARENTS:
        reads_it = f"ckptfs {major}.{minor} or later reads it"
        raise Unsupported(f"a chunk is stored with codec {number} version {version}: {reads_it}")
    codec = Codec(number)
    least, most = _PARENTS[codec]
    if (major, minor) != _RELEASE or reserved or not length:
        raise Corrupt(f"an encoded chunk of codec {codec.name} has a header that nobody writes")
    if not least <= count <= most or end < _HEADER.size + count * DIGEST_BYTES:
        raise Corrupt(f"an encoded chunk of codec {codec.name} has {count} parents")
    if bool(depth) != bool(count) or depth > MAX_DEPTH:
        raise Corrupt(f"an encoded chunk with {count} parents has depth {depth}")
    return Header(codec, length, _element(codec, element), depth, _parents(encoded, count))


def body_of(encoded: Buffer, header: Header) -> memoryview:
    """What stands between the parents and the checksum."""
    start = _HEADER.size + len(header.parents) * DIGEST_BYTES
    return memoryview(encoded)[start : len(encoded) - _TRAILER.size]


def _element(codec: Codec, number: int) -> Element | None:
    if codec not in _HAS_ELEMENT:
        if number:
            raise Corrupt(f"an encoded chunk of codec {codec.name} has an element")
        return None
    try:
        element = Element(number)
    except ValueError:
        raise Corrupt(f"an encoded chunk has elements of unknown kind {number}") from None
    if codec == Codec.CONTEXT and element not in FRACTION_BITS:
        raise Corrupt(f"an encoded chunk of codec {codec.name} has elements of kind {number}")
    return element


def _parents(encoded: Buffer, count: int) -> tuple[ChunkId, ...]:
    ids = bytes(memoryview(encoded)[_HEADER.size : _HEADER.size + count * DIGEST_BYTES])
    return tuple(ChunkId(ids[at : at + DIGEST_BYTES]) for at in range(0, len(ids), DIGEST_BYTES))
