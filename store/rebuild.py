"""A new index from the segments and the history, when the old one is lost or not to be trusted.

One rule: nothing of the store is changed until the new index is whole; one rename puts it in
place. Dying before it leaves the store as it was, so it may be run again as often as needed.

What cannot come back: changes of the live tree since each unit's last version. Staging files that
the lost index alone could name are kept in quarantine/.

Source: FORMAT.md, "Rebuild".
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from ckptfs.store.bad_chunks import find_bad
from ckptfs.store.digest_log import drop_orphans
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.frames import decode_frames
from ckptfs.store.histories import Histories
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import INDEX_PATH, Change, Index, Table
from ckptfs.store.journal import JOURNAL_PATH
from ckptfs.store.live_tree import LiveTree
from ckptfs.store.page_sums import remove_page_sums
from ckptfs.store.parent_table import Lineage, ParentTable
from ckptfs.store.rebuild_copies import Copy, best_copy, by_depth, undecodable
from ckptfs.store.recovery import BOOT_ID, NEW_INDEX_PATH, QUARANTINE_PATH, keep_aside, segment_files
from ckptfs.store.segment_counts import Counts, with_counts
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import (
    Location,
    Row,
    SegmentFacts,
    SegmentIndex,
    SegmentKind,
    decode_location,
    encode_facts,
    encode_location,
    segment_key,
    segment_paths,
)
from ckptfs.store.segments import Segments
from ckptfs.store.staging import Staging
from ckptfs.store.version_check import VersionCheck

_ROWS_A_CHANGE = 4096
_ROWS_A_COMMIT = 1 << 18

Progress = Callable[[int, int], None]
"""Called with (segments done, segments in all)."""


@dataclass(slots=True)
class Rebuilt:
    """What was found. `skipped` segments and `problems` of histories are told with the reason;
    `missing` names each version that lacks chunks, and how many."""

    segments: int = 0
    chunks: int = 0
    units: int = 0
    versions: int = 0
    files: int = 0
    kept_aside: int = 0
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class _NewIndex(Index):
    """An index in a folder of its own."""

    def start_behind(self, sequence: int) -> None:
        """Number changes so that no record of the old journal is taken for one that is missing."""
        self._sequence = max(self._sequence, sequence)


def rebuild(disk: Disk, *, boot_id: str, now_ns: int, progress: Progress | None = None) -> Rebuilt:
    """Make the index of a store anew; the caller holds the StoreLock. Returns what was found.

    Raises NoSpace or OSError; the store is as before then. Durable when: this returned.
    """
    disk.remove_tree(NEW_INDEX_PATH)
    disk.make_dir(NEW_INDEX_PATH)
    index = _NewIndex(disk.below(NEW_INDEX_PATH))
    found = Rebuilt()
    try:
        index.start_behind(_last_sequence(disk))
        trusted, readable = _add_segments(disk, index, found, progress or _silent)
        segments = Segments(disk, index)
        try:
            _add_histories(disk, index, segments, found, now_ns)
        finally:
            segments.close()
        found.kept_aside = _keep_staging(disk, trusted, now_ns)
        _keep_segments(disk, readable)
        _put_numbers(disk, index, boot_id)
    finally:
        index.close()
    _put_in_place(disk)
    return found


def _put_in_place(disk: Disk) -> None:
    """The commit point: one rename. LMDB makes a missing lock file anew."""
    disk.make_dir(INDEX_PATH)
    if disk.exists(f"{INDEX_PATH}/lock.mdb"):
        disk.unlink(f"{INDEX_PATH}/lock.mdb")
    remove_page_sums(disk)
    disk.rename(f"{NEW_INDEX_PATH}/{INDEX_PATH}/data.mdb", f"{INDEX_PATH}/data.mdb")
    disk.sync_dir(INDEX_PATH)
    disk.sync_dir("")
    if disk.exists(JOURNAL_PATH):
        disk.unlink(JOURNAL_PATH)
    disk.remove_tree(NEW_INDEX_PATH)


def _last_sequence(disk: Disk) -> int:
    if not disk.exists(JOURNAL_PATH):
        return 0
    return max((frame.sequence for frame in decode_frames(disk.read_file(JOURNAL_PATH))), default=0)


# Segments


class _Tally:
    """Which rows of the chunk table each segment has; of several of a chunk the highest number wins, until
    `settle` looks at them."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._parents = ParentTable(index)
        self._change = Change()
        self._uncommitted = 0
        self._copies: dict[ChunkId, list[Copy]] = {}
        self.indexes: dict[int, SegmentIndex] = {}
        self.counts: dict[int, Counts] = {}

    def add(self, found: SegmentIndex) -> None:
        """Enter a segment's rows."""
        number = found.number
        self.indexes[number] = SegmentIndex(number, found.kind, found.created_ns, found.file_bytes, ())
        self.counts[number] = Counts()
        for start in range(0, len(found.rows), _ROWS_A_CHANGE):
            for row in found.rows[start : start + _ROWS_A_CHANGE]:
                old = self._place(row.chunk)
                if old is not None and old.segment != number:
                    first = (old.segment, self._row(row.chunk, old))
                    self._copies.setdefault(row.chunk, [first]).append((number, row))
                self._put(row, number)
            self._apply()

    def settle(self, disk: Disk) -> None:
        """Where a chunk has several rows, take the one that is right."""
        segments = Segments(disk, self._index)
        try:
            for copies in by_depth(self._copies.values()):
                number, row = best_copy(disk, segments, copies)
                self._put(row, number)
                self._apply()
        finally:
            segments.close()

    def _put(self, row: Row, number: int) -> None:
        old = self._place(row.chunk)
        if old is not None and old.segment == number:
            return
        self._take_out(row.chunk)
        self._change.put(Table.CHUNK, row.chunk, encode_location(row.location(number)))
        if row.parents:
            self._parents.put(self._change, row.chunk, Lineage(row.depth, row.parents))
        self.counts[number].add(row)

    def _row(self, chunk: ChunkId, place: Location) -> Row:
        lineage = self._parents.lineage(chunk)
        depth, parents = (lineage.depth, lineage.parents) if lineage is not None else (0, ())
        one = place
        return Row(chunk, one.offset, one.stored, one.length, one.codec, one.flags, depth, parents)

    def _take_out(self, chunk: ChunkId) -> None:
        old = self._place(chunk)
        if old is not None:
            self.counts[old.segment].add(old, -1)
            self._change.delete(Table.CHUNK, chunk)
            self._parents.remove(self._change, chunk)

    def _place(self, chunk: ChunkId) -> Location | None:
        encoded = self._index.get(Table.CHUNK, chunk)
        return None if encoded is None else decode_location(encoded)

    def _apply(self) -> None:
        self._uncommitted += len(self._change.operations)
        self._index.apply(self._change)
        self._change = Change()
        if self._uncommitted >= _ROWS_A_COMMIT:
            self._index.commit()
            self._uncommitted = 0


