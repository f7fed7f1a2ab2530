"""Framed records: how the journal and the history are written to an append-only file.

One rule: a reader stops at the first frame that is not whole. What follows a torn frame was
never acknowledged, because a frame is synced before anything that depends on it.

Source: FORMAT.md, "Frames".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ckptfs.store.hashing import crc64
from ckptfs.store.one_bit import mended

_HEADER = struct.Struct("<4sBBHIQ")
_TRAILER = struct.Struct("<Q")
MAGIC = b"CKFR"
_VERSION = 1
_MAGIC_NUMBER = int.from_bytes(MAGIC, "little")
_LENGTH_AT, _LENGTH_BITS = 8, 32
OVERHEAD_BYTES = _HEADER.size + _TRAILER.size
MAX_PAYLOAD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Frame:
    """One record: what `kind` it is, its `sequence` number, its `payload`; `end` is the offset behind it."""

    kind: int
    sequence: int
    payload: bytes
    end: int = 0


def encode_frame(kind: int, sequence: int, payload: bytes) -> bytes:
    """The bytes of one frame."""
    assert 0 < kind < 256 and len(payload) <= MAX_PAYLOAD_BYTES
    body = _HEADER.pack(MAGIC, _VERSION, kind, 0, len(payload), sequence) + payload
    return body + _TRAILER.pack(crc64(body))


def decode_frames(encoded: bytes | memoryview) -> Iterator[Frame]:
    """Every whole frame from the start of `encoded`, up to the first that is not."""
    view = memoryview(encoded)
    at = 0
    while (frame := _frame_at(view, at)) is not None:
        yield frame
        at = frame.end


def mend_frame(encoded: bytes | memoryview, at: int, sequence: int, kinds: range) -> bytes | None:
    """The frame `sequence` that began at byte `at` before one of its bits flipped; None: it was not one.

    `kinds` are those that it may have. Anything whose header is more than one bit away from such a
    frame's is not looked at further.
    """
    view = memoryview(encoded)
    if at + OVERHEAD_BYTES > len(view):
        return None
    magic, version, kind, reserved, length, said = _HEADER.unpack_from(view, at)
    fields = (int.from_bytes(magic, "little") ^ _MAGIC_NUMBER, version ^ _VERSION, reserved, said ^ sequence)
    wrong = sum(field.bit_count() for field in fields) + min((kind ^ k).bit_count() for k in kinds)
    if wrong > 1:
        return None
    for flipped in (0, *(1 << bit for bit in range(_LENGTH_BITS))):
        end = at + OVERHEAD_BYTES + (length ^ flipped)
        if end > len(view):
            continue
        candidate: bytes | None = bytes(view[at:end])
        if flipped and candidate is not None:
            right = (length ^ flipped).to_bytes(4, "little")
            candidate = candidate[:_LENGTH_AT] + right + candidate[_LENGTH_AT + 4 :]
        elif candidate is not None:
            candidate = mended(candidate)
        frame = None if candidate is None else _frame_at(memoryview(candidate), 0)
        if frame is not None and frame.sequence == sequence and frame.kind in kinds:
            return candidate
    return None


def _frame_at(view: memoryview, at: int) -> Frame | None:
    if at + OVERHEAD_BYTES > len(view):
        return None
    magic, version, kind, reserved, length, sequence = _HEADER.unpack_from(view, at)
    end = at + OVERHEAD_BYTES + length
    if magic != MAGIC or version != _VERSION or kind == 0 or reserved != 0 or end > len(view):
        return None
    body = view[at : end - _TRAILER.size]
    (checksum,) = _TRAILER.unpack_from(view, end - _TRAILER.size)
    if crc64(body) != checksum:
        return None
    return Frame(kind, sequence, bytes(body[_HEADER.size :]), end)
