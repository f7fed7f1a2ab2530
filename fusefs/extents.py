"""A set of byte ranges: which parts of an overlaid file its staging file holds.

One rule: ranges are kept sorted, disjoint and merged, so that a question costs a bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Extents:
    """Disjoint half-open ranges [start, end). Grows with the number of gaps, not with bytes."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: list[tuple[int, int]] | None = None) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for offset, length in ranges or []:
            self.add(offset, offset + length)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> None:
        """Add a range, merging it with those that it touches."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def clip(self, size: int) -> None:
        """Forget everything at and behind `size`."""
        keep = bisect_left(self._starts, size)
        del self._starts[keep:], self._ends[keep:]
        if self._ends and self._ends[-1] > size:
            self._ends[-1] = size

    def contains(self, offset: int) -> bool:
        """Whether byte `offset` is in the set."""
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def split(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """[start, end) as consecutive (start, end, inside) parts."""
        at = bisect_right(self._ends, start)
        while start < end:
            if at == len(self._starts) or self._starts[at] >= end:
                yield start, end, False
                return
            if start < self._starts[at]:
                yield start, self._starts[at], False
                start = self._starts[at]
            stop = min(end, self._ends[at])
            yield start, stop, True
            start = stop
            at += 1
