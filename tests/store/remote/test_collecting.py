"""The collector of a remote, and whoever is at work meanwhile: tried at every single call.

The one rule: whatever is stopped where, each version that a head lists has all its chunks in packs that
count; remoteruns.Run.judge says so from the bare objects.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from faultbucket import START_NS, FaultBucket, Faults, Killed, MemoryBucket, Stored
from remoteruns import Run, fetch, small_packs
from saved_store import SavedStore, Tree, contents

from ckptfs.store.bucket import Bucket, ObjectMeta, Payload, Unfinished
from ckptfs.store.errors import CkptfsError, Conflict, Corrupt, NotFound, Unavailable
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import UnitId
from ckptfs.store.remote import collecting, log
from ckptfs.store.remote.box import plain_name
from ckptfs.store.remote.catalogue import RemoteUnit
from ckptfs.store.remote.collecting import Collected, Collector
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.kept import Kept
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.log import RemoteLog
from ckptfs.store.remote.log_entry import Claim, Decision, Extension, Join, encode_entry
from ckptfs.store.remote.lost import lost_versions, stock_of_shards
from ckptfs.store.remote.names import COPY, SHARDS, head_key, kept_key, log_key, pack_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.push import Pusher, PushReport
from ckptfs.store.remote.stock import Stock, stock_of
from ckptfs.store.signing import SigningKey

KEY = SigningKey(b"k" * 32)
MOST_CALLS = 400
# Another of them each time: remoteruns.py does what all of them do.
STEP = 19


@pytest.fixture(autouse=True)
def packs() -> Iterator[None]:
    with small_packs(0.0):
        yield


class StoppingBucket:
    """Another bucket; before the call of number `at`, `meanwhile` is done."""

    def __init__(self, bucket: Bucket, at: int, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._bucket, self._left, self._meanwhile = bucket, at, meanwhile
        self.has_stopped = False

    def __getattr__(self, name: str) -> object:
        found = getattr(self._bucket, name)
        if not callable(found):
            return found

        async def call(*arguments: object, **more: object) -> object:
            self._left -= 1
            if self._left == -1:
                self.has_stopped = True
                await self._meanwhile()
            return await found(*arguments, **more)

        return call


class _Unlisted(Remote):
    """One whose list of shards is old."""

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        return [] if prefix == SHARDS else await super().list_objects(prefix)


def tree(*seeds: int) -> Tree:
    """A file of each seed, which fills a pack of its own."""
    return {b"%d" % seed: _noise(seed) for seed in seeds}


def _noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(50_000)


class Place:
    """A run's storage, and a store that copies to it."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.run = Run(seed)
        self.store = SavedStore(path, key=KEY)
        self.unit = self.store.unit(b"run").unit

    async def save(self, *seeds: int) -> VersionRecord:
        record = await self.store.publish(b"run", tree(*seeds))
        self.run.saved[record.unit, record.number] = contents(tree(*seeds))
        return record

    async def push(
        self, remote: Remote | None = None, *, again: bool = False, even_let_go: bool = False
    ) -> PushReport:
        store, copied = self.store, CopiedUnits(self.store.index, "backup")
        pusher = Pusher(remote or self.run.remote(), store.disk, store.segments, store.histories, copied, "n")
        return await pusher.push(self.unit, again=again, even_let_go=even_let_go)

    async def collect(
        self, kept: int = 1, remote: Remote | None = None, given_up: Iterable[UnitId] = (), **more: bool
    ) -> Collected:
        def let_go(unit: object, now_ns: int) -> set[int]:
            numbers = {record.number for record in unit.versions[:-kept]}  # type: ignore[attr-defined]
            self.run.may_go |= {(self.unit, number) for number in numbers}
            return numbers

        remote = remote or self.run.remote()
        return await Collector(remote, "n", os.urandom, let_go, 0.0, given_up).collect(**more)

    def forget(self) -> None:
        """Let all versions but the newest go here: else each push would bring all of them back."""
        for number in self.store.histories.numbers(self.unit)[:-1]:
            self.store.histories.forget(self.unit, number)

    def stopping(self, at: int, meanwhile: Callable[[], Awaitable[None]]) -> tuple[StoppingBucket, Remote]:
        bucket = StoppingBucket(self.run.bucket, at, meanwhile)
        return bucket, Remote(bucket, self.run.key)  # type: ignore[arg-type]


