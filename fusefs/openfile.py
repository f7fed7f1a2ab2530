"""One inode that somebody has open: its descriptor, and how its bytes are put together.

One rule: an open inode has one staging descriptor at most, shared by all its handles, so every
reader sees every write. Nothing here awaits: one read or write is one step of the event loop.

An *overlay* is a stored file that is being changed: blocks of 4 KiB that were written are in the
staging file, the rest is in the store. A block is copied up before a part of it is written, so a
block is wholly in one place, and the cost of a write follows the bytes written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from ckptfs.fusefs.extents import Extents
from ckptfs.store.disk import BLOCK_BYTES, Disk, ShortWrite
from ckptfs.store.inode import Content
from ckptfs.store.recipe import EMPTY, Recipe
from ckptfs.store.segments import Segments

LOG_WRITE_BYTES = 64 << 10
_COPY_BYTES = 8 << 20
LOG_SAMPLE_BYTES = 256 << 10
_TEXT_CONTROL = frozenset(range(32)) - frozenset(b"\t\n\r\x1b\f")
_LOG_NAMES = (b".log", b".out", b".err", b".txt", b".csv", b".jsonl")


@dataclass(slots=True)
class Growth:
    """How a file was written through its present opens: does it look like a log?"""

    end: int
    appends_only: bool = True
    wrote: bool = False
    first: bytes = b""
    mtime_ns: int = 0

    def note(self, offset: int, payload: bytes) -> None:
        """Account one write."""
        self.wrote = True
        if offset != self.end or len(payload) > LOG_WRITE_BYTES:
            self.appends_only = False
        if offset == 0:
            self.first = bytes(payload[:64])
        self.end = max(self.end, offset + len(payload))

    def sample(self, size: int, mtime_ns: int, first: bytes, ticks: float = 1.0) -> bool:
        """Account what the kernel wrote by itself since the last sample; True if there was any.

        A change of time without growth is an overwrite, and much growth at once is no log.
        """
        if (size, mtime_ns) == (self.end, self.mtime_ns):
            return False
        grown = size - self.end
        if grown > LOG_SAMPLE_BYTES * max(1.0, ticks) or (grown <= 0 and self.mtime_ns):
            self.appends_only = False
        self.end, self.mtime_ns, self.wrote = size, mtime_ns, True
        self.first = self.first or first
        return True

    def is_log(self, name: bytes) -> bool:
        """Whether this only ever grew by small appends and is a log by name or by what it holds.

        A slow save also appends; so what begins with binary bytes is a log only by its name.
        """
        if not self.appends_only:
            return False
        if b"tfevents" in name or name.endswith(_LOG_NAMES):
            return True
        return bool(self.first) and not name.endswith(b".json") and not _TEXT_CONTROL.intersection(self.first)


@dataclass(slots=True)
class Ingesting:
    """A staging file that is being ingested: set `cancel`, then wait for `done`, to write to it."""

    cancel: bool = False
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class OpenFile:
    """State of one open inode. Touched only by the trio thread.

    `content` mirrors the inode record, unless the record was changed behind it (`stale`). `fd` is
    the staging descriptor or -1; `writable` says how it was opened. `extents` is there for an
    overlay only.
    """

    ino: int
    content: Content
    readers: int = 0
    writers: int = 0
    fd: int = -1
    writable: bool = False
    size_stored: int = 0
    recipe: Recipe = EMPTY
    extents: Extents | None = None
    growth: Growth = field(default_factory=lambda: Growth(0))
    stale: bool = False
    unprivileged: bool = False
    privileges_checked: bool = False


def load_overlay(disk: Disk, open_file: OpenFile, base: Recipe) -> None:
    """Read from the staging file's own holes which blocks of an overlay it holds."""
    size = disk.fstat(open_file.fd).st_size
    open_file.recipe = base
    open_file.extents = Extents(disk.data_extents(open_file.fd, -(-size // BLOCK_BYTES) * BLOCK_BYTES))


def base_limit(disk: Disk, open_file: OpenFile) -> int:
    """How much of the base an overlay still shows: a truncate may have ended before its record."""
    return min(open_file.content.base_limit, open_file.recipe.size, disk.fstat(open_file.fd).st_size)


def read_open(disk: Disk, segments: Segments, open_file: OpenFile, offset: int, length: int) -> bytes:
    """Up to `length` bytes at `offset`, fewer only at the end of the file; Corrupt as Segments."""
    if not open_file.content.staging:
        return segments.read_file(open_file.recipe, offset, length)
    if open_file.extents is None:
        return disk.pread(open_file.fd, length, offset)
    end = min(offset + length, disk.fstat(open_file.fd).st_size)
    parts = []
    for start, stop, written in open_file.extents.split(offset, max(offset, end)):
        if written:
            part = disk.pread(open_file.fd, stop - start, start)
            parts.append(part.ljust(stop - start, b"\0"))
        else:
            parts.append(_from_base(disk, segments, open_file, start, stop))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_open(disk: Disk, segments: Segments, open_file: OpenFile, offset: int, payload: bytes) -> int:
    """Write `payload` at `offset`; returns its length or raises OSError with nothing acknowledged: what
    is there then is a first part of `payload`, or nothing of it.

    Durable when: the staging file and its name are synced (fsync), and not before.
    """
    stop = offset
    try:
        if open_file.extents is not None:
            _copy_up(disk, segments, open_file, offset)
            _copy_up(disk, segments, open_file, offset + len(payload))
        try:
            written = disk.pwrite(open_file.fd, payload, offset)
        except ShortWrite as e:
            stop += e.written
            raise
    except OSError:
        _take_back(disk, segments, open_file, offset, stop, offset + len(payload))
        raise
    if open_file.extents is not None:
        first = offset // BLOCK_BYTES * BLOCK_BYTES
        last = -(-(offset + written) // BLOCK_BYTES) * BLOCK_BYTES
        open_file.extents.add(first, last)
    open_file.growth.note(offset, payload)
    return written


def truncate_open(disk: Disk, segments: Segments, open_file: OpenFile, size: int) -> None:
    """Set the length of a file that has a writable staging file."""
    shrinks = size < disk.fstat(open_file.fd).st_size
    try:
        if open_file.extents is not None and shrinks:
            _copy_up(disk, segments, open_file, size)
        disk.truncate(open_file.fd, size)
    except OSError:
        _take_back(disk, segments, open_file, size, size, size)
        raise
    if open_file.extents is not None and shrinks:
        open_file.extents.clip(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
    open_file.growth.wrote = True
    open_file.growth.appends_only = open_file.growth.appends_only and size == open_file.growth.end
    open_file.growth.end = size


def copy_sparse(disk: Disk, source: int, target: int) -> None:
    """Copy a staging file into an empty one: bytes, holes and times. Blocks: for a thread."""
    shown = disk.fstat(source)
    disk.truncate(target, shown.st_size)
    for offset, length in disk.data_extents(source, shown.st_size):
        for at in range(offset, offset + length, _COPY_BYTES):
            part = disk.pread(source, min(_COPY_BYTES, offset + length - at), at)
            disk.pwrite(target, part, at)
    disk.set_times(target, shown.st_atime_ns, shown.st_mtime_ns)


def _from_base(disk: Disk, segments: Segments, open_file: OpenFile, start: int, stop: int) -> bytes:
    limit = base_limit(disk, open_file)
    shown = b""
    if start < limit:
        shown = segments.read_file(open_file.recipe, start, min(stop, limit) - start)
    return shown.ljust(stop - start, b"\0")


def _take_back(
    disk: Disk, segments: Segments, open_file: OpenFile, offset: int, stop: int, meant: int
) -> None:
    """A write to an overlay that was meant to end at `meant` ended at `stop` (disk full): the blocks that
    it has made must not hide what the base has beside it. They are filled from there, which needs no room."""
    if open_file.extents is None:
        return
    size = disk.fstat(open_file.fd).st_size
    for extent, length in disk.data_extents(open_file.fd, min(meant + BLOCK_BYTES, size)):
        for block in range(extent // BLOCK_BYTES * BLOCK_BYTES, extent + length, BLOCK_BYTES):
            if open_file.extents.contains(block):
                continue
            right = bytearray(_from_base(disk, segments, open_file, block, min(block + BLOCK_BYTES, size)))
            first, last = max(offset, block), min(stop, block + len(right))
            if first < last:
                right[first - block : last - block] = disk.pread(open_file.fd, last - first, first)
            disk.pwrite(open_file.fd, right, block)
            open_file.extents.add(block, block + BLOCK_BYTES)


def _copy_up(disk: Disk, segments: Segments, open_file: OpenFile, edge: int) -> None:
    """Make the block around `edge` wholly the staging file's, if a write would own part of it."""
    assert open_file.extents is not None
    start = edge // BLOCK_BYTES * BLOCK_BYTES
    if edge == start or open_file.extents.contains(start) or start >= base_limit(disk, open_file):
        return
    stop = min(start + BLOCK_BYTES, disk.fstat(open_file.fd).st_size)
    if stop > start:
        disk.pwrite(open_file.fd, _from_base(disk, segments, open_file, start, stop), start)
        open_file.extents.add(start, start + BLOCK_BYTES)
