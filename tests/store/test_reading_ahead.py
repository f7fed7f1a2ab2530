"""store/reading_ahead.py: what follows a sequential read is verified unasked, and only if it is right."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
from small_store import SmallStore
from trio.testing import wait_all_tasks_blocked

from ckptfs.store import reading_ahead
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.reading_ahead import ReadingAhead
from ckptfs.store.recipe import Recipe
from ckptfs.store.segment_format import segment_paths

MIB = 1 << 20
LIMIT_S = 30.0
PAYLOAD = random.Random(3).randbytes(5 * MIB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SmallStore]:
    one = SmallStore(tmp_path)
    yield one
    one.close()


def stored(store: SmallStore) -> Recipe:
    """A file of 5 MiB of which nothing is known to be right."""
    identity = store.store_bytes(PAYLOAD).recipe
    store.reopen()
    return store.segments.read_recipe(identity)


async def read(
    store: SmallStore, ahead: ReadingAhead, recipe: Recipe, offset: int, length: int = MIB
) -> bytes:
    """As the mount reads."""
    plan = store.segments.plan_read(recipe, offset, length)
    if plan.unverified and await ahead.prepare(recipe, offset, plan):
        plan = store.segments.plan_read(recipe, offset, length)
    return bytes(store.segments.show(plan))


def unverified(store: SmallStore, recipe: Recipe) -> list[ChunkId]:
    return store.segments.plan_read(recipe, 0, recipe.size).unverified


def run(store: SmallStore, steps: Callable[[ReadingAhead], Awaitable[None]]) -> None:
    """Run `steps` beside the workers."""

    async def main() -> None:
        ahead = ReadingAhead(store.disk, store.segments)
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ahead.run)
                await wait_all_tasks_blocked()
                await steps(ahead)
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_what_follows_a_first_read_is_verified_unasked(store: SmallStore) -> None:
    recipe = stored(store)

    async def steps(ahead: ReadingAhead) -> None:
        assert not ahead.is_busy
        assert await read(store, ahead, recipe, 0) == PAYLOAD[:MIB]
        assert ahead.is_busy
        await ahead.wait(store.segments.plan_read(recipe, 0, recipe.size))
        assert unverified(store, recipe) == []
        for at in range(MIB, recipe.size, MIB):
            assert await read(store, ahead, recipe, at) == PAYLOAD[at : at + MIB]

    run(store, steps)


def test_a_reader_waits_for_what_is_being_hashed(store: SmallStore) -> None:
    recipe = stored(store)

    async def steps(ahead: ReadingAhead) -> None:
        await read(store, ahead, recipe, 0)
        plan = store.segments.plan_read(recipe, 2 * MIB, MIB)
        assert plan.unverified, "nothing is noted before this task waits"
        assert await ahead.prepare(recipe, 2 * MIB, plan)
        assert store.segments.plan_read(recipe, 2 * MIB, MIB).unverified == []

    run(store, steps)


def test_a_read_somewhere_else_hashes_only_itself(store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_ahead, "_NEAR_BYTES", MIB // 2)
    recipe = stored(store)

    async def steps(ahead: ReadingAhead) -> None:
        assert await read(store, ahead, recipe, 3 * MIB, 4096) == PAYLOAD[3 * MIB : 3 * MIB + 4096]
        assert not await ahead.wait(store.segments.plan_read(recipe, 0, recipe.size))
        # The next one goes on where that one ended.
        await read(store, ahead, recipe, 3 * MIB + 4096)
        assert await ahead.wait(store.segments.plan_read(recipe, 0, recipe.size))

    run(store, steps)


def test_a_bad_chunk_ahead_is_the_readers_to_find(store: SmallStore) -> None:
    recipe = stored(store)
    bad = recipe.index_at(3 * MIB)
    chunk = recipe.piece(bad).chunk
    assert chunk is not None
    location = store.segments.locate(chunk)
    assert location is not None
    path = store.root / segment_paths(location.segment)[location.in_idx]
    with path.open("r+b") as file:
        file.seek(location.offset)
        file.write(bytes([PAYLOAD[recipe.start(bad)] ^ 1]))

    async def steps(ahead: ReadingAhead) -> None:
        await read(store, ahead, recipe, 0)
        await ahead.wait(store.segments.plan_read(recipe, 0, recipe.size))
        assert unverified(store, recipe) == [chunk]
        assert not store.segments.corruptions
        with pytest.raises(Corrupt) as caught:
            await read(store, ahead, recipe, 3 * MIB)
        assert caught.value.expected == chunk
        assert await read(store, ahead, recipe, 4 * MIB) == PAYLOAD[4 * MIB :]

    run(store, steps)


def test_nobody_waits_for_workers_that_have_ended(store: SmallStore) -> None:
    recipe = stored(store)

    async def main() -> None:
        ahead = ReadingAhead(store.disk, store.segments)
        assert await read(store, ahead, recipe, 0) == PAYLOAD[:MIB]
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ahead.run)
                await wait_all_tasks_blocked()
                await read(store, ahead, recipe, 0, 2 * MIB)
                nursery.cancel_scope.cancel()
            for at in range(0, recipe.size, MIB):
                assert await read(store, ahead, recipe, at) == PAYLOAD[at : at + MIB]

    trio.run(main)
