"""gc, sweep: what anything reaches is never taken, also when it is reached while the collector runs."""

from __future__ import annotations

import random
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from saved_store import SavedStore, contents

from ckptfs.store.disk import Disk, Space
from ckptfs.store.errors import Corrupt
from ckptfs.store.gc import (
    KEPT,
    UNREACHED,
    Census,
    Kind,
    Marker,
    Marks,
    Reference,
    going_stage,
    marks_of_chunks,
    marks_of_recipe,
    stage_of,
)
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.index import Change, Table
from ckptfs.store.inode import Content, Inode, encode_inode
from ckptfs.store.pins import PinnedFile, encode_pin
from ckptfs.store.recipe import EMPTY, Piece, Recipe
from ckptfs.store.retention import VersionKey
from ckptfs.store.segment_format import segment_paths
from ckptfs.store.sweep import Sweeper

A, B, C, D = (chunk_id(name) for name in (b"a", b"b", b"c", b"d"))


def stages(marks: Marks, *chunks: ChunkId) -> list[int]:
    return [int(stage) for stage in marks.stages_of(marks_of_chunks(chunks))]


def test_a_chunk_has_the_lowest_stage_that_reaches_it() -> None:
    marks = Marks()
    marks.add(marks_of_chunks([A, B]), 2)
    assert stages(marks, A, B, C) == [2, 2, UNREACHED]
    marks.add(marks_of_chunks([B, C]), 1)
    marks.add(marks_of_chunks([A]), 3)
    marks.add_one(C, KEPT)
    assert stages(marks, A, B, C, D) == [2, 1, KEPT, UNREACHED]
    marks.settle()
    assert stages(marks, A, B, C, D) == [2, 1, KEPT, UNREACHED]
    assert len(marks) == 3


@given(
    st.lists(
        st.one_of(
            st.tuples(st.lists(st.integers(0, 40), max_size=300), st.integers(0, 3)),
            st.tuples(st.integers(0, 40), st.integers(0, 3)),
            st.sampled_from(["settle", "ask"]),
        )
    )
)
def test_marks_are_as_a_dict_would_have_them(steps: list[object]) -> None:
    marks, expected = Marks(), dict[ChunkId, int]()
    chunks = [chunk_id(b"%d" % number) for number in range(42)]
    for step in steps:
        match step:
            case (list() as numbers, int() as stage):
                reached = [chunks[number] for number in numbers]
                marks.add(marks_of_chunks(reached), stage)
            case (int() as number, int() as stage):
                reached = [chunks[number]]
                marks.add_one(chunks[number], stage)
            case "settle":
                marks.settle()
                continue
            case _:
                assert stages(marks, *chunks) == [expected.get(chunk, UNREACHED) for chunk in chunks]
                continue
        for chunk in reached:
            expected[chunk] = min(stage, expected.get(chunk, UNREACHED))
    assert stages(marks, *chunks) == [expected.get(chunk, UNREACHED) for chunk in chunks]
    marks.settle()
    assert stages(marks, *chunks) == [expected.get(chunk, UNREACHED) for chunk in chunks]
    assert len(marks) == len(expected)


def test_no_marks_and_no_questions() -> None:
    assert stages(Marks(), A) == [UNREACHED]
    assert stages(Marks()) == []


def test_marks_agree_with_a_dict(rng: random.Random) -> None:
    chunks = [ChunkId(rng.randbytes(32)) for _ in range(300)]
    marks, twin = Marks(), dict[ChunkId, int]()
    for _ in range(40):
        some, stage = rng.sample(chunks, rng.randrange(60)), rng.randrange(9)
        if rng.random() < 0.5:
            marks.add(marks_of_chunks(some), stage)
        else:
            for chunk in some:
                marks.add_one(chunk, stage)
        for chunk in some:
            twin[chunk] = min(stage, twin.get(chunk, UNREACHED))
        if rng.random() < 0.3:
            marks.settle()
    assert stages(marks, *chunks) == [twin.get(chunk, UNREACHED) for chunk in chunks]


