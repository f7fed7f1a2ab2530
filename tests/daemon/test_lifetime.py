"""Background work survives its own bugs; what is in staging is synced before the end."""

from __future__ import annotations

import pytest
import trio
from filled_store import FilledStore

from ckptfs.daemon import lifetime
from ckptfs.daemon.last_sync import sync_staging
from ckptfs.daemon.lifetime import keep_running
from ckptfs.store.inode import Content
from ckptfs.store.staging import Staging


def test_a_task_that_fails_starts_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lifetime, "_PAUSE_S", 0)
    runs: list[int] = []

    async def task() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise ZeroDivisionError

    trio.run(keep_running, "dividing", task)
    assert len(runs) == 3
    assert caplog.text.count("dividing failed") == 2


def test_every_staging_file_is_marked_as_synced(filled_store: FilledStore) -> None:
    staging = Staging(filled_store.disk, 100)
    folder = filled_store.make("/run", mode=0o755)
    waiting = [filled_store.make(f"/run/{n}", mode=0o644, content=b"x") for n in range(3)]
    stored = filled_store.make("/run/stored", mode=0o644, content=b"y")
    draft = filled_store.drafts.begin()
    for ino in waiting:
        number, fd = staging.create()
        filled_store.disk.close(fd)
        draft.update(ino, content=Content(staging=number))
    draft.commit()
    directories = [folder, folder + 1000]
    staging = Staging(filled_store.disk, 0)
    for expected in (len(waiting), 0):
        found = trio.run(
            sync_staging, filled_store.disk, filled_store.index, filled_store.namespace, staging, directories
        )
        assert found == expected
    assert all(filled_store.namespace.inode(ino).content.synced for ino in waiting)
    assert not filled_store.namespace.inode(stored).content.synced
