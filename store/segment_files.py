"""Reading payloads out of segment files: open descriptors, and the check of a chunk's bytes.

One rule: what leaves `read_verified` or `find_bad` as good has been hashed. Whoever wants the only
open descriptor of a segment (for a lease) evicts it here first.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, Place, Unsupported
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.one_bit import mended
from ckptfs.store.segment_format import Codec, Location, SegmentIndex, decode_idx, segment_paths

_OPEN_FILES = 256
_RUN_BYTES = 256 << 10
_LARGE_BYTES = 1 << 20
_MAX_OFFSET = (1 << 62) - 1
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
            found = self._disk.pread(fd, length, offset) if is_there and offset <= _MAX_OFFSET else b""
        except OSError as e:
            raise _unreadable(e, Place(segment_paths(segment)[in_idx], offset)) from e
        if len(found) != length:
            place = Place(segment_paths(segment)[in_idx], offset)
            raise Corrupt(f"{len(found)} bytes where {length} were stored", place=place)
        return found

    def read_into(self, location: Location, view: memoryview) -> bool:
        """Fill `view` from where a payload begins; False if that cannot be read to the end."""
        key = (location.segment, location.in_idx)
        if location.offset > _MAX_OFFSET:
            return False
        try:
            fd = self._open.get(key)
            fd = self._add(key) if fd is None else fd
            return self._disk.read_into(fd, view, location.offset) == len(view)
        except OSError as e:
            if e.errno in _UNREADABLE:
                return False
            raise

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
    if error.errno in _UNREADABLE:
        return Corrupt(f"a segment cannot be read: {error.strerror}", place=place)
    return error


@dataclass(frozen=True, slots=True)
class Bad:
    """A chunk that a check found wrong, and what stands in its place (None: unreadable)."""

    chunk: ChunkId
    location: Location
    got: ChunkId | None


def find_bad(disk: Disk, suspects: Iterable[tuple[ChunkId, Location]]) -> list[Bad]:
    """Read and hash each chunk through descriptors of its own; any thread may call.

    Neighbours are read together, into a buffer that stays in the processor's cache: so reading costs
    little beside hashing. Sort `suspects` by place.
    """
    files = SegmentFiles(disk)
    buffer = memoryview(bytearray(_RUN_BYTES))
    bad: list[Bad] = []
    try:
        for run in _runs(suspects):
            first, last = run[0][1], run[-1][1]
            length = last.offset + last.stored - first.offset
            is_small = first.codec == Codec.RAW and length <= len(buffer)
            if is_small and files.read_into(first, buffer[:length]):
                bad += _wrong_in(run, buffer)
            else:
                bad += _wrong_one_by_one(files, run)
    finally:
        files.close()
    return bad


Suspect = tuple[ChunkId, Location]


def _runs(suspects: Iterable[Suspect]) -> Iterator[list[Suspect]]:
    """Raw neighbours of one file; a run is at most _RUN_BYTES long unless it is a single chunk."""
    run: list[Suspect] = []
    for chunk, one in suspects:
        if run:
            first, last = run[0][1], run[-1][1]
            follows = (one.segment, one.flags, one.offset) == (
                last.segment,
                last.flags,
                last.offset + last.stored,
            )
            is_raw = one.codec == last.codec == Codec.RAW
            if not (follows and is_raw and one.offset + one.stored - first.offset <= _RUN_BYTES):
                yield run
                run = []
        run.append((chunk, one))
    if run:
        yield run


def _wrong_in(run: Sequence[Suspect], view: memoryview) -> list[Bad]:
    """Those chunks of a run that are not what `view`, which holds its bytes, has in their place."""
    start = run[0][1].offset
    wrong = []
    for chunk, one in run:
        at = one.offset - start
        got = chunk_id(view[at : at + one.stored])
        if got != chunk:
            wrong.append(Bad(chunk, one, got))
    return wrong


def _wrong_one_by_one(files: SegmentFiles, run: Sequence[Suspect]) -> list[Bad]:
    wrong = []
    for chunk, one in run:
        try:
            files.read_verified(chunk, one)
        except Corrupt as e:
            wrong.append(Bad(chunk, one, None if e.got is None else ChunkId(e.got)))
    return wrong
