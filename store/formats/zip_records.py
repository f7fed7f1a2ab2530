"""Where the records of a zip archive lie, from its central directory and its local headers.

One rule: only stored (uncompressed) records are reported, so nothing is ever inflated, and each
must lie between the archive's start and its central directory.

Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory),
4.3.14-16 (end records, zip64), 4.5.3 (zip64 extra field).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from ckptfs.store.formats.layout import Reader, read_each, read_exactly

LOCAL_MAGIC: Final = b"PK\x03\x04"
MAX_DIRECTORY_BYTES: Final = 32 * 1024 * 1024
"""Some 300,000 records."""
_MAX_COMMENT: Final = 0xFFFF
_END: Final = struct.Struct("<4sHHHHIIH")
_END_MAGIC: Final = b"PK\x05\x06"
_LOCATOR: Final = struct.Struct("<4sIQI")
_LOCATOR_MAGIC: Final = b"PK\x06\x07"
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_END64_MAGIC: Final = b"PK\x06\x06"
_ENTRY: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ENTRY_MAGIC: Final = b"PK\x01\x02"
_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_ALL_32: Final = 0xFFFFFFFF
_STORED: Final = 0


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive inside a reader: `start` is its first byte, `end` the one after its last."""

    start: int
    end: int
    directory: int
    directory_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """A stored record: its name and where its payload lies in the reader, in bytes."""

    name: str
    offset: int
    length: int


def find_archive(reader: Reader, end: int, comment_bytes: int = _MAX_COMMENT) -> Archive | None:
    """Return the archive that ends at `end`, or up to `comment_bytes` before it."""
    tail_start = max(0, end - _END.size - comment_bytes)
    tail = reader.pread(tail_start, end - tail_start)
    at = len(tail) - _END.size + 4
    # A comment may contain the magic; a real archive is found among the last few.
    for _ in range(8):
        at = tail.rfind(_END_MAGIC, 0, at)
        if at < 0:
            return None
        archive = _archive_at(reader, tail_start + at)
        if archive is not None and archive.end <= end:
            return archive
        at += 3
    return None


def _archive_at(reader: Reader, end_record: int) -> Archive | None:
    raw = read_exactly(reader, end_record, _END.size)
    if raw is None:
        return None
    *_, length, offset, comment = _END.unpack(raw)
    directory_end = end_record
    locator = read_exactly(reader, end_record - _LOCATOR.size, _LOCATOR.size)
    if locator is not None and locator.startswith(_LOCATOR_MAGIC):
        # Writers put the zip64 record right before its locator. Its stated place is relative to
        # the archive, whose start is not known yet.
        directory_end = end_record - _LOCATOR.size - _END64.size
        raw64 = read_exactly(reader, directory_end, _END64.size)
        if raw64 is None or not raw64.startswith(_END64_MAGIC):
            return None
        *_, length, offset = _END64.unpack(raw64)
    start = directory_end - length - offset
    if start < 0:
        return None
    return Archive(start, end_record + _END.size + comment, directory_end - length, length)


def read_records(
    reader: Reader, archive: Archive, is_wanted: Callable[[bytes], bool] = lambda name: True
) -> list[Record] | None:
    """Return the stored records whose names are wanted, in the order of the directory, or None when it is
    broken.

    A directory of more than `MAX_DIRECTORY_BYTES` counts as one without stored records.
    """
    if archive.directory_bytes > MAX_DIRECTORY_BYTES:
        return []
    directory = read_exactly(reader, archive.directory, archive.directory_bytes)
    if directory is None:
        return None
    try:
        entries = [
            (name, archive.start + header, length)
            for name, header, length in _entries(directory)
            if is_wanted(name)
        ]
    except (struct.error, ValueError):
        return None
    headers = read_each(reader, [(header, _LOCAL.size + len(name)) for name, header, _ in entries])
    records: list[Record] = []
    for (name, header, length), raw in zip(entries, headers, strict=True):
        offset = _payload(raw, header, name)
        if offset is None or offset + length > archive.directory:
            return None
        records.append(Record(name.decode("utf-8", "backslashreplace"), offset, length))
    return records


def _entries(directory: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, header offset and length of each stored entry. struct.error, ValueError: broken."""
    at = 0
    while at < len(directory):
        fields = _ENTRY.unpack_from(directory, at)
        magic, _, _, flags, method, _, _, _, packed, length, n, m, k, _, _, _, header = fields
        name_end = at + _ENTRY.size + n
        if magic != _ENTRY_MAGIC or name_end + m + k > len(directory):
            raise ValueError("central directory entry")
        extra = directory[name_end : name_end + m]
        if _ALL_32 in (packed, length, header):
            packed, length, header = _zip64(extra, packed, length, header)
        at, name_start = name_end + m + k, at + _ENTRY.size
        if method == _STORED and packed == length and not flags & 1:
            yield directory[name_start:name_end], header, length


def _zip64(extra: bytes, packed: int, length: int, header: int) -> tuple[int, int, int]:
    at = 0
    while at < len(extra):
        tag, size = struct.unpack_from("<HH", extra, at)
        at += 4
        if tag == 1:
            # Only the fields that did not fit are there, in this order.
            values = iter(struct.unpack_from(f"<{size // 8}Q", extra, at))
            length = next(values, -1) if length == _ALL_32 else length
            packed = next(values, -1) if packed == _ALL_32 else packed
            header = next(values, -1) if header == _ALL_32 else header
            break
        at += size
    if min(packed, length, header) < 0:
        raise ValueError("zip64 extra field")
    return packed, length, header


def _payload(raw: bytes, header: int, name: bytes) -> int | None:
    """Return where the payload behind a local header begins; its extra field differs in length.

    `raw` are its bytes, `header` where it begins. None if it is not that of `name`: then the entry points
    into another record, or behind the end.
    """
    if len(raw) != _LOCAL.size + len(name) or not raw.startswith(LOCAL_MAGIC) or not raw.endswith(name):
        return None
    *_, n, m = _LOCAL.unpack_from(raw)
    return header + _LOCAL.size + int(n) + int(m) if n == len(name) else None
