"""Damage on one remote is named, and healed from another that has the same versions, by a node that has
nothing of them itself; or by the node whose they are."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import trio
from faultbucket import MemoryBucket, Stored
from saved_store import SavedStore, Tree, contents

from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.remote.box import RemoteKey
from ckptfs.store.remote.catalogue import read_unit
from ckptfs.store.remote.collecting import Collector
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.heads import newest_heads
from ckptfs.store.remote.names import FORMAT_KEY, head_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import pack_chunks, pack_rows
from ckptfs.store.remote.pull import Puller
from ckptfs.store.remote.push import Pusher
from ckptfs.store.remote.ranges import Whole
from ckptfs.store.remote.relaying import OtherRemote
from ckptfs.store.segment_format import segment_paths
from ckptfs.store.signing import SigningKey

KEY = SigningKey(b"k" * 32)
TREES: list[Tree] = [
    {b"big": random.Random(seed).randbytes(300_000), b"sub": {b"n": b"%d" % seed}} for seed in range(2)
]
KINDS = ["packs", "shards", "histories", "heads", "log", "kept", FORMAT_KEY]


class Places:
    """Two remotes (the second is encrypted) with the same two versions of one node, and an empty node."""

    def __init__(self, path: Path) -> None:
        self.first, self.second = MemoryBucket(), MemoryBucket()
        self.key = RemoteKey(b"s" * 32)
        self.owner = SavedStore(path / "owner", key=KEY)
        self.stranger = SavedStore(path / "stranger")

    @property
    def other(self) -> Remote:
        return Remote(self.second, self.key)

    def pusher(self, store: SavedStore, remote: Remote, name: str) -> Pusher:
        copied = CopiedUnits(store.index, name)
        return Pusher(remote, store.disk, store.segments, store.histories, copied, "node")

    async def fill(self) -> None:
        unit = self.owner.unit(b"run").unit
        for tree in TREES:
            await self.owner.publish(b"run", tree)
            for remote, name in ((Remote(self.first), "first"), (self.other, "second")):
                await self.pusher(self.owner, remote, name).push(unit)
        await Collector(Remote(self.first), "node", os.urandom, lambda unit, now_ns: (), 0.0).collect()
        await self.pusher(self.owner, Remote(self.first), "first").push(unit)

    async def wrong(self) -> str:
        """What a node that pulls everything from the first remote is told; nothing if all is right."""
        said: list[str] = []
        try:
            remote = Remote(self.first)
            await remote.open()
            for newest in await newest_heads(remote):
                said += newest.problems
                assert newest.head is not None
                unit = await read_unit(remote, newest.head)
                if len(unit.versions) != len(TREES):
                    said.append(f"{len(unit.versions)} versions")
                for version, tree in zip(unit.versions, TREES, strict=False):
                    store = self.stranger
                    puller = Puller(
                        remote, store.index, store.segments, store.ingest, store.histories, os.urandom
                    )
                    pulled = await puller.pull(version, b"copy")
                    assert store.read_version(pulled.record) == contents(tree)
        except (Corrupt, NotFound) as e:
            said.append(str(e))
        return "\n".join(said)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    found = Places(tmp_path)
    try:
        yield found
    finally:
        found.owner.close()
        found.stranger.close()


@pytest.mark.parametrize("how", ["flip", "remove"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_each_kind_is_named_and_healed(places: Places, kind: str, how: str) -> None:
    """By a node that never had the versions, from the other remote; heads by the node whose they are."""

    async def main() -> None:
        await places.fill()
        unit = places.owner.unit(b"run").unit
        bucket = places.first
        for damaged in [one for one in bucket.objects if one.startswith(kind)]:
            if kind == "heads" and damaged != bucket.keys("heads")[-1]:
                continue
            whole = bucket.objects[damaged].payload
            if how == "flip":
                bucket.flip(damaged, 8 * len(whole) - 80)
            else:
                del bucket.objects[damaged]
            healer = places.pusher(places.stranger, Remote(bucket), "first")
            found = await healer.heal(read=True, others=[OtherRemote(places.other)])
            # What a push tells besides: of the log, of shards, of heads.
            report = await places.pusher(places.owner, Remote(bucket), "first").push(unit, again=True)
            told = "\n".join([*found.healed, *report.problems])
            assert found.damaged == [], found
            assert report.safe == (1, 2)
            name = damaged.rpartition("/")[2]
            if how == "flip" or kind in ("packs", "histories", "kept"):
                assert name in told or (kind == "shards" and "lacked" in told), told
            assert await places.wrong() == "", damaged

    trio.run(main)


def test_an_old_head_put_back_is_told_and_put_right(places: Places) -> None:
    async def main() -> None:
        await places.fill()
        unit = places.owner.unit(b"run").unit
        bucket = places.first
        heads = bucket.keys("heads")
        for newer in heads[2:]:
            del bucket.objects[newer]
        assert "versions" in await places.wrong() or heads == heads[:2]
        report = await places.pusher(places.owner, Remote(bucket), "first").push(unit, again=True)
        assert [one for one in report.problems if "older state" in one] and report.safe == (1, 2)
        assert head_key(unit, len(heads) + 1) in bucket.objects
        assert await places.wrong() == ""

    trio.run(main)


def test_what_nobody_has_is_named(places: Places) -> None:
    async def main() -> None:
        await places.fill()
        for bucket in (places.first, places.second):
            big = max(bucket.keys("packs"), key=lambda key: len(bucket.objects[key].payload))
            bucket.objects[big] = Stored(b"gone", 1)
        healer = places.pusher(places.stranger, Remote(places.first), "first")
        found = await healer.heal(read=True, others=[OtherRemote(places.other)])
        assert any("neither this store nor another remote has" in one for one in found.damaged)

    trio.run(main)


def test_another_remote_that_is_away_is_said(places: Places) -> None:
    async def main() -> None:
        await places.fill()
        del places.first.objects[places.first.keys("packs")[0]]
        healer = places.pusher(places.stranger, Remote(places.first), "first")
        found = await healer.heal(read=False, others=[OtherRemote(Remote(MemoryBucket()))])
        assert any("not asked: " in one for one in found.damaged)
        try:
            await OtherRemote(Remote(MemoryBucket())).history(places.owner.unit(b"run").unit)
        except CkptfsError as e:
            raise AssertionError("nobody is held back") from e

    trio.run(main)


def test_one_rotten_chunk_elsewhere_does_not_keep_the_others_from_healing(places: Places) -> None:
    async def main() -> None:
        await places.fill()
        other = Remote(places.first)
        chunks = list(await chunks_on(places))
        rotten = max(
            (key for key in places.first.keys("packs")),
            key=lambda key: len(places.first.objects[key].payload),
        )
        places.first.flip(rotten, -80)
        reader = OtherRemote(other)
        found = {chunk for chunk, _ in await reader.read(chunks)}
        assert len(chunks) > 3 and len(found) == len(chunks) - 1 and not reader.failure

    trio.run(main)


class Asked(OtherRemote):
    """Another remote; `asked`: the chunks that it was asked for."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(remote)
        self.asked: list[ChunkId] = []

    async def read(self, chunks: Iterable[ChunkId]) -> list[Whole]:
        wanted = list(chunks)
        self.asked += wanted
        return await super().read(wanted)