def test_what_dead_writers_left_half_made_goes_by_the_storages_clock(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path / "a")
        await place.save(1)
        await place.push()
        bucket = place.run.bucket
        bucket.half_made = [Stored(b"old", START_NS), Stored(b"young", START_NS + 10**15)]
        would = await place.collect(dry_run=True)
        assert would.unfinished == Unfinished(1, 3) and len(bucket.half_made) == 2
        assert (await place.collect()).unfinished == Unfinished(1, 3)
        assert [one.payload for one in bucket.half_made] == [b"young"]
        assert (await place.collect()).unfinished == Unfinished()
        place.store.close()

    trio.run(main)


def test_what_is_let_go_and_not_needed_goes(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path / "a")
        for seeds in ((1, 2), (2, 3), (3, 4)):
            await place.save(*seeds)
            await place.push()
        bucket = place.run.bucket
        before = dict(bucket.objects)
        would = await place.collect(dry_run=True)
        assert bucket.objects == before, "a dry run changes nothing"
        did = await place.collect()
        assert did.went == would.went == [(place.unit, 1), (place.unit, 2)]
        assert did.removed_packs and did.removed_bytes > 100_000
        assert 100_000 < sum(len(bucket.objects[key].payload) for key in bucket.keys("packs")) < 130_000
        await place.run.judge()
        assert place.run.heads()[place.unit][1].versions == (3,)
        await place.save(4, 5)
        report = await place.push()
        assert (report.problems, report.safe, report.copied) == ([], (3, 4), [4])
        assert (await place.push(again=True)).safe == (3, 4), "what was let go is not sent again by itself"
        place.store.histories.tag(place.unit, 2, "keep")
        assert (await place.push()).safe == (2, 3, 4), "but once somebody wants it"
        assert (await place.push(even_let_go=True)).safe == (1, 2, 3, 4)
        await place.run.judge()
        assert place.run.heads()[place.unit][1].let_go == ()
        place.store.close()

    trio.run(main)


def test_what_is_tagged_and_pushed_before_the_claim_stays(tmp_path: Path) -> None:
    """The collector had decided that it goes; the push said that it is safe, and that it is tagged."""

    async def main() -> None:
        place = Place(tmp_path / "a")
        for seeds in ((1,), (2,), (3,)):
            await place.save(*seeds)
            await place.push()

        def let_go(unit: RemoteUnit, now_ns: int) -> set[int]:
            return {one.number for one in unit.versions[:-1]} - {*unit.tags.values()}

        class Tagging(Remote):
            async def create_unnamed(self, key: str, content: Payload) -> None:
                if key.startswith("log/") and not place.store.histories.tags(place.unit):
                    place.store.histories.tag(place.unit, 1, "keep")
                    assert (await place.push()).safe == (1, 2, 3)
                await super().create_unnamed(key, content)

        remote = Tagging(place.run.bucket, place.run.key)
        done = await Collector(remote, "n", os.urandom, let_go, 0.0).collect()
        assert done.went == [(place.unit, 2)]
        assert place.run.heads()[place.unit][1].versions == (1, 3)
        place.run.may_go.add((place.unit, 2))
        await place.run.judge()
        place.store.close()

    trio.run(main)


def test_the_copy_that_stays_is_one_that_is_right(tmp_path: Path) -> None:
    """Two nodes sent the same without seeing each other's shard. Whichever of the two packs rots: the other
    is fetched from, and survives a collection."""

    async def main() -> None:
        place = Place(tmp_path / "a")
        bucket = place.run.bucket
        await place.save(1, 2)
        await place.push()
        other = SavedStore(tmp_path / "b", key=KEY, node=b"b")
        record = await other.publish(b"run", tree(1))
        place.run.saved[record.unit, record.number] = contents(tree(1))
        await Pusher(
            _Unlisted(bucket), other.disk, other.segments, other.histories, CopiedUnits(other.index, "x"), "b"
        ).push(record.unit)
        whole, shared = dict(bucket.objects), _noise(1)[:100]
        holders = [key for key in bucket.keys("packs") if shared in whole[key].payload]
        assert len(holders) == 2
        for key in holders:
            bucket.objects = dict(whole)
            bucket.flip(key, 8 * whole[key].payload.index(shared))
            for after in ("rotten", "collected"):
                node = SavedStore(tmp_path / f"{key[-9:]}{after}", key=KEY, node=b"n")
                await fetch(node, place.run.remote(), record, b"copy", place.run)
                node.close()
                if after == "rotten":
                    await place.collect(kept=9)
        place.store.close()
        other.close()

    trio.run(main)