def _add_segments(disk: Disk, index: Index, found: Rebuilt, progress: Progress) -> tuple[set[int], Set[int]]:
    """Enter every segment that can be trusted; the st_ino of their payload files, and their numbers."""
    numbers = sorted({number for number, path in segment_files(disk) if path.endswith(".idx")})
    tally = _Tally(index)
    trusted: set[int] = set()
    for done, number in enumerate(numbers):
        progress(done, len(numbers))
        try:
            one = read_idx(disk, number)
            reason = _distrust(disk, one)
        except (CkptfsError, OSError) as e:
            reason = str(e)
        if reason is not None:
            found.skipped.append(f"segment {number:016x}: {reason}; its files are kept in {QUARANTINE_PATH}/")
            continue
        tally.add(one)
        if disk.exists(segment_paths(number)[0]):
            trusted.add(disk.stat(segment_paths(number)[0]).st_ino)
    progress(len(numbers), len(numbers))
    tally.settle(disk)
    if lost := len(undecodable(index)):
        what = "what they are encoded against is missing; they are kept in case that comes back"
        found.problems.append(f"{lost} chunks cannot be decoded: {what}")
    change = Change()
    for number, counts in tally.counts.items():
        if counts.chunks:
            facts = _facts(disk, tally.indexes[number], counts)
            change.put(Table.SEGMENT, segment_key(number), encode_facts(facts))
    index.apply(change)
    found.segments, found.chunks = len(change.operations), sum(one.chunks for one in tally.counts.values())
    return trusted, tally.indexes.keys()


