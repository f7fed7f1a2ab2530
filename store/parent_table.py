"""Which chunk is encoded against which: the tables PARENT and CHILD.

One rule: the rows of a chunk come and go in the change that puts its encoded place into the chunk table or
takes it away; so at every commit a chunk that CHILD names as a parent is in the chunk table.

Touched only by the index thread. Source: FORMAT.md, "Encoded segments", "Tables".
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import DIGEST_BYTES, ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.segment_format import MAX_DEPTH

_MOST_PARENTS = 2
_NO_DEPTHS: Mapping[ChunkId, int] = {}


@dataclass(frozen=True, slots=True)
class Lineage:
    """What one encoded chunk was encoded against. `depth` is greater than that of each parent."""

    depth: int
    parents: tuple[ChunkId, ...]


def encode_lineage(lineage: Lineage) -> bytes:
    """The bytes of a row of PARENT."""
    return bytes((lineage.depth,)) + b"".join(lineage.parents)


def decode_lineage(encoded: bytes) -> Lineage:
    """The row of PARENT in `encoded`, or Corrupt."""
    count, rest = divmod(len(encoded) - 1, DIGEST_BYTES)
    if rest or not 1 <= count <= _MOST_PARENTS or not 1 <= encoded[0] <= MAX_DEPTH:
        raise Corrupt(f"not the parents of a chunk: {len(encoded)} bytes")
    starts = range(1, len(encoded), DIGEST_BYTES)
    return Lineage(encoded[0], tuple(ChunkId(encoded[at : at + DIGEST_BYTES]) for at in starts))


class ParentTable:
    """Reads both tables, and stages changes of them."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def lineage(self, chunk: ChunkId) -> Lineage | None:
        """What a chunk is encoded against; None: nothing."""
        encoded = self._index.get(Table.PARENT, chunk)
        return None if encoded is None else decode_lineage(encoded)

    def depth(self, chunk: ChunkId) -> int:
        """How many generations lie behind a chunk, at most; 0 if it stands alone."""
        lineage = self.lineage(chunk)
        return 0 if lineage is None else lineage.depth

    def is_parent(self, chunk: ChunkId, *, but_of: Set[ChunkId] = frozenset()) -> bool:
        """Whether any chunk is encoded against this one, those of `but_of` left out."""
        rows = self._index.scan(Table.CHILD, chunk, limit=len(but_of) + 1)
        return any(ChunkId(key[DIGEST_BYTES:]) not in but_of for key, _ in rows)

    def count_children(self, chunk: ChunkId, most: int) -> int:
        """How many chunks are encoded against this one, counted up to `most`."""
        return sum(1 for _ in self._index.scan(Table.CHILD, chunk, limit=most))

    def least_child_depth(self, chunk: ChunkId) -> int:
        """The smallest depth of those that are encoded against this one; more than MAX_DEPTH if none is."""
        return min((value[0] for _, value in self._index.scan(Table.CHILD, chunk)), default=MAX_DEPTH + 1)

    def agrees(self, child: ChunkId, lineage: Lineage | None) -> bool:
        """Whether both tables say of a chunk what they should."""
        try:
            found = self.lineage(child)
        except Corrupt:
            return False
        if lineage is None or found is None:
            return found == lineage
        depth = bytes((lineage.depth,))
        rows = (self._index.get(Table.CHILD, parent + child) for parent in lineage.parents)
        return found == lineage and all(row == depth for row in rows)

    def may_put(
        self, chunk: ChunkId, lineage: Lineage | None, depths: Mapping[ChunkId, int] = _NO_DEPTHS
    ) -> bool:
        """Whether a chunk may be stored so: what it is encoded against is there with smaller depths, and what
        is encoded against it has greater ones. `depths` are those that the same change gives."""
        if lineage is None:
            return True
        return self.least_child_depth(chunk) > lineage.depth and all(
            self._index.get(Table.CHUNK, parent) is not None
            and depths.get(parent, self.depth(parent)) < lineage.depth
            for parent in lineage.parents
        )

    def descendants(self, chunk: ChunkId) -> set[ChunkId]:
        """All that cannot be decoded without a chunk."""
        found: set[ChunkId] = set()
        waiting = [chunk]
        while waiting:
            for key, _ in self._index.scan(Table.CHILD, waiting.pop()):
                child = ChunkId(key[DIGEST_BYTES:])
                if child not in found:
                    found.add(child)
                    waiting.append(child)
        return found

    def put(self, change: Change, child: ChunkId, lineage: Lineage) -> None:
        """Note what a chunk is encoded against from now on."""
        self.remove(change, child)
        change.put(Table.PARENT, child, encode_lineage(lineage))
        for parent in lineage.parents:
            change.put(Table.CHILD, parent + child, bytes((lineage.depth,)))

    def remove(self, change: Change, child: ChunkId) -> None:
        """A chunk goes, or stands alone from now on."""
        try:
            lineage = self.lineage(child)
        except Corrupt:
            lineage = None  # A scrub puts right what is left of it in CHILD.
            change.delete(Table.PARENT, child)
        if lineage is not None:
            change.delete(Table.PARENT, child)
            for parent in lineage.parents:
                change.delete(Table.CHILD, parent + child)