def test_rows_are_searched_and_sorted_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million take a second, and a mount is served by the same loop."""
    threads: dict[str, set[int]] = {}

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: object) -> object:
            threads.setdefault(name, set()).add(threading.get_ident())
            return real(*arguments)

        monkeypatch.setattr(owner, name, watched)

    for name in ("rows_of", "needed", "only_copies"):
        watch(Stock, name)
    watch(KnownChunks, "add")
    watch(Collector, "_plan")
    watch(collecting, "stock_of")

    async def main() -> None:
        place = Place(tmp_path / "a")
        for seeds in ((1, 2), (2, 3)):
            await place.save(*seeds)
            await place.push()
        threads.clear()
        await place.collect()
        place.store.close()

    trio.run(main)
    assert threads.keys() == {"rows_of", "needed", "only_copies", "add", "_plan", "stock_of"}
    assert all(threading.get_ident() not in one for one in threads.values())


def test_who_pulls_what_was_collected_meanwhile_is_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path / "a")
        for seeds in ((1,), (2,)):
            await place.save(*seeds)
            await place.push()
        (record, _) = place.store.histories.versions(place.unit)
        await place.collect()
        here = SavedStore(tmp_path / "b", key=KEY, node=b"b")
        with pytest.raises(NotFound, match="version 1 was let go"):
            await fetch(here, place.run.remote(), record, b"copy", place.run)
        here.close()
        place.store.close()

    trio.run(main)


def test_what_is_mostly_not_needed_is_copied_over(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path / "a")
        for seed in (1, 2):
            files = {b"big": _noise(seed), b"small": _noise(3)[:5000]}
            record = await place.store.publish(b"run", files)
            place.run.saved[record.unit, record.number] = files
            await place.push()
        done = await place.collect()
        assert 0 < done.copied_bytes < done.removed_bytes
        await place.run.judge()
        place.store.close()

    trio.run(main)


def test_a_collection_between_any_two_calls_of_a_push(tmp_path: Path, seed: int) -> None:
    """It takes the very chunks that the push has found there, and does not send."""

    async def main() -> None:
        place, at, stopped = Place(tmp_path / "a", seed % 2), seed % STEP, True
        while stopped and at < MOST_CALLS:
            place.forget()
            await place.save(1, 2)
            await place.push()
            await place.save(3)
            await place.push()
            await place.save(2, 4)

            async def meanwhile() -> None:
                await place.collect(kept=1)

            bucket, remote = place.stopping(at, meanwhile)
            report = await place.push(remote)
            stopped, at = bucket.has_stopped, at + STEP
            assert place.store.histories.numbers(place.unit)[-1] in report.safe and report.problems == []
            await place.run.judge()
        assert 20 < at < MOST_CALLS
        place.store.close()

    trio.run(main)


def test_a_push_between_any_two_calls_of_a_collection(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        place, at, stopped, outcomes = Place(tmp_path / "a"), seed % STEP, True, set[bool]()
        while stopped and at < MOST_CALLS:
            place.forget()
            await place.save(1, 2)
            await place.push()
            await place.save(3)
            await place.push()
            await place.save(2, 4)

            async def meanwhile() -> None:
                assert (await place.push()).problems == []

            bucket, remote = place.stopping(at, meanwhile)
            outcomes.add((await place.collect(remote=remote)).is_off)
            stopped, at = bucket.has_stopped, at + STEP
            await place.run.judge()
        assert 20 < at < MOST_CALLS and False in outcomes
        place.store.close()

    trio.run(main)


def test_a_collector_that_died_anywhere_blocks_nobody(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        place, at, died = Place(tmp_path / "a"), seed % STEP, True
        while died and at < MOST_CALLS:
            place.forget()
            await place.save(1, 2)
            await place.save(2, 3 + at % 5)
            await place.push()
            faults = Faults(at, die_at=at)
            try:
                await place.collect(remote=Remote(FaultBucket(place.run.bucket, faults)))
            except* Killed:
                pass
            died, at = faults.died, at + STEP
            await place.run.judge()
            await place.save(1, 6)
            assert (await place.push()).problems == []
            await place.run.judge()
            await place.collect()
            await place.run.judge()
        assert 20 < at < MOST_CALLS
        place.store.close()

    trio.run(main)


def test_nothing_is_taken_where_something_is_damaged(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path / "a")
        bucket = place.run.bucket
        for seeds in ((1, 2), (2, 3)):
            await place.save(*seeds)
            await place.push()
        whole = dict(bucket.objects)
        newest = head_key(place.unit, 3)
        for damaged in (newest, *bucket.keys("shards"), *bucket.keys("packs"), *bucket.keys("histories")):
            bucket.objects = dict(whole)
            bucket.store(damaged, bucket.objects[damaged].payload[:-10])
            try:
                await place.collect(kept=2)
            except (Corrupt, NotFound):
                after = {key for key in bucket.objects if not key.startswith(("log/", "heads/", "kept/"))}
                assert after == {key for key in whole if not key.startswith(("log/", "heads/", "kept/"))}
            else:
                raise AssertionError(f"{damaged} was cut, and nobody noticed")
            assert (await place.push(again=True)).safe == (1, 2)
        place.store.close()

    trio.run(main)


def test_a_head_that_gives_way_lists_nothing_that_is_gone(tmp_path: Path) -> None:
    """The collector's head rots: the one before it lists what was let go, so that is sent anew."""

    async def main() -> None:
        place = Place(tmp_path / "a")
        for seeds in ((1, 2), (2, 3)):
            await place.save(*seeds)
            await place.push()
        assert (await place.collect()).went == [(place.unit, 1)]
        place.run.bucket.flip(place.run.bucket.keys("heads")[-1], 200)
        report = await place.push()
        assert report.safe == (1, 2) and report.sent.chunks and "damaged" in report.problems[0]
        await place.run.judge()
        place.store.close()

    trio.run(main)