def test_the_marks_of_a_recipe_are_those_of_its_pieces() -> None:
    recipe = Recipe([Piece(5, A), Piece(7, None), Piece(9, B)])
    assert list(marks_of_recipe(recipe.encode())) == list(marks_of_chunks([A, bytes(32), B]))
    assert len(marks_of_recipe(EMPTY.encode())) == 0


@pytest.mark.parametrize("broken", [b"", b"CKRC", Recipe([Piece(5, A)]).encode()[:-1], bytes(64)])
def test_what_is_no_recipe_is_corrupt(broken: bytes) -> None:
    with pytest.raises(Corrupt):
        marks_of_recipe(broken)


def test_the_walk_visits_an_object_once_a_stage_and_lower_stages_win() -> None:
    marker = Marker()
    tree, recipe = Reference(Kind.TREE, A), Reference(Kind.RECIPE, B)
    marker.reach([tree, tree, recipe], 3)
    marker.reach([recipe], 5)
    visited = []
    while (found := marker.next()) is not None:
        visited.append(found)
    assert sorted(visited, key=str) == sorted([(tree, 3), (recipe, 3)], key=str)
    marker.reach([recipe], KEPT)
    assert marker.next() == (recipe, KEPT)
    assert marker.next() is None
    marker.take_recipe(Recipe([Piece(1, C)]).encode(), KEPT)
    assert stages(marker.marks, A, B, C, D) == [3, KEPT, KEPT, UNREACHED]


def test_a_pending_object_that_a_lower_stage_reaches_is_given_out_at_that_stage_only() -> None:
    marker = Marker()
    recipe = Reference(Kind.RECIPE, B)
    marker.reach([recipe], 3)
    marker.reach([recipe], 1)
    assert marker.next() == (recipe, 1)
    assert marker.next() is None


def test_versions_go_in_order_until_enough_is_free() -> None:
    census, count = Census(), 3
    census.add(UNREACHED, 10)
    for position, stored in enumerate([5, 0, 100]):
        census.add(stage_of(position, count), stored)
    assert [census.versions_to_forget(wanted, count) for wanted in (0, 10, 11, 15, 16, 115, 999)] == [
        0, 0, 1, 1, 3, 3, 3,
    ]  # fmt: skip
    assert going_stage(0, count) > stage_of(0, count)
    assert going_stage(1, count) == stage_of(0, count)
    assert going_stage(3, count) == stage_of(2, count)


def test_staged_bytes_are_what_forgetting_frees(rng: random.Random) -> None:
    """Against the definition: what the versions that are left reach, by sets."""
    for _ in range(50):
        chunks = [ChunkId(rng.randbytes(32)) for _ in range(30)]
        kept = set(rng.sample(chunks, 5))
        versions = [set(rng.sample(chunks, rng.randrange(12))) for _ in range(rng.randrange(1, 6))]
        marks, count = Marks(), len(versions)
        marks.add(marks_of_chunks(sorted(kept)), KEPT)
        for position, version in enumerate(versions):
            marks.add(marks_of_chunks(sorted(version)), stage_of(position, count))
        found = dict(zip(chunks, stages(marks, *chunks), strict=True))
        for going in range(count + 1):
            left = kept.union(*versions[going:])
            free = {chunk for chunk in chunks if found[chunk] >= going_stage(going, count)}
            assert free == set(chunks) - left


def test_a_mark_costs_twelve_bytes() -> None:
    marks = Marks()
    marks.add(np.arange(1, 100_001, dtype=np.uint64), 1)
    marks.add(np.arange(1, 100_001, dtype=np.uint64), 2)
    marks.settle()
    assert len(marks) == 100_000
    assert marks._settled.marks.nbytes + marks._settled.stages.nbytes == 12 * 100_000


# The sweeper, on real stores


class Collecting:
    """A store with a sweeper."""

    def __init__(self, root: Path) -> None:
        self.store = SavedStore(root)
        self.open: list[RecipeId] = []
        one = self.store
        self.sweeper = Sweeper(
            one.disk, one.index, one.segments, one.histories, one.ingest.reclaim, lambda: self.open
        )

    def chunks(self) -> set[bytes]:
        return {key for key, _ in self.store.index.scan(Table.CHUNK)}


