"""One segment: is its `.idx` right, and what its `.idx` can be made anew from.

One rule: a new `.idx` lists only payloads that were hashed and found right, each where it lies.

Blocking, for a worker thread. Source: FORMAT.md, "Scrub".
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.store.bad_chunks import find_bad
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.ids import ChunkId
from ckptfs.store.packing import write_idx
from ckptfs.store.places import Suspect
from ckptfs.store.reclaim import segment_numbers
from ckptfs.store.segment_files import read_idx, read_idx_bytes
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


def remake_idx(disk: Disk, number: int, facts: SegmentFacts, suspects: Sequence[Suspect]) -> SegmentIndex:
    """Make an `.idx` anew from what the chunk table says lies in its segment. Durable when: this returned.

    Payloads that are wrong get no row. OSError or NoSpace if it cannot be written.
    """
    good = [(chunk, one) for chunk, one in suspects if is_right(disk, chunk, one)]
    inner = [one for _, one in good if one.in_idx]
    inline = b""
    if inner:
        stop = max(one.offset + one.stored for one in inner)
        inline = disk.read_file(segment_paths(number)[1])[INLINE_START:stop]
    rows = tuple(Row(chunk, one.offset, one.stored, one.length, one.codec, one.flags) for chunk, one in good)
    index = SegmentIndex(number, facts.kind, facts.created_ns, _seg_bytes(disk, number, facts), rows, inline)
    write_idx(disk, index)
    return index


def find_copies(disk: Disk, wanted: set[ChunkId]) -> dict[ChunkId, Location]:
    """Where else chunks lie: every `.idx` is looked through, and what it names is hashed."""
    candidates: dict[ChunkId, list[Location]] = {}
    for number in segment_numbers(disk):
        try:
            rows = read_idx(disk, number).rows
        except (CkptfsError, OSError):
            continue
        for row in rows:
            if row.chunk in wanted:
                candidates.setdefault(row.chunk, []).append(row.location(number))
    found: dict[ChunkId, Location] = {}
    for chunk, places in candidates.items():
        for place in places:
            if is_right(disk, chunk, place):
                found[chunk] = place
                break
    return found


def is_right(disk: Disk, chunk: ChunkId, place: Location) -> bool:
    """Whether a chunk lies in a place. Any thread."""
    if place.codec != Codec.RAW or place.stored != place.length or place.flags not in (0, 1):
        return False
    try:
        return not find_bad(disk, [(chunk, place)])
    except (CkptfsError, OSError):
        return False


def _seg_bytes(disk: Disk, number: int, facts: SegmentFacts) -> int:
    """The payload file's length; what the table says of it may have rotted."""
    path = segment_paths(number)[0]
    return disk.size(path) if disk.exists(path) else facts.file_bytes
