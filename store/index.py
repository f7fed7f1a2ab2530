"""The index: the one door to LMDB. Chunk places, the live tree, what is known of versions.

One rule: exactly one thread opens, writes and commits the write transaction (py-lmdb accepts
another thread silently, and the next begin then hangs for ever), and every change is in the
journal before it is in the transaction. So the transaction may be thrown away at any moment.

Rebuildable: everything but the live tree since each unit's last version comes back from the
segments and the history. Source: FORMAT.md, "Index".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import islice, takewhile

import lmdb

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NoSpace, Place, ReadOnly
from ckptfs.store.journal import JOURNAL_PATH, Journal, Op
from ckptfs.store.page_sums import check_pages, remove_page_sums, write_page_sums
from ckptfs.store.removal_gate import RemovalGate

_MAP_BYTES = 1 << 40
_AHEAD_BYTES = 16 << 20
_PAGE_BYTES = 4096
_SEQUENCE = b"sequence"
_BOOT_ID = b"boot_id"
INDEX_PATH = "index"
_FILE_PATH = f"{INDEX_PATH}/data.mdb"
_NEW_FILE_PATH = f"{_FILE_PATH}.tmp"


class Table(IntEnum):
    """The named databases; the numbers are part of the journal's format."""

    META = 0
    CHUNK = 1
    SEGMENT = 2
    INODE = 3
    ENTRY = 4
    ENTRY_SEQ = 5
    XATTR = 6
    DIRTY = 7
    PUBLISHED = 8
    UNIT = 9
    VERSION = 10
    TAG = 11
    PIN = 12
    PREIMAGE = 13
    DIGEST = 14
    WRITERS = 15
    REQUEST = 16
    PARENT = 17
    CHILD = 18
    HEALTH = 19
    MERGE = 20