@pytest.fixture
def collecting(tmp_path: Path) -> Iterator[Collecting]:
    made = Collecting(tmp_path / "store")
    yield made
    made.store.close()


def save(rng: random.Random, size: int = 600_000) -> dict[bytes, bytes]:
    """A save with a large file and a small one."""
    return {b"model.bin": rng.randbytes(size), b"small.json": rng.randbytes(500)}


def test_nothing_is_dead_while_versions_stand(collecting: Collecting, rng: random.Random) -> None:
    async def scenario() -> None:
        saves = [save(rng) for _ in range(3)]
        records = [await collecting.store.publish(b"run", one) for one in saves]
        before = collecting.chunks()
        assert (await collecting.sweeper.collect()).dead == {}
        assert collecting.chunks() == before
        for record, tree in zip(records, saves, strict=True):
            assert collecting.store.read_version(record) == contents(tree)

    trio.run(scenario)


def test_a_forgotten_version_goes_and_what_others_share_stays(
    collecting: Collecting, rng: random.Random
) -> None:
    async def scenario() -> None:
        store = collecting.store
        shared = rng.randbytes(700_000)
        first = await store.publish(b"run", {b"base": shared, b"a": rng.randbytes(400_000)})
        tree = {b"base": shared, b"b": rng.randbytes(400_000)}
        second = await store.publish(b"run", tree)
        payload = store.segments.payload_bytes()
        store.histories.forget(first.unit, first.number)
        dry = await collecting.sweeper.collect(dry_run=True)
        assert store.segments.payload_bytes() == payload
        plan = await collecting.sweeper.collect()
        assert plan == dry and 400_000 < plan.stored_bytes < 410_000
        assert store.segments.payload_bytes() == payload - plan.stored_bytes
        store.segments.close()
        store.segments.verified.__init__()  # type: ignore[misc]
        assert store.read_version(second) == contents(tree)
        assert (await collecting.sweeper.collect()).dead == {}

    trio.run(scenario)


def test_what_is_open_or_pinned_is_not_taken(collecting: Collecting, rng: random.Random) -> None:
    async def scenario() -> None:
        store = collecting.store
        record = await store.publish(b"run", {b"a": rng.randbytes(300_000)})
        await store.publish(b"run", {b"b": b"x"})
        assert record.top.tree is not None
        recipe = store.segments.read_tree(record.top.tree)[0].recipe
        assert recipe is not None
        store.histories.forget(record.unit, record.number)
        collecting.open.append(recipe)
        assert (await collecting.sweeper.collect()).chunks == 1  # the tree
        assert store.segments.read_file(store.segments.read_recipe(recipe), 0, 300_000)
        collecting.open.clear()
        held = list(store.segments.read_recipe(recipe).chunks())
        with store.segments.pins.hold(held):
            assert (await collecting.sweeper.collect()).chunks == len(held) + 1
        assert all(store.segments.locate(chunk) is not None for chunk in held)
        assert (await collecting.sweeper.collect()).chunks == len(held)
        assert all(store.segments.locate(chunk) is None for chunk in held)

    trio.run(scenario)


def test_inodes_pins_and_published_trees_are_roots(collecting: Collecting, rng: random.Random) -> None:
    async def scenario() -> None:
        store = collecting.store
        record = await store.publish(b"run", {b"a": rng.randbytes(90_000), b"b": rng.randbytes(90_000)})
        await store.publish(b"run", {})
        assert record.top.tree is not None
        a, b = (entry.recipe for entry in store.segments.read_tree(record.top.tree))
        change = Change()
        inode = Inode(stat.S_IFREG, 0, 0, ((1, b"a"),), 1, 1, 1, content=Content(staging=9, fallback=a))
        change.put(Table.INODE, bytes(7) + b"\5", encode_inode(inode))
        pinned = msgspec.structs.replace(inode, content=Content(base=b))
        change.put(Table.PREIMAGE, b"p", encode_pin(PinnedFile(5, (), b"b", pinned, ())))
        change.put(Table.PUBLISHED, bytes(8), record.top.tree)
        store.index.apply(change)
        store.histories.forget(record.unit, record.number)
        assert (await collecting.sweeper.collect()).dead == {}
        change = Change()
        change.delete(Table.PUBLISHED, bytes(8))
        store.index.apply(change)
        assert (await collecting.sweeper.collect()).chunks == 1
        change = Change()
        change.delete(Table.INODE, bytes(7) + b"\5")
        change.delete(Table.PREIMAGE, b"p")
        store.index.apply(change)
        plan = await collecting.sweeper.collect()
        assert 180_000 < plan.stored_bytes < 190_000

    trio.run(scenario)


