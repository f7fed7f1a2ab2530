"""A dense file divided into spans that are cut independently of each other, and their cuts put together.

One rule: the chunks that come out are those that one pass over the file would have cut (`Cutter`),
whatever the spans are; so how many take part changes speed and nothing else.

A FIXED region is cut every so many bytes, so a span of it is cut as it is. Of a CONTENT region each span is
cut as if a chunk began where the span begins. That is wrong at first, and right from the first cut on
that the chunks before it lead to as well, because a cut depends on the bytes since the cut before alone
(regions.py). So the chunks between are cut anew, a few per span, and the wrong ones are left out.

Source: Xia et al., "P-Dedupe: exploiting parallelism in data deduplication system", NAS 2012 (cutting in
sections whose borders are put right afterwards).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import DIGEST_BYTES
from ckptfs.store.regions import CHUNK_BYTES, CONTENT_MAX_BYTES, Mode, Region, cuts_of_content

SPAN_BYTES = 16 << 20
LEAST_BYTES = 32 << 20
"""A shorter file is not worth the way to another process."""
MOST_SPANS = 256
"""So many are cut at once at most: a file of many small tensors has spans of a few KiB."""
BRIDGE_BYTES = 2 * CONTENT_MAX_BYTES


@dataclass(frozen=True, slots=True)
class Span:
    """The chunks that begin in [offset, end) of a file, in a region that ends at `region_end`."""

    offset: int
    end: int
    region_end: int
    mode: Mode

    @property
    def limit(self) -> int:
        """Up to where bytes are needed: the last chunk may reach behind the end."""
        return self.end if self.mode is Mode.FIXED else min(self.region_end, self.end + CONTENT_MAX_BYTES)


class Cuts:
    """Consecutive chunks: their lengths, and their ids one behind the other."""

    __slots__ = ("ids", "lengths", "offset")

    def __init__(self, offset: int, lengths: array[int], ids: bytes) -> None:
        assert len(ids) == DIGEST_BYTES * len(lengths)
        self.offset = offset
        self.lengths = lengths
        self.ids = ids

    def starts(self) -> Sequence[int]:
        """Where each chunk begins, and where the last one ends."""
        return list(accumulate(self.lengths, initial=self.offset))

    @classmethod
    def joined(cls, parts: Sequence[Cuts]) -> Cuts:
        """All of them as one; those that are not empty follow one another."""
        parts = [one for one in parts if one.lengths] or parts[:1]
        lengths = array("I")
        for one in parts:
            assert one.offset == parts[0].offset + sum(lengths), "none is left out"
            lengths += one.lengths
        return cls(parts[0].offset, lengths, b"".join([one.ids for one in parts]))

    def part(self, numbers: range) -> Cuts:
        """Only the chunks with these numbers, which follow one another."""
        before = self.lengths[: numbers.start]
        ids = self.ids[DIGEST_BYTES * numbers.start : DIGEST_BYTES * numbers.stop]
        return Cuts(self.offset + sum(before), self.lengths[numbers.start : numbers.stop], ids)


class SpanCutter(Protocol):
    """Cuts bunches of spans of a file, several at a time."""

    @property
    def width(self) -> int:
        """How many bunches it cuts at a time."""

    async def cut(self, fd: int, spans: Sequence[Span]) -> list[Cuts]:
        """The chunks of each of these spans, which follow one another, of the file that `fd` reads;
        Unavailable if the file became shorter, OSError if it cannot be read."""


def spans_of(regions: Sequence[Region], span_bytes: int = SPAN_BYTES) -> list[Span]:
    """The spans of a file in order."""
    assert span_bytes % CHUNK_BYTES == 0, "a span of a FIXED region holds whole chunks"
    return [
        Span(at, min(at + span_bytes, one.offset + one.length), one.offset + one.length, one.mode)
        for one in regions
        for at in range(one.offset, one.offset + one.length, span_bytes)
    ]


def bunches_of(spans: Sequence[Span], bunch_bytes: int = SPAN_BYTES) -> list[list[Span]]:
    """The same spans, as many together as are `bunch_bytes` long: a tensor is often shorter than that, and
    what lies between two of them a few bytes, which are not worth a way to another process."""
    bunches: list[list[Span]] = []
    for span in spans:
        last = bunches[-1] if bunches else []
        if last and len(last) < MOST_SPANS and span.end - last[0].offset <= bunch_bytes:
            last.append(span)
        else:
            bunches.append([span])
    return bunches


def cut_span(view: memoryview, span: Span) -> Cuts:
    """Cut and hash the chunks of a span; `view` are the file's bytes in [span.offset, span.limit).

    Each chunk is hashed while it is still in the processor's cache.
    """
    assert len(view) == span.limit - span.offset
    lengths, ids, at, end = array("I"), bytearray(), 0, span.end - span.offset
    if span.mode is Mode.FIXED:
        for at in range(0, end, CHUNK_BYTES):
            lengths.append(min(CHUNK_BYTES, end - at))
            ids += chunk_id(view[at : at + CHUNK_BYTES])
        return Cuts(span.offset, lengths, bytes(ids))
    for length in cuts_of_content(view):
        lengths.append(length)
        ids += chunk_id(view[at : at + length])
        at += length
        if at >= end:
            break
    return Cuts(span.offset, lengths, bytes(ids))


class Joiner:
    """Puts the cuts of spans together in their order. `at` is how far the chunks are known."""

    def __init__(self) -> None:
        self.at = 0

    def add(self, span: Span, cuts: Cuts) -> tuple[Cuts, Span | None]:
        """(what follows, None), or (nothing, a span that has to be cut first and given to `bridge`)."""
        nothing = cuts.part(range(0))
        if self.at >= span.end:
            return nothing, None  # chunks from before reach over all of it
        starts = cuts.starts()
        try:
            first = starts.index(self.at)
        except ValueError:
            assert span.mode is Mode.CONTENT, "spans of a FIXED region follow one another"
            end = min(self.at + BRIDGE_BYTES, span.region_end)
            return nothing, Span(self.at, end, span.region_end, span.mode)
        self.at = starts[-1]
        return cuts.part(range(first, len(cuts.lengths))), None

    def bridge(self, gap: Cuts, span: Span, cuts: Cuts) -> Cuts:
        """The chunks in a gap up to the first cut that `cuts` has as well."""
        starts, number = set(cuts.starts()), 0
        while number < len(gap.lengths) and self.at < span.end and self.at not in starts:
            self.at += gap.lengths[number]
            number += 1
        return gap.part(range(number))