class Change:
    """A set of puts and deletes that happens whole or not at all."""

    __slots__ = ("actions", "operations")

    def __init__(self) -> None:
        self.operations: list[Op] = []
        self.actions: list[Callable[[], None]] = []

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Set `key` to `value`."""
        self.operations.append((table, key, value))

    def delete(self, table: Table, key: bytes) -> None:
        """Remove `key`, if it is there."""
        self.operations.append((table, key, None))

    def after_commit(self, action: Callable[[], None]) -> None:
        """Run `action` in the index thread once the change is committed and synced.

        For what may only happen after power loss can no longer undo the change: removing or punching bytes
        that the change made superfluous. Lost if the process dies; recovery sweeps up instead.
        """
        self.actions.append(action)


def _make_file(disk: Disk) -> None:
    """A new LMDB file, which gets its name when it is whole: LMDB does not open one of which a loss of
    power has left a part, and it syncs its file but never its name. Durable when: this returned."""
    disk.make_dir(INDEX_PATH)
    if disk.exists(_NEW_FILE_PATH):
        disk.unlink(_NEW_FILE_PATH)
    path, tables = disk.absolute(_NEW_FILE_PATH), len(Table)
    env = lmdb.open(path, map_size=_MAP_BYTES, max_dbs=tables, mode=0o600, subdir=False, lock=False)
    try:
        for table in Table:
            env.open_db(table.name.lower().encode())
        env.sync(True)
    finally:
        env.close()
    disk.rename(_NEW_FILE_PATH, _FILE_PATH)
    disk.sync_dir(INDEX_PATH)


class Index:
    """LMDB and its journal. Every method belongs to the thread that opened it.

    `removals`: see RemovalGate. `problems` is what was found damaged at opening, and mended. As long as
    `changes` is the same, so is every value.
    """

    def __init__(self, disk: Disk, *, read_only: bool = False, boot_id: str = "") -> None:
        """`boot_id`: the kernel's; records that a journal lost are then told from a power cut's.

        Corrupt if pages of the index, or records of its journal, are damaged beyond repair.
        """
        self.problems: list[str] = []
        self._check_pages(disk, read_only)
        self._thread = threading.get_ident()
        self._read_only = read_only
        if not read_only:
            remove_page_sums(disk)
            if not disk.exists(_FILE_PATH):
                _make_file(disk)
        self._env = lmdb.open(
            disk.absolute(INDEX_PATH),
            map_size=_MAP_BYTES,
            max_dbs=len(Table),
            readonly=read_only,
            mode=0o600,
            max_spare_txns=0,
        )
        self._tables = [self._open_table(table) for table in Table]
        self._transaction = self._env.begin(write=not read_only)
        self._sequence = int.from_bytes(self.get(Table.META, _SEQUENCE) or b"", "big")
        self._actions: list[Callable[[], None]] = []
        self._watchers: list[Callable[[list[Op]], None]] = []
        self.removals = RemovalGate()
        self._pending = self._allocated_bytes = self.changes = 0
        self._disk = disk
        if not read_only:
            try:
                self._open_journal(boot_id)
            except BaseException:
                self._transaction.abort()
                self._env.close()
                raise

    def _open_table(self, table: Table) -> lmdb._Database | None:
        """A table's handle. What an index from before there was the table lacks is made; None: read only."""
        try:
            return self._env.open_db(table.name.lower().encode(), create=not self._read_only)
        except lmdb.NotFoundError:
            return None

    def _open_journal(self, boot_id: str) -> None:
        self._journal = Journal(self._disk)
        try:
            self._replay(boot_id)
            self.commit()
            self._journal.begin_anew()
            self._journal.ensure_reserve()
        except BaseException:
            self._journal.close()
            raise

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value of `key`, this process's own changes included."""
        assert self._thread == threading.get_ident(), "the index belongs to one thread"
        # Without a handle LMDB looks among the names of the tables, which are no keys.
        value: bytes | None = self._transaction.get(key, db=self._tables[table])
        return value

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key; keys in ascending order take half the time (they share pages)."""
        assert self._thread == threading.get_ident(), "the index belongs to one thread"
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            return [*map(cursor.get, keys)]

    def scan(
        self, table: Table, prefix: bytes = b"", start: bytes | None = None, limit: int | None = None
    ) -> list[tuple[bytes, bytes]]:
        """Up to `limit` (key, value) pairs in key order: keys with `prefix`, at or behind `start`."""
        assert self._thread == threading.get_ident(), "the index belongs to one thread"
        if self._tables[table] is None:
            return []
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            seek = max(prefix, start) if start is not None else prefix
            if not (cursor.set_range(seek) if seek else cursor.first()):
                return []
            rows: Iterator[tuple[bytes, bytes]] = islice(cursor.iternext(), limit)
            return list(takewhile(lambda row: row[0].startswith(prefix), rows) if prefix else rows)

    def last_key(self, table: Table, prefix: bytes) -> bytes | None:
        """The greatest key with `prefix` (of keys whose next byte is below 0xff)."""
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            found = cursor.set_range(prefix + b"\xff" * 16)
            found = cursor.prev() if found else cursor.last()
            key: bytes = cursor.key()
            return key if found and key.startswith(prefix) else None

    def count(self, table: Table) -> int:
        """Number of keys."""
        handle = self._tables[table]
        return 0 if handle is None else int(self._transaction.stat(handle)["entries"])

    def apply(self, change: Change, *, sync: bool = False) -> None:
        """Make a change: journal first, then the open transaction.

        Durable when: `sync` was set, or a later `sync_journal` or `commit` returned.
        Raises NoSpace if the disk is full even for the journal; then nothing has changed.
        """
        assert self._thread == threading.get_ident(), "the index belongs to one thread"
        if self._read_only:
            raise ReadOnly("the index is open for reading only")
        if change.operations:
            self._journal.append(self._sequence + 1, change.operations)
            self._sequence += 1
            self._pending += len(change.operations)
            for watcher in self._watchers:
                watcher(change.operations)
            try:
                self._put_or_recover(change.operations)
            finally:
                self.changes += 1  # also where it failed half way: nobody may remember what was before
        self._actions += change.actions
        if sync:
            self._journal.sync()

    def sync_journal(self) -> None:
        """Make every change so far durable, without the cost of a commit."""
        self._journal.sync()

    @property
    def pending(self) -> int:
        """Operations since the last commit, deferred actions included."""
        return self._pending + len(self._actions)

    def commit(self) -> None:
        """Commit the transaction, synced, start the journal anew, run what waited for it.

        On a full disk the transaction is rebuilt from the journal and NoSpace is raised: nothing
        is lost, and the next commit tries again.
        """
        assert self._thread == threading.get_ident(), "the index belongs to one thread"
        if self._pending:
            self._commit_transaction()
            self._journal.restart()
            self._pending = 0
            self._allocate_ahead()
        actions, self._actions = self._actions, []
        failure: OSError | None = None
        for action in actions:
            try:
                action()
            except OSError as e:
                failure = e  # the others wait for nothing else than this commit
        if failure is not None:
            raise failure

    @contextmanager
    def watch(self, watcher: Callable[[list[Op]], None]) -> Iterator[None]:
        """Tell `watcher` of every change, right before it is in the tables, until the block ends."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def watch_always(self, watcher: Callable[[list[Op]], None]) -> None:
        """The same for as long as the index is open."""
        self._watchers.append(watcher)

    def free_reserve(self) -> bool:
        """Give up the blocks that are kept aside for a full disk; False if they are gone."""
        return self._journal.free_reserve()

    def ensure_reserve(self) -> None:
        """Keep blocks aside again."""
        self._journal.ensure_reserve()

    def check_journal(self) -> Corrupt | None:
        """What is wrong with the records that the next start would replay; None: nothing."""
        return self._journal.check()

    def close(self) -> None:
        """Commit and close, with the pages' checksums beside the file if there is room for them.

        Closed it is, whatever is raised. NoSpace: the journal, synced, keeps what cannot be committed.
        """
        try:
            if not self._read_only:
                self._commit_or_sync()
        finally:
            self._transaction.abort()
            if not self._read_only:
                self._journal.close()
            self._env.close()
        if not self._read_only:
            try:
                write_page_sums(self._disk, _FILE_PATH)
            except OSError:
                pass  # The next start then checks nothing, as after a kill.

    def _commit_or_sync(self) -> None:
        try:
            self.commit()
        except NoSpace:
            self._journal.sync()
            raise

    def _check_pages(self, disk: Disk, read_only: bool) -> None:
        """What rotted while no daemon ran. Damaged sums say nothing about the index."""
        try:
            found = check_pages(disk, _FILE_PATH, mend=not read_only)
        except Corrupt as e:
            self.problems.append(str(e))
            return
        if found is not None and found.damaged:
            what = f"{len(found.damaged)} pages of the index are damaged; " + (
                "a mount mends it, or says what to do" if read_only else "run `ckptfs rebuild`"
            )
            raise Corrupt(what, place=Place(_FILE_PATH, found.damaged[0] * _PAGE_BYTES))
        if found is not None and found.mended:
            self.problems.append(f"a flipped bit was put right in pages {found.mended} of {_FILE_PATH}")

    def _allocate_ahead(self) -> None:
        """Keep blocks behind the used pages of the file, so that commits go on when the disk is full."""
        used = (int(self._env.info()["last_pgno"]) + 1) * _PAGE_BYTES
        ahead = self._disk.set_aside(_AHEAD_BYTES)
        if used + ahead // 2 <= self._allocated_bytes:
            return
        fd = self._disk.open_write(f"{INDEX_PATH}/data.mdb")
        try:
            if self._disk.allocate(fd, used + ahead):
                self._allocated_bytes = used + ahead
        finally:
            self._disk.close(fd)

    def _commit_transaction(self) -> None:
        for is_last in (False, True):
            self._transaction.put(_SEQUENCE, self._sequence.to_bytes(8, "big"), db=self._tables[Table.META])
            try:
                self._transaction.commit()
                break
            except lmdb.Error as e:
                freed = not is_last and self._journal.free_reserve()
                self._begin_again()
                if not freed:
                    what = f"the index cannot be committed ({e}); the journal keeps the changes"
                    raise NoSpace(what) from e
        self._transaction = self._env.begin(write=True)

    def _put_or_recover(self, operations: list[Op]) -> None:
        try:
            self._put(operations)
        except lmdb.Error:
            # The record is in the journal, so a fresh transaction gets it from there.
            self._begin_again()

    def _begin_again(self) -> None:
        self._transaction.abort()
        self._transaction = self._env.begin(write=True)
        committed = int.from_bytes(self.get(Table.META, _SEQUENCE) or b"", "big")
        for _, operations in self._journal.replay(committed):
            self._put(operations)
        if self._journal.damage is not None:
            raise self._journal.damage

    def _replay(self, boot_id: str) -> None:
        for sequence, operations in self._journal.replay(self._sequence):
            self._put(operations)
            self._sequence = sequence
            self._pending += len(operations)
        if self._journal.mended:
            self.problems.append(
                f"a flipped bit was put right in {self._journal.mended} records of the journal"
            )
        damage = self._journal.damage
        if damage is None:
            return
        # Without a power cut in between every record was whole once, and was answered.
        if boot_id and self.get(Table.META, _BOOT_ID) == boot_id.encode():
            raise Corrupt(f"{damage}; run `ckptfs rebuild`, which keeps the files in staging")
        kept = f"quarantine/journal-{self._sequence}"
        self._disk.make_dir("quarantine")
        self._disk.write_file(kept, self._disk.read_file(JOURNAL_PATH))
        self.problems.append(f"{damage}; that may be so after a power cut; kept as {kept}")

    def _put(self, operations: list[Op]) -> None:
        put, delete, tables = self._transaction.put, self._transaction.delete, self._tables
        for table, key, value in operations:
            if value is None:
                delete(key, db=tables[table])
            else:
                put(key, value, db=tables[table])
