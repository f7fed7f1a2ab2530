"""store/ingest.py: what was staged can be read back from the store, whatever way it took, and at no
moment is a file's content neither in staging nor in the store."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_store import BLOCK_BYTES, DAY_NS, SmallStore, keep_all

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NoSpace, Unavailable
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Ingested
from ckptfs.store.merkle import file_root
from ckptfs.store.recipe import EMPTY, Recipe
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import SegmentKind, segment_key, segment_number, segment_paths

MIB = 1 << 20


def memory_or(path: Path) -> Path:
    """A fresh folder in memory, where there is one."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(path)
    return Path(tempfile.mkdtemp(prefix="ckptfs-test-", dir=parent))


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallStore]:
    root = tmp_path if request.param == "disk" else memory_or(tmp_path)
    one = SmallStore(root)
    yield one
    one.close()
    shutil.rmtree(root)


def random_bytes(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A safetensors file of F32 vectors."""
    header, at = {}, 0
    for name, payload in tensors.items():
        shape = [len(payload) // 4]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(payload)]}
        at += len(payload)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values())


def segment_of(store: SmallStore, stored: Ingested) -> int:
    """The segment of the file's first chunk."""
    location = store.segments.locate(next(store.segments.read_recipe(stored.recipe).chunks()))
    assert location is not None
    return location.segment


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


def test_an_identical_file_costs_nothing(store: SmallStore) -> None:
    payload = random_bytes(2 * MIB)
    first = store.store_bytes(payload)
    before = store.segments.payload_bytes(), len(store.segment_files())
    second = store.store_bytes(payload)
    assert second == Ingested(second.key, first.recipe, first.root, first.size, first.blocks)
    assert (store.segments.payload_bytes(), len(store.segment_files())) == before


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
    report = store.store(
        *map(store.candidate, (kept, dropped)), commit=lambda change, stored: [dropped]
    )
    store.index.commit()
    assert [one.key for one in report.stored] == [kept]
    assert report.cancelled == [dropped]
    assert store.staging.numbers() == [dropped]


# Overlays


def overlay_of(
    store: SmallStore, model: bytes, dirty: set[int], base: Ingested, base_limit: int
) -> Ingested:
    """Store `model`, of which only the `dirty` blocks are in the staging file."""
    extents = [(b * BLOCK_BYTES, model[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES]) for b in sorted(dirty)]
    number = store.stage(*extents, size=len(model))
    report = store.store(store.candidate(number, base=base, base_limit=base_limit))
    assert len(report.stored) == 1, report
    return report.stored[0]


def play(base: bytes, operations: list[tuple[str, int, int, int]]) -> tuple[bytes, set[int], int]:
    """What a writer that copies up whole blocks leaves: the bytes, the blocks of its own, the limit."""
    model, dirty, limit = bytearray(base), set[int](), len(base)
    for kind, at, length, seed in operations:
        if kind == "truncate":
            del model[at:]
            limit = min(limit, at)
            dirty = {block for block in dirty if block * BLOCK_BYTES < at}
        else:
            model += bytes(max(0, at + length - len(model)))
            model[at : at + length] = random_bytes(length, seed)
            dirty |= set(range(at // BLOCK_BYTES, -(-(at + length) // BLOCK_BYTES)))
    return bytes(model), dirty, limit


TENSORS = {"a": random_bytes(700_000, 1), "b": random_bytes(50_000, 2), "c": random_bytes(300_000, 3)}
BASES = {"tensors": safetensors(TENSORS), "content": random_bytes(1_200_000, 4), "small": b"abc" * 900}


def writes(limit: int) -> st.SearchStrategy[tuple[str, int, int, int]]:
    sizes = st.one_of(st.integers(1, 5000), st.integers(1, 400_000))
    return st.tuples(st.just("write"), st.integers(0, limit), sizes, st.integers(0, 9))


def truncations(limit: int) -> st.SearchStrategy[tuple[str, int, int, int]]:
    return st.tuples(st.just("truncate"), st.integers(0, limit), st.just(0), st.just(0))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(BASES)), st.data())
def test_overlays_read_as_their_model(kind: str, data: st.DataObject) -> None:
    base = BASES[kind]
    steps = st.one_of(writes(len(base) + 10_000), truncations(len(base)))
    model, dirty, limit = play(base, data.draw(st.lists(steps, max_size=6)))
    root = memory_or(Path(tempfile.gettempdir()))
    try:
        store = SmallStore(root)
        first = store.store_bytes(base, name="model.safetensors")
        stored = overlay_of(store, model, dirty, first, limit)
        assert store.read(stored) == model
        store.reopen()
        assert store.read(stored) == model
        assert store.read(first) == base
        again = overlay_of(store, model, dirty, first, limit)
        assert again.recipe == stored.recipe
        store.close()
    finally:
        shutil.rmtree(root)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(BASES)), st.data())
