"""Where a file is cut into chunks: a plan made from its size and its tensor layout.

One rule: equal bytes in an equal layout are cut equally, for ever. Every constant here is part of
the on-disk identity of dedup (after a change new saves share no chunk with old ones), so none may
change without a format flag, and tests/store/test_regions.py pins golden cut points.

Tensors are cut at their first byte and then every `CHUNK_BYTES`, so that chunk k of a tensor
lines up with chunk k of the same tensor in the save before, and no element straddles a chunk.
All other bytes form runs; a short run is one chunk, a long one is cut by its content.

Source: FastCDC 2020 (Xia et al., "The Design of Fast Content-Defined Chunking for Data
Deduplication Based Storage Systems", IEEE TPDS 31(9)) as pyfastcdc implements it: the gear table
of the authors' code (seed 0), normalised chunking level 1, minimum 16 KiB, target 64 KiB, maximum
256 KiB. No cut is looked for below the minimum, so the mean on random bytes is 80 KiB (paper,
section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from pyfastcdc import FastCDC

if TYPE_CHECKING:  # a process that only cuts does without the parsers, and is there sooner
    from ckptfs.store.formats import Layout

Buffer = bytes | bytearray | memoryview

CHUNK_BYTES: Final = 256 * 1024
"""The length of a tensor's chunks, its last one excepted; no chunk of any kind is longer."""
MIN_TENSOR_BYTES: Final = 16 * 1024
"""A smaller tensor joins the run around it: chunks of its own would cost more than they save."""
SHORT_RUN_BYTES: Final = 64 * 1024
"""A run up to this length is one chunk: content cutting would hardly ever divide it."""

CONTENT_MIN_BYTES: Final = 16 * 1024
CONTENT_TARGET_BYTES: Final = 64 * 1024
CONTENT_MAX_BYTES: Final = CHUNK_BYTES
CONTENT_NORMALISATION: Final = 1


class Mode(Enum):
    """How a region is cut."""

    FIXED = "fixed"
    """Every `CHUNK_BYTES` from the region's first byte."""
    CONTENT = "content"
    """By `cut_content` over the region's bytes alone."""


@dataclass(frozen=True, slots=True)
class Region:
    """`length` (at least 1) consecutive bytes of a file from `offset` that are cut in one way."""

    offset: int
    length: int
    mode: Mode


def plan_regions(size: int, layout: Layout | None) -> list[Region]:
    """Divide a file of `size` bytes into regions that cover it exactly, in order.

    `layout` is what `ckptfs.store.formats.parse` said of the same bytes; None is an unknown
    format. An empty file has no region.
    """
    assert size >= 0
    regions: list[Region] = []
    at = 0
    for tensor in layout.tensors if layout is not None else ():
        assert at <= tensor.offset and tensor.end <= size, "a layout is sorted and inside the file"
        if tensor.length < MIN_TENSOR_BYTES:
            continue
        if tensor.offset > at:
            regions.append(_run(at, tensor.offset - at))
        regions.append(Region(tensor.offset, tensor.length, Mode.FIXED))
        at = tensor.end
    if size > at:
        regions.append(_run(at, size - at))
    return regions


def _run(offset: int, length: int) -> Region:
    return Region(offset, length, Mode.FIXED if length <= SHORT_RUN_BYTES else Mode.CONTENT)


def cut_fixed(length: int) -> list[int]:
    """Return the chunk lengths of a FIXED region of `length` bytes; their sum is `length`."""
    whole, rest = divmod(length, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + ([rest] if rest else [])


def cut_content(buffer: Buffer) -> list[int]:
    """Return the chunk lengths of a CONTENT region that lies in `buffer`; their sum is its length.

    The buffer is only read, and not kept. The GIL is free while a cut point is looked for.
    """
    return [*cuts_of_content(buffer)]


def cuts_of_content(buffer: Buffer) -> Iterator[int]:
    """The same one by one, so that each chunk can be used before the next cut is looked for."""
    return (chunk.length for chunk in _fastcdc().cut_buf(buffer))


def _fastcdc() -> FastCDC:
    # pyfastcdc forbids sharing one object between threads, and making one takes microseconds.
    return FastCDC(
        CONTENT_TARGET_BYTES,
        min_size=CONTENT_MIN_BYTES,
        max_size=CONTENT_MAX_BYTES,
        normalized_chunking=CONTENT_NORMALISATION,
    )


class ContentCutter:
    """`cut_content` for a region that arrives in consecutive pieces of any size.

    A chunk depends on the bytes since the last cut alone, and on no more than
    `CONTENT_MAX_BYTES` of them. So a cut is final as soon as that many are at hand, and what has
    to be kept is always less. Pieces are not kept; at most three maximal chunks
    are copied.
    Owned by one task.
    """

    def __init__(self) -> None:
        self._fastcdc = _fastcdc()
        self._tail = bytearray()
        self._finished = False

    def feed(self, piece: Buffer) -> list[int]:
        """Take the region's next bytes and return the lengths of the chunks that are now final."""
        assert not self._finished, "a finished cutter takes no more bytes"
        view = memoryview(piece).cast("B")
        lengths: list[int] = []
        if self._tail:
            kept = len(self._tail)
            self._tail += view[:CONTENT_MAX_BYTES]
            if len(self._tail) < CONTENT_MAX_BYTES:
                return []
            lengths = self._final_lengths(bytes(self._tail))
            cut = sum(lengths)
            if len(view) <= CONTENT_MAX_BYTES:
                del self._tail[:cut]
                return lengths
            # The tail held more than a maximal chunk, so the last cut lies in the piece itself
            # and the rest of the piece is cut where it is.
            assert cut > kept
            self._tail.clear()
            view = view[cut - kept :]
        more = self._final_lengths(view)
        self._tail += view[sum(more) :]
        return lengths + more

    def finish(self) -> list[int]:
        """Return the lengths of the chunks that end the region; the cutter is used up then."""
        self._finished = True
        lengths = [chunk.length for chunk in self._fastcdc.cut_buf(bytes(self._tail))]
        self._tail.clear()
        return lengths

    def _final_lengths(self, buffer: Buffer) -> list[int]:
        lengths: list[int] = []
        left = len(buffer)
        chunks = iter(self._fastcdc.cut_buf(buffer))
        while left >= CONTENT_MAX_BYTES:
            lengths.append(next(chunks).length)
            left -= lengths[-1]
        return lengths
