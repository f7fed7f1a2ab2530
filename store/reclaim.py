"""Giving room back: punching what no row names, removing dead chunks.

One rule: the index forgets first, then the `.idx`, then the bytes; each step is durable before the
next. Nothing is punched while anybody else has the segment open or mapped: the lease says so.

Source: FORMAT.md, "Segments", what a crash leaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import trio
from msgspec.structs import replace

from ckptfs.store.disk import BLOCK_BYTES, Disk
from ckptfs.store.errors import Corrupt, NoSpace, Place
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.packing import full_disk_is_no_space, remove_segment_files, write_idx
from ckptfs.store.segment_counts import Counts, moved_by
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import (
    SEGMENTS_PATH,
    Codec,
    Location,
    SegmentIndex,
    SegmentKind,
    decode_facts,
    encode_facts,
    segment_key,
    segment_number,
    segment_paths,
    unnamed_ranges,
)
from ckptfs.store.segments import Segments

TRIED = b"tried:"
"""META, with a recipe's id: everything of that file was looked at by the encoder."""
_LOOKUPS_AT_ONCE = 512
_KEPT_SHARE = 128
FOREIGN_BYTES = 1 << 20
_PROBE_PATH = f"{SEGMENTS_PATH}/punch-probe.tmp"


class Reclaim:
    """Returns room to the disk. Its methods belong to the index thread; disk work is done in
    worker threads.

    `due` are the segments that still occupy unnamed ranges, `dead` the chunks whose removal from
    the index is committed and whose bytes still stand, `damaged` the segments whose `.idx` cannot
    be read, which are left alone, `superfluous` the paths of large files that no record names any
    more (to free gigabytes takes too long for the index thread).
    """

    def __init__(self, disk: Disk, index: Index, segments: Segments) -> None:
        self._disk = disk
        self._index = index
        self._segments = segments
        self._can_punch: bool | None = None
        self._one_at_a_time = trio.Lock()
        self.due: set[int] = set()
        self.dead: dict[int, set[ChunkId]] = {}
        self.damaged: dict[int, Corrupt] = {}
        self.superfluous: list[str] = []
        for key, facts in index.scan(Table.SEGMENT):
            if decode_facts(facts).punch_due:
                self.due.add(int.from_bytes(key, "big"))
        self._unresolved = set(self.due)

    async def can_punch(self) -> bool:
        """Whether the file system can give back ranges of a file."""
        if self._can_punch is None:
            self._can_punch = await trio.to_thread.run_sync(_probe_punch, self._disk)
        return self._can_punch

    def stage_removal(self, change: Change, chunks: Iterable[ChunkId]) -> int:
        """Take chunks out of the index in `change`; returns their stored bytes.

        Pinned and unknown chunks are left out, and those that a chunk which stays is encoded against. Call
        it once for one change and apply that in the same step. Once it is committed, `execute` gives the
        room back; whether a segment goes is decided by what its `.idx` lists then, not by a count.
        """
        lost: dict[int, Counts] = {}
        dead: dict[int, set[ChunkId]] = {}
        for chunk, location in self._removable(chunks):
            change.delete(Table.CHUNK, chunk)
            if location.codec != Codec.RAW:
                self._segments.parents.remove(change, chunk)
            for table in (Table.DIGEST, Table.HEALTH):
                if self._index.get(table, chunk) is not None:
                    change.delete(table, chunk)  # A recipe goes, and with it what is known of its file.
            if self._index.get(Table.META, TRIED + chunk) is not None:
                change.delete(Table.META, TRIED + chunk)
            dead.setdefault(location.segment, set()).add(chunk)
            lost.setdefault(location.segment, Counts()).add(location, -1)
        for segment, counts in lost.items():
            self._stage_segment(change, segment, counts)
        change.after_commit(lambda: self._removed(dead))
        return -sum(counts.payload_bytes for counts in lost.values())

    def _removable(self, chunks: Iterable[ChunkId]) -> Iterator[tuple[ChunkId, Location]]:
        """Those that may go now, children before what they are encoded against."""
        parents, pins = self._segments.parents, self._segments.pins
        places = {one: self._segments.locate(one) for one in set(chunks) if one not in pins}
        going: set[ChunkId] = set()
        for chunk in sorted(places, key=parents.depth, reverse=True):
            location = places[chunk]
            if location is not None and not parents.is_parent(chunk, but_of=going):
                going.add(chunk)
                yield chunk, location

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing is removed or punched until the block ends: for whoever rewrites an `.idx`."""
        async with self._one_at_a_time:
            yield

    def superseded(self, segment: int, chunk: ChunkId) -> None:
        """A chunk has its place elsewhere now, and that is committed."""
        self.dead.setdefault(segment, set()).add(chunk)

    def restored(self, segment: int, chunks: Iterable[ChunkId]) -> None:
        """A segment's `.idx` is right again, and these of its chunks are in use."""
        self.damaged.pop(segment, None)
        if segment in self.dead:
            self.dead[segment].difference_update(chunks)
        facts = self._segments.facts(segment)
        if facts is not None and facts.punch_due:
            self.due.add(segment)

    async def execute(self) -> int:
        """Remove what is dead and punch what is due, as far as leases allow; returns the bytes
        given back. What was refused stays for the next call. NoSpace or OSError of one segment is
        raised when all others had their turn: on a full disk some need room and others give it."""
        # Two at once would break each other's leases.
        async with self._one_at_a_time:
            freed = await self.remove_files()
            failure: Exception | None = None
            for segment in [*self.dead, *(self.due - self.dead.keys())]:
                try:
                    freed += await self._give_back(segment)
                except Corrupt as e:
                    self.due.discard(segment)
                    self.damaged[segment] = e
                except (OSError, NoSpace) as e:
                    failure = e
            if failure is not None:
                raise failure
            return freed

    async def remove_files(self) -> int:
        """Unlink `superfluous` files; returns the bytes given back."""
        paths, self.superfluous = self.superfluous, []
        return await trio.to_thread.run_sync(_unlink_all, self._disk, paths) if paths else 0

    async def _give_back(self, segment: int) -> int:
        if segment in self._unresolved:
            await self._resolve(segment)
        if not await self._is_listed(segment):
            return 0
        # What came to lie here again since it was noted as dead stays.
        dead = {chunk for chunk in self.dead.pop(segment, ()) if not self._is_here(chunk, segment)}
        if not dead:
            return await self._punch(segment)
        try:
            return await self._remove_chunks(segment, dead)
        except (OSError, NoSpace):
            self.dead.setdefault(segment, set()).update(dead)
            raise

    def _is_here(self, chunk: ChunkId, segment: int) -> bool:
        location = self._segments.locate(chunk)
        return location is not None and location.segment == segment

    async def _is_listed(self, segment: int) -> bool:
        """Whether the `.idx` has all chunks that the index has in a segment; False if that changes meanwhile.

        Corrupt if it lacks one: what no row names would be taken, and a payload that could not be read when
        the `.idx` was made anew, or what it is encoded against, may be had again later.
        """
        facts = self._segments.facts(segment)
        if facts is None or not facts.chunks:
            return True
        index, found = await trio.to_thread.run_sync(read_idx, self._disk, segment), 0
        for start in range(0, len(index.rows), _LOOKUPS_AT_ONCE):
            await trio.lowlevel.checkpoint()
            found += sum(
                self._segments.locate(row.chunk) == row.location(segment)
                for row in index.rows[start : start + _LOOKUPS_AT_ONCE]
            )
        if self._segments.facts(segment) != facts:
            return False
        if found < facts.chunks:
            what = f"the .idx of segment {segment:016x} lacks {facts.chunks - found} of its chunks"
            raise Corrupt(what, place=Place(segment_paths(segment)[1], 0))
        return True

    async def _resolve(self, segment: int) -> None:
        """Find the rows whose removal was committed before the process ended, and not finished."""
        facts = self._segments.facts(segment)
        if facts is not None and not facts.chunks and not self._disk.exists(segment_paths(segment)[1]):
            await trio.to_thread.run_sync(remove_segment_files, self._disk, segment)
            self._forget_segment(segment)
        else:
            index = await trio.to_thread.run_sync(read_idx, self._disk, segment)
            for start in range(0, len(index.rows), _LOOKUPS_AT_ONCE):
                await trio.lowlevel.checkpoint()
                for row in index.rows[start : start + _LOOKUPS_AT_ONCE]:
                    if not self._is_here(row.chunk, segment):
                        self.dead.setdefault(segment, set()).add(row.chunk)
        self._unresolved.discard(segment)

    async def _remove_chunks(self, segment: int, dead: set[ChunkId]) -> int:
        """Drop chunks whose removal from the index is committed; returns the bytes given back.

        The `.idx` is rewritten without them, then their ranges are punched; a segment of which
        nothing is left is removed, `.idx` first.
        """
        self._segments.forget(segment)
        left, freed = await trio.to_thread.run_sync(_shrink_idx, self._disk, segment, frozenset(dead))
        self._segments.forget(segment)
        if not left:
            self._forget_segment(segment)
            return freed
        self.due.add(segment)
        return freed + await self._punch(segment)

    def _forget_segment(self, segment: int) -> None:
        self.due.discard(segment)
        self._segments.drop_marks(segment)
        change = Change()
        change.delete(Table.SEGMENT, segment_key(segment))
        self._index.apply(change)

    async def _punch(self, segment: int) -> int:
        if not await self.can_punch():
            self.due.discard(segment)
            return 0
        if self._segments.facts(segment) is None:
            self.due.discard(segment)
            return 0
        # Our own reading descriptor would make the lease fail.
        self._segments.evict(segment)
        freed, is_done = await trio.to_thread.run_sync(_punch_unnamed, self._disk, segment)
        if not is_done:
            return freed
        self.due.discard(segment)
        facts = self._segments.facts(segment)
        if facts is not None and facts.punch_due:
            change = Change()
            done = replace(facts, punch_due=False)
            change.put(Table.SEGMENT, segment_key(segment), encode_facts(done))
            self._index.apply(change)
        return freed

    def _stage_segment(self, change: Change, segment: int, lost: Counts) -> None:
        facts = self._segments.facts(segment)
        if facts is None:
            return
        left = replace(moved_by(facts, lost), punch_due=True)
        change.put(Table.SEGMENT, segment_key(segment), encode_facts(left))
        # Marks of what leaves would be counted for what stays.
        self._segments.verified.remove_segment(segment)

    def _removed(self, dead: dict[int, set[ChunkId]]) -> None:
        for segment, chunks in dead.items():
            self.dead.setdefault(segment, set()).update(chunks)


