"""Versions of several nodes become one: chunks fetched, conflicts named, who is missing told."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from dcp_files import dcp_save
from faultbucket import FaultBucket, Faults, MemoryBucket
from saved_store import File, SavedStore, Tree, contents
from small_store import safetensors

from ckptfs.fusefs.facts import Facts, OpenFile, VersionFacts
from ckptfs.store.errors import Conflict, Corrupt, NotFound
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import TreeId
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.landing import Landing
from ckptfs.store.remote.merge import Merged, Merger, Source, Wanted
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.push import Pusher
from ckptfs.store.remote.retrying import RetryingBucket
from ckptfs.store.signing import SigningKey
from ckptfs.store.tree_merge import Decision

KEY = SigningKey(b"k" * 32)
UNDECIDED = Decision()


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


async def copied(path: Path, node: str, tree: Tree, remote: Remote) -> Source:
    """A version of a node, copied to the remote."""
    store = SavedStore(path / node, key=KEY, node=node.encode())
    record = await store.publish(b"run", tree, state=State.PARTIAL, step=5)
    pusher = Pusher(remote, store.disk, store.segments, store.histories, CopiedUnits(store.index, "x"), node)
    report = await pusher.push(record.unit, lambda one: True)
    assert report.safe == (1,)
    store.close()
    return Source(node, record, "key of " + node)


class Here:
    """The store that is merged into."""

    def __init__(self, path: Path, remote: Remote) -> None:
        self.store = store = SavedStore(path, key=KEY, node=b"here")
        landing = Landing(remote, store.index, store.segments, store.ingest, store.histories, os.urandom)
        facts = VersionFacts(store.segments)

        async def judge(tree: TreeId, step: int | None, open_file: OpenFile | None) -> Facts:
            return await facts.of(tree, None, step, open_file)

        self.log = MergeLog(store.disk, store.index, store.histories)
        self.merger = Merger(landing, self.log, judge)

    async def merge(
        self,
        sources: Sequence[Source],
        inner: tuple[bytes, ...] = (),
        decision: Decision = UNDECIDED,
        lacking: tuple[str, ...] = (),
    ) -> Merged:
        return await self.merger.merge(Wanted(sources, b"run", inner, decision, 5, lacking))

    def files(self, record: VersionRecord) -> dict[bytes, bytes]:
        return self.store.read_version(record)


def ranks(*numbers: int) -> Tree:
    """The part of a Megatron save that some ranks write."""
    return {
        b"iter_0000005": {
            b"mp_rank_%02d" % number: {b"model_optim_rng.pt": noise(number, 100_000)} for number in numbers
        },
        b"args.txt": noise(99, 100),
        b"latest_checkpointed_iteration.txt": b"5",
    }


def test_ranks_of_two_nodes_become_one_tree(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        first = await copied(tmp_path, "a", ranks(0, 1), remote)
        second = await copied(tmp_path, "b", ranks(2, 3), remote)
        here = Here(tmp_path / "here", remote)
        merged = await here.merge([first, second])
        record = merged.pulled.record
        assert here.files(record) == contents(ranks(0, 1)) | contents(ranks(2, 3))
        assert (record.step, record.origin, record.time_ns) == (5, "pull", second.record.time_ns)
        assert "model_optim_rng.pt" in " ".join(record.missing), "noise is no torch file"
        noted = here.log.of(record)
        assert noted is not None and noted.notes == merged.notes == ()
        assert [(one.node, one.unit, one.number, one.link, one.key) for one in noted.sources] == [
            (one.node, one.record.unit, 1, one.record.link(), one.key) for one in (first, second)
        ]
        again = await here.merge([first, second])
        assert again.pulled.record == record and again.pulled.fetched_chunks == 0
        here.store.close()

    trio.run(main)


def test_who_is_missing_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        source = await copied(tmp_path, "b", ranks(2, 3), remote)
        here = Here(tmp_path / "here", remote)
        record = (await here.merge([source], lacking=("a has no version of step 5",))).pulled.record
        assert record.state is State.PARTIAL and record.steps == ()
        assert "a has no version of step 5" in record.missing
        absent = [f"iter_0000005/mp_rank_0{rank}/model_optim_rng.pt" for rank in (0, 1)]
        assert {*absent} <= {*record.missing}
        here.store.close()

    trio.run(main)


def test_a_checkpoint_of_dcp(tmp_path: Path) -> None:
    """`.metadata`, which rank 0 has written, says which ranks' files there have to be."""
    import torch

    rows = torch.arange(20_000, dtype=torch.float32).reshape(200, 100)
    files = dcp_save({"w": [(0, rows[:50]), (50, rows[50:120]), (120, rows[120:])]})
    (first_shard, second, third) = (b"__%d_0.distcp" % rank for rank in range(3))

    async def main() -> None:
        remote = Remote(MemoryBucket())
        nodes = {
            "a": {name: files[name] for name in (b".metadata", first_shard)},
            "b": {second: files[second]},
            "c": {third: files[third]},
        }
        sources = {
            node: await copied(tmp_path, node, {b"step_5": tree}, remote) for node, tree in nodes.items()
        }
        here = Here(tmp_path / "here", remote)
        wanted = Wanted([*sources.values()], b"run", (), UNDECIDED, 5, ())
        seen = await here.merger.look(wanted)
        assert (seen.state, seen.steps) == (State.COMPLETE, (5,))
        assert here.store.histories.unit_named(b"run") is None
        part = (await here.merge([sources["a"], sources["c"]])).pulled.record
        assert (part.state, part.missing) == (State.PARTIAL, ("step_5/__1_0.distcp",))
        whole = (await here.merge([*sources.values()])).pulled.record
        assert (whole.state, whole.missing, whole.steps) == (State.COMPLETE, (), (5,))
        assert here.files(whole) == {b"step_5/" + name: content for name, content in files.items()}
        here.store.close()

    trio.run(main)


