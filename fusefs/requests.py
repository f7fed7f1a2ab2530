"""The kernel's requests by number: which one is being answered, and what was done of one that comes again.

One rule: what may not be done twice is recorded with the request's number, in the same step as it is done;
nothing waits between that and the answer. So of the requests that a daemon leaves unanswered, at most one was
done, and a kept record of 128 is not written over before its request, which comes again first, is answered.

Counts that the kernel only takes over with an answer (how often it holds a node) are taken back when their
request comes again. Source: SEMANTICS.md, "When the daemon dies"; the kernel's FUSE_NOTIFY_RESEND.
"""

from __future__ import annotations

import struct
from contextvars import ContextVar
from dataclasses import dataclass

from ckptfs.fusefs import REPLIES
from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_state import Count, KeptState
from ckptfs.store.errors import Corrupt
from ckptfs.store.index import Change, Index, Table

_AGAIN = 1 << 63
_RECORDS = 128
_ROW = struct.Struct(">QQQ")


@dataclass(frozen=True, slots=True)
class _Handled:
    """A request: its number, and of one that comes again what was made, and which handle was counted."""

    unique: int
    comes_again: bool = False
    made: int | None = None
    handle: int | None = None


_NONE = _Handled(0)
_HANDLED: ContextVar[_Handled] = ContextVar("ckptfs_request", default=_NONE)


def read_rows(index: Index) -> list[tuple[int, int, int]]:
    """The rows of requests that were done: sequence, number, inode. Corrupt if one of them is none."""
    rows = [row for _, row in index.scan(Table.REQUEST)]
    if any(len(row) != _ROW.size for row in rows):
        raise Corrupt("the index has a request that cannot be read, so what was done might be done twice")
    return [_ROW.unpack(row) for row in rows]


class Requests:
    """Belongs to the trio thread; which request is being answered belongs to the task that answers it.

    `_made` and `_moved` are what an earlier daemon did for requests that may come again. They do so before
    any other comes, so with the first other one both are let go.
    """

    def __init__(self, state: KeptState) -> None:
        self._state = state
        self._made: dict[int, int] = {}
        self._moved: dict[int, list[Count]] = {}
        self._counting = 0
        self._sequence = 0

    def begin_anew(self, index: Index) -> None:
        """A new session, which numbers its requests from the start."""
        change = Change()
        for key, _ in index.scan(Table.REQUEST):
            change.delete(Table.REQUEST, key)
        index.apply(change)

    def resume(self, index: Index) -> None:
        """Go on with the session of a daemon that died."""
        for sequence, unique, ino in read_rows(index):
            self._made[unique] = ino
            self._sequence = max(self._sequence, sequence)
        moved = list(self._state.counted)
        if moved and self._state.count(moved[-1].kind, moved[-1].key) == moved[-1].before:
            self._state.counted.drop_last()  # the daemon died between noting and moving it
            moved.pop()
        for count in moved:
            if count.unique:
                self._moved.setdefault(count.unique, []).append(count)

    def begin(self) -> None:
        """A handler begins: note which request it answers."""
        number = REPLIES.request() if REPLIES is not None else 0
        unique = number & ~_AGAIN
        if number & _AGAIN:
            _HANDLED.set(self._taken_up(unique))
            return
        if self._made or self._moved:
            self._made, self._moved = {}, {}
        _HANDLED.set(_Handled(unique))

    @property
    def made(self) -> int | None:
        """What `record` was told of this request, if that was done and its answer got lost."""
        return _HANDLED.get().made

    @property
    def replaces(self) -> bool:
        """Whether this request, whose handler has not waited yet, is a setxattr with XATTR_REPLACE."""
        return REPLIES is not None and bool(REPLIES.replaces())

    @property
    def comes_again(self) -> bool:
        """Whether an earlier daemon has read this request, too."""
        return _HANDLED.get().comes_again

    @property
    def handle(self) -> int | None:
        """The handle that was opened or let go for it, if that was done and its answer got lost."""
        return _HANDLED.get().handle

    def record(self, change: Change, ino: int) -> None:
        """Have `change` say that this request is done; `ino` is what it made or took away."""
        unique = _HANDLED.get().unique
        if unique:
            self._sequence += 1
            key = (self._sequence % _RECORDS).to_bytes(8, "big")
            change.put(Table.REQUEST, key, _ROW.pack(self._sequence, unique, ino))

    def is_open(self, fh: int) -> bool:
        """Whether a file handle is open."""
        return self._state.count(Kind.HANDLE, fh) > 0

    def add(self, kind: Kind, key: int) -> None:
        """Move a count up by 1 for this request; its answer follows in the same step."""
        self._move(kind, key, 1)

    def take(self, kind: Kind, key: int) -> None:
        """Move it down by 1, likewise."""
        self._move(kind, key, -1)

    def _move(self, kind: Kind, key: int, by: int) -> None:
        before, unique = self._state.count(kind, key), _HANDLED.get().unique
        if unique:
            if unique != self._counting and not self._moved:
                self._state.counted.clear()
            self._counting = unique
            self._state.counted.add(Count(unique, kind, key, before))
        self._state.set_count(kind, key, before + by)

    def _taken_up(self, unique: int) -> _Handled:
        moved = self._moved.get(unique, [])
        held = [count for count in moved if count.kind == Kind.HELD]
        if held:
            # A death in between leaves the counts too high: what has no name then stays until the unmount.
            self._state.counted.void(unique, Kind.HELD)
            self._moved[unique] = [count for count in moved if count.kind != Kind.HELD]
        for count in held:
            now = self._state.count(Kind.HELD, count.key)
            self._state.set_count(Kind.HELD, count.key, max(now - 1, 0))
        handle = next((count.key for count in moved if count.kind == Kind.HANDLE), None)
        return _Handled(unique, True, self._made.get(unique), handle)