def test_no_more_is_brought_than_what_failed(places: Places) -> None:
    """A rotten recipe there, and then one in the healer's own store too."""

    async def main() -> None:
        record = await places.owner.publish(b"run", {b"%d" % number: b"%d" % number for number in range(50)})
        unit = record.unit
        for remote, name in ((Remote(places.first), "first"), (places.other, "second")):
            await places.pusher(places.owner, remote, name).push(unit)
        assert record.top.tree is not None
        recipe = places.owner.segments.read_tree(record.top.tree)[7].recipe
        assert recipe is not None
        (key,) = places.first.keys("packs")
        (at,) = [at for chunk, at, _ in pack_rows(places.first.objects[key].payload) if chunk == recipe]
        places.first.flip(key, 8 * at)
        healer = places.pusher(places.stranger, Remote(places.first), "first")
        other = Asked(places.other)
        found = await healer.heal(read=False, others=[other])
        assert other.asked == [recipe] and found.damaged == []
        assert [one for one in found.healed if f"lacked 1 chunks, {cid_text(recipe)}" in one], found

        location = places.owner.segments.locate(recipe)
        assert location is not None
        path = places.owner.root / segment_paths(location.segment)[location.in_idx]
        content = bytearray(path.read_bytes())
        content[location.offset] ^= 1
        path.write_bytes(content)
        del places.first.objects[key]
        healer, other = places.pusher(places.owner, Remote(places.first), "first"), Asked(places.other)
        found = await healer.heal(read=False, others=[other])
        assert other.asked == [recipe] and found.damaged == [] and key in places.first.objects

    trio.run(main)


async def chunks_on(places: Places) -> set[ChunkId]:
    """All chunks of the first remote's packs."""
    return {
        chunk
        for key in places.first.keys("packs")
        for chunk, _ in pack_chunks(places.first.objects[key].payload)
    }
