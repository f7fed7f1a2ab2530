"""One segment: is its `.idx` right, and what its `.idx` can be made anew from.

One rule: a new `.idx` lists only payloads that are right, each where it lies: raw ones are hashed, encoded
ones have a checksum of their own. What those lead to may be damaged, and be healed; then they are needed.

Blocking, for a worker thread. Source: FORMAT.md, "Scrub".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptfs.store.bad_chunks import find_bad
from ckptfs.store.codecs import Header, decode_header
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.ids import ChunkId
from ckptfs.store.packing import write_idx
from ckptfs.store.places import NO_PARENTS, Suspect
from ckptfs.store.reclaim import segment_numbers
from ckptfs.store.segment_files import SegmentFiles, read_idx, read_idx_bytes
from ckptfs.store.segment_format import (
    INLINE_START,
    Codec,
    Location,
    Row,
    SegmentFacts,
    SegmentIndex,
    segment_paths,
)


def mend_idx(disk: Disk, number: int) -> None:
    """Write an `.idx` again of which one bit has flipped. Durable when: this returned."""
    index, is_right = read_idx_bytes(disk, number)
    if not is_right:
        write_idx(disk, index)


def remake_idx(
    disk: Disk,
    number: int,
    facts: SegmentFacts,
    suspects: Sequence[Suspect],
    parents: Mapping[ChunkId, Location],
) -> SegmentIndex:
    """Make an `.idx` anew from what the index says lies in its segment. Durable when: this returned.

    `parents` are the places of all chunks that those lead to. What they are encoded against is told by
    themselves. Payloads that are wrong get no row. OSError or NoSpace if it cannot be written.
    """
    headers = {chunk: header_of(disk, one) for chunk, one in suspects}
    good = [
        (chunk, one)
        for chunk, one in suspects
        if headers[chunk] is not None or (one.codec == Codec.RAW and is_right(disk, chunk, one, parents))
    ]
    inner = [one for _, one in good if one.in_idx]
    inline = b""
    if inner:
        stop = max(one.offset + one.stored for one in inner)
        inline = disk.read_file(segment_paths(number)[1])[INLINE_START:stop]
    rows = tuple(_row(chunk, one, headers[chunk]) for chunk, one in good)
    index = SegmentIndex(number, facts.kind, facts.created_ns, _seg_bytes(disk, number, facts), rows, inline)
    write_idx(disk, index)
    return index


def find_rows(disk: Disk, wanted: set[ChunkId]) -> dict[ChunkId, list[tuple[int, Row]]]:
    """(segment, row) of each `.idx` that names chunks; of a chunk the raw ones first: they need nobody."""
    found: dict[ChunkId, list[tuple[int, Row]]] = {}
    for number in segment_numbers(disk):
        try:
            rows = read_idx(disk, number).rows
        except (CkptfsError, OSError):
            continue
        for row in rows:
            if row.chunk in wanted:
                found.setdefault(row.chunk, []).append((number, row))
    for copies in found.values():
        copies.sort(key=lambda copy: (copy[1].codec != Codec.RAW, copy[1].depth))
    return found


def is_right(
    disk: Disk, chunk: ChunkId, place: Location, parents: Mapping[ChunkId, Location] = NO_PARENTS
) -> bool:
    """Whether a chunk lies in a place; `parents` are the places of all that it leads to. Any thread."""
    if (place.codec == Codec.RAW) != (place.stored == place.length) or place.flags not in (0, 1):
        return False
    try:
        return not find_bad(disk, [(chunk, place)], parents)
    except (CkptfsError, OSError):
        return False


def header_of(disk: Disk, place: Location) -> Header | None:
    """What an encoded payload says of itself, if it is whole and of the codec and the length that its place
    says; None if not, and for raw ones. Any thread may call."""
    if place.codec == Codec.RAW or place.in_idx or not 0 < place.stored < place.length:
        return None
    files = SegmentFiles(disk)
    try:
        header = decode_header(files.pread(place.segment, False, place.stored, place.offset))
    except (CkptfsError, OSError):
        return None
    finally:
        files.close()
    return header if (header.codec, header.length) == (place.codec, place.length) else None


def _row(chunk: ChunkId, one: Location, header: Header | None) -> Row:
    depth, parents = (0, ()) if header is None else (header.depth, header.parents)
    return Row(chunk, one.offset, one.stored, one.length, one.codec, one.flags, depth, parents)


def _seg_bytes(disk: Disk, number: int, facts: SegmentFacts) -> int:
    """The payload file's length; what the table says of it may have rotted."""
    path = segment_paths(number)[0]
    return disk.size(path) if disk.exists(path) else facts.file_bytes