def test_a_head_before_a_damaged_one_lists_nothing_that_is_lost(tmp_path: Path) -> None:
    """It lists what the collector took, and its node has let that go since: nobody can send it anew."""

    async def main() -> None:
        place = Place(tmp_path / "a")
        for seeds in ((1, 2), (2, 3)):
            await place.save(*seeds)
            await place.push()
        assert (await place.collect()).went == [(place.unit, 1)]
        place.forget()
        place.run.bucket.flip(place.run.bucket.keys("heads")[-1], 200)
        report = await place.push()
        assert report.safe == (2,) and "version 1" in report.problems[1] and "missing" in report.problems[1]
        await place.run.judge()
        await place.collect()
        await place.run.judge()
        place.store.close()

    trio.run(main)


def test_what_is_not_whole_is_not_listed_while_it_is_sent_anew(tmp_path: Path, seed: int) -> None:
    """A push that goes on from an older head dies anywhere: what that lists and a collector took is there
    again, or is not listed."""

    async def main() -> None:
        at, died = seed % 7, True
        while died and at < MOST_CALLS:
            place = Place(tmp_path / str(at))
            for seeds in ((1, 2), (2, 3)):
                await place.save(*seeds)
                await place.push()
            await place.collect()
            place.run.bucket.flip(place.run.bucket.keys("heads")[-1], 200)
            faults = Faults(at, die_at=at)
            try:
                await place.push(Remote(FaultBucket(place.run.bucket, faults)))
            except* Killed:
                pass
            died, at = faults.died, at + 7
            assert (await place.push()).safe == (1, 2)
            await place.run.judge()
            place.store.close()
        assert 20 < at < MOST_CALLS

    trio.run(main)


