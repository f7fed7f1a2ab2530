"""TensorBoard event files: read while they are written; they hold back no checkpoint beside them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import pytest
from clients.clientproc import Client
from clients.recovery import Save, assert_all_recoverable, wait_until_recoverable
from clients.writepaths import BOTH_PATHS
from mounting import Mount

ROUNDS, EACH = 12, 5


@pytest.mark.heavy
@BOTH_PATHS
def test_event_files_are_read_while_they_are_written_and_hold_nothing_back(
    quick_mount: Mount, more_frameworks: Mapping[str, str]
) -> None:
    """The first writer is killed with its file open; a second one resumes beside it."""
    run = quick_mount.path / "run"
    logs = {"folder": str(run / "logs")}
    saves = []
    with Client("tensorboard_client.py", environment=more_frameworks) as reader:
        for half in (0, 1):
            with Client("tensorboard_client.py", environment=more_frameworks) as writer:
                for number in range(half * ROUNDS, (half + 1) * ROUNDS):
                    first, last = number * EACH + 1, (number + 1) * EACH
                    writer.call("write", first=first, last=last, **logs)
                    assert reader.call("read", **logs) == list(range(first, last + 1))
                saves.append(save_checkpoint(quick_mount, f"checkpoint-{half}"))
                wait_until_recoverable(quick_mount, "run", saves[-1])
                assert reader.call("read", **logs) == []
    saves.append(Save.of(run, "logs"))
    assert len(saves[-1].files) == 2
    wait_until_recoverable(quick_mount, "run", saves[-1])
    shutil.rmtree(run)
    assert_all_recoverable(quick_mount, "run", saves)
    assert quick_mount.verified("run")


def save_checkpoint(mount: Mount, name: str) -> Save:
    """A checkpoint in the same unit."""
    folder = mount.path / "run" / name
    folder.mkdir()
    (folder / "model.bin").write_bytes(os.urandom(300_000))
    return Save.of(mount.path / "run", name)
