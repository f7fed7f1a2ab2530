"""The numbers by which the kernel knows live inodes: node ids, and how often it holds each.

One rule: a node id is the inode number, and stays so for whoever reads. Only a file that is about to
be changed while the kernel reads its stored bytes by itself gets a second node, for everybody who
comes later; the first is left to its readers, who keep the bytes that they opened.

A node cannot change what it reads: the kernel refuses an open of a node that is in another mode, and
a segment must never be the backing file of a writer. Source: SEMANTICS.md, "Write paths".
"""

from __future__ import annotations

from ckptfs.fusefs import node_ids
from ckptfs.fusefs.kept_notes import Kind, Notes
from ckptfs.fusefs.lookups import Lookups
from ckptfs.fusefs.node_ids import SECOND_NODE


class Nodes:
    """Node ids of live inodes. Belongs to the trio thread.

    `_split` are the inodes with two nodes; `notes` keeps them.
    """

    def __init__(self, lookups: Lookups, notes: Notes) -> None:
        self._lookups = lookups
        self._notes = notes
        self._split = {ino for ino, _ in notes.items(Kind.SPLIT)}

    @staticmethod
    def ino_of(node: int) -> int:
        """The inode of a node; nodes of versions have one each."""
        return node_ids.ino_of(node)

    def node_of(self, ino: int) -> int:
        """The node that everybody who asks now is given."""
        return ino | SECOND_NODE if ino in self._split else ino

    def is_left(self, node: int) -> bool:
        """Whether the node is a first one whose inode has a second."""
        return node in self._split

    def is_second(self, ino: int) -> bool:
        """Whether the inode's present node is a second one: such a node is never split again."""
        return ino in self._split

    def are_two(self, ino: int) -> bool:
        """Whether the kernel may hold both nodes: what it believes of one it must not go on believing when
        the other is changed."""
        return ino in self._split and self._lookups.count_of(ino) > 0

    def all_of(self, ino: int) -> tuple[int, ...]:
        """Every node of an inode."""
        return (ino, ino | SECOND_NODE) if ino in self._split else (ino,)

    def split(self, ino: int) -> None:
        """Give an inode its second node."""
        assert ino not in self._split, "a second node has no readers that keep older bytes"
        self._notes.put(Kind.SPLIT, ino, b"")
        self._split.add(ino)

    def remember(self, ino: int) -> None:
        """The kernel was given the inode's present node once more."""
        self._lookups.remember(self.node_of(ino))

    def forget(self, node: int, count: int) -> bool:
        """The kernel forgot a node `count` times; True if it holds no node of the inode any more."""
        ino = self.ino_of(node)
        gone = self._lookups.forget(node, count)
        if gone and ino in self._split:
            self._split.discard(ino)
            self._notes.delete(Kind.SPLIT, ino)
        return gone
