"""Files that lie whole in one segment: which are handed out, and what if their segment cannot be read."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from small_store import CountingDisk, SmallStore, random_bytes, safetensors

from ckptfs.store import whole_segment
from ckptfs.store.disk import Disk
from ckptfs.store.index import Change
from ckptfs.store.ingest import Ingested
from ckptfs.store.regions import CHUNK_BYTES
from ckptfs.store.whole_segment import MOST_HASHED_BYTES, WholeSegments

MIB = 1 << 20


class UnreadableDisk(Disk):
    """A disk on which nothing can be read while `fails`."""

    fails = False

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        return super().pread(fd, length, offset)


@pytest.fixture
def disk(tmp_path: Path) -> UnreadableDisk:
    return UnreadableDisk(str(tmp_path))


@pytest.fixture
def store(tmp_path: Path, disk: UnreadableDisk) -> Iterator[SmallStore]:
    small = SmallStore(tmp_path, disk)
    yield small
    small.close()


def second_save(store: SmallStore) -> Ingested:
    """A save whose header is stored with the save before, and yet lies in its own segment, too."""
    for seed in (1, 2):
        content = safetensors({"w": random_bytes(4 * MIB, seed)})
        stored = store.store_bytes(content, "m.safetensors")
    store.reclaim()
    return stored


def found(store: SmallStore, stored: Ingested) -> WholeSegments:
    whole = WholeSegments(store.disk, store.segments)
    whole.want(stored.recipe)
    trio.run(whole.execute)
    return whole


def test_a_segment_that_cannot_be_read_is_not_handed_out_and_not_left_open(
    store: SmallStore, disk: UnreadableDisk
) -> None:
    stored = second_save(store)
    whole = found(store, stored)
    opened = whole.open(stored.recipe, only_tensors=True)
    assert opened is not None
    assert os.pread(opened.fd, stored.size, 0) == store.read(stored)
    os.close(opened.fd)
    before = os.listdir("/proc/self/fd")
    disk.fails = True
    assert whole.open(stored.recipe, only_tensors=True) is None
    disk.fails = False
    assert os.listdir("/proc/self/fd") == before


def test_a_header_that_is_not_there_any_more_is_noticed(store: SmallStore) -> None:
    """No row says what is at the start of the segment, so nothing else would."""
    stored = second_save(store)
    whole = found(store, stored)
    segment = max(p for p in store.segment_files() if p.suffix == ".seg" and p.stat().st_size > MIB)
    with segment.open("r+b") as file:
        file.write(b"\0" * 8)
    assert whole.open(stored.recipe, only_tensors=True) is None


def test_of_a_file_that_nobody_has_read_yet_little_is_hashed(tmp_path: Path) -> None:
    """Whoever only looks at a header does not make the daemon read gigabytes."""
    disk = CountingDisk(str(tmp_path))
    store = SmallStore(tmp_path, disk)
    stored = store.store_bytes(safetensors({"w": random_bytes(2 * MOST_HASHED_BYTES)}), "m.safetensors")
    store.reopen()
    before = disk.bytes_read
    whole = found(store, stored)
    assert whole.open(stored.recipe, only_tensors=True) is None
    assert disk.bytes_read - before < MOST_HASHED_BYTES
    store.read(stored)
    trio.run(whole.execute)
    opened = whole.open(stored.recipe, only_tensors=True)
    assert opened is not None
    os.close(opened.fd)
    store.close()


def test_few_unnamed_bytes_stay_only_where_nothing_was_taken_yet(store: SmallStore) -> None:
    """Where a hole is, no file can be read as a whole: there what is dead goes, however little it is."""
    stored = store.store_bytes(safetensors({"w": random_bytes(32 * MIB)}), "m.safetensors")
    chunks = [piece.chunk for piece in store.segments.read_recipe(stored.recipe).pieces()]
    occupied = [store.occupied_bytes()]
    for number in (5, 9, 20):
        change = Change()
        store.ingest.reclaim.stage_removal(change, [chunk for chunk in [chunks[number]] if chunk is not None])
        store.index.apply(change)
        store.reclaim()
        occupied.append(store.occupied_bytes())
    taken = [before - after for before, after in itertools.pairwise(occupied)]
    assert taken[0] == 0 and taken[1] > CHUNK_BYTES and taken[2] > CHUNK_BYTES // 2, taken


class ColdDisk(Disk):
    """A disk from which everything would have to be read first, while `is_cold`."""

    is_cold = True

    def is_in_memory(self, fd: int, size: int) -> bool:
        assert super().is_in_memory(fd, size), "what was just written is in memory"
        return not self.is_cold


def ready(whole: WholeSegments, stored: Ingested, *, only_tensors: bool = True) -> bool:
    """Whether the file is handed out at its first open."""

    async def steps() -> bool:
        await whole.make_ready(stored.recipe, only_tensors=only_tensors)
        opened = whole.open(stored.recipe, only_tensors=only_tensors)
        if opened is not None:
            os.close(opened.fd)
        return opened is not None

    return trio.run(steps)


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[tuple[SmallStore, Ingested]]:
    """Tensors that nobody has read since the mount, more than is hashed unasked."""
    store = SmallStore(tmp_path, ColdDisk(str(tmp_path)))
    stored = store.store_bytes(safetensors({"w": random_bytes(MOST_HASHED_BYTES + MIB)}), "m.safetensors")
    store.reopen()
    yield store, stored
    store.close()


def test_a_first_open_waits_for_what_is_in_memory(unread: tuple[SmallStore, Ingested]) -> None:
    store, stored = unread
    disk = store.disk
    assert isinstance(disk, ColdDisk)
    whole = WholeSegments(disk, store.segments)
    assert not ready(whole, stored), "the disk is not waited for"
    disk.is_cold = False
    assert not ready(whole, stored), "a file is waited for once"
    assert ready(WholeSegments(disk, store.segments), stored)
    assert store.segments.corruption_count == 0


def test_several_first_opens_wait_for_the_same(unread: tuple[SmallStore, Ingested]) -> None:
    store, stored = unread
    store.disk.is_cold = False  # type: ignore[attr-defined]
    whole = WholeSegments(store.disk, store.segments)

    async def steps() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(lambda: whole.make_ready(stored.recipe, only_tensors=True))
        opened = whole.open(stored.recipe, only_tensors=True)
        assert opened is not None
        os.close(opened.fd)

    trio.run(steps)


@pytest.mark.parametrize("limit", ["_NOW_BYTES", "_MOST_WAIT_S"])
def test_a_first_open_waits_for_a_moment_only(
    unread: tuple[SmallStore, Ingested], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    store, stored = unread
    store.disk.is_cold = False  # type: ignore[attr-defined]
    monkeypatch.setattr(whole_segment, limit, 0)
    assert not ready(WholeSegments(store.disk, store.segments), stored)


def test_nobody_waits_for_a_file_that_the_kernel_may_not_read(tmp_path: Path) -> None:
    """One without tensors is edited, so its readers must see that; only of a version it may be any file."""
    store = SmallStore(tmp_path)
    stored = store.store_bytes(random_bytes(MOST_HASHED_BYTES + MIB))
    store.reopen()
    assert not ready(WholeSegments(store.disk, store.segments), stored)
    assert len(store.segments.plan_read(store.segments.read_recipe(stored.recipe), 0, MIB).unverified) > 0
    assert ready(WholeSegments(store.disk, store.segments), stored, only_tensors=False)
    store.close()


def test_a_first_open_of_a_damaged_file_hands_nothing_out(unread: tuple[SmallStore, Ingested]) -> None:
    store, stored = unread
    store.disk.is_cold = False  # type: ignore[attr-defined]
    segment = max(store.root.glob("segments/*/*.seg"), key=lambda one: one.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(3 * MIB)
        byte = file.read(1)[0]
        file.seek(3 * MIB)
        file.write(bytes([byte ^ 1]))
    assert not ready(WholeSegments(store.disk, store.segments), stored)
    assert store.segments.corruption_count == 1
