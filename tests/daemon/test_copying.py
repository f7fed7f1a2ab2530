"""What this node notes of its copies follows what collections leave of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from faultbucket import MemoryBucket
from saved_store import SavedStore

from ckptfs.daemon import copying
from ckptfs.daemon.config import RemoteConfig
from ckptfs.daemon.copying import Check, Copying
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.remote_collecting import RemoteCollecting
from ckptfs.daemon.retaining import Policies
from ckptfs.store.errors import Unavailable
from ckptfs.store.remote.catalogue import RemoteUnit
from ckptfs.store.remote.collecting import Collector
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

    def let_go(unit: RemoteUnit) -> list[int]:
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