def segment_numbers(disk: Disk) -> list[int]:
    """The segments that have an `.idx`, in ascending order (a rebuild lets the last row win)."""
    numbers: list[int] = []
    for folder in disk.list_dir(SEGMENTS_PATH):
        names = disk.list_dir(f"{SEGMENTS_PATH}/{folder}") if len(folder) == 2 else []
        for name in names:
            number = segment_number(name)
            if number is not None and name.endswith(".idx"):
                numbers.append(number)
    return sorted(numbers)


def _shrink_idx(disk: Disk, segment: int, dead: frozenset[ChunkId]) -> tuple[bool, int]:
    """Rewrite the `.idx` without `dead`; (whether a chunk is left, bytes given back if none is)."""
    index = read_idx(disk, segment)
    left = index.without(dead)
    if left.rows:
        if left != index:
            write_idx(disk, left)
        return True, 0
    seg = segment_paths(segment)[0]
    # After a loss of power the .seg may be gone and the .idx, which went before it, back again.
    freed = disk.allocated(seg) if disk.exists(seg) else 0
    remove_segment_files(disk, segment)
    return False, freed


def _punch_unnamed(disk: Disk, segment: int) -> tuple[int, bool]:
    """Punch what no row names; the bytes given back, and whether that was all. Not where somebody has the
    file open; and who wants to open it (the event loop may be it) waits for one range at most."""
    index = read_idx(disk, segment)
    fd = disk.open_write(segment_paths(segment)[0])
    try:
        # A second name is that of an import under way, which may yet have to read the file there again.
        if disk.fstat(fd).st_nlink > 1 or not disk.lease(fd, "write"):
            return 0, False
        freed = 0
        extents = disk.data_extents(fd, index.file_bytes)
        ranges = unnamed_ranges(index, extents)
        has_holes = extents != [(0, index.file_bytes)]
        if not has_holes and sum(length for _, length in ranges) <= _kept_bytes(index):
            return 0, True
        for offset, length in ranges:
            if disk.is_lease_wanted(fd):
                return freed, False
            blocks_bytes = _to_block_end(index, offset, length)
            disk.punch(fd, offset, blocks_bytes)
            freed += blocks_bytes
        return freed, True
    finally:
        disk.close(fd)


