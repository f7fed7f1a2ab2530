"""Which of the copies of a chunk a rebuild takes: a healing or a re-encoding that was cut short leaves two.

One rule: the younger one, unless it is wrong and another is right; what nobody can read now is kept, since
what it is encoded against may be healed later.

Source: FORMAT.md, "Rebuild".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptfs.store.disk import Disk
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Index, Table
from ckptfs.store.parent_table import ParentTable, decode_lineage
from ckptfs.store.recovery import rows
from ckptfs.store.segment_check import header_of, is_right
from ckptfs.store.segment_format import Row
from ckptfs.store.segments import Segments

Copy = tuple[int, Row]
"""A segment's number, and its row of the chunk."""


def best_copy(disk: Disk, segments: Segments, copies: Sequence[Copy]) -> Copy:
    """The copy to take, of those of one chunk in the order of their segments' numbers. Reads and hashes.

    The youngest that is right; else the youngest that is whole, but for what it is encoded against; else the
    youngest.
    """
    youngest_first = copies[::-1]
    for number, row in youngest_first:
        if is_right(disk, row.chunk, row.location(number), segments.ways_to([row.parents])):
            return number, row
    whole = (copy for copy in youngest_first if header_of(disk, copy[1].location(copy[0])) is not None)
    return next(whole, youngest_first[0])


def undecodable(index: Index) -> set[ChunkId]:
    """What leads to chunks that are not there, or lead deeper than they may."""
    parents = ParentTable(index)
    found: set[ChunkId] = set()
    lineages = ((ChunkId(key), decode_lineage(value)) for key, value in rows(index, Table.PARENT))
    for chunk, lineage in sorted(lineages, key=lambda pair: pair[1].depth):
        if not found.isdisjoint(lineage.parents) or not all(
            index.get(Table.CHUNK, parent) is not None and parents.depth(parent) < lineage.depth
            for parent in lineage.parents
        ):
            found.add(chunk)
    return found


def by_depth(copies: Iterable[Sequence[Copy]]) -> list[Sequence[Copy]]:
    """What others may be encoded against before these."""
    return sorted(copies, key=lambda some: some[-1][1].depth)
