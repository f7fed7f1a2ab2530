"""store/ingest.py: what was staged can be read back from the store, whatever way it took, and at no
moment is a file's content neither in staging nor in the store."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from small_store import (
    BLOCK_BYTES,
    CountingDisk,
    SmallStore,
    memory_or,
    random_bytes,
    safetensors,
    segment_of,
)

from ckptfs.store.errors import Unavailable
from ckptfs.store.hashing import chunk_id
from ckptfs.store.index import Change
from ckptfs.store.ingest import Ingested
from ckptfs.store.merkle import file_root
from ckptfs.store.recipe import EMPTY, Recipe
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import SegmentKind, segment_paths

MIB = 1 << 20


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallStore]:
    root = tmp_path if request.param == "disk" else memory_or(tmp_path)
    one = SmallStore(root)
    yield one
    one.close()
    shutil.rmtree(root)


# Which way a file takes


def test_a_large_file_is_adopted_without_a_copy(store: SmallStore) -> None:
    payload = random_bytes(3 * MIB)
    number = store.stage((0, payload))
    inode = (store.root / f"staging/{number:016x}").stat().st_ino
    (stored,) = store.store(store.candidate(number)).stored
    seg, idx = (store.root / path for path in segment_paths(segment_of(store, stored)))
    assert seg.stat().st_ino == inode and idx.exists()
    assert store.staging.numbers() == [number], "the staging name stays until the commit"
    store.index.commit()
    assert store.staging.numbers() == []
    assert store.read(stored) == payload
    recipe = store.segments.read_recipe(stored.recipe)
    assert stored.root == file_root(recipe.root_leaves())
    assert (stored.key, stored.size, stored.blocks) == (number, len(payload), len(payload) // 512)
    location = store.segments.locate(stored.recipe)
    assert location is not None and location.in_idx


def test_small_files_share_a_pack(store: SmallStore) -> None:
    payloads = [random_bytes(100 * k, k) for k in range(600)]
    numbers = [store.stage((0, payload)) for payload in payloads]
    calls: list[int] = []

    def commit(change: Change, stored: list[Ingested]) -> list[object]:
        calls.append(len(stored))
        return []

    report = store.store(*map(store.candidate, numbers), commit=commit)
    assert [store.read(one) for one in report.stored] == payloads
    assert calls == [600]
    assert len(store.segment_files()) == 2
    assert report.stored[0].recipe == EMPTY.identity()
    store.index.commit()
    assert store.staging.numbers() == []


def test_packs_are_bounded(store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfs.store.ingest_batch.PACK_FILES", 100)
    monkeypatch.setattr("ckptfs.store.ingest_batch.PACK_BYTES", MIB)
    payloads = [random_bytes(10_000 if k < 700 else 90_000, k) for k in range(760)]
    report = store.store(*(store.candidate(store.stage((0, payload))) for payload in payloads))
    assert [store.read(one) for one in report.stored] == payloads
    assert 3 <= len(store.segment_files()) // 2 <= 8


def test_an_identical_file_costs_nothing(store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfs.store.ingest_batch.AT_ONCE_UNLINKED_BYTES", MIB)
    payload = random_bytes(2 * MIB)
    first = store.store_bytes(payload)
    before = store.segments.payload_bytes(), len(store.segment_files())
    second = store.store_bytes(payload)
    assert second == Ingested(second.key, first.recipe, first.root, first.size, first.blocks)
    assert (store.segments.payload_bytes(), len(store.segment_files())) == before
    assert store.staging.numbers() != []
    assert store.reclaim() >= 2 * MIB, "the file itself, removed in a worker thread"
    assert store.staging.numbers() == []


def test_duplicates_are_punched_after_the_commit(store: SmallStore) -> None:
    shared, mine = random_bytes(MIB, 1), random_bytes(MIB, 2)
    store.store_bytes(safetensors({"a": shared}))
    both = safetensors({"b": mine, "c": shared})
    stored = store.store_bytes(both)
    before = store.occupied_bytes()
    assert trio.run(store.ingest.reclaim.execute) == 0, "not before the commit"
    freed = store.reclaim()
    assert MIB - 2 * BLOCK_BYTES <= freed <= MIB
    assert store.occupied_bytes() == before - freed
    assert store.read(stored) == both
    store.reopen()
    assert store.read(stored) == both
    assert not store.ingest.reclaim.due


def test_a_due_punch_is_remembered_over_a_restart(store: SmallStore) -> None:
    shared = random_bytes(MIB)
    store.store_bytes(safetensors({"a": shared}))
    stored = store.store_bytes(safetensors({"b": random_bytes(MIB, 2), "c": shared}))
    store.reopen()
    assert store.ingest.reclaim.due == {segment_of(store, stored)}
    assert store.reclaim() > 0
    store.index.commit()
    store.reopen()
    assert not store.ingest.reclaim.due


@pytest.mark.parametrize("how", ["descriptor", "mapping"])
def test_nothing_is_punched_under_a_reader(store: SmallStore, how: str) -> None:
    shared = random_bytes(MIB)
    store.store_bytes(safetensors({"a": shared}))
    stored = store.store_bytes(safetensors({"b": random_bytes(MIB, 2), "c": shared}))
    path = store.root / segment_paths(segment_of(store, stored))[0]
    fd = os.open(path, os.O_RDONLY)
    held = mmap.mmap(fd, 0, prot=mmap.PROT_READ) if how == "mapping" else None
    if held is not None:
        os.close(fd)
    assert store.reclaim() == 0
    if held is not None:
        assert held[-MIB:] == shared
        held.close()
    else:
        assert os.pread(fd, MIB, len(safetensors({"b": shared, "c": shared})) - MIB) == shared
        os.close(fd)
    assert store.reclaim() > 0


def test_without_punching_a_file_with_duplicates_is_copied(
    store: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.disk, "punch", lambda fd, offset, length: False)
    shared = random_bytes(MIB)
    store.store_bytes(safetensors({"a": shared}))
    both = safetensors({"b": random_bytes(MIB, 2), "c": shared})
    stored = store.store_bytes(both)
    store.index.commit()
    assert read_idx(store.disk, segment_of(store, stored)).kind is SegmentKind.PACKED
    assert store.occupied_bytes() < 2.2 * MIB
    assert store.read(stored) == both


def test_a_sparse_file_is_not_read_where_it_is_empty(store: SmallStore) -> None:
    number = store.stage((5 << 30, b"x" * 300_000), size=1 << 40)
    (stored,) = store.store(store.candidate(number)).stored
    recipe = store.segments.read_recipe(stored.recipe)
    assert stored.size == 1 << 40 and len(recipe) < 10
    assert store.segments.read_file(recipe, (5 << 30) - 10, 20) == bytes(10) + b"x" * 10
    assert stored.blocks * 512 < 400_000


def test_zeros_that_are_allocated_stay_bytes(store: SmallStore) -> None:
    stored = store.store_bytes(bytes(MIB))
    assert store.segments.read_recipe(stored.recipe).data_bytes() == MIB
    assert store.read(stored) == bytes(MIB)


# Who may still write


def test_an_open_writer_makes_a_file_busy(store: SmallStore) -> None:
    numbers = [store.stage((0, random_bytes(length))) for length in (1000, MIB)]
    writers = [store.staging.open_write(number) for number in numbers]
    report = store.store(*map(store.candidate, numbers))
    assert (report.stored, sorted(map(str, report.busy))) == ([], sorted(map(str, numbers)))
    for fd in writers:
        os.close(fd)
    assert len(store.store(*map(store.candidate, numbers)).stored) == 2


def test_a_writable_mapping_makes_a_file_busy(store: SmallStore) -> None:
    number = store.stage((0, random_bytes(MIB)))
    fd = store.staging.open_write(number)
    with mmap.mmap(fd, 0) as mapping:
        os.close(fd)
        assert store.store(store.candidate(number)).busy == [number]
        mapping[0] = 1
    assert len(store.store(store.candidate(number)).stored) == 1


def test_a_file_of_another_size_is_busy(store: SmallStore) -> None:
    number = store.stage((0, b"abc"))
    candidate = store.candidate(number)
    with (store.root / f"staging/{number:016x}").open("ab") as file:
        file.write(b"d")
    assert store.store(candidate).busy == [number]


def test_a_staging_file_that_is_gone_is_cancelled(store: SmallStore) -> None:
    numbers = [store.stage((0, random_bytes(length))) for length in (1000, MIB)]
    candidates = [store.candidate(number) for number in numbers]
    for number in numbers:
        store.staging.drop(number)
    assert sorted(map(str, store.store(*candidates).cancelled)) == sorted(map(str, numbers))


@pytest.mark.parametrize("length", [1000, 40 * MIB])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_cancelled_files_leave_nothing(store: SmallStore, length: int, after: int) -> None:
    number = store.stage((0, random_bytes(length)))
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    report = store.store(store.candidate(number, cancelled=cancelled))
    if length < MIB and after:
        assert [one.key for one in report.stored] == [number]
    else:
        assert report.cancelled == [number]
        assert store.segment_files() == []
    assert store.staging.numbers() == [number]


@pytest.mark.parametrize("length", [1000, MIB])
def test_a_key_that_the_commit_drops_keeps_its_staging_file(store: SmallStore, length: int) -> None:
    kept, dropped = (store.stage((0, random_bytes(length, seed))) for seed in (1, 2))
    report = store.store(*map(store.candidate, (kept, dropped)), commit=lambda change, stored: [dropped])
    store.index.commit()
    assert [one.key for one in report.stored] == [kept]
    assert report.cancelled == [dropped]
    assert store.staging.numbers() == [dropped]


# Growing files and objects


@pytest.mark.parametrize("is_overlay", [False, True])
def test_a_growing_log_is_stored_again_and_again(tmp_path: Path, is_overlay: bool) -> None:
    disk = CountingDisk(str(tmp_path))
    store = SmallStore(tmp_path, disk)
    log = bytearray(random_bytes(3 * MIB + 123))
    recipe: Recipe | None = None
    base_limit = clean = 0
    if is_overlay:
        recipe = store.segments.read_recipe(store.store_bytes(bytes(log)).recipe)
        base_limit = clean = len(log)
    _, fd = store.staging.create()
    disk.truncate(fd, base_limit)
    if not is_overlay:
        disk.pwrite(fd, log, 0)
    for step in range(6):
        line = random_bytes(70_000, step)
        start = len(log) // BLOCK_BYTES * BLOCK_BYTES
        log += line
        disk.pwrite(fd, log[start:], start)
        disk.bytes_read = 0

        grow = partial(store.ingest.store_growing, base_limit=base_limit, key="log")
        stored = trio.run(grow, fd, len(log), "train.log", recipe, clean)
        assert store.read(stored) == log
        if step:
            assert disk.bytes_read < len(log) + MIB, "reading it back is most of what was read"
        recipe, clean = store.segments.read_recipe(stored.recipe), len(log)
    os.close(fd)
    store.close()


def test_a_growing_file_that_shrank_is_unavailable(store: SmallStore) -> None:
    number = store.stage((0, random_bytes(MIB)))
    fd = store.staging.open_read(number)
    with pytest.raises(Unavailable):
        trio.run(store.ingest.store_growing, fd, 2 * MIB, "log", None, 0)
    os.close(fd)
    assert store.segment_files() == []


def test_objects_are_stored_once(store: SmallStore) -> None:
    objects = [(chunk_id(payload), payload) for payload in (b"", b"a", b"a", random_bytes(20 * MIB))]
    for _ in range(2):
        trio.run(store.ingest.store_objects, objects)
    assert len(store.segment_files()) == 2
    for identity, payload in objects:
        assert store.segments.read(identity) == payload
    store.reopen()
    for identity, payload in objects:
        assert store.segments.read(identity) == payload
