"""Passthrough: the kernel reads and writes a backing file itself, and Python is not in the way.

One rule: the mode of a node is decided at its first open and kept to its last release, because
the kernel refuses a second backing file, and a cached open beside a passthrough one.

A segment is never the backing file of an open that may write: see nodes.py. Source: SEMANTICS.md,
"Write paths".
"""

from __future__ import annotations

import struct
from collections.abc import Collection

from ckptfs.fusefs import REPLIES, kernel
from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_state import KeptState

_PASSTHROUGH = 1 << 7
_SEGMENT = struct.Struct("<QQ")


class Passthrough:
    """The backing ids of one mount: of staging files by inode, of segments by node.

    Belongs to the trio thread. Off until `enable`; `why` says in a few words which path writes take, and why.
    What is registered with the kernel outlives the daemon, so it is noted in `state`.
    """

    def __init__(self, state: KeptState) -> None:
        self._fuse_fd = -1
        self._is_refused = False
        self._state, self._notes = state, state.notes
        self._ids = {ino: _id_of(value) for ino, value in self._notes.items(Kind.BACKING)}
        self._stored_ids = {node: _id_of(value) for node, value in self._notes.items(Kind.SEGMENT)}
        self._nobodys: list[int] = []
        self._nobodys_nodes: list[int] = []
        self.why = "the kernel session is not ours"

    @property
    def enabled(self) -> bool:
        """Whether files may be opened this way."""
        return self._fuse_fd >= 0 and not self._is_refused

    def enable(self, fuse_fd: int) -> None:
        """The kernel negotiated passthrough on this fd."""
        assert REPLIES is not None, "replies with a backing id need the extension"
        self._fuse_fd = fuse_fd
        self.why = "kernel and extension support it"

    def refuse(self, why: str) -> None:
        """Nothing more is opened this way; what is goes on (of a session that was taken over)."""
        self._is_refused = True
        self.why = why

    def expect(self, inos: Collection[int], nodes: Collection[int]) -> None:
        """These are open in the session that is taken over: what is registered for others is nobody's."""
        self._nobodys = [ino for ino in self._ids if ino not in inos]
        self._nobodys_nodes = [node for node in self._stored_ids if node not in nodes]

    def resume(self, fuse_fd: int) -> None:
        """Go on with the session of a daemon that died: let go of what it has registered for nobody."""
        self.enable(fuse_fd)
        for ino in self._nobodys:
            self.detach(ino)
        for node in self._nobodys_nodes:
            self.detach_stored(node)
        named = {*self._ids.values(), *self._stored_ids.values()}
        half_closed = self._notes.get(Kind.LETTING_GO, 0)
        if half_closed is not None and _id_of(half_closed) not in named:
            self._close(_id_of(half_closed))

    def close_unnamed(self, backing_id: int) -> None:
        """Let go of an id that may be nobody's: the daemon died before it could note it."""
        if backing_id > 0 and backing_id not in {*self._ids.values(), *self._stored_ids.values()}:
            self._close(backing_id)

    def attach(self, ino: int, fd: int) -> bool:
        """Make the file behind `fd` the backing file of an inode that nobody has open yet.

        False if the kernel refuses (a limit, a stacked file system): then the inode goes plain.
        """
        if not self.enabled:
            return False
        try:
            backing_id = kernel.open_backing(self._fuse_fd, fd)
        except OSError as e:
            self.why = f"the kernel refused a backing file: {e.strerror}"
            return False
        self._notes.put(Kind.BACKING, ino, backing_id.to_bytes(8, "little"))
        self._ids[ino] = backing_id
        self._state.set_written_behind(ino, written=True)
        return True

    def is_attached(self, ino: int) -> bool:
        """Whether the inode's opens go this way, to its staging file."""
        return ino in self._ids

    def attach_stored(self, node: int, fd: int, segment: int) -> bool:
        """Make the segment behind `fd`, which holds just the file's bytes, what readers of a node read."""
        try:
            backing_id = kernel.open_backing(self._fuse_fd, fd)
        except OSError:
            return False
        self._notes.put(Kind.SEGMENT, node, _SEGMENT.pack(backing_id, segment))
        self._stored_ids[node] = backing_id
        return True

    def segments(self) -> dict[int, int]:
        """The number of the segment that the kernel reads for each node."""
        return {node: _SEGMENT.unpack(value)[1] for node, value in self._notes.items(Kind.SEGMENT)}

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
            self._let_go(Kind.SEGMENT, node, backing_id)

    def detach(self, ino: int) -> None:
        """The last handle is gone."""
        backing_id = self._ids.pop(ino, None)
        if backing_id is not None:
            self._let_go(Kind.BACKING, ino, backing_id)

    def _let_go(self, kind: Kind, key: int, backing_id: int) -> None:
        self._notes.put(Kind.LETTING_GO, 0, backing_id.to_bytes(8, "little"))
        self._notes.delete(kind, key)
        self._close(backing_id)

    def _close(self, backing_id: int) -> None:
        try:
            kernel.close_backing(self._fuse_fd, backing_id)
        except FileNotFoundError:
            pass  # the daemon before us had just done it

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
        return self._state.is_written_behind(ino)

    def take_stale(self, ino: int) -> bool:
        """Whether the kernel may hold cached pages of an inode that were changed behind its back;
        asked once, at the next plain open, which then must not keep the cache."""
        if not self._state.is_written_behind(ino):
            return False
        self._state.set_written_behind(ino, written=False)
        return True


def _id_of(value: bytes) -> int:
    return int.from_bytes(value[:8], "little")
