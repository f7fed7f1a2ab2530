"""The body of codec 5: which contexts there are, and how frequent each symbol is in them.

One rule: `packed` chooses, and whatever it chooses, `unpacked` follows. More contexts fit the symbols better,
and each costs a table.

Source: FORMAT.md, "Contexts".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ckptfs.store.codecs.context_twin import EXPONENTS, MOST_CONTEXTS, SCALE, SYMBOLS
from ckptfs.store.codecs.elements import FRACTION_BITS, WIDTH, Element
from ckptfs.store.codecs.kernels import CONTEXT_KERNELS
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import Buffer

_TWO_BYTES: Final = 0x80
_SYMBOL_BITS: Final = 9.0
"""What a symbol takes of a table, about."""
_MOST_TRIED: Final = 48
"""So many contexts are looked at at most; a tensor's values seldom have more than 20 exponents."""

_Counts = NDArray[np.float64]


def packed(payload: Buffer, parent: Buffer, element: Element) -> list[Buffer]:
    """The body of a chunk beside its parent, in parts. `element` is one of FRACTION_BITS."""
    width, fraction_bits = WIDTH[element], FRACTION_BITS[element]
    counted = CONTEXT_KERNELS.context_counts(payload, parent, width, fraction_bits)
    counts = np.frombuffer(counted, np.uint32).reshape(EXPONENTS, SYMBOLS)
    firsts, rows = _contexts(counts)
    context_of = (np.searchsorted(firsts, np.arange(EXPONENTS), side="right") - 1).astype(np.uint8).tobytes()
    frequencies = np.array([_frequencies(row) for row in rows], np.uint16)
    streams = CONTEXT_KERNELS.context_pack(
        payload, parent, width, fraction_bits, context_of, frequencies.tobytes()
    )
    tables = bytes([len(firsts), *firsts[1:]]) + b"".join(map(_table, frequencies.tolist()))
    return [tables, streams, memoryview(payload)[len(payload) // width * width :]]


def unpacked(body: Buffer, parent: Buffer, element: Element) -> bytes:
    """The chunk, as long as its parent; Corrupt if that is not what the body stands for."""
    found = CONTEXT_KERNELS.context_unpack(body, parent, WIDTH[element], FRACTION_BITS[element])
    if found is None:
        raise Corrupt(
            f"the contexts, states or words of an encoded chunk are not those of {len(parent)} bytes"
        )
    return found


def _contexts(counts: NDArray[np.uint32]) -> tuple[list[int], _Counts]:
    """The first exponent of each context, and how often each symbol occurs in it: from one for each exponent
    on, those two neighbours become one that cost the least by it."""
    firsts = np.flatnonzero(counts.any(axis=1)).tolist() or [0]
    rows = counts[firsts].astype(np.float64)
    if len(firsts) > _MOST_TRIED:
        kept = np.linspace(0, len(firsts), _MOST_TRIED, endpoint=False).astype(int)
        firsts, rows = [firsts[at] for at in kept], np.add.reduceat(rows, kept)
    found = [*rows]
    alone = _bits(rows).tolist()
    joined = _bits(rows[:-1] + rows[1:]).tolist()
    while len(found) > 1:
        losses = [both - one - other for both, one, other in zip(joined, alone, alone[1:], strict=False)]
        at = min(range(len(losses)), key=losses.__getitem__)
        if losses[at] > 0 and len(found) <= MOST_CONTEXTS:
            break
        found[at : at + 2] = [found[at] + found[at + 1]]
        alone[at : at + 2] = [joined.pop(at)]
        del firsts[at + 1]
        for pair in (at - 1, at):
            if 0 <= pair < len(joined):
                joined[pair] = float(_bits((found[pair] + found[pair + 1])[None])[0])
    firsts[0] = 0
    return firsts, np.array(found)


def _bits(rows: _Counts) -> _Counts:
    """What the symbols of a context take with its table."""
    total = rows.sum(axis=1)
    each = rows * np.log2(np.maximum(rows, 1))
    is_there = rows > 0
    last = rows.shape[1] - is_there[:, ::-1].argmax(axis=1)
    spans = last - is_there.argmax(axis=1)
    bits: _Counts = total * np.log2(np.maximum(total, 1)) - each.sum(axis=1) + _SYMBOL_BITS * spans
    return bits


def _frequencies(row: _Counts) -> NDArray[np.int64]:
    """Whole numbers that sum up to SCALE, at least 1 where the symbol occurs."""
    total = row.sum()
    if not total:
        return np.where(np.arange(SYMBOLS) == 0, SCALE, 0)
    found = np.where(row > 0, np.maximum(np.rint(row * SCALE / total), 1), 0).astype(np.int64)
    while excess := int(found.sum()) - SCALE:
        largest = int(found.argmax())
        found[largest] -= excess if excess < 0 else min(excess, int(found[largest]) // 2)
    return found


def _table(frequencies: Sequence[int]) -> bytes:
    used = [symbol for symbol, frequency in enumerate(frequencies) if frequency]
    first, last = used[0], used[-1]
    found = bytearray((first, last))
    for frequency in frequencies[first : last + 1]:
        if frequency < _TWO_BYTES:
            found.append(frequency)
        else:
            found += bytes((frequency & 0x7F | _TWO_BYTES, frequency >> 7))
    return bytes(found)
