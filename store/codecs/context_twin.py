"""Differences to a parent by rANS with the parent's exponent as context, in numpy: what this says is right.

One rule: for any bytes, at any address, `store/native/context.c` returns the same. It is used where that is
not built, at a hundredth of the speed.

A value stands for each element, the zigzag difference of `planes_twin`. It is a symbol, its magnitude in
quarters of an octave, and the low bits below that. Element i belongs to state i modulo LANES, so a row of as
many elements is one step of all states.

Source: FORMAT.md, "Contexts".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ckptfs.store.codecs.planes_twin import SIGN_MAGNITUDE, join, split
from ckptfs.store.hashing import Buffer

EXPONENTS: Final = 256
SYMBOLS: Final = 128
"""Room for those of an element; one of W bits has 4 W - 4."""
MOST_CONTEXTS: Final = 16
SCALE_BITS: Final = 12
SCALE: Final = 1 << SCALE_BITS
"""What the frequencies of a context sum up to."""
LANES: Final = 32
_LOWEST: Final = 1 << 16
_WORDS: Final = struct.Struct("<I")
_STATES_BYTES: Final = 4 * LANES
_ALONE_BELOW: Final = 8

_Numbers = NDArray[np.integer[Any]]


class _NotPacked(Exception):
    """A body is not one."""


def context_counts(source: Buffer, parent: Buffer, width: int, fraction_bits: int) -> bytes:
    """How often each symbol occurs beside each exponent of the parent: EXPONENTS × SYMBOLS counters, u32 in
    the machine's order. ValueError if the parent is not as long as the source."""
    symbols, _, _ = _symbols(_values(source, parent, width))
    at = _exponents(parent, width, fraction_bits) * SYMBOLS + symbols
    return np.bincount(at, minlength=EXPONENTS * SYMBOLS).astype(np.uint32).tobytes()


