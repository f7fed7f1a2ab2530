"""Versions go to a remote and come back: what is sent, what is found, what is refused."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from faultbucket import MemoryBucket
from saved_store import File, SavedStore, Special, Tree, contents

from ckptfs.store.errors import Conflict, Corrupt, InvalidRequest, NotFound
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.remote.box import RemoteKey
from ckptfs.store.remote.catalogue import RemoteUnit, read_unit
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.head import decode_head
from ckptfs.store.remote.heads import KEPT, newest_heads
from ckptfs.store.remote.names import FORMAT_KEY, head_key, parse_head_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import pack_chunks
from ckptfs.store.remote.pull import Pulled, Puller
from ckptfs.store.remote.push import Pusher, PushReport
from ckptfs.store.segment_format import segment_paths
from ckptfs.store.signing import SigningKey

KEY = SigningKey(b"k" * 32)
OTHER_KEY = SigningKey(b"o" * 32)
Run = Callable[[Callable[[], Awaitable[None]]], None]


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def checkpoint(seed: int, frozen: int = 0) -> Tree:
    """Weights of which `frozen` decides the larger part."""
    return {
        b"model": {b"frozen.bin": noise(1000 + frozen, 3_000_000), b"head.bin": noise(seed, 50_000)},
        b"config.json": b'{"seed": %d}' % seed,
        b"empty": b"",
        b"sparse": File(bytes(2 << 20) + b"end", holes=((0, 2 << 20),)),
        b"link": Special(b"model"),
    }


@contextmanager
def saved_store(path: Path, node: bytes = b"", key: SigningKey | None = KEY) -> Iterator[SavedStore]:
    store = SavedStore(path, key=key, node=node)
    try:
        yield store
    finally:
        store.close()


def pusher(store: SavedStore, remote: Remote, node: str = "node-1") -> Pusher:
    copied = CopiedUnits(store.index, "backup")
    return Pusher(remote, store.disk, store.segments, store.histories, copied, node)


async def push(store: SavedStore, remote: Remote, name: bytes = b"run", *, again: bool = False) -> PushReport:
    return await pusher(store, remote).push(store.unit(name).unit, again=again)


async def remote_units(remote: Remote) -> list[RemoteUnit]:
    await remote.open()
    return [await read_unit(remote, one.head) for one in await newest_heads(remote) if one.head is not None]


async def pull(
    store: SavedStore,
    remote: Remote,
    source: VersionRecord,
    name: bytes = b"run",
    inner: tuple[bytes, ...] = (),
) -> Pulled:
    puller = Puller(remote, store.index, store.segments, store.ingest, store.histories, os.urandom)
    return await puller.pull(source, name, inner)


@pytest.fixture(params=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> RemoteKey | None:
    return RemoteKey(b"s" * 32) if request.param == "encrypted" else None


def test_every_byte_comes_back_on_another_node(tmp_path: Path, key: RemoteKey | None) -> None:
    """With nothing but the remote, its key and a public key."""
    bucket = MemoryBucket()

    async def main() -> None:
        with saved_store(tmp_path / "a") as store:
            sent = [await store.publish(b"run", checkpoint(seed), step=seed) for seed in range(3)]
            store.histories.tag(store.unit(b"run").unit, 2, "good")
            report = await push(store, Remote(bucket, key))
            assert report.copied == [3, 2, 1] and report.safe == (1, 2, 3) and report.problems == []
        remote = Remote(bucket, key)
        (unit,) = await remote_units(remote)
        assert unit.versions == tuple(sent) and unit.tags == {"good": 2}
        assert (unit.name, unit.head.node, unit.head.generation) == (b"run", "node-1", 0)
        report_of_history = unit.check([KEY.public])
        assert report_of_history.findings == []
        with saved_store(tmp_path / "b", key=OTHER_KEY) as store:
            for seed in (2, 0, 1):
                assert unit.doubt_of(report_of_history, unit.versions[seed], [KEY.public]) is None
                pulled = await pull(store, remote, unit.versions[seed])
                assert store.read_version(pulled.record) == contents(checkpoint(seed))
                theirs, ours = unit.versions[seed], pulled.record
                assert (ours.top, ours.root, ours.step, ours.state) == (
                    theirs.top, theirs.root, theirs.step, theirs.state,
                )  # fmt: skip
                assert ours.origin == "pull" and ours.unit != theirs.unit
            assert [one.number for one in store.histories.versions(pulled.record.unit)] == [1, 2, 3]

    trio.run(main)


def test_what_rotted_since_it_was_verified_is_not_sent(tmp_path: Path) -> None:
    """A mount takes what it has ingested or read for right: a copy of it elsewhere may not."""

    async def main() -> None:
        bucket = MemoryBucket()
        with saved_store(tmp_path / "a") as store:
            record = await store.publish(b"run", {b"big": noise(1, 300_000), b"small": b"one"})
            assert record.top.tree is not None
            recipe = store.segments.read_tree(record.top.tree)[0].recipe
            assert recipe is not None
            (chunk, *_) = store.segments.read_recipe(recipe).chunks()
            location = store.segments.locate(chunk)
            assert location is not None
            store.segments.mark_verified(location.segment)
            path = store.root / segment_paths(location.segment)[location.in_idx]
            content = bytearray(path.read_bytes())
            content[location.offset] ^= 1
            path.write_bytes(content)
            report = await push(store, Remote(bucket))
            assert report.safe == () and "version 1 is not copied whole" in report.problems[0]
            for key in bucket.keys("packs"):
                list(pack_chunks(bucket.objects[key].payload))

    trio.run(main)


def test_only_what_is_new_is_sent_and_fetched(tmp_path: Path, key: RemoteKey | None) -> None:
    """Later saves, and a second node with the same shards: at most 2 % (of the first)."""
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket, key)
        with saved_store(tmp_path / "a", b"a") as store, saved_store(tmp_path / "b", b"b") as second:
            await store.publish(b"run", checkpoint(0))
            whole = (await push(store, remote)).sent.bytes
            assert whole > 3_000_000
            await store.publish(b"run", checkpoint(1))
            assert (await push(store, remote)).sent.bytes < whole * 0.025
            await second.publish(b"run", checkpoint(1))
            assert (await push(second, remote)).sent.bytes < whole * 0.02
            for again in (store, second):
                before = bucket.sent_bytes
                report = await push(again, remote, again=True)
                assert (report.sent.bytes, report.sent.chunks, report.copied) == (0, 0, [])
                assert bucket.sent_bytes == before, "nothing at all is sent"
            fresh = [unit for unit in await remote_units(remote) if len(unit.versions) == 2]
            pulled = await pull(second, remote, fresh[0].versions[0], b"theirs")
            assert pulled.fetched_bytes < 60_000
            assert (await pull(second, remote, fresh[0].versions[0], b"theirs")).fetched_chunks == 0
            assert len(second.histories.versions(pulled.record.unit)) == 1, "pulling twice lists it once"

    trio.run(main)


def test_only_complete_versions_unless_asked(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        with saved_store(tmp_path / "a") as store:
            for seed, state in enumerate((State.COMPLETE, State.PARTIAL, State.OPAQUE)):
                await store.publish(b"run", checkpoint(seed), state=state)
            assert (await push(store, remote)).safe == (1,)
            report = await pusher(store, remote).push(store.unit(b"run").unit, lambda record: True)
            assert report.copied == [3, 2] and report.safe == (1, 2, 3)

    trio.run(main)


def test_what_was_pulled_is_not_copied_again_unless_asked(tmp_path: Path) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket)
        with saved_store(tmp_path / "a") as store:
            record = await store.publish(b"run", checkpoint(0))
            await push(store, remote)
        with saved_store(tmp_path / "b") as store:
            unit = (await pull(store, remote, record)).record.unit
            await store.publish(b"other", checkpoint(1), state=State.PARTIAL)
            before = dict(bucket.objects)
            for unit_id in (unit, store.unit(b"other").unit):
                report = await pusher(store, remote).push(unit_id)
                assert (report.safe, report.copied) == ((), [])
            assert bucket.objects == before, "not even a head"
            assert (await pusher(store, remote).push(unit, lambda record: True)).copied == [1]
        assert [len(one.versions) for one in await remote_units(remote)] == [1, 1]

    trio.run(main)


def test_one_directory_or_file_is_fetched(tmp_path: Path, key: RemoteKey | None) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket(), key)
        with saved_store(tmp_path / "a") as store:
            await store.publish(b"run", checkpoint(7), step=7)
            await push(store, remote)
        (unit,) = await remote_units(remote)
        every = contents(checkpoint(7))
        with saved_store(tmp_path / "b") as store:
            part = await pull(store, remote, unit.versions[0], b"part", (b"model", b"head.bin"))
            assert store.read_version(part.record) == {b"model/head.bin": every[b"model/head.bin"]}
            assert part.fetched_bytes < 100_000
            assert part.record.state is State.PARTIAL and part.record.steps == () and part.record.step == 7
            assert part.record.missing == ("only model/head.bin was pulled of version 1",)
            folder = await pull(store, remote, unit.versions[0], b"folder", (b"model",))
            assert store.read_version(folder.record) == {
                path: content for path, content in every.items() if path.startswith(b"model/")
            }
            assert folder.record.files == 2
            with pytest.raises(NotFound, match="no model/nothing"):
                await pull(store, remote, unit.versions[0], b"none", (b"model", b"nothing"))
            assert store.histories.unit_named(b"none") is None

    trio.run(main)


def test_a_live_unit_is_not_touched(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        with saved_store(tmp_path / "a") as store:
            record = await store.publish(b"run", checkpoint(0))
            await push(store, remote)
            with pytest.raises(Conflict, match="live here"):
                await pull(store, remote, record)
            for name in (b"", b"a//b", b"../a", b"a/..", b"a\0"):
                with pytest.raises(InvalidRequest):
                    await pull(store, remote, record, name)
            assert len(store.histories.units()) == 1

    trio.run(main)


def test_what_was_let_go_here_stays_there(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        with saved_store(tmp_path / "a") as store:
            for seed in range(3):
                await store.publish(b"run", checkpoint(seed))
            unit = store.unit(b"run").unit
            await push(store, remote)
            store.histories.forget(unit, 1)
            report = await push(store, remote)
            assert report.copied == [] and report.safe == (1, 2, 3)
        (there,) = await remote_units(remote)
        assert [one.number for one in there.versions] == [1, 2, 3]
        assert there.check([KEY.public]).findings == []
        with saved_store(tmp_path / "b") as store:
            pulled = await pull(store, remote, there.versions[0])
            assert store.read_version(pulled.record) == contents(checkpoint(0))

    trio.run(main)


def test_heads_go_forward_and_old_ones_go(tmp_path: Path) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket)
        with saved_store(tmp_path / "a") as store:
            for seed in range(12):
                await store.publish(b"run", checkpoint(seed))
                await push(store, remote)
            heads = bucket.keys("heads")
            assert len(heads) == KEPT
            sequences = [parse_head_key(key) for key in heads]
            assert [one[1] for one in sequences if one is not None] == list(range(6, 14))
            pieces = decode_head(bucket.objects[heads[-1]].payload).pieces
            assert len(pieces) <= 5
            copied = CopiedUnits(store.index, "backup").of(store.unit(b"run").unit)
            assert copied is not None and copied.sequence == 13
            assert copied.versions == tuple(range(1, 13))
            assert copied.newest_ns == store.now_ns
            assert copied.modified_ns == bucket.objects[heads[-1]].modified_ns

    trio.run(main)


def test_another_history_under_the_same_id_is_refused(tmp_path: Path) -> None:
    """A store that was put back to an older state and goes on, or a copy of one."""
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket)
        for path in ("a", "copy"):
            with saved_store(tmp_path / path) as store:
                await store.publish(b"run", checkpoint(0))
        with saved_store(tmp_path / "a") as store:
            await store.publish(b"run", checkpoint(1))
            await push(store, remote)
        before = dict(bucket.objects)
        with saved_store(tmp_path / "copy") as store:
            for _ in range(3):
                with pytest.raises(Conflict, match="another history"):
                    await push(store, remote)
                await store.publish(b"run", checkpoint(random.getrandbits(30)))
        assert bucket.objects == before, "nothing is written then"

    trio.run(main)


def test_an_older_state_of_the_storage_is_told_and_brought_up_to_date(tmp_path: Path) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket)
        with saved_store(tmp_path / "a") as store:
            await store.publish(b"run", checkpoint(0))
            await push(store, remote)
            before = dict(bucket.objects)
            await store.publish(b"run", checkpoint(1))
            await push(store, remote)
            bucket.objects = before
            report = await push(store, remote)
            assert [problem for problem in report.problems if "older state" in problem]
            assert report.safe == (1, 2) and report.copied == [2]
            sequences = [parse_head_key(key) for key in bucket.keys("heads")]
            assert max(one[1] for one in sequences if one is not None) > 3, "no number is used again"
            assert (await push(store, remote)).problems == []
        (unit,) = await remote_units(remote)
        with saved_store(tmp_path / "b") as store:
            pulled = await pull(store, remote, unit.versions[1])
            assert store.read_version(pulled.record) == contents(checkpoint(1))

    trio.run(main)


@pytest.mark.parametrize("kind", ["packs", "shards", "histories", "heads"])
@pytest.mark.parametrize("how", ["flip", "remove", "cut"])
def test_damage_is_named_and_the_next_push_heals(
    tmp_path: Path, kind: str, how: str, key: RemoteKey | None
) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket, key)
        with saved_store(tmp_path / "a") as store:
            await store.publish(b"run", checkpoint(0))
            await push(store, remote)
            unit_id = store.unit(b"run").unit
            damaged = head_key(unit_id, 2) if kind == "heads" else bucket.keys(kind)[0]
            if how == "flip":
                bucket.flip(damaged, 8 * len(bucket.objects[damaged].payload) - 600)
            elif how == "cut":
                bucket.store(damaged, bucket.objects[damaged].payload[:-1])
            else:
                del bucket.objects[damaged]
            said = await _said_by_pull(tmp_path / "b", remote)
            if (kind, how) == ("shards", "remove"):
                assert "lacks 1 chunks" in said
            elif (kind, how) != ("heads", "remove"):
                assert damaged in said or damaged.rpartition("/")[2] in said, said
            if kind == "packs":
                one = pusher(store, remote)
                healed = await one.heal(read=True)
                assert len(healed.healed) == 1 and damaged in healed.healed[0] and healed.damaged == []
                assert (await one.heal(read=True)).healed == []
            report = await push(store, remote, again=True)
            assert report.safe == (1,)
            if kind in ("shards", "heads") and how != "remove":
                assert damaged in "\n".join(report.problems)
            assert await _said_by_pull(tmp_path / "c", remote) == ""

    trio.run(main)


async def _said_by_pull(path: Path, remote: Remote) -> str:
    """What is told when everything is pulled; nothing if that works."""
    with saved_store(path) as store:
        problems: list[str] = []
        try:
            for newest in await newest_heads(remote):
                problems += newest.problems
                if newest.head is None:
                    continue
                unit = await read_unit(remote, newest.head)
                problems += [one.message for one in unit.check([KEY.public]).findings]
                for version in unit.versions:
                    pulled = await pull(store, remote, version)
                    assert store.read_version(pulled.record) == contents(checkpoint(0))
        except (Corrupt, NotFound) as e:
            problems.append(str(e))
        return "\n".join(problems)


def test_a_pack_that_cannot_be_made_anew_is_named(tmp_path: Path) -> None:
    """Each node heals its own; a list tells of a pack that is gone or cut, not of a flipped bit."""
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket)
        with saved_store(tmp_path / "a", b"a") as store, saved_store(tmp_path / "b", b"b") as other:
            await store.publish(b"run", checkpoint(0))
            await push(store, remote)
            (first,) = bucket.keys("packs")
            await other.publish(b"run", checkpoint(1, frozen=1))
            await push(other, remote)
            (second,) = {*bucket.keys("packs")} - {first}
            bucket.flip(first, 8 * 1_000_000)
            del bucket.objects[second]
            report = await pusher(store, remote).heal(read=False)
            assert report.packs == 2 and report.read_bytes == 0 and report.healed == []
            assert len(report.damaged) == 1
            assert f"{second}: it is not there; this store has not all" in report.damaged[0]
            assert len((await pusher(other, remote).heal(read=False)).healed) == 1
            report = await pusher(other, remote).heal(read=True)
            assert len(report.damaged) == 1 and first in report.damaged[0]
            assert len((await pusher(store, remote).heal(read=True)).healed) == 1
            report = await pusher(other, remote).heal(read=True)
            assert (report.healed, report.damaged) == ([], []) and report.read_bytes > 6_000_000

    trio.run(main)


def test_a_torn_upload_is_replaced(tmp_path: Path) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket)
        with saved_store(tmp_path / "a") as store:
            await store.publish(b"run", checkpoint(0))
            await push(store, remote)
            for torn in (*bucket.keys("packs"), *bucket.keys("shards")):
                bucket.store(torn, bucket.objects[torn].payload[:100])
            await store.publish(b"run", checkpoint(1))
            report = await push(store, remote)
            assert report.safe == (1, 2)
        (unit,) = await remote_units(remote)
        with saved_store(tmp_path / "b") as store:
            for seed, version in enumerate(unit.versions):
                pulled = await pull(store, remote, version)
                assert store.read_version(pulled.record) == contents(checkpoint(seed))

    trio.run(main)


def test_keys_have_to_fit(tmp_path: Path) -> None:
    async def main() -> None:
        plain, encrypted = MemoryBucket(), MemoryBucket()
        right, wrong = RemoteKey(b"r" * 32), RemoteKey(b"w" * 32)
        await Remote(plain).open(create=True)
        await Remote(encrypted, right).open(create=True)
        for remote, said in (
            (Remote(plain, right), "is not encrypted"),
            (Remote(encrypted, wrong), "another key"),
            (Remote(encrypted), "is encrypted"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await remote.open(create=True)
        await Remote(encrypted, right).open()
        with pytest.raises(NotFound, match="ckptfs push"):
            await Remote(MemoryBucket()).open()
        assert plain.keys() == [FORMAT_KEY]

    trio.run(main)


@pytest.mark.parametrize("kept_bytes", [None, 0, 30])
def test_what_a_place_is_is_made_anew_with_the_right_key_only(tmp_path: Path, kept_bytes: int | None) -> None:
    """Somebody else's key in it, or none, would lock out whoever has the right one."""

    async def main() -> None:
        right, wrong = RemoteKey(b"r" * 32), RemoteKey(b"w" * 32)
        with saved_store(tmp_path / "a") as store:
            await store.publish(b"run", checkpoint(0))
            for owner, others in ((right, [None, wrong]), (None, [right])):
                bucket = MemoryBucket()
                await push(store, Remote(bucket, owner))
                whole = bucket.objects[FORMAT_KEY].payload
                if kept_bytes is None:
                    del bucket.objects[FORMAT_KEY]
                else:
                    bucket.store(FORMAT_KEY, whole[:kept_bytes])
                before = dict(bucket.objects)
                for other in others:
                    with pytest.raises(Corrupt, match=FORMAT_KEY):
                        await Remote(bucket, other).open(create=True)
                    assert bucket.objects == before
                await Remote(bucket, owner).open(create=True)
                assert bucket.objects[FORMAT_KEY].payload == whole

    trio.run(main)


