"""daemon/encode_orphan.py: a process that encodes for a dead daemon is gone before the next one begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptfs.daemon import encode_orphan
from ckptfs.daemon.encode_orphan import end_orphan
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Conflict
from ckptfs.store.layout import LOCK_PATH, Holder, StoreLock, open_store


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A store that a daemon has; its lock is of another kind, so neither hinders the other."""
    disk = open_store(str(tmp_path / "store"), create=True)
    lock = StoreLock(disk, Holder(os.getpid(), "/mnt", "/sock"))
    yield disk
    lock.release()


@contextmanager
def encoding(disk: Disk, parent: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a batch, which it never gets."""
    command = [sys.executable, "-m", "ckptfs.daemon.encode_process", disk.root, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_found(disk: Disk, pid: int) -> None:
    until = time.monotonic() + 20
    fd = disk.open_read(LOCK_PATH)
    while encode_orphan._holder(fd) != pid:
        assert time.monotonic() < until, "it takes the lock"
        time.sleep(0.01)
    disk.close(fd)


def test_one_that_is_left_is_ended(disk: Disk) -> None:
    with encoding(disk, os.getpid()) as process:
        wait_until_found(disk, process.pid)
        os.kill(process.pid, signal.SIGSTOP)  # it does nothing by itself any more
        end_orphan(disk)
        assert process.wait(20) == -signal.SIGKILL
    end_orphan(disk)  # there is none


def test_one_whose_daemon_has_died_before_it_could_be_found_does_nothing(disk: Disk) -> None:
    with encoding(disk, 1 << 22) as process:  # no process has this number
        assert process.wait(20) == 0


def test_one_that_does_not_end_keeps_the_next_daemon_away(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with encoding(disk, os.getpid()) as process:
        wait_until_found(disk, process.pid)
        with monkeypatch.context() as patched:
            patched.setattr(encode_orphan, "_WITHIN_S", 0.05)
            patched.setattr(os, "kill", lambda pid, number: None)
            with pytest.raises(Conflict, match=f"process {process.pid} still encodes"):
                end_orphan(disk)
