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
_ZSTD, _PLANES, _DELTA, _CAST, _CONTEXT = 1, 2, 3, 4, 5
_WIDTHS = {1: 1, 2: 2, 3: 4, 4: 8, 5: 1, 6: 2, 7: 2, 8: 4, 9: 8}
_FIRST_ORDERED, _FIRST_ROTATED = 5, 7
_FRACTION_BITS = {6: 10, 7: 7, 8: 23}
_LANES = 32


class Undecodable(ValueError):
    """A chunk cannot be decoded; the message says why."""


def decode(stored: bytes, codec: int, length: int, depth: int, read: Callable[[bytes, int], bytes]) -> bytes:
    """The plain bytes of an encoded chunk whose depth is below `depth`.

    `read(chunk, depth)` gives those of a chunk that it is encoded against, itself of a smaller depth.
    """
    number, version, major, minor, element, own, count, _, says = HEADER.unpack_from(stored)
    if number != codec:
        raise Undecodable(f"its place says codec {codec}, and it is not")
    if version != 1 or not _ZSTD <= codec <= _CONTEXT:
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
    if codec == _CONTEXT:
        planes, tail = _context_planes(body, parents[0], width, _FRACTION_BITS[element])
    else:
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


def _context_planes(body: bytes, parent: bytes, width: int, fraction_bits: int) -> tuple[list[bytes], bytes]:
    """The planes of the differences that codec 5 has coded by the parent's exponents, and the tail."""
    try:
        values, tail = _context_values(body, parent, width, fraction_bits)
        mixed = struct.pack(f"<{len(values)}{'H' if width == 2 else 'I'}", *values)
    except (IndexError, struct.error):
        raise Undecodable("its tables or words are not those of as many values") from None
    return [mixed[at::width] for at in range(width)], tail


def _context_values(body: bytes, parent: bytes, width: int, fraction_bits: int) -> tuple[list[int], bytes]:
    known = struct.unpack_from(f"<{len(parent) // width}{'H' if width == 2 else 'I'}", parent)
    mask = (1 << 8 * width - 1 - fraction_bits) - 1
    table_of, at = _context_tables(body)
    tables = [table_of[x >> fraction_bits & mask] for x in known]
    (words,) = struct.unpack_from("<I", body, at)
    states = [*struct.unpack_from(f"<{_LANES}I", body, at + 4)]
    at += 4 + 4 * _LANES
    stream = iter(struct.unpack_from(f"<{words}H", body, at))
    end = len(body) - len(parent) % width
    low, low_at = int.from_bytes(body[at + 2 * words : end], "little"), 0
    symbols = []
    for number, table in enumerate(tables):
        state = states[number % _LANES]
        symbol, frequency, offset = table[state & 0xFFF]
        state = frequency * (state >> 12) + offset
        if state < 1 << 16:
            state = state << 16 | next(stream, 0)
        states[number % _LANES] = state
        symbols.append(symbol)
    if any(state != 1 << 16 for state in states):
        raise Undecodable("its states do not end where they began")
    bits = f"{low:b}"[::-1]
    values = []
    for symbol in symbols:
        count = max(0, symbol // 4 - 1)
        mantissa = int(bits[low_at : low_at + count][::-1] or "0", 2)
        values.append((symbol - 4 * count << count) + mantissa)
        low_at += count
    return values, body[end:]


def _context_tables(body: bytes) -> tuple[list[list[tuple[int, int, int]]], int]:
    """Of each exponent, by slot: symbol, frequency, distance from its first slot. And where they end."""
    firsts, at = [0, *body[1 : body[0]]], body[0]
    tables = []
    for _ in firsts:
        first, last = body[at], body[at + 1]
        at += 2
        table: list[tuple[int, int, int]] = []
        for symbol in range(first, last + 1):
            frequency = body[at]
            if frequency >= 0x80:
                at += 1
                frequency += (body[at] << 7) - 0x80
            at += 1
            table += [(symbol, frequency, offset) for offset in range(frequency)]
        tables.append(table)
    if any(len(table) != 1 << 12 for table in tables):
        raise Undecodable("its frequencies do not add up")
    return [tables[sum(first <= exponent for first in firsts) - 1] for exponent in range(256)], at


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
