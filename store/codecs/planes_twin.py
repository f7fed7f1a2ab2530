"""The loops of the tensor codecs in numpy: what this says is right.

One rule: for any bytes, at any address, `store/native/planes.c` returns the same. It is used where that is
not built, at a tenth of the speed.

A value stands for each element: the element itself; with ROTATED, its bits rotated left by one, so that a
float's exponent is a byte of its own; beside a parent, the difference to the parent's element, modulo 2^bits,
zigzag (0, -1, 1, -2 become 0, 1, 2, 3), where SIGN_MAGNITUDE maps floats to integers of the same order first.
Plane k is the k-th byte of all values, the lowest first. Elements are little-endian; what is left behind the
last whole one belongs to no plane.

Source: FORMAT.md, "Encoded chunks".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptfs.store.hashing import Buffer

ROTATED = 1
SIGN_MAGNITUDE = 2

SAMPLE_RUN = 256
SAMPLE_STRIDE = 8192
WORD_STRIDE = 256
_WORD_BYTES = 8
_SLOT_SHIFT = np.uint64(53)
_HASH = np.uint64(0x9E3779B97F4A7C15)

_Values = NDArray[np.integer[Any]]
_Bytes = NDArray[np.uint8]


def split(source: Buffer, parent: Buffer | None, width: int, parameters: int) -> bytes:
    """The planes of `source`, one behind the other. `parent` is as long as `source`."""
    return np.ascontiguousarray(_planes(source, parent, width, parameters)).tobytes()


def join(planes: Sequence[Buffer], parent: Buffer | None, width: int, parameters: int, tail: Buffer) -> bytes:
    """The source again: of its `width` planes, its parent, and what was behind the last whole element."""
    if len(planes) != width or len({len(plane) for plane in planes}) != 1:
        raise ValueError("not the planes of one chunk")
    count = len(planes[0])
    if parent is not None and len(parent) != count * width + len(tail):
        raise ValueError("a parent of another length")
    stacked = np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=1)
    values = np.ascontiguousarray(stacked).view(f"<u{width}").reshape(count)
    if parent is None:
        found = _rotated_back(values) if parameters & ROTATED else values
    else:
        known = _elements(parent, width)
        difference = _zigzag_back(values)
        if parameters & SIGN_MAGNITUDE:
            found = _ordered(difference + _ordered(known))
        else:
            found = difference + known
    return found.astype(f"<u{width}", copy=False).tobytes() + bytes(tail)


def cast(source: Buffer) -> bytes:
    """bfloat16 of each float32: the nearest, ties to even; every NaN becomes 0x7fc0."""
    bits = _elements(source, 4)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    is_nan = bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(0x7FC0), nearest).astype("<u2").tobytes()


def sample(source: Buffer, parent: Buffer | None, width: int, parameters: int) -> bytes:
    """How often each byte value occurs in each plane, in the first 256 of every 8192 elements.

    `width` times 256 counters, u32 in the machine's order.
    """
    planes = _planes(source, parent, width, parameters)
    kept = np.arange(planes.shape[1]) % SAMPLE_STRIDE < SAMPLE_RUN
    counts = [np.bincount(plane[kept], minlength=256) for plane in planes]
    return np.array(counts, np.uint32).tobytes()


def repeats(source: Buffer) -> int:
    """Of the 8-byte words at every 256th byte, how many equal the one before in the same of 2048 slots."""
    words = np.frombuffer(source, np.uint8)
    count = max(0, (len(words) - _WORD_BYTES) // WORD_STRIDE + 1)
    at = np.arange(count)[:, None] * WORD_STRIDE + np.arange(_WORD_BYTES)
    found = words[at].view("<u8").reshape(count).astype(np.uint64)
    slots = found * _HASH >> _SLOT_SHIFT
    order = np.argsort(slots, kind="stable")
    found, slots = found[order], slots[order]
    return int(np.count_nonzero((found[1:] == found[:-1]) & (slots[1:] == slots[:-1])))


def _planes(source: Buffer, parent: Buffer | None, width: int, parameters: int) -> _Bytes:
    """width × count."""
    values = _elements(source, width)
    if parent is not None:
        if len(parent) != len(source):
            raise ValueError("a parent of another length")
        known = _elements(parent, width)
        if parameters & SIGN_MAGNITUDE:
            values, known = _ordered(values), _ordered(known)
        values = _zigzag(values - known)
    elif parameters & ROTATED:
        values = _rotated(values)
    return values.astype(f"<u{width}", copy=False).view(np.uint8).reshape(-1, width).T


def _elements(source: Buffer, width: int) -> _Values:
    if width not in (1, 2, 4, 8):
        raise ValueError(f"an element of {width} bytes")
    count = len(source) // width
    return np.frombuffer(source, f"<u{width}", count).astype(f"=u{width}", copy=False)


def _top(values: _Values) -> int:
    return 8 * values.itemsize - 1


def _sign(values: _Values) -> _Values:
    """All bits set where the highest is, none elsewhere."""
    return (values.view(f"=i{values.itemsize}") >> _top(values)).view(values.dtype)


def _rotated(values: _Values) -> _Values:
    return values << 1 | values >> _top(values)


def _rotated_back(values: _Values) -> _Values:
    return values >> 1 | values << _top(values)


def _ordered(values: _Values) -> _Values:
    """Its own inverse."""
    return values ^ (_sign(values) & values.dtype.type((1 << _top(values)) - 1))


def _zigzag(values: _Values) -> _Values:
    return values << 1 ^ _sign(values)


def _zigzag_back(values: _Values) -> _Values:
    return values >> 1 ^ (~(values & 1) + values.dtype.type(1))
