"""Files of which only some blocks were written anew: they read as their model, are cut as if from
scratch, and cost what was changed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_store import (
    BLOCK_BYTES,
    CountingDisk,
    SmallStore,
    memory_or,
    random_bytes,
    safetensors,
    segment_of,
)

from ckptfs.store.errors import Corrupt
from ckptfs.store.ingest import Ingested
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


def overlay_of(store: SmallStore, model: bytes, dirty: set[int], base: Ingested, base_limit: int) -> Ingested:
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
        appended = data.draw(st.lists(st.integers(1, 300_000), max_size=1))
        steps += [("write", len(base), length, 7) for length in appended]
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
    recipe = store.segments.read_recipe(stored.recipe)
    assert store.segments.read_file(recipe, 63 * MIB, 2 * MIB) == model[63 * MIB :]
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
