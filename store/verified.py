"""Which stored chunks are known, in this mount, to match their ids; and which must not go away.

One rule: a chunk counts as verified only if its very place was hashed since the mount, or written
from bytes that were; so a segment is forgotten here before its place is given to other bytes.

Touched only by the index thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ckptfs.store.ids import ChunkId
from ckptfs.store.segment_format import Location


class Verified:
    """Per segment either "all of it" or a set of places; a place is offset x 2 + IN_IDX.

    `epoch` grows whenever a segment is forgotten: as long as it is the same, what was stored somewhere
    still is. `_watches` are tokens of segments of which nothing was forgotten since somebody asked.
    """

    __slots__ = ("_places", "_watches", "_whole", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        self._whole: set[int] = set()
        self._places: dict[int, set[int]] = {}
        self._watches: dict[int, object] = {}

    def __contains__(self, location: Location) -> bool:
        segment = location.segment
        if segment in self._whole:
            return True
        places = self._places.get(segment)
        return places is not None and (location.offset << 1 | location.flags & 1) in places

    def add(self, location: Location) -> int:
        """Mark one chunk; returns how many of its segment are marked."""
        return self.add_all(location.segment, (location.offset << 1 | location.flags & 1,))

    def add_all(self, segment: int, places: Iterable[int]) -> int:
        """Mark places of one segment; returns how many of it are marked."""
        marked = self._places.setdefault(segment, set())
        marked.update(places)
        return len(marked)

    def add_segment(self, segment: int) -> None:
        """Mark all chunks of a segment."""
        self._whole.add(segment)
        self._places.pop(segment, None)

    def remove_segment(self, segment: int) -> None:
        """Forget a segment: its chunks are verified again at their next read."""
        self.epoch += 1
        self._whole.discard(segment)
        self._places.pop(segment, None)
        self._watches.pop(segment, None)

    def watch(self, segment: int) -> object:
        """A token that `is_watched` knows until something of the segment is forgotten."""
        return self._watches.setdefault(segment, object())

    def is_watched(self, segment: int, token: object) -> bool:
        """Whether nothing of the segment was forgotten since `watch` gave this token."""
        return self._watches.get(segment) is token

    def has_segment(self, segment: int) -> bool:
        """Whether all chunks of a segment are marked."""
        return segment in self._whole


class Pins:
    """The chunks that running ingests and publishes rely on and no record names yet.

    The collector asks `in` before it takes a chunk out of the index, in the same step.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[set[ChunkId]] = []

    def __contains__(self, chunk: ChunkId) -> bool:
        return any(chunk in held for held in self._held)

    @contextmanager
    def hold(self, chunks: Iterable[ChunkId] = ()) -> Iterator[set[ChunkId]]:
        """Pin `chunks`, and whatever is added to the set that is yielded, until the block ends."""
        held = set(chunks)
        self._held.append(held)
        try:
            yield held
        finally:
            self._held = [other for other in self._held if other is not held]
