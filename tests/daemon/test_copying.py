"""What this node notes of its copies follows what collections leave of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from faultbucket import START_NS, MemoryBucket
from saved_store import SavedStore

from ckptfs.daemon import copying
from ckptfs.daemon.config import RemoteConfig
from ckptfs.daemon.copying import Check, Copying
from ckptfs.daemon.fetching import Fetching
from ckptfs.daemon.merging import Merging
from ckptfs.daemon.messages import Pull
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.remote_collecting import RemoteCollecting
from ckptfs.daemon.retaining import Policies
from ckptfs.store.bucket import Payload
from ckptfs.store.errors import Corrupt, InvalidRequest, NotPermitted, Unavailable
from ckptfs.store.histories import Histories
from ckptfs.store.history import State
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.catalogue import RemoteUnit
from ckptfs.store.remote.collecting import Collector
from ckptfs.store.remote.names import pieces_of
from ckptfs.store.remote.objects import Remote
from ckptfs.store.retention import Policy
from ckptfs.store.signing import SigningKey


@dataclass
class Node:
    store: SavedStore
    bucket: MemoryBucket
    copying: Copying

    @property
    def noted(self) -> tuple[int, ...]:
        """The versions of the run that count as copied."""
        copied = self.copying.target(None).copied.of(self.store.unit(b"run").unit)
        return () if copied is None else copied.versions

    async def save_and_follow(self, nursery: trio.Nursery) -> None:
        for number in range(3):
            await self.store.publish(b"run", {b"n": b"%d" % number})
        nursery.start_soon(self.copying.run)
        await self.wait_for((1, 2, 3))

    async def wait_for(self, versions: tuple[int, ...]) -> None:
        with trio.fail_after(30):
            while self.noted != versions:
                await trio.sleep(0.01)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(copying, "LOOK_EVERY_S", 0.01)
    store, bucket = SavedStore(tmp_path / "a", key=SigningKey(b"k" * 32)), MemoryBucket()
    config = RemoteConfig(name="backup", url="file:///nowhere")
    yield Node(store, bucket, Copying(cast(OpenStore, store), [config], lambda one: Remote(bucket), "node"))
    store.close()


def test_what_another_node_collected_is_noticed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "ASK_EVERY_S", 0.05)

    def let_go(unit: RemoteUnit, now_ns: int) -> list[int]:
        return [1]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await node.save_and_follow(nursery)
            node.store.histories.forget(node.store.unit(b"run").unit, 1)
            await Collector(Remote(node.bucket), "other", os.urandom, let_go, 0.0).collect()
            await node.wait_for((2, 3))
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_what_was_collected_from_here_is_not_called_safe(node: Node) -> None:
    policies = cast(Policies, SimpleNamespace(of=lambda name: Policy("/*", keep_last=1)))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await node.save_and_follow(nursery)
            nursery.cancel_scope.cancel()
        collecting = RemoteCollecting(node.copying, node.store.histories, policies, "node")
        await collecting.collect(None, dry_run=True, every_node=False)
        assert node.noted == (1, 2, 3)
        await collecting.collect(None, dry_run=False, every_node=False)
        assert node.noted == (3,)

    trio.run(main)


@pytest.mark.parametrize("ahead_days", [0, 20])
def test_a_remote_is_collected_by_the_clock_of_its_storage(
    node: Node, monkeypatch: pytest.MonkeyPatch, ahead_days: int
) -> None:
    """A node whose clock is years ahead lets nothing go there that is young."""
    policies = cast(Policies, SimpleNamespace(of=lambda name: Policy("/*", keep_days=10)))

    async def main() -> None:
        node.store.now_ns = START_NS - ahead_days * 24 * 3600 * 10**9
        async with trio.open_nursery() as nursery:
            await node.save_and_follow(nursery)
            nursery.cancel_scope.cancel()
        years_ahead_ns = time.time_ns() + 10 * 365 * 24 * 3600 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: years_ahead_ns)
        collecting = RemoteCollecting(node.copying, node.store.histories, policies, "node")
        for dry_run in (True, False):
            row = await collecting.collect(None, dry_run=dry_run, every_node=False)
            forgotten = cast("dict[str, list[dict[str, object]]]", row)["forgotten"]
            assert [one["number"] for one in forgotten] == ([1, 2] if ahead_days else [])
        assert not node.bucket.keys("probe")

    trio.run(main)


def test_who_may_only_look_is_told_what_would_go(node: Node) -> None:
    """By the newest time that the storage shows, which is not later than now."""
    policies = cast(Policies, SimpleNamespace(of=lambda name: Policy("/*", keep_days=10)))

    class Shown(MemoryBucket):
        async def create(self, key: str, payload: Payload) -> None:
            raise NotPermitted("403: no right to write")

    async def main() -> None:
        node.store.now_ns = START_NS - 20 * 24 * 3600 * 10**9
        async with trio.open_nursery() as nursery:
            await node.save_and_follow(nursery)
            nursery.cancel_scope.cancel()
        shown = Shown()
        shown.objects = node.bucket.objects
        node.copying.target(None).open = lambda: Remote(shown)
        collecting = RemoteCollecting(node.copying, node.store.histories, policies, "node")
        row = cast("dict[str, list[object]]", await collecting.collect(None, dry_run=True, every_node=False))
        assert len(row["forgotten"]) == 2
        with pytest.raises(NotPermitted):
            await collecting.collect(None, dry_run=False, every_node=False)

    trio.run(main)


def test_what_was_let_go_elsewhere_waits_for_nobody(node: Node) -> None:
    """It is not sent again by itself, nor said to wait; but when it is asked for, or tagged since."""
    policies = cast(Policies, SimpleNamespace(of=lambda name: Policy("/*", keep_last=1)))
    unit = node.store.unit(b"run")

    def waiting() -> tuple[object, object]:
        (row,) = cast("list[dict[str, object]]", node.copying.status())
        return row["waiting_versions"], cast("dict[str, object]", node.copying.copies())["waiting_versions"]

    async def push(number: int | None = None) -> list[int]:
        more = {"partial": False, "check": Check.NO, "report": lambda done: None}
        (row,) = cast("list[dict[str, object]]", await node.copying.push([unit], number, None, **more))
        assert row["enough"] and not row["problems"]
        return cast("list[int]", row["copied"])

    async def main() -> None:
        for number in range(3):
            await node.store.publish(b"run", {b"n": b"%d" % number})
        assert await push() == [1, 2, 3]
        elsewhere = RemoteCollecting(node.copying, cast(Histories, Stranger()), policies, "other")
        before = node.copying.target(None).copied.of(unit.unit)
        assert before is not None
        answer = await elsewhere.collect(None, dry_run=False, every_node=True)
        assert len(cast("dict[str, list[object]]", answer)["forgotten"]) == 2
        node.copying.target(None).copied.note(unit.unit, before)
        assert await push() == [] and node.noted == (3,) and waiting() == (0, 0)
        node.store.histories.tag(unit.unit, 1, "good")
        assert waiting() == (1, 1)
        assert await push() == [1] and await push(2) == [2]
        assert node.noted == (1, 2, 3) and waiting() == (0, 0)

    trio.run(main)


def test_a_damaged_history_hides_only_its_own_unit(node: Node, tmp_path: Path) -> None:
    """Whoever lost a node sees what else is there, and has the run of the same name of another node."""

    async def main() -> None:
        other = SavedStore(tmp_path / "b", key=SigningKey(b"k" * 32), node=b"b")
        config = RemoteConfig(name="backup", url="file:///nowhere")
        both = [
            (node.store, node.copying),
            (other, Copying(cast(OpenStore, other), [config], lambda one: Remote(node.bucket), "other")),
        ]
        for store, one in both:
            await store.publish(b"run", {b"n": b"1"})
            await one.push(
                store.histories.units(), None, None, partial=False, check=Check.NO, report=lambda done: None
            )
        damaged = pieces_of(node.store.unit(b"run").unit)
        for key in node.bucket.keys(damaged):
            node.bucket.flip(key, 200)
        fetching = Fetching(cast(OpenStore, other), both[1][1])
        (listing,) = cast("list[dict[str, list[dict[str, object]]]]", await fetching.listing(None, ()))
        assert [unit["node"] for unit in listing["units"]] == ["other"]
        (problem,) = listing["problems"]
        assert "history of run cannot be read" in str(problem) and damaged in str(problem)
        wanted = Pull(path="/run", node="other")
        assert (await fetching.find(Remote(node.bucket), wanted, ())).unit.head.node == "other"
        with pytest.raises(Corrupt):
            await fetching.find(Remote(node.bucket), Pull(path="/run", node="node"), ())
        merging = Merging(cast(OpenStore, other), both[1][1])
        with pytest.raises(Corrupt, match=r"run of node is not merged: .*; --node names the nodes that are"):
            await merging.merge(Pull(path="/run", name="copy", merge=True), (), lambda done: None)
        with pytest.raises(InvalidRequest, match="no step"):
            await merging.merge(
                Pull(path="/run", name="copy", merge=True, nodes=("other",)), (), lambda done: None
            )
        other.close()

    trio.run(main)


class Stranger:
    """The histories of a node that has none."""

    def unit(self, unit: UnitId) -> None:
        return None

    def pins(self, unit: UnitId) -> set[int]:
        return set()

    def tags(self, unit: UnitId) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("text", ["run", "", "ab", "0" * 31])
def test_what_is_given_up_is_named_by_its_id(node: Node, text: str) -> None:
    policies = cast(Policies, SimpleNamespace(of=lambda name: None))
    collecting = RemoteCollecting(node.copying, node.store.histories, policies, "node")

    async def main() -> None:
        with pytest.raises(InvalidRequest, match="32 hex digits"):
            await collecting.collect(None, dry_run=False, every_node=False, give_up=[text])

    trio.run(main)


def test_only_what_was_asked_for_has_to_be_copied(node: Node) -> None:
    """Where one of two remotes is away, what it lacks of other units is not told of a push of this one."""

    async def main() -> None:
        copied = await node.store.publish(b"run", {b"n": b"1"})
        await node.store.publish(b"other", {b"n": b"1"})
        unit = node.store.unit(b"run")

        def open_remote(config: RemoteConfig) -> Remote:
            if config.name == "away":
                raise Unavailable("it is away")
            return Remote(node.bucket)

        configs = [RemoteConfig(name=name, url="file:///nowhere", push=False) for name in ("there", "away")]
        two = Copying(cast(OpenStore, node.store), configs, open_remote, "node", copies=1)
        rows = await two.push(
            [unit], copied.number, None, partial=False, check=Check.NO, report=lambda done: None
        )
        assert [row["enough"] for row in cast("list[dict[str, object]]", rows)] == [True, True]

    trio.run(main)


@pytest.mark.parametrize("partial", [False, True])
def test_versions_with_some_of_the_ranks_are_copied_where_the_remote_is_for_such(
    node: Node, partial: bool
) -> None:
    """Each node of a run has a part of each save, so none is ever complete."""

    async def main() -> None:
        config = RemoteConfig(name="backup", url="file:///nowhere", partial=partial)
        parts = cast(OpenStore, node.store)
        node.copying = Copying(parts, [config], lambda one: Remote(node.bucket), "node")
        await node.store.publish(b"run", {b"__0_0.distcp": b"1"}, state=State.PARTIAL)
        (row,) = cast("list[dict[str, object]]", node.copying.status())
        assert row["waiting_versions"] == int(partial)
        async with trio.open_nursery() as nursery:
            await node.store.publish(b"run", {b"whole": b"1"})
            nursery.start_soon(node.copying.run)
            await node.wait_for((1, 2) if partial else (2,))
            nursery.cancel_scope.cancel()
        (row,) = cast("list[dict[str, object]]", node.copying.status())
        assert row["waiting_versions"] == 0

    trio.run(main)