def context_pack(
    source: Buffer, parent: Buffer, width: int, fraction_bits: int, context_of: Buffer, frequencies: Buffer
) -> bytes:
    """What stands behind the tables: the number of words, the states, the words, the low bits.

    `context_of` has a byte for each exponent, `frequencies` SYMBOLS u16, in the machine's order, for each
    context. ValueError if a row does not sum up to SCALE, or lacks a symbol that occurs.
    """
    shares = np.frombuffer(frequencies, np.uint16).reshape(-1, SYMBOLS).astype(np.int64)
    contexts = np.frombuffer(context_of, np.uint8)
    if len(contexts) != EXPONENTS or contexts.max() >= len(shares) or (shares.sum(axis=1) != SCALE).any():
        raise ValueError("not contexts with frequencies")
    symbols, low, count = _symbols(_values(source, parent, width))
    context = contexts[_exponents(parent, width, fraction_bits)]
    frequency, start = shares[context, symbols], (shares.cumsum(axis=1) - shares)[context, symbols]
    if not frequency.all():
        raise ValueError("a symbol has no frequency")
    states = np.full(LANES, _LOWEST, np.int64)
    words: list[_Numbers] = []
    for at in range((len(symbols) - 1) // LANES * LANES, -1, -LANES):
        row, first = frequency[at : at + LANES], start[at : at + LANES]
        own = states[: len(row)]
        is_high = own >> (32 - SCALE_BITS) >= row
        words.append(own[is_high] & 0xFFFF)
        own = np.where(is_high, own >> 16, own)
        states[: len(row)] = (own // row << SCALE_BITS) + own % row + first
    packed = np.concatenate([*words[::-1], states[:0]]).astype("<u2").tobytes()
    head = _WORDS.pack(len(packed) // 2) + states.astype("<u4").tobytes()
    return head + packed + _packed_bits(low, count)


def context_unpack(body: Buffer, parent: Buffer, width: int, fraction_bits: int) -> bytes | None:
    """The source again, as long as its parent; None if the body does not stand for that many bytes."""
    try:
        return _unpacked(bytes(body), parent, width, fraction_bits)
    except (_NotPacked, struct.error):
        return None


def _values(source: Buffer, parent: Buffer, width: int) -> _Numbers:
    planes = np.frombuffer(split(source, parent, width, SIGN_MAGNITUDE), np.uint8).reshape(width, -1)
    return np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1).astype(np.int64)


def _exponents(parent: Buffer, width: int, fraction_bits: int) -> _Numbers:
    if not 8 * width - 9 <= fraction_bits <= 8 * width - 2 or width not in (2, 4):
        raise ValueError("not a float of 2 or 4 bytes whose exponent has 1 to 8 bits")
    known = np.frombuffer(parent, f"<u{width}", len(parent) // width).astype(np.int64)
    return known >> fraction_bits & (1 << (8 * width - 1 - fraction_bits)) - 1


def _symbols(values: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Of each value its symbol, its low bits, and how many these are."""
    bits: _Numbers = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    count = np.maximum(bits - 3, 0)
    return 4 * count + (values >> count), values & (1 << count) - 1, count


def _packed_bits(low: _Numbers, count: _Numbers) -> bytes:
    """The lowest bit of the first value first; bit by bit, which takes 30 bytes of memory for each."""
    total = int(count.sum())
    owner = np.repeat(np.arange(len(low)), count)
    within = np.arange(total) - (count.cumsum() - count)[owner]
    return np.packbits((low[owner] >> within & 1).astype(np.uint8), bitorder="little").tobytes()


def _unpacked_bits(packed: bytes, count: _Numbers) -> _Numbers:
    total = int(count.sum())
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    if len(packed) != -(-total // 8) or bits[total:].any():
        raise _NotPacked
    start = count.cumsum() - count
    low = np.zeros(len(count), np.int64)
    for bit in range(int(count.max(initial=0))):
        has = count > bit
        low[has] |= bits[start[has] + bit].astype(np.int64) << bit
    return low


@dataclass(frozen=True, slots=True)
class _Tables:
    """Of each context and slot: the symbol, its frequency, and how far the slot is from its first."""

    context_of: _Numbers
    symbol: _Numbers
    frequency: _Numbers
    offset: _Numbers


def _unpacked(body: bytes, parent: Buffer, width: int, fraction_bits: int) -> bytes:
    exponents = _exponents(parent, width, fraction_bits)
    tables, at = _read_tables(body, 32 * width - 4)
    tail = len(parent) % width
    (words,) = _WORDS.unpack_from(body, at)
    states_at = at + _WORDS.size
    low_at = states_at + _STATES_BYTES + 2 * words
    if low_at + tail > len(body):
        raise _NotPacked
    states = np.frombuffer(body, "<u4", LANES, states_at).astype(np.int64)
    stream = np.frombuffer(body, "<u2", words, states_at + _STATES_BYTES).astype(np.int64)
    symbols = _unpacked_symbols(tables, tables.context_of[exponents], states, stream)
    count = np.where(symbols < _ALONE_BELOW, 0, (symbols >> 2) - 1)
    low = _unpacked_bits(body[low_at : len(body) - tail], count)
    values = ((symbols - 4 * count << count) + low).astype(f"<u{width}")
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, width).T)
    return join([*map(bytes, planes)], parent, width, SIGN_MAGNITUDE, body[len(body) - tail :])


def _unpacked_symbols(tables: _Tables, context: _Numbers, states: _Numbers, stream: _Numbers) -> _Numbers:
    symbols = np.empty(len(context), np.int64)
    if (states < _LOWEST).any():
        raise _NotPacked
    taken = 0
    for at in range(0, len(context), LANES):
        row = context[at : at + LANES]
        own = states[: len(row)]
        slot = own & SCALE - 1
        symbols[at : at + LANES] = tables.symbol[row, slot]
        own = tables.frequency[row, slot] * (own >> SCALE_BITS) + tables.offset[row, slot]
        is_low = own < _LOWEST
        wanted = int(is_low.sum())
        if taken + wanted > len(stream):
            raise _NotPacked
        own[is_low] = own[is_low] << 16 | stream[taken : taken + wanted]
        taken += wanted
        states[: len(row)] = own
    if taken != len(stream) or (states != _LOWEST).any():
        raise _NotPacked
    return symbols


def _read_tables(body: bytes, symbols: int) -> tuple[_Tables, int]:
    """The tables, and where they end."""
    contexts = body[0] if body else 0
    firsts = [0, *body[1:contexts]]
    if not 1 <= contexts <= MOST_CONTEXTS or len(firsts) != contexts or firsts != sorted({*firsts}):
        raise _NotPacked
    rows, at = [], contexts
    for _ in range(contexts):
        row, at = _read_row(body, at, symbols)
        rows.append(row)
    shares = np.array(rows, np.int64)
    symbol = np.array([np.repeat(np.arange(SYMBOLS), row) for row in shares])
    context = np.arange(contexts)[:, None]
    offset = np.arange(SCALE) - (shares.cumsum(axis=1) - shares)[context, symbol]
    context_of = np.searchsorted(firsts, np.arange(EXPONENTS), side="right") - 1
    return _Tables(context_of, symbol, shares[context, symbol], offset), at


def _read_row(body: bytes, at: int, symbols: int) -> tuple[list[int], int]:
    """The frequencies of a context, and where they end."""
    row = [0] * SYMBOLS
    first, last = struct.unpack_from("BB", body, at)
    at += 2
    if first > last or last >= symbols:
        raise _NotPacked
    for symbol in range(first, last + 1):
        low, high = (*body[at : at + 2], -1, -1)[:2]
        is_long = low >= 0x80
        if low < 0 or (is_long and high <= 0):
            raise _NotPacked
        row[symbol] = low & 0x7F | high << 7 if is_long else low
        at += 1 + is_long
    if sum(row) != SCALE or not row[first] or not row[last]:
        raise _NotPacked
    return row, at