def test_a_step_that_no_name_tells(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        first = await copied(tmp_path, "a", {b"x.safetensors": safetensors({"x": noise(1, 400)})}, remote)
        second = await copied(tmp_path, "b", {b"y.safetensors": safetensors({"y": noise(2, 400)})}, remote)
        here = Here(tmp_path / "here", remote)
        record = (await here.merge([first, second])).pulled.record
        assert (record.state, record.step, record.steps) == (State.COMPLETE, 5, (5,))
        lacking = (await here.merge([first, second], lacking=("c has none",))).pulled.record
        assert (lacking.state, lacking.step, lacking.steps) == (State.PARTIAL, 5, ())
        here.store.close()

    trio.run(main)


def test_older_saves_that_are_rotated_away_on_one_node_hold_nothing_back(tmp_path: Path) -> None:
    import torch

    rows = torch.arange(20_000, dtype=torch.float32).reshape(200, 100)
    files = dcp_save({"w": [(0, rows[:50]), (50, rows[50:])]})
    first = {name: content for name, content in files.items() if name != b"__1_0.distcp"}
    second = {b"__1_0.distcp": files[b"__1_0.distcp"]}

    async def main() -> None:
        remote = Remote(MemoryBucket())
        sources = [
            await copied(tmp_path, "a", {b"step_4": first, b"step_5": first}, remote),
            await copied(tmp_path, "b", {b"step_5": second}, remote),
        ]
        here = Here(tmp_path / "here", remote)
        record = (await here.merge(sources)).pulled.record
        assert (record.state, record.steps) == (State.COMPLETE, (5,))
        assert record.missing == ("step_4/__1_0.distcp",)
        here.store.close()

    trio.run(main)


def test_conflicts_fetch_nothing_of_contents_until_somebody_decides(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        same, mine, theirs = noise(1, 300_000), noise(2, 300_000), noise(3, 300_001)
        first = await copied(tmp_path, "a", {b"same": same, b"f": mine}, remote)
        second = await copied(tmp_path, "b", {b"same": same, b"f": theirs}, remote)
        here = Here(tmp_path / "here", remote)
        with pytest.raises(Conflict, match=r"f has other content on a and b.*--prefer NODE.*--keep-both"):
            await here.merge([first, second])
        assert here.store.histories.unit_named(b"run") is None
        taken = await here.merge([second, first], decision=Decision(preferred=1))
        assert here.files(taken.pulled.record) == {b"same": same, b"f": theirs}
        assert taken.notes == ("f is that of b; a has another",)
        kept = await here.merge([first, second], decision=Decision(keep_both=True))
        assert here.files(kept.pulled.record) == {b"same": same, b"f~a": mine, b"f~b": theirs}
        noted = here.log.of(kept.pulled.record)
        assert noted is not None and noted.notes == kept.notes
        here.store.close()

    trio.run(main)


LONG = noise(4, 600_000)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (LONG, LONG[:-1] + bytes([LONG[-1] ^ 1])),
        (safetensors({"w": LONG}), safetensors({"w": bytes([LONG[0] ^ 1]) + LONG[1:]})),
        (File(LONG[:5] + bytes(1 << 20)), File(LONG[:5] + bytes(1 << 20), holes=((8192, 900_000),))),
        (
            File(LONG[:5] + bytes(1 << 20), holes=((8192, 900_000),)),
            LONG[:5] + bytes(700_000) + LONG[:348576],
        ),
    ],
    ids=["cut by content", "cut at tensors", "the same with a hole", "something in a hole"],
)
def test_contents_of_one_size(tmp_path: Path, mine: File | bytes, theirs: File | bytes) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        sources = [
            await copied(tmp_path, node, {b"f": content}, remote)
            for node, content in (("a", mine), ("b", theirs))
        ]
        here = Here(tmp_path / "here", remote)
        bytes_of = [one.content if isinstance(one, File) else one for one in (mine, theirs)]
        assert len(bytes_of[0]) == len(bytes_of[1])
        if bytes_of[0] == bytes_of[1]:
            record = (await here.merge(sources)).pulled.record
            assert here.files(record) == {b"f": bytes_of[0]}
        else:
            with pytest.raises(Conflict, match="f has other content on a and b"):
                await here.merge(sources)
        here.store.close()

    trio.run(main)


