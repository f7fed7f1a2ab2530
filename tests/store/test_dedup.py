"""What is stored already: found, checked by sampling, healed, counted once, and removed in the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from small_store import (
    BLOCK_BYTES,
    DAY_NS,
    CountingDisk,
    SmallStore,
    keep_all,
    memory_or,
    random_bytes,
    safetensors,
    segment_of,
)

from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Ingested
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import segment_key, segment_paths

MIB = 1 << 20


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallStore]:
    root = tmp_path if request.param == "disk" else memory_or(tmp_path)
    one = SmallStore(root)
    yield one
    one.close()
    shutil.rmtree(root)


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
    listed = {row.chunk for row in read_idx(store.disk, segment_of(store, stored)).rows}
    assert not listed & set(dead)
    store.reopen()
    assert store.segments.read_file(store.segments.read_recipe(stored.recipe), header, MIB) == keep
    assert store.read(store.store_bytes(both)) == both


def test_a_segment_without_chunks_is_removed(store: SmallStore) -> None:
    stored = store.store_bytes(random_bytes(MIB))
    store.index.commit()
    recipe = store.segments.read_recipe(stored.recipe)
    number = segment_of(store, stored)
    for marked in (store.segments.suspect, store.segments.damaged):
        marked.add(number)
    assert remove(store, [*recipe.chunks(), stored.recipe]) >= MIB
    assert not store.segments.suspect and not store.segments.damaged, "what is gone has no marks"
    assert store.segment_files() == []
    assert store.segments.payload_bytes() == 0
    assert store.index.get(Table.SEGMENT, segment_key(number)) is None
    assert store.index.count(Table.CHUNK) == 0


def test_pinned_chunks_are_not_removed(store: SmallStore) -> None:
    stored = store.store_bytes(random_bytes(1000))
    with store.segments.pins.hold([stored.recipe]):
        remove(store, [stored.recipe])
    assert store.segments.read_recipe(stored.recipe).size == 1000


@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_removal_that_was_cut_short_is_finished_after_a_restart(store: SmallStore, all_of_it: bool) -> None:
    stored = store.store_bytes(safetensors({"a": random_bytes(MIB, 1), "b": random_bytes(MIB, 2)}))
    store.index.commit()
    chunks = list(store.segments.read_recipe(stored.recipe).chunks())
    dead = [*chunks, stored.recipe] if all_of_it else chunks[-4:]
    change = Change()
    store.ingest.reclaim.stage_removal(change, dead)
    store.index.apply(change)
    store.reopen()
    assert trio.run(store.ingest.reclaim.execute) >= MIB - 2 * BLOCK_BYTES
    assert (store.segment_files() == []) == all_of_it
    assert (store.index.count(Table.SEGMENT) == 0) == all_of_it
    store.reopen()
    assert not store.ingest.reclaim.due
    if not all_of_it:
        assert store.segments.read_file(store.segments.read_recipe(stored.recipe), 500_000, 500_000)


def test_the_mark_of_a_segment_that_somebody_still_reads_stays_until_it_is_given_back(
    store: SmallStore,
) -> None:
    """Whoever opens the file anew meanwhile must not be given the same descriptor."""
    stored = store.store_bytes(random_bytes(MIB))
    store.index.commit()
    number, recipe = segment_of(store, stored), store.segments.read_recipe(stored.recipe)
    store.segments.suspect.add(number)
    readers = {number}
    store.segments.is_lent = readers.__contains__
    store.segments.given_back(number)
    assert number in store.segments.suspect, "it is still there"
    remove(store, [*recipe.chunks(), stored.recipe])
    assert store.segment_files() == [] and number in store.segments.suspect
    readers.clear()
    store.segments.given_back(number)
    assert number not in store.segments.suspect


def test_a_segment_that_lost_its_idx_half_removed_goes(store: SmallStore) -> None:
    stored = store.store_bytes(random_bytes(MIB))
    store.index.commit()
    number = segment_of(store, stored)
    chunks = [*store.segments.read_recipe(stored.recipe).chunks(), stored.recipe]
    change = Change()
    store.ingest.reclaim.stage_removal(change, chunks)
    store.index.apply(change)
    store.index.commit()
    (store.root / segment_paths(number)[1]).unlink()
    store.reopen()
    trio.run(store.ingest.reclaim.execute)
    assert store.segment_files() == []
    assert store.index.count(Table.SEGMENT) == 0


def test_a_damaged_idx_does_not_stop_the_rest(store: SmallStore) -> None:
    shared = random_bytes(MIB)
    store.store_bytes(safetensors({"a": shared}))
    numbers = [
        segment_of(store, store.store_bytes(safetensors({"b": random_bytes(MIB, seed), "c": shared})))
        for seed in (2, 3)
    ]
    (store.root / segment_paths(numbers[0])[1]).write_bytes(b"?")
    assert store.reclaim() >= MIB - 2 * BLOCK_BYTES
    assert list(store.ingest.reclaim.damaged) == [numbers[0]]