def test_overlays_are_cut_as_if_from_scratch(kind: str, data: st.DataObject) -> None:
    """Holds for writes in place and appends; a hole of its own makes a recipe another one."""
    base = BASES[kind]
    start = len(base) - sum(map(len, TENSORS.values())) if kind == "tensors" else 0
    drawn = data.draw(st.lists(writes(len(base) - start - 1), max_size=5))
    steps = [(k, start + at, min(n, len(base) - start - at), seed) for k, at, n, seed in drawn]
    if kind != "tensors":
        steps += [("write", len(base), n, 7) for n in data.draw(st.lists(st.integers(1, 300_000), max_size=1))]
    model, dirty, limit = play(base, steps)
    roots = [memory_or(Path(tempfile.gettempdir())) for _ in range(2)]
    try:
        store, scratch = map(SmallStore, roots)
        stored = overlay_of(store, model, dirty, store.store_bytes(base), limit)
        assert stored.recipe == scratch.store_bytes(model).recipe
        store.close()
        scratch.close()
    finally:
        for root in roots:
            shutil.rmtree(root)


class CountingDisk(Disk):
    """Counts the bytes that are read and written."""

    bytes_read = 0
    bytes_written = 0

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        found = super().pread(fd, length, offset)
        self.bytes_read += len(found)
        return found

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        n = super().read_into(fd, buffer, offset)
        self.bytes_read += n
        return n

    def pwrite(self, fd: int, payload: bytes | bytearray | memoryview, offset: int) -> int:
        self.bytes_written += len(payload)
        return super().pwrite(fd, payload, offset)


@pytest.mark.parametrize("kind", ["content", "tensors"])
def test_an_overlay_costs_what_was_changed(tmp_path: Path, kind: str) -> None:
    tensors = {name: random_bytes(16 * MIB, seed) for seed, name in enumerate("abcd")}
    base = safetensors(tensors) if kind == "tensors" else random_bytes(64 * MIB)
    disk = CountingDisk(str(tmp_path))
    store = SmallStore(tmp_path, disk)
    first = store.store_bytes(base, name="x.safetensors")
    disk.bytes_read = disk.bytes_written = 0
    model, dirty, limit = play(base, [("write", 20 * MIB + 5, 100, 1), ("write", 50 * MIB, 100, 2)])
    stored = overlay_of(store, model, dirty, first, limit)
    recipe_bytes = len(store.segments.read_recipe(stored.recipe).encode())
    assert disk.bytes_written < 2 * MIB + 3 * recipe_bytes
    assert disk.bytes_read < 5 * MIB + 3 * recipe_bytes
    assert store.read(stored) == model
    store.close()


def test_appending_to_a_stored_log_reads_only_its_last_chunk(tmp_path: Path) -> None:
    disk = CountingDisk(str(tmp_path))
    store = SmallStore(tmp_path, disk)
    base = random_bytes(64 * MIB)
    first = store.store_bytes(base, name="train.log")
    disk.bytes_read = disk.bytes_written = 0
    model, dirty, limit = play(base, [("write", len(base), 1000, 5)])
    stored = overlay_of(store, model, dirty, first, limit)
    assert disk.bytes_read < 2 * MIB and disk.bytes_written < MIB
    assert store.segments.read_file(store.segments.read_recipe(stored.recipe), 63 * MIB, 2 * MIB) == model[63 * MIB :]
    store.close()


