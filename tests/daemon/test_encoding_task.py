"""encoding: what is due when, and what status says when the encoder fails of a chunk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing
from encoded_series import PATH, saves
from saved_store import SECOND_NS, SavedStore

from ckptfs.daemon import encoding_batches
from ckptfs.daemon.config import Config, UnitPolicy
from ckptfs.daemon.encoding import AfterS, EncodingTask
from ckptfs.daemon.encoding_files import EncodingFiles
from ckptfs.daemon.encoding_worker import EncoderDied
from ckptfs.daemon.retaining import Policies
from ckptfs.store.encoding_level import Level
from ckptfs.store.encoding_plan import PlannedChunk
from ckptfs.store.errors import NoSpace
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Table
from ckptfs.store.reencode import Encoding, Reencoder
from ckptfs.store.segment_format import Codec, Location

NAME = PATH.encode()
HOUR_S = 3600.0
SERIES = saves(4, values=70_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SavedStore]:
    one = SavedStore(tmp_path / "store")
    try:
        yield one
    finally:
        one.close()


class FailingReencoder(Reencoder):
    """The encoder dies of some chunks."""

    culprits: frozenset[ChunkId] = frozenset()
    calls = 0

    async def encode(self, planned: Sequence[PlannedChunk], level: Level = "fast") -> Encoding:
        self.calls += 1
        if any(one.chunk in self.culprits for one in planned):
            raise EncoderDied("the process that encodes has died")
        return await super().encode(planned, level)


def task_of(
    store: SavedStore,
    after_s: AfterS,
    *,
    may_work: Callable[[], bool] = lambda: True,
    has_room: Callable[[], bool] = lambda: True,
) -> tuple[EncodingTask, FailingReencoder]:
    async def end() -> None:
        pass

    reencoder = FailingReencoder(store.disk, store.index, store.segments, store.ingest.committer)
    task = EncodingTask(
        store.index, store.segments, store.histories, reencoder, after_s, lambda: 0, may_work, end,
        has_room=has_room, now_ns=lambda: store.now_ns,
    )  # fmt: skip
    return task, reencoder


async def published(store: SavedStore) -> list[VersionRecord]:
    """Four versions, a minute apart."""
    return [await store.publish(b"run", {NAME: one[PATH]}) for one in SERIES]


async def encoded(store: SavedStore, record: VersionRecord) -> list[bool]:
    """Of each version whether any chunk of it is encoded."""
    unit = await EncodingFiles(store.segments, store.histories).of_unit(record.unit)
    found = []
    for save in unit.saves:
        chunks = store.segments.read_recipe(save.files[PATH].recipe).chunks()
        found.append(any(place.codec != Codec.RAW for one in chunks if (place := store.segments.locate(one))))
    return found


def test_a_save_is_encoded_when_its_time_has_come_and_never_the_newest(store: SavedStore) -> None:
    after = Policies(()).encode_after_s(b"run", HOUR_S)
    task, _ = task_of(store, lambda _: after)

    async def scenario() -> None:
        records = await published(store)
        seen = []
        for minutes in (0, 55, 1, 1, 1, 1, 600):
            store.now_ns += minutes * 60 * SECOND_NS
            await task.catch_up()
            seen.append(sum(await encoded(store, records[0])))
        # The first is three minutes older than the last; then the others follow each other by a minute.
        assert seen == [0, 0, 0, 1, 2, 3, 3]
        assert await encoded(store, records[0]) == [True, True, True, False]

    trio.run(scenario)


def test_a_policy_says_it_for_its_units() -> None:
    policies = Policies(
        (UnitPolicy(path="/scratch", encode_after_s="never"), UnitPolicy(path="/a", keep_last=2))
    )
    default = Config().encode_after_s
    assert policies.encode_after_s(b"scratch", HOUR_S) is None
    assert policies.encode_after_s(b"a", HOUR_S) == policies.encode_after_s(b"b", HOUR_S) == HOUR_S
    assert policies.encode_after_s(b"b", default) == (None if default == "never" else default)


def test_what_the_encoder_dies_of_is_left_and_told_and_not_tried_again(
    store: SavedStore, caplog: pytest.LogCaptureFixture
) -> None:
    task, reencoder = task_of(store, lambda _: 0.0)

    async def scenario() -> None:
        records = await published(store)
        unit = await EncodingFiles(store.segments, store.histories).of_unit(records[0].unit)
        # The first holds the header, which all saves share.
        _, victim, *_ = store.segments.read_recipe(unit.saves[1].files[PATH].recipe).chunks()
        reencoder.culprits = frozenset([victim])
        done = await task.catch_up()
        assert done.encoded_chunks and await encoded(store, records[0]) == [True, True, True, False]
        status = task.status()
        assert isinstance(status, dict) and status["left_raw_chunks"] == 1
        assert sum("stays as it is" in one.message for one in caplog.records) == 1
        assert (await task.catch_up()).chunks == 0, "what was looked at is not looked at again"
        place = store.segments.locate(victim)
        assert place is not None and place.codec == Codec.RAW

    trio.run(scenario)


def test_a_look_costs_what_is_new_and_lets_others_run(
    store: SavedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many files, each is looked up until it is known to be done, and a few at a time."""
    task, _ = task_of(store, lambda _: 0.0)
    looked_up: list[ChunkId] = []
    locate = store.segments.locate

    def counted(chunk: ChunkId) -> Location | None:
        looked_up.append(chunk)
        return locate(chunk)

    async def scenario() -> None:
        for save in range(2):
            await store.publish(b"run", {b"%d" % n: bytes([save, n % 256]) * 20_000 for n in range(300)})
        await task.catch_up()
        monkeypatch.setattr(store.segments, "locate", counted)
        at_once = [0]

        async def beside() -> None:
            while True:
                before = len(looked_up)
                await trio.lowlevel.checkpoint()
                at_once.append(len(looked_up) - before)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            await task.catch_up()
            first = len(looked_up)
            await task.catch_up()
            nursery.cancel_scope.cancel()
        assert 300 <= first < 400 and len(looked_up) == first
        assert max(at_once) < 300

    trio.run(scenario)


