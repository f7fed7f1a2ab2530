"""How often the kernel holds each live inode: lookup counts.

One rule: an inode's number and record stay as long as its count is not zero, and memory for it
goes when the count does, so `find` over a large tree does not grow the daemon for ever.
"""

from __future__ import annotations

from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.node_ids import SECOND_NODE, ino_of
from ckptfs.fusefs.requests import Requests
from ckptfs.store.inode import ROOT_INO


class Lookups:
    """Counts by node of live inodes. Belongs to the trio thread."""

    def __init__(self, state: KeptState, requests: Requests) -> None:
        self._state = state
        self._requests = requests

    def remember(self, node: int) -> None:
        """The kernel is given this node once more."""
        self._requests.add(Kind.HELD, node)

    def forget(self, node: int, count: int) -> bool:
        """The kernel forgot it `count` times; True if it does not hold its inode any more."""
        self._state.set_count(Kind.HELD, node, max(self.count_of(node) - count, 0))
        ino = ino_of(node)
        return ino != ROOT_INO and not self.is_known(ino)

    def count_of(self, node: int) -> int:
        """How often the kernel holds a node."""
        return self._state.count(Kind.HELD, node)

    def count(self, ino: int) -> int:
        """How often it holds an inode, by whichever node."""
        return self.count_of(ino) + self.count_of(ino | SECOND_NODE)

    def is_known(self, ino: int) -> bool:
        """Whether the kernel may still ask for it."""
        return self.count(ino) > 0