def _distrust(disk: Disk, one: SegmentIndex) -> str | None:
    """Why a segment is left out; None: it is not.

    A file with a second name was being adopted: its inode may never have been committed, and a job
    may have gone on writing to it.
    """
    seg = segment_paths(one.number)[0]
    in_file = [row for row in one.rows if not row.location(0).in_idx]
    if not in_file:
        return None
    facts = disk.stat(seg)
    if facts.st_size < max(row.offset + row.stored for row in in_file):
        return f"{seg} is shorter than its .idx says"
    may_be_in_flight = one.kind == SegmentKind.ADOPTED and facts.st_nlink > 1
    if may_be_in_flight and find_bad(disk, [(row.chunk, row.location(one.number)) for row in in_file]):
        return "it was being adopted, and its file was written to since"
    return None


def _facts(disk: Disk, one: SegmentIndex, counts: Counts) -> SegmentFacts:
    # Nothing is known of when the payloads were last right, so every dedup hit is checked.
    seg = segment_paths(one.number)[0]
    surplus = disk.exists(seg) and disk.allocated(seg) >= counts.payload_bytes + 4096
    return with_counts(SegmentFacts(one.kind, one.file_bytes, 0, 0, one.created_ns, 0, surplus), counts)


# History, live tree, what is left


def _add_histories(disk: Disk, index: Index, segments: Segments, found: Rebuilt, now_ns: int) -> None:
    histories = Histories(disk, index)
    found.problems += [str(problem) for problem in histories.problems]
    check = VersionCheck(segments)
    for unit in histories.units():
        found.units += 1
        for record in histories.versions(unit.unit):
            found.versions += 1
            lack = check.lack(record.top)
            if lack.chunks:
                found.missing.append(f"{unit.text}@{record.number}: {lack.chunks} chunks are missing")
    drop_orphans(index)
    root = disk.stat("")
    tree = LiveTree(index, segments, histories, check, now_ns)
    tree.build((root.st_uid, root.st_gid))
    found.files = tree.files
    found.problems += tree.problems


def _keep_staging(disk: Disk, trusted: set[int], now_ns: int) -> int:
    """Second names in quarantine/ for the staging files whose bytes no segment has.

    The staging names themselves go at the next start, when recovery finds that nothing names them.
    """
    kept = 0
    for number in Staging(disk, 0).numbers():
        facts = disk.stat(f"staging/{number:016x}")
        if facts.st_size and facts.st_ino not in trusted:
            keep_aside(disk, number, "unnamed", b"", now_ns, "the index that named it was lost")
            kept += 1
    return kept


def _keep_segments(disk: Disk, readable: Set[int]) -> None:
    """Second names in quarantine/ for the segments that cannot be read as they are: an `.idx` may be mended
    elsewhere, and then put back. The names here go at the next start, when recovery finds no row of them.

    One that was being adopted when the daemon died has its staging name, which is kept by that.
    """
    for number, path in segment_files(disk):
        kept = f"{QUARANTINE_PATH}/skipped-{path.rpartition('/')[2]}"
        if number not in readable and disk.stat(path).st_nlink == 1 and not disk.exists(kept):
            disk.make_dir(QUARANTINE_PATH)
            disk.link(path, kept)
    if disk.exists(QUARANTINE_PATH):
        disk.sync_dir(QUARANTINE_PATH)


def _put_numbers(disk: Disk, index: Index, boot_id: str) -> None:
    """Numbers that were given out once are not given out again."""
    segments = [number for number, _ in segment_files(disk)]
    change = Change()
    change.put(Table.META, b"next_segment", (max(segments, default=0) + 1).to_bytes(8, "big"))
    numbers = Staging(disk, 0).numbers()
    change.put(Table.META, b"next_staging", (max(numbers, default=0) + 1).to_bytes(8, "big"))
    change.put(Table.META, BOOT_ID, boot_id.encode())
    index.apply(change)


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""
