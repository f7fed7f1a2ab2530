"""A unit that is removed at one of the waits of a publish: nothing is listed, and nothing fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from small_face import SmallFace, small_face

from ckptfs.fusefs.publish import Publisher
from ckptfs.fusefs.recording import Recorder, Request
from ckptfs.store.ingest import Ingest
from ckptfs.store.inode import ROOT_INO


@pytest.mark.parametrize(
    ("owner", "wait"),
    [
        (Publisher, "_store_files"),
        (Ingest, "store_objects"),
        (Recorder, "judge"),
    ],
)
def test_a_unit_that_is_removed_at_a_wait(
    owner: type, wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_face(tmp_path / "store") as small:
        small.make(ROOT_INO, {"run": {"model.bin": bytes(300_000)}})
        removes_it_behind(owner, wait, small, monkeypatch)
        publisher, top = small.face.publisher, small.at("run")
        due = publisher.due_now(publisher.changed_dirs_by_unit()[top])
        assert trio.run(publisher.publish, top, due, Request("command")) is None
        assert small.tree(ROOT_INO) == {}
        assert not small.parts.histories.shown_names()


def removes_it_behind(owner: type, wait: str, small: SmallFace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once that has been awaited for the first time."""
    done = getattr(owner, wait)

    async def removed(*arguments: object, **options: object) -> object:
        found = await done(*arguments, **options)
        if small.face.namespace.child(ROOT_INO, b"run") is not None:
            small.remove(ROOT_INO, "run")
        return found

    monkeypatch.setattr(owner, wait, removed)
