"""What stands in a segment's `.idx`, in the chunk table and in the segment table: encode, decode.

One rule: the `.idx` tells everything that a rebuild needs about its segment, and lists exactly
the chunks whose payload is there; a range of the segment that no row names may be punched.

Source: FORMAT.md, "Segments".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, IntFlag
from typing import Final

import msgspec

from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import crc64
from ckptfs.store.ids import ChunkId

SEGMENTS_PATH = "segments"
BLOCK_BYTES = 4096
MAX_CHUNK_BYTES = (1 << 32) - 1

_HEADER = struct.Struct("<4sHBBQQQII")
_ROW = struct.Struct("<32sQIIBBH")
_TRAILER = struct.Struct("<Q")
_LOCATION = struct.Struct("<QQIIBB")
_EDGES = struct.Struct("<II")
_EDGE = struct.Struct("<IB3s32s")
_MAGIC = b"CKIX"
_VERSION = 1
_VERSION_OF_ENCODED = 2
MAX_DEPTH = 8
"""How many generations of parents an encoded chunk may have."""
INLINE_START = _HEADER.size


class SegmentKind(IntEnum):
    """How a segment came to be."""

    ADOPTED = 1
    """A staging file as it was: every payload at the offset that it had in the file."""
    PACKED = 2
    """Payloads written one behind the other."""
    ENCODED = 3
    """The same, of payloads that are encoded."""


class Codec(IntEnum):
    """How a payload is encoded. A reader refuses a number that it does not know."""

    RAW = 0
    ZSTD = 1
    PLANES = 2
    """Byte planes of the elements."""
    DELTA = 3
    """Byte planes of the differences to a parent of the same length."""
    CAST = 4
    """bfloat16 that is the cast of its float32 parents."""
    CONTEXT = 5
    """The same differences as DELTA's, coded by the exponents of the parent."""


DIFFERENCES: Final = frozenset({Codec.DELTA, Codec.CONTEXT})
"""The codecs of what is the difference to one chunk."""


PARENTS_OF: Final[dict[int, tuple[int, int]]] = {
    Codec.RAW: (0, 0),
    Codec.ZSTD: (0, 0),
    Codec.PLANES: (0, 0),
    Codec.DELTA: (1, 1),
    Codec.CAST: (1, 2),
    Codec.CONTEXT: (1, 1),
}
"""How many parents a payload of each codec has, at least and at most."""


class LocationFlag(IntFlag):
    """Bits of a row's and a location's flags; all others are zero."""

    IN_IDX = 1
    """The payload lies in the `.idx`, and the offset counts from the beginning of that file."""


_IN_IDX: Final = int(LocationFlag.IN_IDX)  # a flag takes ten times as long, for every chunk of every read


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a chunk lies: `stored` bytes from `offset` of a file, `length` once decoded."""

    segment: int
    offset: int
    stored: int
    length: int
    codec: int = Codec.RAW
    flags: int = 0

    @property
    def in_idx(self) -> bool:
        """Whether the bytes lie in the `.idx` instead of the `.seg`."""
        return bool(self.flags & _IN_IDX)


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chunk of a segment, as the `.idx` lists it; `parents` are those that it is encoded against."""

    chunk: ChunkId
    offset: int
    stored: int
    length: int
    codec: int = Codec.RAW
    flags: int = 0
    depth: int = 0
    parents: tuple[ChunkId, ...] = ()

    def location(self, segment: int) -> Location:
        """The place that the chunk table gets for this row."""
        return Location(segment, self.offset, self.stored, self.length, self.codec, self.flags)


class SegmentFacts(msgspec.Struct, frozen=True, array_like=True):
    """What the segment table says of one segment; its key is the number, u64 big-endian.

    `payload_bytes` and `chunks` count what the chunk table says lies here. `verified_ns` is when
    every payload was last known to match its id. `punch_due`: the file still occupies ranges
    that no row names. `spared_bytes`: how many more bytes the chunks have than their payloads; 0 where
    nothing is encoded, and in a row from before there was the field.
    """

    kind: SegmentKind
    file_bytes: int
    payload_bytes: int
    chunks: int
    created_ns: int
    verified_ns: int = 0
    punch_due: bool = False
    spared_bytes: int = 0


