"""A full disk, a failed sync or the end of the process at any call: nothing is lost or half stored."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import trio
from small_store import (
    SmallStore,
    memory_or,
    random_bytes,
)

from ckptfs.store.disk import Disk
from ckptfs.store.errors import NoSpace
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Ingested
from ckptfs.store.segment_format import segment_key, segment_number

MIB = 1 << 20


class Died(BaseException):
    """The process ended here."""


class FailingDisk(Disk):
    """Fails at the `at`th call that changes something: with `error`, or for good if it is Died."""

    def __init__(self, root: str, error: BaseException) -> None:
        super().__init__(root)
        self.error = error
        self.calls = 0
        self.at = 0

    def _count(self) -> None:
        self.calls += 1
        is_dead = isinstance(self.error, Died)
        if self.at and (self.calls == self.at or (is_dead and self.calls > self.at)):
            raise self.error


def counted(name: str) -> Callable[..., object]:
    def call(self: FailingDisk, *arguments: object) -> object:
        self._count()
        return getattr(Disk, name)(self, *arguments)

    return call


for _name in ("create", "pwrite", "truncate", "sync", "sync_dir", "link", "rename", "unlink", "punch"):
    setattr(FailingDisk, _name, counted(_name))


PAYLOADS = [
    random_bytes(MIB, 1),
    random_bytes(2000, 2),
    random_bytes(MIB, 1)[:900_000] + random_bytes(MIB, 3),
    random_bytes(100_000, 4),
    random_bytes(2 * MIB, 1)[:MIB],
]


def stage_all(store: SmallStore) -> list[int]:
    """Stage every payload, with a record of it in the index as an inode would be."""
    numbers = [store.stage((0, payload)) for payload in PAYLOADS]
    change = Change()
    for number in numbers:
        change.put(Table.INODE, number.to_bytes(8, "big"), b"staging")
    store.index.apply(change, sync=True)
    store.index.commit()
    return numbers


def record(change: Change, stored: list[Ingested]) -> list[object]:
    for one in stored:
        assert isinstance(one.key, int)
        change.put(Table.INODE, one.key.to_bytes(8, "big"), one.recipe)
    return []


def check_all(store: SmallStore, numbers: list[int]) -> int:
    """Every payload is whole where the index says that it is; how many are in the store."""
    in_store = 0
    for number, payload in zip(numbers, PAYLOADS, strict=True):
        value = store.index.get(Table.INODE, number.to_bytes(8, "big"))
        if value == b"staging":
            assert (store.root / f"staging/{number:016x}").read_bytes() == payload
        else:
            assert value is not None
            stored = Ingested(number, value, b"", len(payload), 0)  # type: ignore[arg-type]
            assert store.read(stored) == payload
            in_store += 1
    return in_store


def sweep(store: SmallStore) -> None:
    """What recovery does with segments that no commit names."""
    for path in store.segment_files():
        number = segment_number(path.name)
        if number is None or store.index.get(Table.SEGMENT, segment_key(number)) is None:
            path.unlink()


def work(store: SmallStore, numbers: list[int]) -> None:
    store.store(*map(store.candidate, numbers), commit=record)
    store.index.commit()
    trio.run(store.ingest.reclaim.execute)


def test_a_death_at_any_call_loses_nothing(tmp_path: Path) -> None:
    at, done = 0, 0
    while done < len(PAYLOADS) or at < 10:
        at += 1
        root = memory_or(tmp_path)
        disk = FailingDisk(str(root), Died())
        store = SmallStore(root, disk)
        numbers = stage_all(store)
        disk.calls, disk.at = 0, at
        try:
            work(store, numbers)
            died = False
        except BaseException as e:
            died = True
            assert isinstance(e, Died) or any(isinstance(x, Died) for x in getattr(e, "exceptions", ())), e
        abandon(store)
        after = SmallStore(root)
        sweep(after)
        done = check_all(after, numbers)
        work(after, left_of(after, numbers))
        assert check_all(after, numbers) == len(PAYLOADS)
        after.close()
        shutil.rmtree(root)
        if not died:
            break
    assert at > 25, "the loop has seen every call"


def abandon(store: SmallStore) -> None:
    """Let go of the database as a killed process does: without a commit."""
    store.segments.close()
    store.index._transaction.abort()
    store.index._env.close()
    os.close(store.index._journal._fd)


def left_of(store: SmallStore, numbers: list[int]) -> list[int]:
    """The files that are in staging still."""
    return [n for n in numbers if store.index.get(Table.INODE, n.to_bytes(8, "big")) == b"staging"]


def test_a_full_disk_at_any_call_is_no_space_and_heals(tmp_path: Path) -> None:
    at, more = 0, True
    while more:
        at += 1
        root = memory_or(tmp_path)
        disk = FailingDisk(str(root), OSError(errno.ENOSPC, "No space left on device"))
        store = SmallStore(root, disk)
        numbers = stage_all(store)
        disk.calls, disk.at = 0, at
        try:
            report = store.store(*map(store.candidate, numbers), commit=record)
            assert all(isinstance(error, OSError) for _, error in report.failed)
        except NoSpace:
            pass
        except OSError:
            # The journal could not be synced: it is broken for good, and the daemon starts anew.
            abandon(store)
            store = SmallStore(root)
            sweep(store)
        more, disk.at = disk.calls >= at, 0
        check_all(store, numbers)
        for path in store.segment_files():
            if path.name == "punch-probe.tmp":
                continue  # its own removal was what failed
            number = segment_number(path.name)
            assert number is not None
            assert store.index.get(Table.SEGMENT, segment_key(number)) is not None
        store.reopen()
        work(store, left_of(store, numbers))
        assert check_all(store, numbers) == len(PAYLOADS)
        store.reopen()
        assert check_all(store, numbers) == len(PAYLOADS)
        store.close()
        shutil.rmtree(root)
    assert at > 30, "the loop has seen every call"


def test_a_staging_file_whose_sync_failed_is_not_believed_later(tmp_path: Path) -> None:
    disk = FailingDisk(str(tmp_path), OSError(errno.EIO, "Input/output error"))
    store = SmallStore(tmp_path, disk)
    number = store.stage((0, random_bytes(MIB)))
    disk.calls, disk.at = 0, 1
    for _ in range(2):
        report = store.store(store.candidate(number))
        assert [key for key, _ in report.failed] == [number]
        assert isinstance(report.failed[0][1], OSError)
    assert store.staging.numbers() == [number] and store.segment_files() == []
    store.close()


def test_a_file_that_is_removed_while_it_is_adopted_is_no_failure(tmp_path: Path) -> None:
    """Its staging file goes with it; nothing "stays in staging", and nothing of it is left."""
    store = SmallStore(tmp_path)
    number = store.stage((0, random_bytes(4 * MIB, 7)), size=4 * MIB)
    asked: list[int] = []

    def removed_when_hashed() -> bool:
        asked.append(number)
        if len(asked) > 1:  # the first time it is not even open yet
            store.staging.drop(number)
        return False

    report = store.store(store.candidate(number, cancelled=removed_when_hashed))
    assert len(asked) > 1
    assert (report.cancelled, report.failed, report.stored) == ([number], [], [])
    assert store.segment_files() == []
    store.close()