def test_what_is_damaged_and_not_here_any_more_stays_listed(tmp_path: Path) -> None:
    """It may yet be healed from another remote."""

    async def main() -> None:
        place = Place(tmp_path / "a")
        bucket = place.run.bucket
        for seeds in ((1, 2), (2, 3)):
            await place.save(*seeds)
            await place.push()
        place.forget()
        bucket.flip(bucket.keys("heads")[-1], 200)
        for shard in bucket.keys("shards"):
            bucket.flip(shard, 200)
        assert (await place.push()).safe == (1, 2)
        place.store.close()

    trio.run(main)


def test_which_versions_lack_something_whatever_they_share(tmp_path: Path) -> None:
    """A version that is not whole makes no other one pass that has the same directory."""

    async def main() -> None:
        place = Place(tmp_path / "a")
        shared = {b"dir": tree(1, 2)}
        records = [
            await place.store.publish(b"run", shared | {b"own": _noise(seed)}) for seed in (3, 4, 5, 6, 7)
        ]
        await place.push()
        known = KnownChunks(place.run.remote(), every=True)
        await known.refresh()
        stock = await stock_of_shards(known)
        assert await lost_versions(place.run.remote(), stock, records) == {}
        for seeds in ((4,), (4, 6), (1,)):
            whole = dict(place.run.bucket.objects)
            for seed in seeds:
                (key,) = [
                    key for key in place.run.bucket.keys("packs") if _noise(seed)[:100] in whole[key].payload
                ]
                gone = [number for number, pack in enumerate(known.packs) if pack_key(pack.name) == key]
                keep = ~np.isin(stock.rows["pack"], gone)
                stock = stock_of(known.packs, stock.rows[keep])
            lost = await lost_versions(place.run.remote(), stock, records)
            assert all(lack.is_missing for lack in lost.values())
            has_shared = 1 not in seeds
            assert {*lost} >= ({number - 2 for number in seeds} if has_shared else {1, 2, 3, 4, 5})
            if has_shared:
                assert {*lost} < {1, 2, 3, 4, 5}
        place.store.close()

    trio.run(main)


def damaged_head(bucket: MemoryBucket, place: Place) -> None:
    bucket.flip(bucket.keys("heads")[-1], 200)


def damaged_heads(bucket: MemoryBucket, place: Place) -> None:
    for key in bucket.keys("heads"):
        bucket.flip(key, 200)


def damaged_history(bucket: MemoryBucket, place: Place) -> None:
    bucket.flip(bucket.keys("histories")[-1], 200)


def lost_pack(bucket: MemoryBucket, place: Place) -> None:
    (key,) = [key for key in bucket.keys("packs") if _noise(3)[:100] in bucket.objects[key].payload]
    del bucket.objects[key]


@pytest.mark.parametrize(
    ("damage", "left"),
    [(damaged_head, {1}), (damaged_heads, set()), (damaged_history, None), (lost_pack, {1})],
)
def test_what_is_damaged_of_a_node_that_is_gone_is_given_up(
    tmp_path: Path, damage: Callable[[MemoryBucket, Place], None], left: set[int] | None
) -> None:
    """Never unasked: the error names what to say. What is not damaged stays, and a node that is not gone
    after all sends what it has."""

    async def main() -> None:
        place = Place(tmp_path / "a")
        bucket = place.run.bucket
        for seeds in ((1, 2), (2, 3)):
            await place.save(*seeds)
            await place.push()
        damage(bucket, place)
        for given_up in ((), (UnitId(bytes(16)),)):
            with pytest.raises(CkptfsError) as raised:
                await place.collect(kept=9, given_up=given_up)
            assert given_up or f"--give-up {place.unit.hex()}" in str(raised.value), raised.value
        would = await place.collect(kept=9, given_up=[place.unit], dry_run=True)
        done = await place.collect(kept=9, given_up=[place.unit])
        assert done.lost == would.lost and {unit for unit, _, _ in done.lost} == {place.unit}
        assert (done.went, done.is_off) == ([], False)
        head = place.run.heads()[place.unit][1]
        assert left is None or {*head.versions} == left
        assert {1, 2} - {*head.versions} <= {number for _, number, _ in done.lost} or (
            0 in dict((number, why) for _, number, why in done.lost)
        )
        assert head.let_go == ()
        place.run.may_go |= {(place.unit, 1), (place.unit, 2)}
        place.run.history_may_shrink = True
        await place.run.judge()
        assert (await place.collect(kept=9)).lost == [], "it holds back nothing any more"
        assert (await place.push()).safe == (1, 2)
        await place.run.judge()
        place.store.close()

    trio.run(main)