def test_what_a_publish_has_read_stays_until_it_names_it(collecting: Collecting, rng: random.Random) -> None:
    async def scenario() -> None:
        store = collecting.store
        record = await store.publish(b"run", {b"a": rng.randbytes(300_000)})
        await store.publish(b"run", {})
        assert record.top.tree is not None
        (entry,) = store.segments.read_tree(record.top.tree)
        async with trio.open_nursery() as nursery:
            with store.index.removals.hold():
                store.histories.forget(record.unit, record.number)
                nursery.start_soon(collecting.sweeper.collect)
                for _ in range(50):
                    await trio.testing.wait_all_tasks_blocked(0.001)
                inode = Inode(stat.S_IFREG, 0, 0, ((1, b"a"),), 1, 1, 1, content=Content(base=entry.recipe))
                change = Change()
                change.put(Table.INODE, bytes(7) + b"\5", encode_inode(inode))
                store.index.apply(change)
        assert entry.recipe is not None
        assert store.segments.read_file(store.segments.read_recipe(entry.recipe), 0, 300_000)
        assert all(store.segments.locate(c) for c in store.segments.read_recipe(entry.recipe).chunks())
        assert store.segments.locate(record.top.tree) is None

    trio.run(scenario)


def test_an_unreadable_tree_stops_the_collector(collecting: Collecting, rng: random.Random) -> None:
    async def scenario() -> None:
        store = collecting.store
        record = await store.publish(b"run", save(rng))
        change = Change()
        assert record.top.tree is not None
        change.delete(Table.CHUNK, record.top.tree)
        store.index.apply(change)
        before = collecting.chunks()
        with pytest.raises(Corrupt, match="nothing is collected while a tree cannot be read"):
            await collecting.sweeper.collect()
        assert collecting.chunks() == before

    trio.run(scenario)


def test_a_recipe_that_rotted_since_it_was_verified_stops_the_collector(
    collecting: Collecting, rng: random.Random
) -> None:
    """One bit of an id in it, and a chunk that is right would be taken."""

    async def scenario() -> None:
        store = collecting.store
        record = await store.publish(b"run", save(rng))
        assert record.top.tree is not None
        recipe = store.segments.read_tree(record.top.tree)[0].recipe
        assert recipe is not None
        (chunk, *_) = store.segments.read_recipe(recipe).chunks()
        location = store.segments.locate(recipe)
        assert location is not None
        store.segments.mark_verified(location.segment)
        path = store.root / segment_paths(location.segment)[location.in_idx]
        content = bytearray(path.read_bytes())
        content[content.index(chunk, location.offset) + 20] ^= 1
        path.write_bytes(content)
        before = collecting.chunks()
        with pytest.raises(Corrupt, match="nothing is collected while a recipe cannot be read"):
            await collecting.sweeper.collect()
        assert collecting.chunks() == before

    trio.run(scenario)


class SmallDisk(Disk):
    """Claims a disk of a certain size on which only the segments take room."""

    capacity = 1 << 40

    def space(self) -> Space:
        used = 0
        for folder in self.list_dir("segments"):
            if len(folder) == 2:
                names = self.list_dir(f"segments/{folder}")
                used += sum(self.allocated(f"segments/{folder}/{name}") for name in names)
        left = max(0, self.capacity - used)
        return Space(self.capacity, left, left, 1 << 20, 1 << 20)


