"""Which of several remotes a pull is served by, and what it says of the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from faultbucket import MemoryBucket
from saved_store import SavedStore

from ckptfs.daemon import fetching
from ckptfs.daemon.copying import Copying
from ckptfs.daemon.fetching import Fetching
from ckptfs.daemon.messages import Pull
from ckptfs.daemon.open_store import OpenStore
from ckptfs.store.errors import Corrupt
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.push import Pusher
from ckptfs.store.signing import SigningKey

KEY, STRANGER = SigningKey(b"k" * 32), SigningKey(b"s" * 32)


class Silent(Remote):
    """One that never answers."""

    async def open(self, *, create: bool = False) -> None:
        await trio.sleep_forever()


async def filled(path: Path, key: SigningKey, versions: int) -> Remote:
    """A remote with a run of so many versions, signed with a key."""
    remote, store = Remote(MemoryBucket()), SavedStore(path, key=key)
    for number in range(versions):
        await store.publish(b"run", {b"n": b"%d" % number})
    copied = CopiedUnits(store.index, "x")
    pusher = Pusher(remote, store.disk, store.segments, store.histories, copied, "node")
    await pusher.push(store.unit(b"run").unit)
    store.close()
    return remote


def fetching_from(store: SavedStore, remotes: dict[str, Remote]) -> Fetching:
    targets = [SimpleNamespace(name=name, open=lambda one=one: one) for name, one in remotes.items()]

    def chosen(name: str | None) -> Sequence[SimpleNamespace]:
        return targets

    return Fetching(cast(OpenStore, store), cast(Copying, SimpleNamespace(targets=chosen)))


def test_a_newer_history_of_a_stranger_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that never answers; both are told of."""
    monkeypatch.setattr(fetching, "SLOW_S", 1.0)

    async def main() -> None:
        good = await filled(tmp_path / "good", KEY, 1)
        bad = await filled(tmp_path / "bad", STRANGER, 3)
        here = SavedStore(tmp_path / "here", node=b"here")
        remotes = {"bad": bad, "silent": Silent(MemoryBucket()), "good": good}
        request = Pull(path="run")
        pulled, answer = await fetching_from(here, remotes).pull(request, [KEY.public], lambda done: None)
        assert answer["remote"] == "good" and answer["of"] == pulled.record.number == 1
        said = cast("list[str]", answer["passed_over"])
        assert any(one.startswith("bad: ") and "not fetched" in one for one in said)
        assert any(one.startswith("silent: ") for one in said)
        with pytest.raises(Corrupt, match="is not fetched"):
            await fetching_from(here, {"bad": bad}).pull(request, [KEY.public], lambda done: None)
        here.close()

    trio.run(main)