def test_a_preferred_node_without_the_part_prefers_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        trees: dict[str, Tree] = {"a": {b"x": b""}, "b": {b"ck": {b"f": b"1"}}, "c": {b"ck": {b"f": b"2"}}}
        sources = [await copied(tmp_path, node, tree, remote) for node, tree in trees.items()]
        here = Here(tmp_path / "here", remote)
        with pytest.raises(Conflict, match="ck/f has other content on b and c"):
            await here.merge(sources, (b"ck",), Decision(preferred=1))
        here.store.close()

    trio.run(main)


def test_the_same_bytes_that_are_cut_otherwise_are_one(tmp_path: Path) -> None:
    """As of a file that grew, or of which zeros are a hole on one node: its recipe is another."""

    async def main() -> None:
        remote = Remote(MemoryBucket())
        head, tail = noise(1, 200_000), noise(2, 200_000)
        whole = head + bytes(1 << 20) + tail
        first = await copied(tmp_path, "a", {b"f": whole}, remote)
        second = await copied(tmp_path, "b", {b"f": File(whole, holes=((204_800, 800_000),))}, remote)
        assert first.record.root != second.record.root
        here = Here(tmp_path / "here", remote)
        merged = await here.merge([first, second])
        assert here.files(merged.pulled.record) == {b"f": whole} and merged.notes == ()
        here.store.close()

    trio.run(main)


def test_a_part_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        remote = Remote(MemoryBucket())
        first = await copied(tmp_path, "a", {b"ck": {b"r0": b"0"}, b"f": b"1"}, remote)
        second = await copied(tmp_path, "b", {b"ck": {b"r1": b"1"}, b"f": b"2"}, remote)
        third = await copied(tmp_path, "c", {b"f": b"3"}, remote)
        here = Here(tmp_path / "here", remote)
        record = (await here.merge([third, first, second], (b"ck",), Decision(1))).pulled.record
        assert here.files(record) == {b"ck/r0": b"0", b"ck/r1": b"1"}
        assert record.state is State.PARTIAL
        assert record.missing[:2] == ("only ck was merged", f"c has no ck in {third.record.name}")
        with pytest.raises(NotFound, match="none of these versions has no/where"):
            await here.merge([first, second], (b"no", b"where"))
        here.store.close()

    trio.run(main)


def test_a_damaged_pack_is_named_and_nothing_listed(tmp_path: Path) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        remote = Remote(bucket)
        first = await copied(tmp_path, "a", ranks(0), remote)
        before = bucket.keys("packs")
        second = await copied(tmp_path, "b", ranks(1), remote)
        (damaged,) = {*bucket.keys("packs")} - {*before}
        bucket.flip(damaged, 8 * 50_000)
        here = Here(tmp_path / "here", remote)
        with pytest.raises(Corrupt, match=damaged):
            await here.merge([first, second])
        assert here.store.histories.unit_named(b"run") is None
        here.store.close()

    trio.run(main)


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_network_changes_nothing(tmp_path: Path, seed: int) -> None:
    bucket = MemoryBucket()

    async def main() -> None:
        first = await copied(tmp_path, "a", ranks(0, 1), Remote(bucket))
        second = await copied(tmp_path, "b", ranks(2), Remote(bucket))
        faults = Faults(seed, refused=0.05, lost=0.05, in_flight=0.05, stale=0.2)
        remote = Remote(RetryingBucket(FaultBucket(bucket, faults), (0.0,) * 8))
        here = Here(tmp_path / "here", remote)
        record = (await here.merge([first, second])).pulled.record
        assert here.files(record) == contents(ranks(0, 1)) | contents(ranks(2))
        here.store.close()

    trio.run(main)