class SegmentIndex(msgspec.Struct, frozen=True):
    """A whole `.idx`. `inline` is the payload area that rows with IN_IDX point into."""

    number: int
    kind: SegmentKind
    created_ns: int
    file_bytes: int
    rows: tuple[Row, ...]
    inline: bytes = b""

    def without(self, dead: frozenset[ChunkId]) -> SegmentIndex:
        """The same with the rows of `dead` left out; `inline` stays where a row still needs it."""
        rows = tuple(row for row in self.rows if row.chunk not in dead)
        needed = any(row.flags & LocationFlag.IN_IDX for row in rows)
        inline = self.inline if needed else b""
        return SegmentIndex(self.number, self.kind, self.created_ns, self.file_bytes, rows, inline)


def segment_paths(number: int) -> tuple[str, str]:
    """(.seg, .idx) of segment `number`, below the store root."""
    stem = f"{segment_dir(number)}/{number:016x}"
    return stem + ".seg", stem + ".idx"


def segment_dir(number: int) -> str:
    """The folder of segment `number`: the last two hex digits of the number."""
    return f"{SEGMENTS_PATH}/{number & 0xFF:02x}"


def segment_number(name: str) -> int | None:
    """The number in a file name such as `000000000000002a.seg`; None for any other name."""
    stem, _, suffix = name.partition(".")
    if suffix not in ("seg", "idx") or len(stem) != 16 or set(stem) - set("0123456789abcdef"):
        return None
    return int(stem, 16)


def segment_key(number: int) -> bytes:
    """The key in the segment table."""
    return number.to_bytes(8, "big")


def encode_location(location: Location) -> bytes:
    """The 26 bytes of a place."""
    one = location
    return _LOCATION.pack(one.segment, one.offset, one.stored, one.length, one.codec, one.flags)


def decode_location(encoded: bytes) -> Location:
    """The place in `encoded`, or Corrupt."""
    if len(encoded) != _LOCATION.size:
        raise Corrupt(f"a chunk's place has {len(encoded)} bytes instead of {_LOCATION.size}")
    return Location(*_LOCATION.unpack(encoded))


_facts_encoder = msgspec.msgpack.Encoder()
_facts_decoder = msgspec.msgpack.Decoder(SegmentFacts)


def encode_facts(facts: SegmentFacts) -> bytes:
    """Packed bytes of a segment's facts."""
    return _facts_encoder.encode(facts)


def decode_facts(encoded: bytes) -> SegmentFacts:
    """The facts in `encoded`, or Corrupt."""
    try:
        return _facts_decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"not the facts of a segment: {e}") from None


def encode_idx(index: SegmentIndex) -> bytes:
    """The bytes of an `.idx`. Decoded and compared before they are handed out."""
    body = bytearray(
        _HEADER.pack(
            _MAGIC,
            _version(index.kind),
            index.kind,
            0,
            index.number,
            index.created_ns,
            index.file_bytes,
            len(index.inline),
            len(index.rows),
        )
    )
    body += index.inline
    pack = _ROW.pack
    body += b"".join(pack(r.chunk, r.offset, r.stored, r.length, r.codec, r.flags, 0) for r in index.rows)
    if index.kind == SegmentKind.ENCODED:
        body += _encoded_edges(index.rows)
    encoded = bytes(body) + _TRAILER.pack(crc64(body))
    assert decode_idx(encoded) == index, "an .idx decodes to what was encoded"
    return encoded


def decode_idx(encoded: bytes) -> SegmentIndex:
    """The description in `encoded`; Corrupt unless it is whole and makes sense."""
    if len(encoded) < _HEADER.size + _TRAILER.size:
        raise Corrupt("an .idx is shorter than its header")
    magic, version, kind, flags, *rest = _HEADER.unpack_from(encoded)
    number, created_ns, file_bytes, inline_bytes, count = rest
    if magic != _MAGIC or kind not in set(SegmentKind) or version != _version(kind) or flags != 0:
        raise Corrupt("not an .idx of a version that there is")
    is_encoded = kind == SegmentKind.ENCODED
    if is_encoded and inline_bytes:
        raise Corrupt("the .idx of an encoded segment has an inline area")
    rows_start = _HEADER.size + inline_bytes
    rows_end = end = rows_start + count * _ROW.size
    if is_encoded and len(encoded) >= rows_end + _EDGES.size:
        end += _EDGES.size + _EDGE.size * int(_EDGES.unpack_from(encoded, rows_end)[0])
    if len(encoded) != end + _TRAILER.size:
        raise Corrupt(f"an .idx of {count} rows has {len(encoded)} bytes")
    (checksum,) = _TRAILER.unpack_from(encoded, end)
    if crc64(memoryview(encoded)[:end]) != checksum:
        raise Corrupt("an .idx does not match its CRC-64")
    rows = tuple(_rows(encoded, rows_start, rows_end, file_bytes, is_encoded=is_encoded))
    if is_encoded:
        rows = tuple(_with_parents(rows, memoryview(encoded)[rows_end:end]))
    inline = encoded[_HEADER.size : rows_start]
    return SegmentIndex(number, SegmentKind(kind), created_ns, file_bytes, rows, inline)


