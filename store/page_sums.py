"""Checksums of the index's pages, for LMDB has none: what rots while no daemon runs is found at the start.

One rule: the sums are there only while nobody writes to the index. They are written when it is closed
and removed, durably, before it is opened for writing; so a page that does not match them has rotted.

A page with one flipped bit is put right (one_bit.py). Source: FORMAT.md, "Index".
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import crc64
from ckptfs.store.one_bit import flipped_bit

PAGE_SUMS_PATH = "index/pages"
PAGE_BYTES = 4096
_READ_PAGES = 64
_HEADER = struct.Struct("<4sHHIIQ")
_SUM = struct.Struct("<Q")
_MAGIC = b"CKPS"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class PageCheck:
    """What a comparison found: the pages that were put right, and those that cannot be."""

    mended: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()


def encode_page_sums(sums: Sequence[int]) -> bytes:
    """The bytes of the sums of pages 0, 1, 2, …"""
    header = _HEADER.pack(_MAGIC, _VERSION, 0, PAGE_BYTES, 0, len(sums))
    body = header + _swapped(array("Q", sums)).tobytes()
    return body + _SUM.pack(crc64(body))


def decode_page_sums(encoded: bytes) -> array[int]:
    """The sums in `encoded`, or Corrupt."""
    if len(encoded) < _HEADER.size + _SUM.size:
        raise Corrupt("the checksums of the index are shorter than their header")
    magic, version, reserved, page_bytes, more, count = _HEADER.unpack_from(encoded)
    if (magic, version, reserved, page_bytes, more) != (_MAGIC, _VERSION, 0, PAGE_BYTES, 0):
        raise Corrupt("not the checksums of an index")
    end = _HEADER.size + count * _SUM.size
    if len(encoded) != end + _SUM.size or crc64(encoded[:end]) != _SUM.unpack_from(encoded, end)[0]:
        raise Corrupt("the checksums of the index are damaged themselves")
    return _swapped(array("Q", encoded[_HEADER.size : end]))


def _swapped(sums: array[int]) -> array[int]:
    """Between the machine's byte order and the file's, which is little-endian."""
    if sys.byteorder == "big":
        sums.byteswap()
    return sums


def write_page_sums(disk: Disk, path: str) -> None:
    """Note the sums of the index file `path`, which is closed. Durable when: this returned."""
    sums = array("Q")
    for part in _parts(disk, path):
        sums.extend(_sums_of(part))
    disk.write_file(PAGE_SUMS_PATH, encode_page_sums(sums))


def check_pages(disk: Disk, path: str, *, mend: bool) -> PageCheck | None:
    """Compare the index file `path`, which nobody has open, with its sums; None if there are none.

    With `mend` what is one flipped bit is put right on disk, synced. Corrupt if the sums themselves
    are damaged.
    """
    if not disk.exists(PAGE_SUMS_PATH):
        return None
    sums = decode_page_sums(disk.read_file(PAGE_SUMS_PATH))
    pages, rest = divmod(disk.size(path), PAGE_BYTES)
    if rest or pages != len(sums):
        return PageCheck(damaged=(min(pages, len(sums)),))
    wrong = list(_wrong_pages(disk, path, sums))
    mended, damaged = [], []
    for number, page, right in wrong:
        bit = flipped_bit(page, right)
        if bit is None or bit >= 8 * PAGE_BYTES or not mend:
            damaged.append(number)
        else:
            _flip(disk, path, number * PAGE_BYTES + bit // 8, 1 << bit % 8)
            mended.append(number)
    if not disk.exists(PAGE_SUMS_PATH):
        return None  # A daemon has begun to write meanwhile.
    return PageCheck(tuple(mended), tuple(damaged))


def remove_page_sums(disk: Disk) -> None:
    """The index is about to be written. Durable when: this returned."""
    if disk.exists(PAGE_SUMS_PATH):
        disk.unlink(PAGE_SUMS_PATH)
        disk.sync_dir("index")


def _wrong_pages(disk: Disk, path: str, sums: array[int]) -> Iterator[tuple[int, bytes, int]]:
    """(number, bytes, right sum) of each page that does not match its sum."""
    first = 0
    for part in _parts(disk, path):
        found = _sums_of(part)
        right = sums[first : first + len(found)]
        if found != right:
            for at, (sum_now, sum_then) in enumerate(zip(found, right, strict=True)):
                if sum_now != sum_then:
                    yield first + at, bytes(part[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]), sum_then
        first += len(found)


def _sums_of(part: memoryview) -> array[int]:
    return array("Q", [crc64(part[at : at + PAGE_BYTES]) for at in range(0, len(part), PAGE_BYTES)])


def _parts(disk: Disk, path: str) -> Iterator[memoryview]:
    """The file in order, whole pages; each part is valid until the next one is asked for.

    The buffer is one for all and small enough to stay in the processor's cache: a start with 10,000,000
    chunks reads 1 GiB here.
    """
    buffer = memoryview(bytearray(_READ_PAGES * PAGE_BYTES))
    fd = disk.open_read(path)
    try:
        at = 0
        while length := disk.read_into(fd, buffer, at):
            yield buffer[:length]
            at += length
    finally:
        disk.close(fd)


def _flip(disk: Disk, path: str, offset: int, mask: int) -> None:
    fd = disk.open_write(path)
    try:
        byte = disk.pread(fd, 1, offset)[0]
        disk.pwrite(fd, bytes([byte ^ mask]), offset)
        disk.sync(fd)
    finally:
        disk.close(fd)
