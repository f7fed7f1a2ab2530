"""Reading payloads out of segment files: open descriptors, and the check of a chunk's bytes.

One rule: whoever wants the only open descriptor of a segment (for a lease) evicts it here first. What is
read is what is stored; `chunk_files` decodes it.
"""

from __future__ import annotations

import errno
import mmap
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, Place
from ckptfs.store.hashing import Buffer, chunk_id
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.mapped_file import MappedFile
from ckptfs.store.one_bit import mended
from ckptfs.store.segment_format import Location, SegmentIndex, decode_idx, segment_paths

_OPEN_FILES = 256
_LARGE_BYTES = 1 << 20
_MAP_BYTES = 64 << 20
MAX_OFFSET = (1 << 62) - 1
_UNREADABLE = (errno.ENOENT, errno.EIO)


def place_of(location: Location) -> Place:
    """The place as error messages name it."""
    return Place(segment_paths(location.segment)[location.in_idx], location.offset)


def read_idx(disk: Disk, number: int) -> SegmentIndex:
    """The description of a segment, from its `.idx`; Corrupt if it is damaged or another's.

    One flipped bit is put right in what is returned; the file is mended by a scrub.
    """
    return read_idx_bytes(disk, number)[0]


def read_idx_bytes(disk: Disk, number: int) -> tuple[SegmentIndex, bool]:
    """As read_idx, and whether the file itself is right."""
    path = segment_paths(number)[1]
    is_right = True
    try:
        encoded = disk.read_file(path)
        try:
            index = decode_idx(encoded)
        except Corrupt:
            right, is_right = mended(encoded), False
            if right is None:
                raise
            index = decode_idx(right)
    except Corrupt as e:
        raise Corrupt(str(e), place=Place(path, 0)) from None
    except FileNotFoundError:
        raise Corrupt(f"segment {number} has no .idx", place=Place(path, 0)) from None
    except OSError as e:
        raise _unreadable(e, Place(path, 0)) from e
    if index.number != number:
        raise Corrupt(f"an .idx describes segment {index.number}", place=Place(path, 0))
    return index, is_right