def test_an_overlay_that_covers_the_whole_file_is_adopted(store: SmallStore) -> None:
    first = store.store_bytes(random_bytes(MIB, 1))
    model = random_bytes(MIB, 2)
    stored = overlay_of(store, model, set(range(MIB // BLOCK_BYTES)), first, MIB)
    assert store.read(stored) == model
    assert read_idx(store.disk, segment_of(store, stored)).kind is SegmentKind.ADOPTED


def test_a_damaged_base_fails_only_its_own_overlay(store: SmallStore) -> None:
    base = random_bytes(300_000)
    first = store.store_bytes(base)
    store.reopen()
    seg = store.root / segment_paths(segment_of(store, first))[0]
    seg.write_bytes(bytes(300_000))
    overlay = store.stage((BLOCK_BYTES * 10, bytes(BLOCK_BYTES)), size=300_000)
    plain = store.stage((0, b"fine"))
    report = store.store(store.candidate(overlay, base=first), store.candidate(plain))
    assert [one.key for one in report.stored] == [plain]
    ((key, error),) = report.failed
    assert key == overlay and isinstance(error, Corrupt)


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
    number, fd = store.staging.create()
    disk.truncate(fd, base_limit)
    if not is_overlay:
        disk.pwrite(fd, log, 0)
    for step in range(6):
        line = random_bytes(70_000, step)
        start = len(log) // BLOCK_BYTES * BLOCK_BYTES
        log += line
        disk.pwrite(fd, log[start:], start)
        disk.bytes_read = 0

        async def grow() -> Ingested:
            return await store.ingest.store_growing(
                fd, len(log), "train.log", recipe, clean, base_limit=base_limit, key="log"
            )

        stored = trio.run(grow)
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


# Healing, checking, accounting


def damage(store: SmallStore, stored: Ingested) -> None:
    path = store.root / segment_paths(segment_of(store, stored))[0]
    with path.open("r+b") as file:
        file.write(b"\xff" * 10)


@pytest.mark.parametrize("length", [5000, MIB])
def test_writing_the_same_bytes_again_heals(store: SmallStore, length: int) -> None:
    payload = random_bytes(length)
    first = store.store_bytes(payload)
    stored_bytes = store.segments.payload_bytes()
    damage(store, first)
    store.now_ns += 8 * DAY_NS
    store.reopen()
    store.store_bytes(payload)
    assert store.read(first) == payload
    assert store.segments.payload_bytes() == stored_bytes
    assert len(store.segments.corruptions) == 1
    store.reopen()
    assert store.read(first) == payload
    assert store.segments.payload_bytes() == stored_bytes


def test_some_hits_are_checked_even_when_young(tmp_path: Path) -> None:
    disk = CountingDisk(str(tmp_path))
    store = SmallStore(tmp_path, disk)
    payload = safetensors({"a": random_bytes(16 * MIB)})
    store.store_bytes(payload)
    store.reopen()
    disk.bytes_read = 0
    store.store_bytes(payload)
    checked = disk.bytes_read - len(payload)
    assert MIB <= checked <= 2 * MIB
    store.close()


def test_payload_is_counted_once(store: SmallStore) -> None:
    payload = random_bytes(MIB)
    first = store.store_bytes(payload)
    recipe_bytes = len(store.segments.read_recipe(first.recipe).encode())
    assert store.segments.payload_bytes() == MIB + recipe_bytes
    second = store.store_bytes(payload + b"more")
    recipe_bytes += len(store.segments.read_recipe(second.recipe).encode())
    assert MIB + recipe_bytes < store.segments.payload_bytes() < 1.5 * MIB
    store.index.commit()
    before = store.segments.payload_bytes()
    store.reopen()
    assert store.segments.payload_bytes() == before


def test_two_ingests_of_the_same_bytes_at_once(store: SmallStore) -> None:
    payload = random_bytes(MIB)
    number = store.stage((0, payload))
    identity = chunk_id(payload)
    report = []

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.ingest.store_objects, [(identity, payload)])
            nursery.start_soon(store.ingest.store_objects, [(identity, payload)])
            report.append(await store.ingest.store_files([store.candidate(number)], keep_all))

    trio.run(both)
    assert store.segments.read(identity) == payload
    assert store.read(report[0].stored[0]) == payload
    assert store.segments.payload_bytes() < 2.1 * MIB
    store.reclaim()
    store.reopen()
    assert store.segments.read(identity) == payload
    assert store.read(report[0].stored[0]) == payload


# Removal


def remove(store: SmallStore, chunks: list[ChunkId]) -> int:
    change = Change()
    store.ingest.reclaim.stage_removal(change, chunks)
    store.index.apply(change)
    return store.reclaim()


def test_removed_chunks_give_back_their_room(store: SmallStore) -> None:
    keep, lose = random_bytes(MIB, 1), random_bytes(MIB, 2)
    both = safetensors({"a": keep, "b": lose})
    stored = store.store_bytes(both)
    store.index.commit()
    recipe = store.segments.read_recipe(stored.recipe)
    header = len(both) - 2 * MIB
    dead = [
        piece.chunk
        for at, piece in enumerate(recipe.pieces())
        if piece.chunk is not None and recipe.start(at) >= header + MIB
    ]
    freed = remove(store, [*dead, ChunkId(b"\1" * 32)])
    assert MIB - 2 * BLOCK_BYTES <= freed <= MIB
    assert store.segments.read_file(recipe, 0, header + MIB) == both[: header + MIB]
    assert [row.chunk for row in read_idx(store.disk, segment_of(store, stored)).rows if row.chunk in dead] == []
    store.reopen()
    assert store.segments.read_file(store.segments.read_recipe(stored.recipe), header, MIB) == keep
    assert store.read(store.store_bytes(both)) == both


def test_a_segment_without_chunks_is_removed(store: SmallStore) -> None:
    stored = store.store_bytes(random_bytes(MIB))
    store.index.commit()
    recipe = store.segments.read_recipe(stored.recipe)
    number = segment_of(store, stored)
    assert remove(store, [*recipe.chunks(), stored.recipe]) >= MIB
    assert store.segment_files() == []
    assert store.segments.payload_bytes() == 0
    assert store.index.get(Table.SEGMENT, segment_key(number)) is None
    assert store.index.count(Table.CHUNK) == 0


def test_pinned_chunks_are_not_removed(store: SmallStore) -> None:
    stored = store.store_bytes(random_bytes(1000))
    with store.segments.pins.hold([stored.recipe]):
        remove(store, [stored.recipe])
    assert store.segments.read_recipe(stored.recipe).size == 1000


# Full disks and sudden ends


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
    random_bytes(MIB, 1)[: 900_000] + random_bytes(MIB, 3),
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