def test_room_is_made_by_as_few_versions_as_needed_the_oldest_first(
    collecting: Collecting, rng: random.Random
) -> None:
    async def scenario() -> None:
        store = collecting.store
        disk = SmallDisk(store.disk.root)
        collecting.sweeper._disk = disk
        saves = [{b"model.bin": rng.randbytes(1_000_000)} for _ in range(6)]
        records = [await store.publish(b"run", one) for one in saves]
        store.histories.tag(records[0].unit, 1, "good")
        disk.capacity = 1 << 30
        used = disk.capacity - disk.space().available
        disk.capacity = used + 100_000
        gained = await collecting.sweeper.make_room(1_500_000)
        assert gained >= 1_400_000
        assert store.histories.numbers(records[0].unit) == [1, 4, 5, 6]
        for number in (1, 4, 5, 6):
            assert store.read_version(records[number - 1]) == contents(saves[number - 1])
        await collecting.sweeper.make_room(1 << 40)
        assert store.histories.numbers(records[0].unit) == [1, 6]
        assert await collecting.sweeper.make_room(1 << 40) == 0
        assert store.histories.numbers(records[0].unit) == [1, 6]

    trio.run(scenario)


def test_garbage_goes_before_any_version(collecting: Collecting, rng: random.Random) -> None:
    async def scenario() -> None:
        store = collecting.store
        records = [await store.publish(b"run", {b"m": rng.randbytes(800_000)}) for _ in range(4)]
        store.histories.forget(records[1].unit, 2)
        disk = SmallDisk(store.disk.root)
        collecting.sweeper._disk = disk
        disk.capacity = 1 << 30
        disk.capacity -= disk.space().available
        census = await collecting.sweeper.survey()
        assert census.garbage_bytes > 800_000 and len(census.stage_bytes) == 2
        assert collecting.sweeper.reclaimable_bytes > 2_400_000
        assert await collecting.sweeper.make_room(700_000) >= 700_000
        assert store.histories.numbers(records[0].unit) == [1, 3, 4]

    trio.run(scenario)


def test_a_version_that_is_tagged_meanwhile_stays_whole(collecting: Collecting, rng: random.Random) -> None:
    async def scenario() -> None:
        store, sweeper = collecting.store, collecting.sweeper
        saves = [{b"m": rng.randbytes(300_000)} for _ in range(3)]
        records = [await store.publish(b"run", one) for one in saves]
        plain_forget = sweeper._forget

        async def tag_first(
            keys: tuple[VersionKey, ...], may_go: Callable[[], Iterable[VersionKey]]
        ) -> list[VersionKey]:
            store.histories.tag(records[0].unit, 1, "wait")
            return await plain_forget(keys, may_go)

        sweeper._forget = tag_first  # type: ignore[method-assign]
        await sweeper.make_room(1 << 60)
        assert store.histories.numbers(records[0].unit) == [1, 3]
        assert store.read_version(records[0]) == contents(saves[0])

    trio.run(scenario)


def test_writers_beside_the_collector_lose_nothing(collecting: Collecting, rng: random.Random) -> None:
    """Saves that share chunks with versions being forgotten, while the collector runs without pause."""

    async def scenario() -> None:
        store = collecting.store
        pool = [rng.randbytes(rng.randrange(100, 200_000)) for _ in range(12)]
        expected: dict[tuple[bytes, int], dict[bytes, bytes]] = {}
        done = False

        async def collect() -> None:
            while not done:
                await collecting.sweeper.collect()
                await trio.lowlevel.checkpoint()

        async def write(name: bytes) -> None:
            for _ in range(25):
                tree = {b"f%d" % i: one for i, one in enumerate(rng.sample(pool, 4))}
                record = await store.publish(name, tree)
                expected[name, record.number] = contents(tree)
                while len(numbers := store.histories.numbers(record.unit)) > 2:
                    store.histories.forget(record.unit, numbers[0])
                    del expected[name, numbers[0]]
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect)
            async with trio.open_nursery() as writers:
                writers.start_soon(write, b"run1")
                writers.start_soon(write, b"run2")
            done = True
        await collecting.sweeper.collect()
        store.close()
        again = SavedStore(store.root)
        assert len(expected) == 4
        for (name, number), files in expected.items():
            record = again.histories.version(again.unit(name).unit, number)
            assert record is not None and again.read_version(record) == files
        again.close()
        collecting.store = SavedStore(store.root)

    trio.run(scenario)