def test_a_node_that_copies_meanwhile_is_not_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path / "a")
        for seeds in ((1, 2), (2, 3)):
            await place.save(*seeds)
            await place.push()
        damaged_head(place.run.bucket, place)

        class Copying(Remote):
            async def create_unnamed(self, key: str, content: Payload) -> None:
                await super().create_unnamed(key, content)
                if key.startswith("log/"):
                    assert (await place.push()).safe == (1, 2)

        remote = Copying(place.run.bucket, place.run.key)
        with pytest.raises(Conflict, match="it is not given up"):
            await place.collect(kept=9, remote=remote, given_up=[place.unit])
        assert (await place.push()).safe == (1, 2)
        await place.run.judge()
        place.store.close()

    trio.run(main)


def test_what_is_listed_no_more_is_said_though_nothing_was_removed(tmp_path: Path) -> None:
    """Another one called the claim off, behind the collector's heads."""

    async def main() -> None:
        place = Place(tmp_path / "a")
        for seeds in ((1, 2), (2, 3)):
            await place.save(*seeds)
            await place.push()

        class CalledOff(Remote):
            async def put(self, key: str, *more: object, **named: object) -> bool:
                if key.startswith("kept/"):
                    await RemoteLog(place.run.remote()).settle(0)
                return await super().put(key, *more, **named)  # type: ignore[arg-type]

        packs = place.run.bucket.keys("packs")
        done = await place.collect(remote=CalledOff(place.run.bucket, place.run.key))
        assert done.is_off and done.went == [(place.unit, 1)] and done.removed_packs == 0
        assert place.run.bucket.keys("packs") == packs
        assert place.run.heads()[place.unit][1].versions == (2,)
        place.store.close()

    trio.run(main)


def test_the_log_is_healed_from_its_copies(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path / "a")
        bucket = place.run.bucket
        await place.save(1)
        await place.push()
        await place.collect()
        whole = dict(bucket.objects)
        for key in (log_key(1), log_key(2), log_key(3), bucket.keys("kept")[0]):
            for how in ("flip", "remove"):
                bucket.objects = dict(whole)
                bucket.flip(key, 200) if how == "flip" else bucket.objects.pop(key)
                found = RemoteLog(place.run.remote())
                await found.settle()
                assert (found.claim, found.decided, found.is_open) == (2, 2, False)
                assert (await found.kept()).units == {place.unit}
                if key != log_key(1):
                    (told,) = found.problems
                    assert key in told and "healed" in told
                    assert bucket.objects[key].payload == whole[key].payload
                assert (await place.push(again=True)).safe == (1,)
        bucket.objects = {key: one for key, one in whole.items() if not key.startswith("kept/")}
        with pytest.raises(CkptfsError, match="last collection"):
            await place.push()
        place.store.close()

    trio.run(main)


def test_who_relies_on_an_entry_sees_to_its_copy() -> None:
    """Who called the claim off died before he copied that, and it rots once a push went by it: the collector
    that slept may not decide any more."""

    async def main() -> None:
        bucket = MemoryBucket()
        asleep = RemoteLog(Remote(bucket))
        claim = await asleep.add(Claim("n", bytes(16)))
        off = encode_entry(claim + 1, Decision(claim))
        bucket.store(log_key(claim + 1), off)
        pushing = RemoteLog(Remote(bucket))
        await pushing.settle()
        assert pushing.end == claim + 1 and bucket.objects[log_key(claim + 1) + COPY].payload == off
        bucket.flip(log_key(claim + 1), 200)
        assert await asleep.add(Decision(claim, b"k" * 32), lambda: not asleep.is_open) == 0
        assert asleep.decided == 0 and bucket.objects[log_key(claim + 1)].payload == off

    trio.run(main)