def test_nothing_of_an_encrypted_remote_tells_what_it_holds(tmp_path: Path) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        with saved_store(tmp_path / "a") as store:
            await store.publish(b"secret-run", {b"secret-file": b"secret-content" * 1000})
            await push(store, Remote(bucket, RemoteKey(b"s" * 32)), b"secret-run")
        for key, stored in bucket.objects.items():
            assert b"secret" not in stored.payload and "secret" not in key
            assert KEY.public.raw not in stored.payload

    trio.run(main)


def test_a_history_by_a_stranger_is_not_taken(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        with saved_store(tmp_path / "a", key=OTHER_KEY) as store:
            await store.publish(b"run", checkpoint(0))
            await push(store, remote)
        (unit,) = await remote_units(remote)
        (version,) = unit.versions
        for keys, doubt in (
            ([KEY.public], "not signed with a key that is accepted"),
            ([OTHER_KEY.public], None),
            ([], None),
        ):
            said = unit.doubt_of(unit.check(keys), version, keys)
            assert said is doubt is None or (said is not None and doubt is not None and doubt in said)

    trio.run(main)


def test_versions_that_nobody_signed(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        with saved_store(tmp_path / "a", key=None) as store:
            await store.publish(b"run", checkpoint(0))
            await push(store, remote)
        (unit,) = await remote_units(remote)
        assert unit.doubt_of(unit.check([]), unit.versions[0], []) is None
        assert unit.doubt_of(unit.check([KEY.public]), unit.versions[0], [KEY.public]) is not None

    trio.run(main)


def test_a_version_that_is_damaged_here_is_named_and_the_others_go(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        with saved_store(tmp_path / "a") as store:
            for seed in range(3):
                await store.publish(b"run", checkpoint(seed, frozen=seed))
            paths = sorted((tmp_path / "a" / "segments").rglob("*.seg"), key=lambda path: path.stat().st_size)
            damaged = bytearray(paths[-1].read_bytes())
            damaged[1_000_000] ^= 1
            paths[-1].write_bytes(damaged)
        with saved_store(tmp_path / "a") as store:
            report = await push(store, remote)
            assert len(report.safe) == 2
            assert len(report.problems) == 1 and "is not copied whole: " in report.problems[0]

    trio.run(main)
