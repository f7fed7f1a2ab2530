"""The share of failingcalls.py that every run of the tests takes."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest import mock

import pytest
import trio
from faceclient import FaceClient
from failingcalls import fail_at, planned
from faultdisk import Faults, Log, RecordingDisk, stores_on
from mounting import memory_folder
from reopened import opened, version_outlines
from small_store import random_bytes
from truth import Truth

from ckptfs.store.disk import Disk
from ckptfs.store.errors import NoSpace, ReadOnly
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.journal import Journal
from ckptfs.store.layout import Holder, StoreLock

RUNS = 60


def test_nothing_that_was_answered_is_lost_when_calls_fail(seed: int) -> None:
    findings: list[str] = []
    failed = 0
    for name in planned(seed, RUNS):
        one, call, kind = name.split(":")
        outcome = fail_at(one, int(call), kind)
        failed += bool(outcome.failed)
        findings += [f"{name}: {what}" for what in outcome.findings]
    assert findings == [], "\n".join(findings)
    assert failed > RUNS // 2


def test_a_journal_whose_sync_failed_is_not_believed_at_the_next(tmp_path: Path) -> None:
    faults = Faults()
    journal = Journal(RecordingDisk(str(tmp_path), Log(faults=faults)))
    journal.append(1, [(0, b"key", b"value")])
    faults.first = faults.last = faults.calls + 1
    with pytest.raises(OSError):
        journal.sync()
    with pytest.raises(ReadOnly):
        journal.sync()
    journal.close()


def test_an_index_that_cannot_be_opened_can_be_opened_later(tmp_path: Path) -> None:
    """In the same process: nothing of the first try is left."""
    Index(Disk(str(tmp_path))).close()
    faults = Faults(1, 1 << 62, only="pread")
    with pytest.raises(OSError) as refused:
        Index(RecordingDisk(str(tmp_path), Log(faults=faults)))
    index = Index(Disk(str(tmp_path)))
    change = Change()
    change.put(Table.META, b"key", b"value")
    index.apply(change)
    index.close()
    assert refused.value.errno == errno.EIO


def test_a_full_disk_does_not_keep_a_store_from_being_locked(tmp_path: Path) -> None:
    """What stands in the lock file is for messages only."""
    faults = Faults()
    disk = RecordingDisk(str(tmp_path), Log(faults=faults))
    StoreLock(disk, Holder(1)).release()
    faults.first, faults.last, faults.code, faults.only = 1, 1 << 62, errno.ENOSPC, "pwrite"
    lock = StoreLock(disk, Holder(2))
    assert faults.failed, "the description was not refused"
    lock.release()


def life_of(script: Callable[[FaceClient, Faults], Awaitable[None]]) -> FaceClient:
    """Calls on a new store, whose disk fails when the script says so; what was found."""
    faults = Faults()
    log = Log(faults=faults)
    client = FaceClient(log, Truth())

    async def life() -> None:
        client.attach(parts)
        await script(client, faults)

    with (
        memory_folder() as memory,
        stores_on(lambda root: RecordingDisk(root, log)),
        opened(f"{memory}/store", "boot") as parts,
    ):
        trio.run(life)
    return client


def test_after_a_failed_sync_a_file_is_not_called_durable_until_it_is_written_anew() -> None:
    async def script(client: FaceClient, faults: Faults) -> None:
        key = await client.create("file")
        assert key is not None
        await client.write(key, 0, b"bytes" * 1000)
        faults.first, faults.last, faults.only = faults.calls + 1, 1 << 62, "sync"
        await client.flush()
        faults.last = 0
        assert not await client.fsync(key), "the daemon's own sync had failed"
        await client.close(key)
        await client.open_truncated(key)
        await client.write(key, 0, b"anew" * 1000)
        assert await client.fsync(key)

    assert life_of(script).findings == []


async def stored_file_opened(client: FaceClient) -> int:
    """A file that is in the store and in a version, open for writing again; its key."""
    await client.mkdir("run0")
    key = await client.create("run0/file")
    assert key is not None
    await client.write(key, 0, random_bytes(50_000))
    await client.close(key)
    await client.publish("run0")
    await client.open(key)
    return key


@pytest.mark.parametrize(
    ("offset", "length"), [(8192, 9001), (100, 3000), (45_000, 20_001), (53_000, 5000), (90_000, 30_000)]
)
def test_half_a_write_to_a_stored_file_takes_nothing_else_along(offset: int, length: int) -> None:
    """The block in which a full disk ended the write had no byte of what was stored behind it."""

    async def script(client: FaceClient, faults: Faults) -> None:
        key = await stored_file_opened(client)
        await client.write(key, 40_000, b"y")
        faults.halfway, faults.code = True, errno.ENOSPC
        faults.first, faults.last, faults.only = faults.calls + 1, 1 << 62, "pwrite"
        assert not await client.write(key, offset, b"x" * length)
        faults.last = 0
        await client.close(key)
        await client.open(key)
        assert not Truth(states=[client.truth.state]).check_killed(await client.look(), 1 << 62)

    assert life_of(script).findings == []


def test_a_truncate_of_a_stored_file_that_fails_shows_what_was_there() -> None:
    async def script(client: FaceClient, faults: Faults) -> None:
        key = await stored_file_opened(client)
        await client.write(key, 20_000, b"new" * 10_000)
        faults.first, faults.last, faults.only = faults.calls + 1, 1 << 62, "truncate"
        assert not await client.truncate(key, 10_000)
        faults.last = 0
        assert not Truth(states=[client.truth.state]).check_killed(await client.look(), 1 << 62)

    assert life_of(script).findings == []


def test_what_a_version_names_stays_if_its_rows_were_refused() -> None:
    """The frame is in the history, so the version is listed later; the collector came first."""

    async def script(client: FaceClient, faults: Faults) -> None:
        await client.mkdir("run0")
        key = await client.create("run0/file")
        assert key is not None
        await client.write(key, 0, random_bytes(50_000))
        await client.close(key)
        apply = client.parts.index.apply

        def refusing(change: Change, *, sync: bool = False) -> None:
            if any(operation[0] == Table.VERSION for operation in change.operations):
                raise NoSpace("as if the disk was full")
            apply(change, sync=sync)

        with mock.patch.object(client.parts.index, "apply", refusing):
            faults.failed.append("the rows")
            await client.publish("run0")
        await client.unlink("run0/file")
        await client.collect()
        (listed,) = [outline for outline in version_outlines(client.parts).values()] or [{}]
        assert not listed
        assert [record.number for record in client.parts.histories.unlisted()] == [1]
        unit = client.parts.histories.units()[0]
        assert client.parts.histories.unit(unit.unit) is not None
        (listed,) = version_outlines(client.parts).values()
        assert not any(line.startswith("unreadable") for line in listed.values())

    life_of(script)


def test_a_clean_stop_does_not_make_good_a_sync_that_failed() -> None:
    async def script(client: FaceClient, faults: Faults) -> None:
        key = await client.create("file")
        assert key is not None
        await client.write(key, 0, b"bytes" * 1000)
        faults.first, faults.last, faults.only = faults.calls + 1, 1 << 62, "sync"
        await client.flush()
        faults.last = 0
        await client.stop()
        assert not client.face.namespace.inode(client.inos[key]).content.synced

    assert life_of(script).findings == []
