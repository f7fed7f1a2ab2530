"""The ranges of node ids, the numbers by which the kernel knows what it holds.

below 2^61      a live inode: its inode number
2^61 to 2^62    the second node of the live inode that the other bits name (nodes.py)
from 2^62 on    something below `.versions` (browse_nodes.py)
"""

from __future__ import annotations

SECOND_NODE = 1 << 61
"""The bit of a second node's id; native/replies.c shows st_ino without it."""
FIRST_VIRTUAL_INO = SECOND_NODE << 1


def ino_of(node: int) -> int:
    """The inode of a node; nodes of versions have one each."""
    return node & ~SECOND_NODE if node < FIRST_VIRTUAL_INO else node