def _version(kind: int) -> int:
    return _VERSION_OF_ENCODED if kind == SegmentKind.ENCODED else _VERSION


def _rows(encoded: bytes, start: int, end: int, file_bytes: int, *, is_encoded: bool) -> Iterator[Row]:
    known_flags = 0 if is_encoded else int(LocationFlag.IN_IDX)
    packed = memoryview(encoded)[start:end]
    for chunk, offset, stored, length, codec, flags, reserved in _ROW.iter_unpack(packed):
        low, high = (INLINE_START, start) if flags else (0, file_bytes)
        if flags & ~known_flags or reserved or offset < low or offset + stored > high:
            raise Corrupt("an .idx lists a chunk outside of its segment")
        if codec == Codec.RAW and stored != length:
            raise Corrupt("an .idx lists a raw chunk of two lengths")
        if codec != Codec.RAW and (not is_encoded or not 0 < stored < length):
            raise Corrupt("an .idx lists an encoded chunk where none can be")
        yield Row(ChunkId(chunk), offset, stored, length, codec, flags)


def _encoded_edges(rows: Sequence[Row]) -> bytes:
    edges = [
        _EDGE.pack(number, row.depth, bytes(3), parent)
        for number, row in enumerate(rows)
        for parent in row.parents
    ]
    return _EDGES.pack(len(edges), 0) + b"".join(edges)


def _with_parents(rows: Sequence[Row], encoded: memoryview) -> Iterator[Row]:
    """The rows with the parents that their edges name; Corrupt if the edges are not those of such rows."""
    if _EDGES.unpack_from(encoded)[1]:
        raise Corrupt("an .idx has edges of a kind that nobody writes")
    edges: dict[int, tuple[int, tuple[ChunkId, ...]]] = {}
    last = 0
    for number, depth, reserved, parent in _EDGE.iter_unpack(encoded[_EDGES.size :]):
        known, parents = edges.get(number, (depth, ()))
        if number < last or depth != known or not 1 <= depth <= MAX_DEPTH or any(reserved):
            raise Corrupt("an .idx has edges that do not fit together")
        edges[number], last = (depth, (*parents, ChunkId(parent))), number
    if edges and last >= len(rows):
        raise Corrupt("an .idx has an edge of a row that it lacks")
    for number, row in enumerate(rows):
        depth, parents = edges.get(number, (0, ()))
        least, most = PARENTS_OF.get(row.codec, (0, 0))
        if not least <= len(parents) <= most or row.chunk in parents:
            raise Corrupt(f"an .idx lists a chunk of codec {row.codec} with {len(parents)} parents")
        yield Row(row.chunk, row.offset, row.stored, row.length, row.codec, row.flags, depth, parents)


def unnamed_ranges(index: SegmentIndex, extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) of the whole blocks in the `.seg` that no row names and that occupy room.

    `extents` are the (offset, length) of the file's allocated ranges, in order. The file's last,
    partial block counts as whole. These ranges may be punched.
    """
    ranges: list[tuple[int, int]] = []
    gaps = _gaps(index)
    gap = next(gaps, None)
    for offset, length in extents:
        while gap is not None and gap[0] < offset + length:
            low, high = max(gap[0], offset), min(gap[1], offset + length)
            if low < high:
                ranges.append((low, high - low))
            if gap[1] > offset + length:
                break
            gap = next(gaps, None)
    return ranges


def _gaps(index: SegmentIndex) -> Iterator[tuple[int, int]]:
    """[start, end) of the runs of whole blocks between the payloads, in order."""
    at = 0
    in_file = (r for r in index.rows if r.stored and not r.flags & LocationFlag.IN_IDX)
    named = sorted((r.offset, r.offset + r.stored) for r in in_file)
    for start, end in [*named, (index.file_bytes, index.file_bytes)]:
        low = -(-at // BLOCK_BYTES) * BLOCK_BYTES
        high = start if start == index.file_bytes else start // BLOCK_BYTES * BLOCK_BYTES
        if low < high:
            yield low, high
        at = max(at, end)
