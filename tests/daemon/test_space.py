"""Room: what is kept free, what statfs counts, and that a vain search is not repeated for every write."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
from filled_store import FilledStore

from ckptfs.daemon import space
from ckptfs.daemon.config import Config
from ckptfs.daemon.space import SpaceKeeper
from ckptfs.store.disk import Space
from ckptfs.store.errors import NoSpace
from ckptfs.store.sweep import Sweeper

DISK = Space(total=1000, free=300, available=200, inodes=10, inodes_free=5)


class Sweeping(Sweeper):
    """A sweeper that gains what it is told to, on a disk that it fills and empties."""

    def __init__(self, gain: int) -> None:
        self.gain = gain
        self.asked: list[int] = []
        self.reclaimable_bytes = 100
        self.disk = DISK

    async def make_room(self, free_bytes: int) -> int:
        self.asked.append(free_bytes)
        if self.gain < 0:
            raise NoSpace("full")
        self.disk = replace(
            self.disk, free=self.disk.free + self.gain, available=self.disk.available + self.gain
        )
        return self.gain


@pytest.fixture
def full_disk(filled_store: FilledStore) -> FilledStore:
    """A store with a version of 60 bytes."""
    filled_store.publish("run", {"x": b"1" * 60})
    filled_store.index.commit()
    return filled_store


def keeper(
    store: FilledStore,
    sweeping: Sweeping,
    config: Config | None = None,
    *,
    saved: int = 60,
    pins: int = 0,
    is_publishing: Callable[[], bool] = lambda: False,
    publish_soon: Callable[[], bool] = lambda: False,
) -> SpaceKeeper:
    """A keeper on a disk of 1000 bytes; `saved` is the size of the last save."""
    store.disk.space = lambda: sweeping.disk  # type: ignore[method-assign]
    return SpaceKeeper(
        store.disk,
        store.index,
        store.histories,
        sweeping,
        config or Config(),
        lambda: pins,
        lambda: saved,
        is_publishing,
        publish_soon,
    )


def test_history_that_may_go_counts_as_free(full_disk: FilledStore) -> None:
    assert keeper(full_disk, Sweeping(0)).space() == replace(DISK, free=400, available=300)


def test_twice_the_last_save_or_what_is_configured(full_disk: FilledStore) -> None:
    assert keeper(full_disk, Sweeping(0)).min_free_bytes() == 120
    assert keeper(full_disk, Sweeping(0), Config(min_free="30%")).min_free_bytes() == 300
    assert keeper(full_disk, Sweeping(0), saved=500).min_free_bytes() == 200


@pytest.mark.parametrize("gain", [0, -1])
def test_a_vain_search_is_not_repeated_at_once(full_disk: FilledStore, gain: int) -> None:
    sweeping = Sweeping(gain)
    kept = keeper(full_disk, sweeping)
    assert not trio.run(kept.make_room, 300)
    assert not trio.run(kept.make_room, 300)
    assert len(sweeping.asked) == 1


def test_room_that_was_made_lets_the_writer_try_again(full_disk: FilledStore) -> None:
    sweeping = Sweeping(50)
    kept = keeper(full_disk, sweeping)
    assert trio.run(kept.make_room, 300) and trio.run(kept.make_room, 300)
    assert len(sweeping.asked) == 2 and min(sweeping.asked) >= 300


def test_room_for_a_save_like_the_last_one_is_made_before_a_file_is_opened(full_disk: FilledStore) -> None:
    sweeping = Sweeping(100)
    trio.run(keeper(full_disk, sweeping, Config(min_free=10), saved=250).make_room_for_a_save)
    assert sweeping.asked == [int(1.05 * 250) + 1000 // 16]
    trio.run(keeper(full_disk, idle := Sweeping(100), Config(min_free=10), saved=100).make_room_for_a_save)
    assert not idle.asked


def test_a_save_waits_for_the_version_that_lets_another_go(
    full_disk: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeping, looks = Sweeping(0), 0

    def is_publishing() -> bool:
        nonlocal looks
        looks += 1
        sweeping.gain = 500 if looks >= 3 else 0
        return True

    kept = keeper(full_disk, sweeping, saved=250, is_publishing=is_publishing)
    monkeypatch.setattr(space, "listed", lambda _: (looks // 3, 0))
    trio.run(kept.make_room_for_a_save)
    assert sweeping.disk.available == DISK.available + 500 and len(sweeping.asked) == 2


def test_what_is_in_no_version_yet_is_published_for_the_room(
    full_disk: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeping, made = Sweeping(0), 0

    def publish_soon() -> bool:
        nonlocal made
        made, sweeping.gain = made + 1, 500
        return True

    kept = keeper(full_disk, sweeping, saved=250, publish_soon=publish_soon)
    monkeypatch.setattr(space, "listed", lambda _: (made, 0))
    trio.run(kept.make_room_for_a_save)
    assert sweeping.disk.available == DISK.available + 500
    trio.run(keeper(full_disk, Sweeping(0), saved=250, publish_soon=publish_soon).make_room_for_a_save)
    assert made == 2, "it is asked for once, not over and over"


def test_the_wait_for_a_version_has_a_bound(full_disk: FilledStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "_PATIENCE_S", 1.0)
    kept = keeper(full_disk, Sweeping(0), saved=250, is_publishing=lambda: True)
    started = time.monotonic()
    trio.run(kept.make_room_for_a_save)
    waited_s = time.monotonic() - started
    trio.run(kept.make_room_for_a_save)
    assert waited_s >= 1.0
    assert time.monotonic() - started - waited_s < 0.9, "the second save waited again"


def test_min_free_is_kept_all_the_time(full_disk: FilledStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "LOOK_EVERY_S", 0.01)
    sweeping = Sweeping(5)
    kept = keeper(full_disk, sweeping, Config(min_free=250))

    async def for_a_moment() -> None:
        with trio.move_on_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kept.run)
                while len(sweeping.asked) < 2:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(for_a_moment)
    assert sweeping.asked[:2] == [250, 250]
