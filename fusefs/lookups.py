"""How often the kernel holds each live inode: lookup counts.

One rule: an inode's number and record stay as long as its count is not zero, and memory for it
goes when the count does, so `find` over a large tree does not grow the daemon for ever.
"""

from __future__ import annotations

from array import array

from ckptfs.store.inode import ROOT_INO

_PAGE_BITS = 9
_IN_PAGE = (1 << _PAGE_BITS) - 1


class _Page:
    """The counts of 512 inodes with neighbouring numbers; `known` of them are not zero."""

    __slots__ = ("counts", "known")

    def __init__(self) -> None:
        self.counts = array("Q", bytes(8 << _PAGE_BITS))
        self.known = 0


class Lookups:
    """Counts by inode number. Belongs to the trio thread.

    Numbers are handed out in order, so pages of counts take a tenth of what a dict takes.
    """

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}

    def remember(self, ino: int) -> None:
        """The kernel was given this inode once more."""
        page = self._pages.get(ino >> _PAGE_BITS)
        if page is None:
            page = self._pages[ino >> _PAGE_BITS] = _Page()
        at = ino & _IN_PAGE
        if not page.counts[at]:
            page.known += 1
        page.counts[at] += 1

    def forget(self, ino: int, count: int) -> bool:
        """The kernel forgot it `count` times; True if it does not hold it any more."""
        page = self._pages.get(ino >> _PAGE_BITS)
        at = ino & _IN_PAGE
        if page is not None and page.counts[at]:
            if page.counts[at] > count:
                page.counts[at] -= count
                return False
            page.counts[at] = 0
            page.known -= 1
            if not page.known:
                del self._pages[ino >> _PAGE_BITS]
        return ino != ROOT_INO

    def count(self, ino: int) -> int:
        """How often the kernel holds it."""
        page = self._pages.get(ino >> _PAGE_BITS)
        return 0 if page is None else page.counts[ino & _IN_PAGE]

    def is_known(self, ino: int) -> bool:
        """Whether the kernel may still ask for it."""
        return self.count(ino) > 0