def _kept_bytes(index: SegmentIndex) -> int:
    """So few unnamed bytes stay in a file from which nothing was taken yet: a save whose header equals that
    of the save before is still whole in its segment, and can be read there by the kernel itself
    (whole_segment.py)."""
    if index.kind != SegmentKind.ADOPTED:
        return 0
    return min(index.file_bytes // _KEPT_SHARE, FOREIGN_BYTES)


def _unlink_all(disk: Disk, paths: Sequence[str]) -> int:
    freed = 0
    for path in paths:
        if disk.exists(path):
            freed += disk.allocated(path)
            disk.unlink(path)
    return freed


def _to_block_end(index: SegmentIndex, offset: int, length: int) -> int:
    """The length up to the end of the block, where a range ends with the file."""
    if offset + length < index.file_bytes:
        return length
    return -(-(offset + length) // BLOCK_BYTES) * BLOCK_BYTES - offset


def _probe_punch(disk: Disk) -> bool:
    disk.make_dir(SEGMENTS_PATH)
    if disk.exists(_PROBE_PATH):
        disk.unlink(_PROBE_PATH)
    with full_disk_is_no_space():
        fd = disk.create(_PROBE_PATH)
        try:
            disk.pwrite(fd, b"\1" * (2 * BLOCK_BYTES), 0)
            return disk.punch(fd, 0, BLOCK_BYTES)
        finally:
            disk.close(fd)
            disk.unlink(_PROBE_PATH)