def test_a_copy_that_arrives_torn_is_made_anew() -> None:
    class Tearing(MemoryBucket):
        async def create(self, key: str, payload: Payload) -> None:
            await super().create(key, bytes(payload)[: 20 if key.endswith(COPY) else None])

    async def main() -> None:
        bucket = Tearing()
        number = await RemoteLog(Remote(bucket)).add(Join(UnitId(bytes(16)), b"run", "n"))
        assert bucket.objects[log_key(number) + COPY].payload == bucket.objects[log_key(number)].payload

    trio.run(main)


def test_an_entry_whose_copy_is_damaged_too_is_not_taken_for_void() -> None:
    async def main() -> None:
        bucket = MemoryBucket()
        writer = RemoteLog(Remote(bucket))
        claim = await writer.add(Claim("n", bytes(16)))
        decision = await writer.add(Decision(claim, b"k" * 32))
        for key in (log_key(decision), log_key(decision) + COPY):
            bucket.flip(key, 200)
        for work in (RemoteLog(Remote(bucket)).settle, RemoteLog(Remote(bucket)).refresh):
            with pytest.raises(Corrupt, match="both damaged"):
                await work()
        # One that a newer decision has made moot is told by who checks all, and holds up nobody.
        for key in (log_key(decision), log_key(decision) + COPY):
            bucket.flip(key, 200)
        kept = Kept(await writer.add(Claim("n", bytes(16)))).encode()
        for key in (kept_key(name := plain_name(kept)), kept_key(name) + COPY):
            bucket.store(key, kept)
        await writer.add(Decision(writer.claim, name))
        for key in (log_key(decision), log_key(decision) + COPY):
            bucket.flip(key, 200)
        checking = RemoteLog(Remote(bucket))
        await checking.settle()
        await checking.check()
        (told,) = checking.problems
        assert checking.decided == writer.claim and "both damaged" in told

    trio.run(main)


def test_who_may_only_read_goes_by_the_copies_of_a_log() -> None:
    class Readable(MemoryBucket):
        async def overwrite(self, key: str, payload: Payload) -> None:
            raise Unavailable("403: no right to write")

    async def main() -> None:
        bucket = Readable()
        number = await RemoteLog(Remote(bucket)).add(Join(UnitId(bytes(16)), b"run", "n"))
        bucket.store(log_key(number), b"rotten")
        reader = RemoteLog(Remote(bucket))
        await reader.refresh()
        assert reader.joined.keys() == {UnitId(bytes(16))}
        (told,) = reader.problems
        assert "not healed: 403" in told

    trio.run(main)


def test_entries_of_a_log_follow_each_other() -> None:
    async def main() -> None:
        bucket = MemoryBucket()
        first, second = RemoteLog(Remote(bucket)), RemoteLog(Remote(bucket))
        unit = UnitId(bytes(16))
        assert await first.add(Join(unit, b"run", "n")) == 1
        assert await second.add(Claim("n", bytes(16))) == 2 and second.joined.keys() == {unit}
        await first.refresh()
        assert first.is_open and first.claim == 2
        assert await first.add(Claim("m", bytes(16)), lambda: first.is_open) == 0
        await first.settle()
        assert (first.is_open, first.decided, first.generation) == (False, 0, 2)
        assert await second.add(Decision(2, b"k" * 32)) == 4, "too late"
        for one in (first, second, RemoteLog(Remote(bucket))):
            await one.refresh()
            assert (one.end, one.is_open, one.decided) == (4, False, 0)
        bucket.store(log_key(5), b"torn")
        assert await first.add(Claim("n", bytes(16))) == 6, "what nobody can read is passed over"
        assert log_key(6) + COPY in bucket.objects and log_key(5) + COPY not in bucket.objects

    trio.run(main)


def test_a_collector_that_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "POLL_S", 1.0)

    async def main() -> None:
        bucket, token = MemoryBucket(), bytes(16)
        collector, waiter = RemoteLog(Remote(bucket)), RemoteLog(Remote(bucket))
        for is_alive in (True, False):
            claim = await collector.add(Claim("n", token))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(waiter.settle, 60.0)
                with trio.move_on_after(600):
                    if is_alive:
                        await collector.keep_alive(Extension(claim, token))
                    await trio.sleep_forever()
                assert waiter.is_open is is_alive
                await collector.add(Decision(claim, b"k" * 32), lambda: not collector.is_open)
            assert (waiter.decided == claim) is is_alive

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
