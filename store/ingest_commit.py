"""The one step in which a segment becomes part of the store.

One rule: between the last look into the chunk table and the applied change nothing else runs, and
a segment is removed again only if its change was certainly not made: what failed behind the first byte of the
journal's record is for the next start to decide.

Touched only by the index thread; files are written in worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from ckptfs.store.chunk_table import NEXT_SEGMENT, ChunkTable, Putting
from ckptfs.store.cutting import Fresh
from ckptfs.store.disk import Disk
from ckptfs.store.errors import NoSpace, ReadOnly
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.packing import Built, PackWriter, remove_segment_files
from ckptfs.store.reclaim import Reclaim
from ckptfs.store.segment_format import segment_paths


class Committer:
    """Numbers segments and commits them."""

    def __init__(
        self, disk: Disk, index: Index, table: ChunkTable, reclaim: Reclaim, now_ns: Callable[[], int]
    ) -> None:
        self.disk = disk
        self.table = table
        self.reclaim = reclaim
        self.now_ns = now_ns
        self._index = index
        last = index.last_key(Table.SEGMENT, b"") or b""
        said = index.get(Table.META, NEXT_SEGMENT) or b""
        self._next = max(int.from_bytes(last, "big") + 1, int.from_bytes(said, "big"))

    def take_number(self) -> int:
        """A segment number that no file and no record has."""
        number = self._next
        while any(self.disk.exists(path) for path in segment_paths(number)):
            number += 1
        self._next = number + 1
        return number

    @property
    def next_number(self) -> int:
        """The number that is taken next, at the least."""
        return self._next

    def commit(self, built: Built | None, fill: Callable[[Change], bool]) -> bool:
        """Enter a durable segment and what `fill` adds to the change, and sync the journal.

        If `fill` returns False nothing is entered, and the segment is removed; so it is if the
        change cannot be applied (NoSpace). Durable when: this returned.
        """
        change = Change()
        try:
            putting = self.table.put(change, built, self._next) if built is not None else None
            wanted = fill(change)
        except BaseException:
            self._remove(built)
            raise
        if wanted:
            if built is not None and putting is not None:
                change.after_commit(partial(self._reclaim_later, built, putting))
            self._apply(change, built)
        if not wanted or (putting is not None and not putting.counts.chunks):
            self._remove(built)
        elif built is not None and putting is not None:
            self.table.committed(built, putting)
        return wanted

    def _apply(self, change: Change, built: Built | None) -> None:
        try:
            self._index.apply(change, sync=True)
        except (NoSpace, ReadOnly):
            # Refused before the journal had it. Whatever else it was (the sync failed, memory ran out): the
            # journal may have the change, so its bytes have to stay; recovery decides.
            self._remove(built)
            raise

    def _remove(self, built: Built | None) -> None:
        if built is not None:
            remove_segment_files(self.disk, built.index.number)

    def _reclaim_later(self, built: Built, putting: Putting) -> None:
        if built.punch_due and putting.counts.chunks:
            self.reclaim.due.add(putting.segment)
        if putting.surplus and putting.counts.chunks:
            self.reclaim.dead.setdefault(putting.segment, set()).update(putting.surplus)


class Pack:
    """The packed segment in the making: takes what the store lacks, then is committed whole.

    `held` is the pin that keeps the hits in the store until then. Owned by one task; discarded by
    it if anything goes wrong.
    """

    def __init__(self, committer: Committer, held: set[ChunkId]) -> None:
        self.held = held
        self.seen: set[ChunkId] = set()
        self._committer = committer
        self._writer: PackWriter | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes that were appended since the last commit."""
        return self._writer.payload_bytes if self._writer is not None else 0

    @property
    def writer(self) -> PackWriter:
        """What writes the segment; made when first asked for."""
        if self._writer is None:
            one = self._committer
            self._writer = PackWriter(one.disk, one.take_number(), one.now_ns())
        return self._writer

    async def add(self, fresh: Sequence[Fresh]) -> None:
        """Append those chunks that the store and this pack lack."""
        new = await self._committer.table.unknown(fresh, self.held, self.seen)
        if new:
            await trio.to_thread.run_sync(self.writer.append, new)

    async def commit(self, fill: Callable[[Change], bool]) -> bool:
        """Seal the segment, if there is anything in it, and commit it with what `fill` adds."""
        built = None
        if self._writer is not None and self._writer.payload_bytes:
            built = await trio.to_thread.run_sync(self._writer.seal)
        self._writer = None
        self.seen = set()
        return self._committer.commit(built, fill)

    def discard(self) -> None:
        """Remove what was written since the last commit."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.discard()