class SegmentFiles:
    """Open read descriptors of segments, the least recently used closed first. One thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._open: OrderedDict[tuple[int, bool], int] = OrderedDict()
        self._shown: dict[tuple[int, bool], mmap.mmap] = {}
        self._mapping: MappedFile | None = None
        self._mapped_key: tuple[int, bool] | None = None
        self._mapped_start = self._mapped_end = 0

    def pread(self, segment: int, in_idx: bool, length: int, offset: int) -> bytes:
        """Exactly `length` bytes; Corrupt if the file is gone, too short or unreadable."""
        key = (segment, in_idx)
        try:
            fd = self._open.get(key)
            if fd is None:
                fd = self._add(key)
            else:
                self._open.move_to_end(key)
            # A place that rotted must not make us reserve gigabytes for it.
            is_there = length < _LARGE_BYTES or offset + length <= self._disk.fstat(fd).st_size
            found = self._disk.pread(fd, length, offset) if is_there and offset <= MAX_OFFSET else b""
        except OSError as e:
            raise _unreadable(e, Place(segment_paths(segment)[in_idx], offset)) from e
        if len(found) != length:
            place = Place(segment_paths(segment)[in_idx], offset)
            raise Corrupt(f"{len(found)} bytes where {length} were stored", place=place)
        return found

    def fill(self, view: memoryview, segment: int, in_idx: bool, offset: int) -> None:
        """Read exactly as many bytes as `view` takes; Corrupt as `pread`."""
        place = Place(segment_paths(segment)[in_idx], offset)
        try:
            fd = self._fd_of((segment, in_idx))
            have = self._disk.read_into(fd, view, offset) if offset <= MAX_OFFSET else 0
        except OSError as e:
            raise _unreadable(e, place) from e
        if have != len(view):
            raise Corrupt(f"{have} bytes where {len(view)} were stored", place=place)

    def show(self, segment: int, in_idx: bool, length: int, offset: int) -> memoryview:
        """The bytes in a mapping of the file, uncopied; Corrupt if it is gone or too short.

        For a system call, and nobody else (Disk.map_for_calls). To be let go before the next `evict`.
        """
        key, place = (segment, in_idx), Place(segment_paths(segment)[in_idx], offset)
        try:
            fd = self._fd_of(key)
            mapping = self._shown.get(key)
            if mapping is None:
                mapping = self._shown[key] = self._disk.map_for_calls(fd)
            # What was cut off since is zeros to the end of its page in a mapping.
            size = min(self._disk.fstat(fd).st_size, len(mapping))
        except ValueError:
            size, mapping = 0, None
        except OSError as e:
            raise _unreadable(e, place) from e
        if mapping is None or offset + length > size:
            raise Corrupt(f"{max(0, size - offset)} bytes where {length} were stored", place=place)
        return memoryview(mapping)[offset : offset + length]

    def read_into(self, location: Location, view: memoryview) -> bool:
        """Fill `view` from where a payload begins; False if that cannot be read to the end."""
        if location.offset > MAX_OFFSET:
            return False
        try:
            return self._disk.read_into(
                self._fd_of((location.segment, location.in_idx)), view, location.offset
            ) == len(view)
        except OSError as e:
            if e.errno in _UNREADABLE:
                return False
            raise

    def descriptor(self, location: Location) -> int:
        """The open file in which a payload lies; it stays open until the next call of anything here."""
        return self._fd_of((location.segment, location.in_idx))

    def loaded(self, location: Location, length: int) -> memoryview | None:
        """`length` bytes from where a payload begins, as `MappedFile.loaded` gives them; None if it does not.
        To be released before the next call.

        The mapping stays for what lies behind: each new one takes as long as hashing 200 KiB.
        """
        key, start = (location.segment, location.in_idx), location.offset
        try:
            if self._mapped_key != key or not self._mapped_start <= start <= self._mapped_end - length:
                self._map(key, start, length)
            return None if self._mapping is None else self._mapping.loaded(length, start)
        except OSError:
            return None  # who reads it piece by piece finds out why

    def _map(self, key: tuple[int, bool], start: int, length: int) -> None:
        self._unmap()
        fd = self._fd_of(key)
        end = min(self._disk.fstat(fd).st_size, start + max(length, _MAP_BYTES))
        if end - start >= length:
            self._mapping = self._disk.map(fd, end - start, start)
            self._mapped_key, self._mapped_start, self._mapped_end = key, start, end

    def _unmap(self) -> None:
        mapping, self._mapping, self._mapped_key = self._mapping, None, None
        if mapping is not None:
            mapping.close()

    def fill_verified(self, view: memoryview, chunk: ChunkId, location: Location) -> None:
        """Read a raw chunk into `view`, which takes all of it. After Corrupt it holds anything."""
        self.fill(view, location.segment, location.in_idx, location.offset)
        check_payload(chunk, location, view)

    def evict(self, segment: int) -> None:
        """Close what is open of a segment."""
        if self._mapped_key is not None and self._mapped_key[0] == segment:
            self._unmap()
        for key in ((segment, False), (segment, True)):
            fd = self._open.pop(key, None)
            if fd is not None:
                self._close(key, fd)

    def close(self) -> None:
        """Close everything."""
        self._unmap()
        while self._open:
            self._close(*self._open.popitem())

    def _close(self, key: tuple[int, bool], fd: int) -> None:
        mapping = self._shown.pop(key, None)
        if mapping is not None:
            # Refused while somebody holds a view of it: then it goes with that.
            with suppress(BufferError):
                mapping.close()
        self._disk.close(fd)

    def _fd_of(self, key: tuple[int, bool]) -> int:
        fd = self._open.get(key)
        if fd is None:
            return self._add(key)
        self._open.move_to_end(key)
        return fd

    def _add(self, key: tuple[int, bool]) -> int:
        fd = self._disk.open_read(segment_paths(key[0])[key[1]])
        self._open[key] = fd
        if len(self._open) > _OPEN_FILES:
            self._close(*self._open.popitem(last=False))
        return fd


def check_payload(chunk: ChunkId, location: Location, payload: Buffer) -> None:
    """Corrupt unless these are all bytes of the chunk, which were read at `location`."""
    got = chunk_id(payload)
    if got != chunk:
        what = f"chunk {cid_text(chunk)} does not match its bytes"
        raise Corrupt(what, expected=chunk, got=got, place=place_of(location))


def _unreadable(error: OSError, place: Place) -> Corrupt | OSError:
    if error.errno in _UNREADABLE:
        return Corrupt(f"a segment cannot be read: {error.strerror}", place=place)
    return error


@dataclass(frozen=True, slots=True)
class Bad:
    """A chunk that a check found wrong, and what stands in its place (None: unreadable). `cause` is where the
    damage lies, if that is not there but in a chunk that it is encoded against."""

    chunk: ChunkId
    location: Location
    got: ChunkId | None
    cause: Place | None = None

    @property
    def place(self) -> Place:
        """Where the damage lies."""
        return self.cause or place_of(self.location)


def bad_of(chunk: ChunkId, location: Location, error: Corrupt) -> Bad:
    """What reading a chunk came to."""
    got = None if error.got is None else ChunkId(error.got)
    cause = error.place if error.place != place_of(location) else None
    return Bad(chunk, location, got, cause)
