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
