"""Reading payloads out of segment files: open descriptors, and the check of a chunk's bytes.

One rule: what leaves `read_verified` or `find_bad` as good has been hashed. Whoever wants the only
open descriptor of a segment (for a lease) evicts it here first.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, Place, Unsupported
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.segment_format import Codec, Location, SegmentIndex, decode_idx, segment_paths

_OPEN_FILES = 256


def place_of(location: Location) -> Place:
    """The place as error messages name it."""
    return Place(segment_paths(location.segment)[location.in_idx], location.offset)


def read_idx(disk: Disk, number: int) -> SegmentIndex:
    """The description of a segment, from its `.idx`; Corrupt if it is damaged or another's."""
    path = segment_paths(number)[1]
    try:
        index = decode_idx(disk.read_file(path))
    except Corrupt as e:
        raise Corrupt(str(e), place=Place(path, 0)) from None
    except FileNotFoundError:
        raise Corrupt(f"segment {number} has no .idx", place=Place(path, 0)) from None
    if index.number != number:
        raise Corrupt(f"an .idx describes segment {index.number}", place=Place(path, 0))
    return index


class SegmentFiles:
    """Open read descriptors of segments, the least recently used closed first. One thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: OrderedDict[tuple[int, bool], int] = OrderedDict()

    def pread(self, segment: int, in_idx: bool, length: int, offset: int) -> bytes:
        """Exactly `length` bytes; Corrupt if the file is gone, too short or unreadable."""
        key = (segment, in_idx)
        try:
            fd = self._open.get(key)
            if fd is None:
                fd = self._add(key)
            else:
                self._open.move_to_end(key)
            found = self._disk.pread(fd, length, offset)
        except OSError as e:
            raise _unreadable(e, Place(segment_paths(segment)[in_idx], offset)) from e
        if len(found) != length:
            place = Place(segment_paths(segment)[in_idx], offset)
            raise Corrupt(f"{len(found)} bytes where {length} were stored", place=place)
        return found

    def read_verified(self, chunk: ChunkId, location: Location) -> bytes:
        """A whole chunk, hashed and found right; else Corrupt."""
        stored = self.pread(location.segment, location.in_idx, location.stored, location.offset)
        payload = decode_payload(location, stored)
        got = chunk_id(payload)
        if got != chunk:
            what = f"chunk {cid_text(chunk)} does not match its bytes"
            raise Corrupt(what, expected=chunk, got=got, place=place_of(location))
        return payload

    def evict(self, segment: int) -> None:
        """Close what is open of a segment."""
        for key in ((segment, False), (segment, True)):
            fd = self._open.pop(key, None)
            if fd is not None:
                self._disk.close(fd)

    def close(self) -> None:
        """Close everything."""
        while self._open:
            self._disk.close(self._open.popitem()[1])

    def _add(self, key: tuple[int, bool]) -> int:
        fd = self._disk.open_read(segment_paths(key[0])[key[1]])
        self._open[key] = fd
        if len(self._open) > _OPEN_FILES:
            self._disk.close(self._open.popitem(last=False)[1])
        return fd


def decode_payload(location: Location, stored: bytes) -> bytes:
    """The plain bytes of a stored payload; Unsupported for a codec of a later program."""
    if location.codec != Codec.RAW:
        raise Unsupported(f"a chunk is stored with codec {location.codec}, which this version lacks")
    return stored


def _unreadable(error: OSError, place: Place) -> Corrupt | OSError:
    if error.errno in (errno.ENOENT, errno.EIO):
        return Corrupt(f"a segment cannot be read: {error.strerror}", place=place)
    return error


@dataclass(frozen=True, slots=True)
class Bad:
    """A chunk that a check found wrong, and what stands in its place (None: unreadable)."""

    chunk: ChunkId
    location: Location
    got: ChunkId | None


def find_bad(disk: Disk, suspects: Iterable[tuple[ChunkId, Location]]) -> list[Bad]:
    """Read and hash each chunk through descriptors of its own; any thread may call."""
    files = SegmentFiles(disk)
    bad: list[Bad] = []
    try:
        for chunk, location in suspects:
            try:
                files.read_verified(chunk, location)
            except Corrupt as e:
                got = None if e.got is None else ChunkId(e.got)
                bad.append(Bad(chunk, location, got))
    finally:
        files.close()
    return bad
