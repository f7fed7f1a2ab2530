"""Writing segments: a pack of many payloads, or a staging file adopted as it is.

One rule: when a function here returns a Built, its bytes and names are on the disk and nothing
refers to them yet; whoever does not commit it discards it, and a crash leaves an orphan that
recovery sweeps. The payloads of a Built may enter the chunk table, no others.

Source: FORMAT.md, "Segments", write order. Blocking, for a worker thread.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckptfs.store.cutting import Fresh
from ckptfs.store.disk import Disk
from ckptfs.store.errors import NoSpace
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import (
    INLINE_START,
    SEGMENTS_PATH,
    LocationFlag,
    Row,
    SegmentFacts,
    SegmentIndex,
    SegmentKind,
    encode_idx,
    segment_dir,
    segment_paths,
)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_JOIN_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Built:
    """A segment that is durable and not yet committed. `punch_due`: it holds unnamed ranges."""

    index: SegmentIndex
    punch_due: bool = False

    def facts(self) -> SegmentFacts:
        """What the segment table is to say, but for the counts: they are those of the chunk table."""
        one = self.index
        return SegmentFacts(one.kind, one.file_bytes, 0, 0, one.created_ns, one.created_ns, self.punch_due)


class SyncFailed(OSError):
    """The sync of a staging file failed: its bytes are not to be believed, whatever the next one says."""


@contextmanager
def full_disk_is_no_space() -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into NoSpace."""
    try:
        yield
    except OSError as e:
        if e.errno not in _NO_ROOM:
            raise
        raise NoSpace(f"the disk below the store is full: {e.strerror}") from e


class PackWriter:
    """Writes one packed segment. The file is made at the first append; one task at a time."""

    def __init__(self, disk: Disk, number: int, created_ns: int) -> None:
        self._disk = disk
        self._created_ns = created_ns
        self._fd = -1
        self._rows: list[Row] = []
        self.number = number
        self.payload_bytes = 0

    def append(self, chunks: Sequence[Fresh]) -> None:
        """Write payloads behind the ones before. Durable when: `seal` returned.

        Raises NoSpace; the caller then discards the pack.
        """
        if not chunks:
            return
        with full_disk_is_no_space():
            if self._fd < 0:
                make_segment_dir(self._disk, self.number)
                self._fd = self._disk.create(segment_paths(self.number)[0])
            at = self.payload_bytes
            for payload in _joined(chunks):
                self._disk.pwrite(self._fd, payload, at)
                at += len(payload)
        for one in chunks:
            self._rows.append(Row(one.chunk, self.payload_bytes, one.length, one.length))
            self.payload_bytes += one.length

    def seal(self) -> Built:
        """Sync the payloads, write and sync the `.idx`. Durable when: this returned."""
        assert self._fd >= 0, "an empty pack is not sealed"
        index = SegmentIndex(
            self.number, SegmentKind.PACKED, self._created_ns, self.payload_bytes, tuple(self._rows)
        )
        with full_disk_is_no_space():
            self._disk.sync(self._fd)
            self._close()
            write_idx(self._disk, index)
        return Built(index)

    def discard(self) -> None:
        """Remove what was written."""
        self._close()
        remove_segment_files(self._disk, self.number)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._disk.close(fd)


@dataclass(frozen=True, slots=True)
class Adoption:
    """A staging file that is to become segment `number`, with the chunks in it that are new.

    `inline` is the recipe that goes into the `.idx`, unless it is stored already.
    """

    number: int
    created_ns: int
    path: str
    file_bytes: int
    rows: Sequence[Row]
    inline: Fresh | None
    has_duplicates: bool


def adopt(disk: Disk, fd: int, plan: Adoption) -> Built:
    """Sync the staging file that `fd` is open on, give it its name as a segment, write the `.idx`.

    The staging name stays: it goes once the commit is synced. Raises SyncFailed, NoSpace or another
    OSError; then the segment's names are gone again.
    """
    rows = [*plan.rows]
    if plan.inline is not None:
        length = plan.inline.length
        rows.append(Row(plan.inline.chunk, INLINE_START, length, length, flags=LocationFlag.IN_IDX))
    inline = bytes(plan.inline.payload) if plan.inline is not None else b""
    kind = SegmentKind.ADOPTED
    index = SegmentIndex(plan.number, kind, plan.created_ns, plan.file_bytes, tuple(rows), inline)
    try:
        disk.sync(fd)
    except OSError as e:
        raise SyncFailed(*e.args) from e
    with full_disk_is_no_space():
        make_segment_dir(disk, plan.number)
        try:
            disk.link(plan.path, segment_paths(plan.number)[0])
            write_idx(disk, index)
        except OSError:
            remove_segment_files(disk, plan.number)
            raise
    return Built(index, plan.has_duplicates)


def write_idx(disk: Disk, index: SegmentIndex) -> None:
    """Write or replace an `.idx`. Durable, and with it the segment's name: when this returned."""
    disk.write_file(segment_paths(index.number)[1], encode_idx(index))


def make_segment_dir(disk: Disk, number: int) -> None:
    """Make the folder of a segment. Durable when: this returned."""
    folder = segment_dir(number)
    if disk.exists(folder):
        return
    is_first = not disk.exists(SEGMENTS_PATH)
    disk.make_dir(folder)
    try:
        disk.sync_dir(SEGMENTS_PATH)
        if is_first:
            disk.sync_dir("")
    except OSError:
        disk.remove_tree(folder)  # a folder that is there counts as synced
        raise


def remove_segment_files(disk: Disk, number: int) -> None:
    """Remove a segment's names, the `.idx` first: a payload file without one is an orphan."""
    seg, idx = segment_paths(number)
    for path in (idx + ".tmp", idx, seg):
        if disk.exists(path):
            disk.unlink(path)


def copy_ranges(disk: Disk, fd: int, rows: Sequence[Row], pack: PackWriter) -> list[ChunkId]:
    """Append the chunks at `rows` of the file `fd` to a pack.

    Returns those whose bytes are no longer what was hashed; the caller gives up then.
    """
    changed: list[ChunkId] = []
    for row in rows:
        payload = disk.pread(fd, row.stored, row.offset)
        if chunk_id(payload) != row.chunk:
            changed.append(row.chunk)
        else:
            pack.append([Fresh(row.chunk, 0, len(payload), payload)])
    return changed


def _joined(chunks: Sequence[Fresh]) -> Iterator[bytes | memoryview]:
    """The payloads in order, small neighbours joined so that a pack of tiny files is few writes."""
    small: list[bytes | memoryview] = []
    for one in chunks:
        if one.length < _JOIN_BYTES:
            small.append(one.payload)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield one.payload
    if small:
        yield b"".join(small)