def test_who_asks_by_hand_is_not_kept_waiting_by_what_rests(store: SavedStore) -> None:
    task, _ = task_of(store, lambda _: 0.0, may_work=lambda: False)

    async def scenario() -> None:
        records = await published(store)
        unit = store.unit(b"run")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task.catch_up)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(60):
                would = await task.now(unit, None, lambda _: None, True)
                done = await task.now(unit, None, lambda _: None, False)
            nursery.cancel_scope.cancel()
        assert isinstance(would, dict) and isinstance(done, dict)
        assert would["chunks"] and done["encoded_chunks"]
        assert await encoded(store, records[0]) == [True, True, True, False]
        assert task.pending_bytes == 0

    trio.run(scenario)


def test_it_rests_before_each_batch(store: SavedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_batches, "BATCH_CHUNKS", 1)
    task, reencoder = task_of(store, lambda _: 0.0, may_work=lambda: not reencoder.calls)

    async def scenario() -> None:
        await published(store)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task.catch_up)
            with trio.fail_after(60):
                while not reencoder.calls:
                    await trio.sleep(0.01)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
        assert reencoder.calls == 1

    trio.run(scenario)


def test_by_hand_it_stops_where_there_is_no_room(store: SavedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_batches, "BATCH_CHUNKS", 1)
    task, reencoder = task_of(store, lambda _: 0.0, has_room=lambda: not reencoder.calls)

    async def scenario() -> None:
        await published(store)
        with pytest.raises(NoSpace, match="min_free"):
            await task.now(store.unit(b"run"), None, lambda _: None, False)
        assert reencoder.calls == 1 and task.pending_bytes == 0

    trio.run(scenario)


def test_what_was_wrongly_blamed_is_encoded_by_the_next_daemon(store: SavedStore) -> None:
    async def scenario() -> None:
        records = await published(store)
        unit = await EncodingFiles(store.segments, store.histories).of_unit(records[0].unit)
        _, victim, *_ = store.segments.read_recipe(unit.saves[1].files[PATH].recipe).chunks()
        task, reencoder = task_of(store, lambda _: 0.0)
        reencoder.culprits = frozenset([victim])
        await task.catch_up()
        task, _ = task_of(store, lambda _: 0.0)
        await task.catch_up()
        place = store.segments.locate(victim)
        assert place is not None and place.codec != Codec.RAW

    trio.run(scenario)


def test_what_somebody_relied_on_meanwhile_is_encoded_at_the_next_look(store: SavedStore) -> None:
    task, reencoder = task_of(store, lambda _: 0.0)

    async def scenario() -> None:
        records = await published(store)
        unit = await EncodingFiles(store.segments, store.histories).of_unit(records[0].unit)
        _, victim, *_ = store.segments.read_recipe(unit.saves[0].files[PATH].recipe).chunks()
        with store.segments.pins.hold() as held:
            held.add(victim)
            await task.catch_up()
        place = store.segments.locate(victim)
        assert place is not None and place.codec == Codec.RAW
        await task.catch_up()
        place = store.segments.locate(victim)
        assert place is not None and place.codec != Codec.RAW
        calls = reencoder.calls
        await task.catch_up()
        assert reencoder.calls == calls

    trio.run(scenario)


def test_small_files_share_a_segment_and_no_room_is_lost(store: SavedStore) -> None:
    """And the chunks that would bring next to nothing, stay."""
    draw = random.Random(1)
    task, reencoder = task_of(store, lambda _: 0.0)

    def occupied() -> int:
        files = [path for path in (store.root / "segments").rglob("*") if path.is_file()]
        return sum(512 * path.stat().st_blocks for path in files)

    async def scenario() -> None:
        for compressible in (200, 12_000):
            name = b"%d" % compressible
            for _ in range(2):
                tree = {
                    b"f%d.bin" % n: draw.randbytes(40_000 - compressible) + bytes(compressible)
                    for n in range(20)
                }
                await store.publish(name, tree)
        store.index.commit()
        await store.ingest.reclaim.execute()
        before, segments = occupied(), sum(1 for _ in store.index.scan(Table.SEGMENT))
        done = await task.catch_up()
        assert reencoder.calls == 2
        assert done.encoded_chunks and done.encoded_bytes < 0.9 * done.encoded_plain_bytes
        store.index.commit()
        await store.ingest.reclaim.execute()
        assert occupied() < before - 100_000
        assert sum(1 for _ in store.index.scan(Table.SEGMENT)) <= segments + 1

    trio.run(scenario)
