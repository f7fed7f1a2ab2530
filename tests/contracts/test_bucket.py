"""What every bucket promises: one suite for the directory, a real S3 server, and the one in memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from faultbucket import FaultBucket, Faults, MemoryBucket
from seaweed import S3Server

from ckptfs.store.bucket import Bucket, Payload, Unfinished
from ckptfs.store.bucket_cloud import open_cloud
from ckptfs.store.bucket_directory import DirectoryBucket
from ckptfs.store.bucket_probe import probe
from ckptfs.store.disk import Disk
from ckptfs.store.errors import (
    Conflict,
    Corrupt,
    InvalidRequest,
    NotFound,
    NotPermitted,
    Unavailable,
    Unsupported,
)
from ckptfs.store.remote.retrying import RetryingBucket

Test = Callable[[Bucket], Awaitable[None]]
_numbers = itertools.count()


@pytest.fixture(params=["memory", "directory", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param == "memory":
        return MemoryBucket()
    if request.param == "directory":
        (tmp_path / "remote").mkdir()
        return DirectoryBucket(str(tmp_path / "remote"), "file:///remote")
    server: S3Server = request.getfixturevalue("s3")
    return open_cloud(f"s3://tests/{next(_numbers)}/prefix", server.options)


def test_what_is_created_is_read(bucket: Bucket) -> None:
    async def main() -> None:
        payload = os.urandom(300_000)
        await bucket.create("a/b/one", payload)
        assert await bucket.read("a/b/one") == payload
        assert await bucket.read_range("a/b/one", 5, 7) == payload[5:12]
        assert await bucket.read_range("a/b/one", 0, len(payload)) == payload
        meta = await bucket.stat("a/b/one")
        assert (meta.key, meta.size) == ("a/b/one", len(payload)) and meta.modified_ns > 10**18
        await bucket.create("empty", b"")
        assert await bucket.read("empty") == b"" and (await bucket.stat("empty")).size == 0
        for view in (bytearray(b"abc"), memoryview(b"xabcx")[1:4]):
            await bucket.overwrite("view", view)
            assert await bucket.read("view") == b"abc"

    trio.run(main)


def test_a_range_behind_the_end_is_corrupt(bucket: Bucket) -> None:
    async def main() -> None:
        await bucket.create("short", b"abc")
        for offset, length in ((0, 4), (2, 2), (3, 1), (100, 1)):
            with pytest.raises(Corrupt):
                await bucket.read_range("short", offset, length)

    trio.run(main)


def test_an_object_holds_its_own_bytes_and_no_others(bucket: Bucket) -> None:
    async def main() -> None:
        payload = os.urandom(3_000_000)
        changed = bytearray(payload)
        changed[-1] ^= 1
        await bucket.create("one", payload)
        for view in (payload, bytearray(payload), memoryview(b"x" + payload + b"x")[1:-1]):
            assert await bucket.holds("one", view)
        for other in (b"", payload[:-1], payload + b"\0", bytes(changed), payload[1:]):
            assert not await bucket.holds("one", other)
        await bucket.create("empty", b"")
        assert await bucket.holds("empty", b"") and not await bucket.holds("empty", b"x")

    trio.run(main)


def test_create_takes_a_name_once(bucket: Bucket) -> None:
    async def main() -> None:
        await bucket.create("one", b"first")
        for payload in (b"second", b"first"):
            with pytest.raises(Conflict):
                await bucket.create("one", payload)
        assert await bucket.read("one") == b"first"
        await bucket.overwrite("one", b"third")
        assert await bucket.read("one") == b"third"
        with pytest.raises(Conflict):
            await bucket.create("one", b"fourth")

    trio.run(main)


def test_of_several_at_once_one_creates(bucket: Bucket) -> None:
    async def main() -> None:
        made: list[int] = []

        async def race(key: str, number: int) -> None:
            try:
                await bucket.create(key, b"%d" % number * 1000)
                made.append(number)
            except Conflict:
                pass

        for round_number in range(3):
            made.clear()
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(race, f"race/{round_number}", number)
            assert len(made) == 1
            assert await bucket.read(f"race/{round_number}") == b"%d" % made[0] * 1000

    trio.run(main)


def test_lists_are_of_a_folder(bucket: Bucket) -> None:
    async def main() -> None:
        assert await bucket.list_objects("") == [] and await bucket.list_objects("nothing") == []
        for key in ("a/2", "a/1", "a/b/3", "ab/4", "c"):
            await bucket.create(key, key.encode())
        assert [meta.key for meta in await bucket.list_objects("")] == ["a/1", "a/2", "a/b/3", "ab/4", "c"]
        listed = await bucket.list_objects("a")
        assert [(meta.key, meta.size) for meta in listed] == [("a/1", 3), ("a/2", 3), ("a/b/3", 5)]
        assert listed[0] == await bucket.stat("a/1")
        assert await bucket.list_objects("a/b") == [await bucket.stat("a/b/3")]

    trio.run(main)


def test_what_is_not_there(bucket: Bucket) -> None:
    async def main() -> None:
        for call in (bucket.read, bucket.stat):
            with pytest.raises(NotFound):
                await call("nothing")
        with pytest.raises(NotFound):
            await bucket.read_range("nothing", 0, 1)
        await bucket.remove("nothing")
        await bucket.create("x/y", b"1")
        await bucket.remove("x/y")
        await bucket.remove("x/y")
        with pytest.raises(NotFound):
            await bucket.read("x/y")
        await bucket.create("x/y", b"2")
        assert await bucket.read("x/y") == b"2"

    trio.run(main)


def test_keys_that_are_none_are_refused(bucket: Bucket) -> None:
    async def main() -> None:
        for key in ("", "/a", "a/", "a//b", "../a", "a/../b", "a b", "a\0b", "ä", "x" * 513):
            with pytest.raises(InvalidRequest):
                await bucket.create(key, b"")
            with pytest.raises(InvalidRequest):
                await bucket.read(key)

    trio.run(main)


def test_the_probe_finds_it_good_and_leaves_nothing(bucket: Bucket) -> None:
    async def main() -> None:
        await probe(bucket, "00ff")
        await probe(bucket, "00ff")
        assert await bucket.list_objects("") == []

    trio.run(main)


def test_a_bucket_of_the_cloud_says_what_is_wrong(s3: S3Server) -> None:
    async def main() -> None:
        wrong = open_cloud("s3://tests/wrong", {**s3.options, "secret_access_key": "another"})
        with pytest.raises(NotPermitted, match="refuses"):
            await wrong.create("a", b"")
        nobody = open_cloud("s3://tests/nobody", {**s3.options, "endpoint": "http://127.0.0.1:1"})
        with pytest.raises(Unavailable, match="s3://tests/nobody/a: ") as raised:
            await nobody.read("a")
        assert "\n" not in str(raised.value) and s3.options["secret_access_key"] not in str(raised.value)
        assert str(raised.value).startswith("s3://tests/nobody/a: HTTP error"), "the cause, not the address"
        missing = open_cloud("s3://missing/a", s3.options)
        with pytest.raises(
            Unavailable, match=r"^s3://missing/a/b: The specified bucket .* \(NoSuchBucket\)$"
        ):
            await missing.list_objects("b")
        with pytest.raises(InvalidRequest, match="not known"):
            open_cloud("s3://tests/x", {"nonsense": "1"})

    trio.run(main)


def test_only_amazon_is_believed_to_check_uploads(s3: S3Server) -> None:
    assert not open_cloud("s3://tests/x", s3.options).checks_uploads
    assert open_cloud("s3://tests/x", {"region": "eu-central-1", "skip_signature": "true"}).checks_uploads


def test_a_directory_has_to_be_there(tmp_path: Path) -> None:
    async def main() -> None:
        bucket = DirectoryBucket(str(tmp_path / "unmounted"), "file:///unmounted")
        with pytest.raises(NotFound):
            await bucket.create("a", b"")
        assert not (tmp_path / "unmounted").exists()

    trio.run(main)


class IgnoringBucket(MemoryBucket):
    """A server that takes no notice of `If-None-Match`, such as s3rver."""

    async def create(self, key: str, payload: Payload) -> None:
        await self.overwrite(key, payload)


class RacyBucket(MemoryBucket):
    """One that looks whether something is there, and later stores."""

    async def create(self, key: str, payload: Payload) -> None:
        if key in self.objects:
            raise Conflict(key)
        await trio.lowlevel.checkpoint()
        await self.overwrite(key, payload)


@pytest.mark.parametrize("kind", [IgnoringBucket, RacyBucket])
def test_a_server_that_ignores_conditions_is_refused(kind: type[MemoryBucket]) -> None:
    async def main() -> None:
        bucket = kind()
        with pytest.raises(Unsupported, match="If-None-Match"):
            await probe(bucket, "00")
        assert bucket.objects == {}

    trio.run(main)


def test_the_probe_raises_what_the_bucket_does() -> None:
    async def main() -> None:
        with pytest.raises(Unavailable):
            await probe(FaultBucket(MemoryBucket(), Faults(1, refused=1.0)), "00")

    trio.run(main)


@pytest.mark.parametrize("seed", range(20))
def test_what_fails_now_and_then_succeeds(seed: int) -> None:
    """Whatever the faults, an object is made once, and a name that another has is a Conflict."""

    async def main() -> None:
        memory = MemoryBucket()
        faults = Faults(seed, refused=0.2, lost=0.2, in_flight=0.2)
        bucket = RetryingBucket(FaultBucket(memory, faults), (0.0,) * 40)
        for number in range(20):
            await bucket.create(f"a/{number}", b"%d" % number)
            await bucket.create(f"a/{number}", b"%d" % number)
            with pytest.raises(Conflict):
                await bucket.create(f"a/{number}", b"other")
            assert await bucket.read(f"a/{number}") == b"%d" % number
        assert len(await bucket.list_objects("a")) == 20 and (await bucket.stat("a/7")).size == 1
        assert "overwrite" not in memory.calls
        assert faults.seen == {"refused", "lost", "in_flight"}

    trio.run(main)


def test_what_always_fails_is_raised_after_the_last_pause() -> None:
    async def main() -> None:
        faults = Faults(1, refused=1.0)
        bucket = RetryingBucket(FaultBucket(MemoryBucket(), faults), (0.0, 0.0, 0.0))
        with pytest.raises(Unavailable):
            await bucket.read("a")
        assert faults.calls == 4

    trio.run(main)


def test_a_sweep_leaves_what_is_whole(bucket: Bucket) -> None:
    async def main() -> None:
        await bucket.create("a/one", b"one")
        for dry_run in (True, False):
            assert await bucket.sweep(1 << 62, dry_run=dry_run) == Unfinished()
        assert await bucket.read("a/one") == b"one"

    trio.run(main)


def test_what_writers_left_half_made_in_a_directory_is_swept_once_it_is_old(tmp_path: Path) -> None:
    bucket = DirectoryBucket(str(tmp_path), "file:///remote")

    async def main() -> None:
        assert await bucket.sweep(1 << 62, dry_run=False) == Unfinished(), "nobody has written anything yet"
        await bucket.create("one", b"one")
        work = tmp_path / ".-new"
        for name, age_s in (("a" * 32, 0), ("b" * 32, 100), ("c" * 32, 101), ("mine", 1000)):
            (work / name).write_bytes(name.encode())
            os.utime(work / name, (5000 - age_s, 5000 - age_s))
        (work / ("d" * 32)).mkdir()
        before_ns = 4950 * 10**9
        assert await bucket.sweep(before_ns, dry_run=True) == Unfinished(2, 64)
        assert len(list(work.iterdir())) == 5
        assert await bucket.sweep(before_ns, dry_run=False) == Unfinished(2, 64)
        assert {path.name for path in work.iterdir()} == {"a" * 32, "d" * 32, "mine"}
        assert await bucket.sweep(before_ns, dry_run=False) == Unfinished()

    trio.run(main)


@pytest.mark.parametrize("way", ["create", "overwrite"])
def test_a_writer_that_was_swept_away_makes_nothing_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    bucket = DirectoryBucket(str(tmp_path), "file:///remote")
    sync, sweeps = Disk.sync, [0]

    def sync_slowly(disk: Disk, fd: int) -> None:
        sync(disk, fd)
        if sweeps[0]:
            sweeps[0] -= 1
            assert bucket._sweep(1 << 62, dry_run=False).count == 1

    monkeypatch.setattr(Disk, "sync", sync_slowly)

    async def main() -> None:
        sweeps[0] = 1
        with pytest.raises(Unavailable):
            await getattr(bucket, way)("one", b"one")
        assert await bucket.list_objects("") == []
        sweeps[0] = 1
        await getattr(RetryingBucket(bucket, (0.0,)), way)("one", b"one")
        assert await bucket.read("one") == b"one" and list((tmp_path / ".-new").iterdir()) == []

    trio.run(main)
