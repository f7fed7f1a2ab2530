"""What of a mount outlives its daemon: what the kernel holds, what is open, how the session was negotiated.

All of it lies in one memory file that somebody else keeps too (a service manager).

One rule: nothing here needs to be closed, saved or repaired: the file is right at every moment, so that the
daemon may be killed at any.

| at | what |
| --- | --- |
| 0 | `CKSS`, u16 layout, u16 0, u32 length, MessagePack of `Negotiated` |
| 2^56 | Words: how often the kernel holds each live inode's first node, by inode number |
| 2 × 2^56 | Words: the same of second nodes |
| 3 × 2^56 | Words: one bit per inode that the kernel wrote by itself since its last plain open |
| 4 × 2^56 | Notes |
| 5 × 2^56 | Counted |

Source: SEMANTICS.md, "When the daemon dies".
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ckptfs.fusefs.kept_notes import Kind, Notes
from ckptfs.fusefs.kept_words import PAGE_BYTES, REGION_BYTES, Words
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO, SECOND_NODE, ino_of
from ckptfs.store.errors import Corrupt, Unsupported

LAYOUT = 2
_READABLE = (1, LAYOUT)  # 1 differs by having no notes of the later kinds
_MAGIC = b"CKSS"
_HEAD = struct.Struct("<4sHHI")
_LAYOUT_AT = slice(4, 6)
_FILE_BYTES = 1 << 62
_MOST_COUNTED = 1 << 16
_COUNT = struct.Struct("<4Q")
_COUNT_BYTES = _COUNT.size
_U64 = struct.Struct("<Q")


class Negotiated(msgspec.Struct, frozen=True, array_like=True):
    """The session: where it is mounted (device 0:`minor`), and what the kernel offered and was answered."""

    mountpoint: str
    store: str
    minor: int
    request: bytes
    answer: bytes
    passthrough: bool
    killpriv_v2: bool


class Count(NamedTuple):
    """A count that was moved by 1 for a request: `kind` is HANDLE, or HELD; `before` is what it was."""

    unique: int
    kind: int
    key: int
    before: int


class Counted:
    """Which counts were moved for which requests, of those that may not be answered yet."""

    def __init__(self, fd: int, start: int) -> None:
        self._mapped = mmap.mmap(fd, PAGE_BYTES + _MOST_COUNTED * _COUNT_BYTES, offset=start)
        self._words = memoryview(self._mapped).cast("Q")
        if self._words[0] > _MOST_COUNTED:
            raise Corrupt(f"what was kept of the session has {self._words[0]} counts")

    def __iter__(self) -> Iterator[Count]:
        for at in range(self._words[0]):
            yield Count(*_COUNT.unpack_from(self._mapped, PAGE_BYTES + at * _COUNT_BYTES))

    def add(self, count: Count) -> None:
        """Note that a count is about to be moved. What does not fit is not noted: it may be moved twice."""
        end = self._words[0]
        if end < _MOST_COUNTED:
            _COUNT.pack_into(self._mapped, PAGE_BYTES + end * _COUNT_BYTES, *count)
            self._words[0] = end + 1

    def drop_last(self) -> None:
        """The last one was not moved."""
        self._words[0] -= 1

    def void(self, unique: int, kind: int) -> None:
        """Those of a kind that were moved for a request are about to be taken back."""
        for at, count in enumerate(self):
            if (count.unique, count.kind) == (unique, kind):
                self._words[(PAGE_BYTES + at * _COUNT_BYTES) // 8] = 0

    def clear(self) -> None:
        """All of these requests were answered."""
        self._words[0] = 0


class KeptState:
    """The file and its parts. Belongs to the trio thread."""

    def __init__(self, fd: int) -> None:
        """Take the file behind `fd` as it is; `make` and `adopt` are the ways to get one."""
        self.fd = fd
        self._head = mmap.mmap(fd, PAGE_BYTES)
        self._first = Words(fd, REGION_BYTES)
        self._second = Words(fd, 2 * REGION_BYTES)
        self._written = Words(fd, 3 * REGION_BYTES)
        self.notes = Notes(fd, 4 * REGION_BYTES)
        self.counted = Counted(fd, 5 * REGION_BYTES)

    @classmethod
    def make(cls) -> KeptState:
        """That of a new mount."""
        fd = os.memfd_create("ckptfs", os.MFD_CLOEXEC)
        os.ftruncate(fd, _FILE_BYTES)
        state = cls(fd)
        weakref.finalize(state, _close_if, fd, os.fstat(fd).st_ino)
        return state

    @classmethod
    def adopt(cls, fd: int) -> KeptState:
        """That of a daemon that is gone. Unsupported if another version of ckptfs has made it, Corrupt if it
        is none, or damaged."""
        try:
            head = os.pread(fd, _HEAD.size, 0)
        except OSError as e:
            raise Corrupt(f"what was kept of the session cannot be read: {e.strerror}") from None
        if len(head) != _HEAD.size or not head.startswith(_MAGIC):
            raise Corrupt("what was kept of the session is not a session's state")
        _, layout, _, _ = _HEAD.unpack(head)
        if layout not in _READABLE:
            raise Unsupported(f"what was kept of the session has layout {layout}, this is {LAYOUT}")
        try:
            state = cls(fd)
            # From here on there may be notes that who knows the layout of before only cannot read.
            state._head[_LAYOUT_AT] = LAYOUT.to_bytes(2, "little")
            return state
        except (OSError, ValueError, struct.error) as e:
            raise Corrupt(f"what was kept of the session cannot be read: {e}") from None

    def close(self) -> None:
        """Let go of the file; it stays as long as somebody else keeps it."""
        os.close(self.fd)

    @property
    def negotiated(self) -> Negotiated:
        """How the session was begun."""
        *_, length = _HEAD.unpack_from(self._head)
        try:
            return msgspec.msgpack.decode(self._head[_HEAD.size : _HEAD.size + length], type=Negotiated)
        except (msgspec.DecodeError, ValueError) as e:
            raise Corrupt(f"what was kept of the session cannot be read: {e}") from None

    @negotiated.setter
    def negotiated(self, negotiated: Negotiated) -> None:
        encoded = msgspec.msgpack.encode(negotiated)
        assert _HEAD.size + len(encoded) <= PAGE_BYTES, "two paths and two short messages"
        self._head[_HEAD.size : _HEAD.size + len(encoded)] = encoded
        self._head[: _HEAD.size] = _HEAD.pack(_MAGIC, LAYOUT, 0, len(encoded))

    def count(self, kind: int, key: int) -> int:
        """How often a node is held (HELD), or a handle is open (HANDLE)."""
        if kind == Kind.HELD and key < FIRST_VIRTUAL_INO:
            return self._words_of(key)[ino_of(key)]
        value = self.notes.get(Kind(kind), key)
        return 0 if value is None else int.from_bytes(value, "little")

    def set_count(self, kind: int, key: int, count: int) -> None:
        """Change a count."""
        if kind == Kind.HELD and key < FIRST_VIRTUAL_INO:
            self._words_of(key)[ino_of(key)] = count
        elif count:
            self.notes.put(Kind(kind), key, _U64.pack(count))
        else:
            self.notes.delete(Kind(kind), key)

    def is_held(self, ino: int) -> bool:
        """Whether the kernel holds a live inode, or somebody has it open."""
        nodes = (ino, ino | SECOND_NODE)
        return any(self.count(Kind.HELD, node) or self.is_open(node) for node in nodes)

    def is_open(self, node: int) -> bool:
        """Whether anybody has a node open."""
        return any(self.count(Kind.HANDLE, node << 1 | write) for write in (0, 1))

    def is_written_behind(self, ino: int) -> bool:
        """Whether the kernel may hold cached pages of an inode that it wrote behind its own back."""
        return bool(self._written[ino >> 6] >> (ino & 63) & 1)

    def set_written_behind(self, ino: int, *, written: bool) -> None:
        """Note it, or that it dropped them."""
        bit = 1 << (ino & 63)
        word = self._written[ino >> 6]
        self._written[ino >> 6] = word | bit if written else word & ~bit

    def _words_of(self, node: int) -> Words:
        return self._second if node & SECOND_NODE else self._first


def _close_if(fd: int, inode: int) -> None:
    """Close what is still the file of a state that is gone."""
    try:
        if os.fstat(fd).st_ino == inode:
            os.close(fd)
    except OSError:
        pass  # it was closed
