"""The bytes of a file that is about to be cut: its staging file, and what lies below its holes.

One rule: a byte comes from the staging file where a block of it is allocated, else from the base
below `base_limit`, else it is zero; and nothing here decides anything else.

Source: FORMAT.md, "Live tree" (overlays).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from ckptfs.store.errors import Unavailable
from ckptfs.store.recipe import Piece, Recipe

BLOCK_BYTES = 4096


class Ranges:
    """Disjoint, sorted [start, end) ranges; ones that touch are merged."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(spans):
            if start >= end:
                continue
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def next_at(self, offset: int) -> tuple[int, int] | None:
        """The first range that ends behind `offset`."""
        at = bisect_right(self._ends, offset)
        return (self._starts[at], self._ends[at]) if at < len(self._ends) else None

    def joined(self, spans: Iterable[tuple[int, int]]) -> Ranges:
        """These ranges and `spans` together."""
        return Ranges([*zip(self._starts, self._ends, strict=True), *spans])

    def cover(self, size: int) -> bool:
        """Whether every byte below `size` is in a range."""
        return size == 0 or (self._starts[:1] == [0] and self._ends[0] >= size)


def block_ranges(extents: Iterable[tuple[int, int]], size: int) -> Ranges:
    """The ranges of whole blocks that (offset, length) `extents` touch, cut off at `size`."""
    return Ranges(
        (
            offset // BLOCK_BYTES * BLOCK_BYTES,
            min(-(-(offset + length) // BLOCK_BYTES) * BLOCK_BYTES, size),
        )
        for offset, length in extents
    )


class Base(Protocol):
    """Reads the stored content that an overlay lies upon."""

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the content ends."""


class Source:
    """`size` bytes: `own` ranges through `read_own`, holes below `base_limit` from the base.

    `changed` are the ranges in which a piece of `recipe` may not be taken over unread; `recipe`
    is the base's. Used by one thread.
    """

    def __init__(
        self,
        read_own: Callable[[memoryview, int], int],
        size: int,
        own: Ranges,
        *,
        recipe: Recipe | None = None,
        base: Base | None = None,
        base_limit: int = 0,
        changed: Ranges | None = None,
    ) -> None:
        self.size = size
        self.own = own
        self.recipe = recipe
        self.changed = changed if changed is not None else Ranges([(0, size)])
        self._read_own = read_own
        self._base = base
        self._base_limit = min(base_limit, size, recipe.size if recipe is not None else 0)
        self._dense = own.cover(size)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`; Unavailable if the staging file is shorter than it was."""
        if self._dense:
            self._own_into(view, offset)
            return
        at, stop = offset, offset + len(view)
        while at < stop:
            found = self.own.next_at(at)
            start, end = found if found is not None else (stop, stop)
            if start > at:
                end = min(start, stop)
                self._below_into(view[at - offset : end - offset], at)
            else:
                end = min(end, stop)
                self._own_into(view[at - offset : end - offset], at)
            at = end

    def pread(self, offset: int, length: int) -> bytes:
        """The same as bytes, fewer where the file ends (the Reader protocol of `formats`)."""
        length = min(length, self.size - offset)
        if offset < 0 or length <= 0:
            return b""
        part = bytearray(length)
        self.read_into(memoryview(part), offset)
        return bytes(part)

    def unchanged(self, at: int, end: int) -> Iterator[Piece]:
        """The base's data pieces from `at` on that lie below `end` and that nothing touched.

        None if no piece begins at `at`. A piece that only the base's end cut short is left out.
        """
        recipe = self.recipe
        if recipe is None or at >= min(recipe.size, end):
            return
        index = recipe.index_at(at)
        if recipe.start(index) != at:
            return
        changed = self.changed.next_at(at)
        limit = min(end, changed[0]) if changed is not None else end
        for one in range(index, len(recipe)):
            stop = recipe.start(one + 1)
            piece = recipe.piece(one)
            if stop > limit or piece.chunk is None or (stop == recipe.size and stop < end):
                return
            yield piece

    def zero_until(self, at: int) -> int:
        """Where the zeros end that begin at `at` and are nowhere allocated; `at` if none do."""
        if self._dense:
            return at
        found = self.own.next_at(at)
        limit = found[0] if found is not None else self.size
        while at < limit:
            if at >= self._base_limit or self.recipe is None:
                return limit
            index = self.recipe.index_at(at)
            if self.recipe.piece(index).chunk is not None:
                return at
            at = min(self.recipe.start(index + 1), self._base_limit)
        return min(at, limit)

    def next_hole(self, at: int, end: int, least: int, region_end: int) -> int:
        """The first offset in [at, end) from which at least `least` zeros follow that are below
        `region_end`, or `end`."""
        while at < end and not self._dense:
            found = self.own.next_at(at)
            if found is not None and found[0] <= at:
                at = found[1]
                continue
            zeros = min(self.zero_until(at), region_end)
            if zeros - at >= least:
                return at
            at = zeros if zeros > at else self._base_piece_end(at)
        return end

    def _base_piece_end(self, at: int) -> int:
        assert self.recipe is not None, "what is neither allocated nor zero is the base's"
        return min(self.recipe.start(self.recipe.index_at(at) + 1), self._base_limit)

    def _own_into(self, view: memoryview, offset: int) -> None:
        if self._read_own(view, offset) != len(view):
            raise Unavailable("the file became shorter while it was read")

    def _below_into(self, view: memoryview, offset: int) -> None:
        have = max(0, min(len(view), self._base_limit - offset))
        if have:
            assert self._base is not None, "an overlay has a base"
            part = self._base.pread(offset, have)
            if len(part) != have:
                raise Unavailable("the base of an overlay is shorter than its limit")
            view[:have] = part
        view[have:] = bytes(len(view) - have)
