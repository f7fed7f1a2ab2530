"""Passthrough: the kernel reads and writes a backing file itself, and Python is not in the way.

One rule: the mode of a node is decided at its first open and kept to its last release, because
the kernel refuses a second backing file, and a cached open beside a passthrough one.

A segment is never the backing file of an open that may write: see nodes.py. Source: SEMANTICS.md,
"Write paths".
"""

from __future__ import annotations

from ckptfs.fusefs import REPLIES, kernel

_PASSTHROUGH = 1 << 7


class Passthrough:
    """The backing ids of one mount: of staging files by inode, of segments by node.

    Belongs to the trio thread.

    Off until `enable`; `why` says in a few words which path writes take, and why.
    """

    def __init__(self) -> None:
        self._fuse_fd = -1
        self._ids: dict[int, int] = {}
        self._stored_ids: dict[int, int] = {}
        self.why = "the kernel session is not ours"
        self._stale: set[int] = set()

    @property
    def enabled(self) -> bool:
        """Whether files may be opened this way."""
        return self._fuse_fd >= 0

    def enable(self, fuse_fd: int) -> None:
        """The kernel negotiated passthrough on this fd."""
        assert REPLIES is not None, "replies with a backing id need the extension"
        self._fuse_fd = fuse_fd
        self.why = "kernel and extension support it"

    def refuse(self, why: str) -> None:
        """Passthrough stays off for this mount."""
        self._fuse_fd = -1
        self.why = why

    def attach(self, ino: int, fd: int) -> bool:
        """Make the file behind `fd` the backing file of an inode that nobody has open yet.

        False if the kernel refuses (a limit, a stacked file system): then the inode goes plain.
        """
        if not self.enabled:
            return False
        try:
            self._ids[ino] = kernel.open_backing(self._fuse_fd, fd)
        except OSError as e:
            self.why = f"the kernel refused a backing file: {e.strerror}"
            return False
        self._stale.add(ino)
        return True

    def is_attached(self, ino: int) -> bool:
        """Whether the inode's opens go this way, to its staging file."""
        return ino in self._ids

    def attach_stored(self, node: int, fd: int) -> bool:
        """Make the segment behind `fd`, which holds just the file's bytes, what readers of a node read."""
        try:
            self._stored_ids[node] = kernel.open_backing(self._fuse_fd, fd)
        except OSError:
            return False
        return True

    def reads_stored(self, node: int) -> bool:
        """Whether the kernel reads a segment for this node: then it must not be opened for writing."""
        return node in self._stored_ids

    @property
    def stored_nodes(self) -> int:
        """How many nodes the kernel reads a segment for."""
        return len(self._stored_ids)

    def detach_stored(self, node: int) -> None:
        """The last reader of the node is gone."""
        backing_id = self._stored_ids.pop(node, None)
        if backing_id is not None:
            kernel.close_backing(self._fuse_fd, backing_id)

    def detach(self, ino: int) -> None:
        """The last handle is gone."""
        backing_id = self._ids.pop(ino, None)
        if backing_id is not None:
            kernel.close_backing(self._fuse_fd, backing_id)

    def arm(self, ino: int, fh: int) -> None:
        """Have the reply that comes next, for `fh`, name the inode's backing file."""
        self._arm(fh, self._ids[ino])

    def arm_stored(self, node: int, fh: int) -> None:
        """The same with the node's segment."""
        self._arm(fh, self._stored_ids[node])

    @staticmethod
    def _arm(fh: int, backing_id: int) -> None:
        assert REPLIES is not None
        REPLIES.arm(fh, _PASSTHROUGH, backing_id)

    def disarm(self) -> None:
        """The reply that comes next is an ordinary one."""
        if REPLIES is not None:
            REPLIES.arm(0, 0, 0)

    def is_stale(self, ino: int) -> bool:
        """Whether the kernel wrote to the inode by itself since its last plain open."""
        return ino in self._stale

    def take_stale(self, ino: int) -> bool:
        """Whether the kernel may hold cached pages of an inode that were changed behind its back;
        asked once, at the next plain open, which then must not keep the cache."""
        if ino in self._stale:
            self._stale.discard(ino)
            return True
        return False
