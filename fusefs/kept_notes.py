"""Notes in memory that outlives the process: small values by kind and key.

One rule: a note is written behind the last one, and is there once the word that says where the notes end has
been stored. So whoever takes the file over finds every note as it was before or after its last change.

There are two halves; when most of one is out of date, what is valid is written to the other, and the same
word says which of them counts. Source: SEMANTICS.md, "When the daemon dies".
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from enum import IntEnum

from ckptfs.fusefs.kept_words import PAGE_BYTES
from ckptfs.store.errors import Corrupt, NoSpace

HALF_BYTES = 1 << 30
_LEAST_BYTES = 1 << 18
_HEAD = struct.Struct("<BQi")
_SECOND_HALF = 1 << 63
_GONE = -1


class Kind(IntEnum):
    """What a note is about; the numbers are part of the state's layout: a new kind is a new LAYOUT."""

    HANDLE = 1
    """File handle → how often it is open (u64)."""
    BACKING = 2
    """Inode → id of its staging file as a backing file (u64)."""
    SEGMENT = 3
    """Node → id of the segment that is its backing file, segment number (2 × u64)."""
    SPLIT = 4
    """Inode that has two nodes → empty."""
    LEFT = 5
    """Inode → what readers of its first node read."""
    NODE = 6
    """Node of a version → what it is."""
    HELD = 7
    """Node of a version → how often the kernel holds it (u64)."""
    SAVED = 8
    """Node of a version that is open → what it reads."""
    UNPRIVILEGED = 9
    """Inode that another than root has open for writing → empty."""
    FAILED = 10
    """Staging file of which a sync failed → errno (u64)."""
    LETTING_GO = 11
    """0 → the backing id that is being closed (u64)."""
    SUSPECT = 12
    """From layout 2 on. Segment in which a chunk was found bad → empty."""
    DAMAGED = 13
    """From layout 2 on. Segment of which the quarantine has yet to make a copy → empty."""


class Notes:
    """The notes that begin at byte `start` of a file. Belongs to the trio thread."""

    def __init__(self, fd: int, start: int) -> None:
        self._mapped = mmap.mmap(fd, PAGE_BYTES + 2 * HALF_BYTES, offset=start)
        self._words = memoryview(self._mapped)[:8].cast("Q")
        self._kinds: dict[int, dict[int, bytes]] = {kind: {} for kind in Kind}
        self._live_bytes = 0
        self._read()

    def get(self, kind: Kind, key: int) -> bytes | None:
        """The value of a note; None if there is none."""
        return self._kinds[kind].get(key)

    def put(self, kind: Kind, key: int, value: bytes) -> None:
        """Make or replace a note. NoSpace if there are more than fit: then nothing has changed."""
        self._append(_HEAD.pack(kind, key, len(value)) + value)
        self._note(kind, key, value)

    def delete(self, kind: Kind, key: int) -> None:
        """Take a note away, if it is there."""
        if key in self._kinds[kind]:
            self._append(_HEAD.pack(kind, key, _GONE))
            self._note(kind, key, None)

    def items(self, kind: Kind) -> Iterator[tuple[int, bytes]]:
        """(key, value) of all notes of a kind, as they were when this was called."""
        return iter([*self._kinds[kind].items()])

    def _note(self, kind: int, key: int, value: bytes | None) -> None:
        notes = self._kinds[kind]
        before = notes.pop(key, None)
        if before is not None:
            self._live_bytes -= _HEAD.size + len(before)
        if value is not None:
            notes[key] = value
            self._live_bytes += _HEAD.size + len(value)

    def _append(self, frame: bytes) -> None:
        half, end = divmod(self._words[0], _SECOND_HALF)
        if end + len(frame) > max(_LEAST_BYTES, 4 * self._live_bytes) or end + len(frame) > HALF_BYTES:
            half, end = self._compacted(1 - half)
        if end + len(frame) > HALF_BYTES:
            raise NoSpace("the kernel holds more open files and versions than can be kept account of")
        at = PAGE_BYTES + half * HALF_BYTES + end
        self._mapped[at : at + len(frame)] = frame
        self._words[0] = half * _SECOND_HALF + end + len(frame)

    def _compacted(self, half: int) -> tuple[int, int]:
        """Write what is valid to the other half, and let go of this one."""
        begin = PAGE_BYTES + half * HALF_BYTES
        at = begin
        for kind, notes in self._kinds.items():
            for key, value in notes.items():
                frame = _HEAD.pack(kind, key, len(value)) + value
                self._mapped[at : at + len(frame)] = frame
                at += len(frame)
        self._words[0] = half * _SECOND_HALF + at - begin
        self._mapped.madvise(mmap.MADV_REMOVE, PAGE_BYTES + (1 - half) * HALF_BYTES, HALF_BYTES)
        return half, at - begin

    def _read(self) -> None:
        half, end = divmod(self._words[0], _SECOND_HALF)
        at = PAGE_BYTES + half * HALF_BYTES
        if end > HALF_BYTES:
            raise Corrupt(f"what was kept of the session has notes of {end} bytes")
        end += at
        while at < end:
            if end - at < _HEAD.size:
                raise Corrupt("what was kept of the session ends within a note")
            kind, key, length = _HEAD.unpack_from(self._mapped, at)
            at += _HEAD.size
            if kind not in self._kinds:
                raise Corrupt(f"what was kept of the session has a note of kind {kind}")
            if not _GONE <= length <= end - at:
                raise Corrupt(f"what was kept of the session has a note of {length} bytes")
            value = None if length == _GONE else bytes(self._mapped[at : at + length])
            at += max(length, 0)
            self._note(kind, key, value)
