"""How often the kernel holds each live inode: lookup counts.

One rule: an inode's number and record stay as long as its count is not zero, and memory for it
goes when the count does, so `find` over a large tree does not grow the daemon for ever.
"""

from __future__ import annotations

from ckptfs.store.inode import ROOT_INO


class Lookups:
    """Counts by inode number. Belongs to the trio thread."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def remember(self, ino: int) -> None:
        """The kernel was given this inode once more."""
        self._counts[ino] = self._counts.get(ino, 0) + 1

    def forget(self, ino: int, count: int) -> bool:
        """The kernel forgot it `count` times; True if it does not hold it any more."""
        left = self._counts.get(ino, 0) - count
        if left > 0:
            self._counts[ino] = left
            return False
        self._counts.pop(ino, None)
        return ino != ROOT_INO

    def is_known(self, ino: int) -> bool:
        """Whether the kernel may still ask for it."""
        return ino in self._counts
