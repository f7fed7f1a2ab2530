"""What extract.py needs beside itself where chunks are encoded: FORMAT.md, "Encoded chunks", once more.

One rule: as extract.py, it imports nothing of ckptfs, and shares no code with `store/codecs`. It needs zstd
(Python 3.14 has it, else the `zstandard` package); with numpy it is a hundred times as fast.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

numpy: Any = None
try:
    import numpy
except ImportError:
    pass

HEADER = struct.Struct("<BBBBBBBBI")
_ZSTD, _PLANES, _DELTA, _CAST = 1, 2, 3, 4
_WIDTHS = {1: 1, 2: 2, 3: 4, 4: 8, 5: 1, 6: 2, 7: 2, 8: 4, 9: 8}
_FIRST_ORDERED, _FIRST_ROTATED = 5, 7


class Undecodable(ValueError):
    """A chunk cannot be decoded; the message says why."""


def decode(stored: bytes, codec: int, length: int, depth: int, read: Callable[[bytes, int], bytes]) -> bytes:
    """The plain bytes of an encoded chunk whose depth is below `depth`.

    `read(chunk, depth)` gives those of a chunk that it is encoded against, itself of a smaller depth.
    """
    number, version, major, minor, element, own, count, _, says = HEADER.unpack_from(stored)
    if number != codec:
        raise Undecodable(f"its place says codec {codec}, and it is not")
    if version != 1 or not _ZSTD <= codec <= _CAST:
        raise Undecodable(f"it has codec {codec} version {version}, which ckptfs {major}.{minor} reads")
    body_at = HEADER.size + 32 * count
    if says != length or own >= depth or body_at + 8 > len(stored):
        raise Undecodable("its header does not fit its place")
    ids = [stored[at : at + 32] for at in range(HEADER.size, body_at, 32)]
    parents, body = [read(one, own) for one in ids], stored[body_at:-8]
    if codec == _ZSTD:
        return _unzstd(body, length)
    if codec == _CAST:
        return b"".join(map(_cast, parents))
    width = _WIDTHS[element]
    planes, tail = _planes(body, length, width)
    is_ordered, is_rotated = element >= _FIRST_ORDERED, element >= _FIRST_ROTATED
    if numpy is not None:
        joined = _joined_fast(planes, parents, width, is_ordered, is_rotated)
    else:
        joined = _joined(planes, parents, width, is_ordered, is_rotated)
    return joined + tail


def _unzstd(frame: bytes, length: int) -> bytes:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        return bytes(zstd.decompress(frame))
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise Undecodable("it needs Python 3.14, or the zstandard package (pip install zstandard)") from None
    try:
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=length)
    except zstandard.ZstdError as e:
        raise Undecodable(str(e)) from None


def _planes(body: bytes, length: int, width: int) -> tuple[list[bytes], bytes]:
    """The planes, and what lies behind the last whole element."""
    count = length // width
    at, planes = 4 * width, []
    for stored in struct.unpack_from(f"<{width}I", body):
        plane = body[at : at + stored]
        planes.append(plane if stored == count else _unzstd(plane, count))
        at += stored
    if any(len(plane) != count for plane in planes):
        raise Undecodable("its planes are too short")
    return planes, body[at:]


def _joined_fast(
    planes: Sequence[bytes], parents: Sequence[bytes], width: int, is_ordered: bool, is_rotated: bool
) -> bytes:
    count, top = len(planes[0]), 8 * width - 1
    stacked: Any = numpy.stack([numpy.frombuffer(plane, "u1") for plane in planes], axis=1)
    values = numpy.ascontiguousarray(stacked).view(f"<u{width}").reshape(count)
    one, others = values.dtype.type(1), values.dtype.type((1 << top) - 1)

    def ordered(x: Any) -> Any:
        return numpy.where(x >> top, x ^ others, x).astype(values.dtype)

    if not parents:
        return bytes((values >> one | values << top if is_rotated else values).tobytes())
    known = numpy.frombuffer(parents[0], f"<u{width}", count)
    difference = values >> one ^ (~(values & one) + one)
    if is_ordered:
        return bytes(ordered(difference + ordered(known)).tobytes())
    return bytes((difference + known).tobytes())


def _joined(
    planes: Sequence[bytes], parents: Sequence[bytes], width: int, is_ordered: bool, is_rotated: bool
) -> bytes:
    bits = 8 * width
    top, mask = 1 << bits - 1, (1 << bits) - 1
    mixed = bytearray(width * len(planes[0]))
    for at, plane in enumerate(planes):
        mixed[at::width] = plane
    code = f"<{len(planes[0])}" + {1: "B", 2: "H", 4: "I", 8: "Q"}[width]
    values = struct.unpack(code, mixed)
    if not parents:
        if not is_rotated:
            return bytes(mixed)
        return struct.pack(code, *[x >> 1 | (x & 1) << bits - 1 for x in values])
    known = struct.unpack_from(code, parents[0])
    if not is_ordered:
        return struct.pack(
            code, *[((x >> 1 ^ -(x & 1)) + p) & mask for x, p in zip(values, known, strict=True)]
        )
    found = []
    for x, p in zip(values, known, strict=True):
        y = ((x >> 1 ^ -(x & 1)) + (p ^ top - 1 if p & top else p)) & mask
        found.append(y ^ top - 1 if y & top else y)
    return struct.pack(code, *found)


def _cast(parent: bytes) -> bytes:
    """Each float32 as the nearest bfloat16, ties to even; every NaN is 0x7fc0."""
    if numpy is not None:
        x: Any = numpy.frombuffer(parent, "<u4").astype("u8")
        nearest = x + 0x7FFF + (x >> 16 & 1) >> 16
        return bytes(numpy.where((x & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest).astype("<u2").tobytes())
    bits = struct.unpack(f"<{len(parent) // 4}I", parent)
    found = [0x7FC0 if x & 0x7FFFFFFF > 0x7F800000 else x + 0x7FFF + (x >> 16 & 1) >> 16 for x in bits]
    return struct.pack(f"<{len(found)}H", *found)
