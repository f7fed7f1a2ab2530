"""The share of handover.py that every run of the tests takes: 20 kills in all, over both write paths."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handover import DYING_DAEMON, WRITE_PATHS, daemons, run_store
from handover_client import renameat2
from handover_mutants import MUTANTS, kills_until_found
from mounting import may_pass_through, memory_folder

from ckptfs.fusefs.kept_notes import Kind

KILLS = 10
QUICK_MUTANTS = ("reopen", "orphans")  # found at the first kill


needs_kept_mounts = pytest.mark.skipif(
    not may_pass_through(), reason="a mount outlives its daemon as root, on Linux 6.9 and newer"
)


@needs_kept_mounts
@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_clients_do_not_notice_that_the_daemon_is_killed(write_path: str, seed: int) -> None:
    with memory_folder() as memory:
        result = run_store(Path(memory) / "store", write_path, KILLS, random.Random(seed))
    assert result.findings == [], "\n".join(result.findings)
    assert result.kills >= KILLS and result.calls > 1000


@contextlib.contextmanager
def open_in(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def truncated(path: Path) -> None:
    with open_in(path, os.O_WRONLY) as fd:
        os.ftruncate(fd, 3)


def created(path: Path) -> None:
    with open_in(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        os.write(fd, b"new")


def kind_of(path: Path) -> int | None:
    return stat.S_IFMT(path.lstat().st_mode) if os.path.lexists(path) else None


# What is asked of a directory that has `file` (with the attribute user.old), `other` and `sub`; and what is
# there afterwards, which would be otherwise, or an error, if it was not done or done twice.
CHANGES: dict[str, tuple[Callable[[Path], object], Callable[[Path], bool]]] = {
    "mkdir": (lambda d: os.mkdir(d / "new"), lambda d: kind_of(d / "new") == stat.S_IFDIR),
    "mknod": (lambda d: os.mknod(d / "new", 0o010600), lambda d: kind_of(d / "new") == stat.S_IFIFO),
    "symlink": (lambda d: os.symlink("file", d / "new"), lambda d: os.readlink(d / "new") == "file"),
    "link": (lambda d: os.link(d / "file", d / "new"), lambda d: (d / "file").stat().st_nlink == 2),
    "create": (lambda d: created(d / "new"), lambda d: (d / "new").read_bytes() == b"new"),
    "unlink": (lambda d: os.unlink(d / "file"), lambda d: kind_of(d / "file") is None),
    "rmdir": (lambda d: os.rmdir(d / "sub"), lambda d: kind_of(d / "sub") is None),
    "rename": (
        lambda d: os.rename(d / "file", d / "new"),
        lambda d: (d / "new").read_bytes() == b"content" and kind_of(d / "file") is None,
    ),
    "rename over": (
        lambda d: os.rename(d / "file", d / "other"),
        lambda d: (d / "other").read_bytes() == b"content" and kind_of(d / "file") is None,
    ),
    "exchange": (
        lambda d: renameat2(str(d / "file"), str(d / "other"), 2),
        lambda d: (d / "other").read_bytes() == b"content" and (d / "file").read_bytes() == b"other",
    ),
    "chmod": (lambda d: os.chmod(d / "file", 0o751), lambda d: (d / "file").stat().st_mode & 0o777 == 0o751),
    "truncate": (lambda d: truncated(d / "file"), lambda d: (d / "file").read_bytes() == b"con"),
    "utime": (lambda d: os.utime(d / "file", (5, 7)), lambda d: (d / "file").stat().st_mtime == 7),
    "setxattr": (
        lambda d: os.setxattr(d / "file", "user.old", b"2"),
        lambda d: os.getxattr(d / "file", "user.old") == b"2",
    ),
    "setxattr, new": (
        lambda d: os.setxattr(d / "file", "user.new", b"2", os.XATTR_CREATE),
        lambda d: os.getxattr(d / "file", "user.new") == b"2",
    ),
    "setxattr, there": (
        lambda d: os.setxattr(d / "file", "user.old", b"2", os.XATTR_REPLACE),
        lambda d: os.getxattr(d / "file", "user.old") == b"2",
    ),
    "removexattr": (
        lambda d: os.removexattr(d / "file", "user.old"),
        lambda d: os.listxattr(d / "file").count("user.old") == 0,
    ),
}


@needs_kept_mounts
def test_each_change_is_done_once_when_its_answer_gets_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon dies behind the record in the journal, and in front of the answer."""
    with memory_folder() as memory:
        sign = Path(memory) / "sign"
        monkeypatch.setenv("CKPTFS_DIES_BY", str(sign))
        with daemons(Path(memory) / "store", "plain", DYING_DAEMON) as mount:
            for name, (change, holds) in CHANGES.items():
                directory = mount.path / name
                (directory / "sub").mkdir(parents=True)
                for file, content in (("file", b"content"), ("other", b"other")):
                    (directory / file).write_bytes(content)
                os.setxattr(directory / "file", "user.old", b"1")
                time.sleep(0.5)  # what was closed just before leaves records of its own
                before = mount.pid()
                sign.touch()
                change(directory)
                assert not sign.exists(), f"{name} is not in the journal"
                mount.wait_until_ready()
                assert mount.pid() != before and holds(directory), name
            assert mount.stop() == 0


@needs_kept_mounts
def test_a_damaged_state_costs_what_is_open_and_nothing_else() -> None:
    """The daemon starts afresh; who had something open gets an error, and waits for nobody."""
    with memory_folder() as memory, daemons(Path(memory) / "store", "auto") as mount:
        fd = os.open(mount.path / "file", os.O_CREAT | os.O_RDWR)
        try:
            os.write(fd, b"content")
            with mount.state() as state:
                assert state is not None
                state.notes.put(Kind.NODE, 5, b"damaged")
            mount.kill()
            mount.wait_until_ready()
            with pytest.raises(OSError) as caught:
                os.fsync(fd)
            assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)
        assert (mount.path / "file").read_bytes() == b"content"
        assert "NODE of 5 is damaged" in mount.log()
        assert mount.stop() == 0


@needs_kept_mounts
def test_clients_would_notice(seed: int) -> None:
    """One part of the hand-over, switched off. handover_mutants.py does that with each."""
    name = random.Random(seed).choice(sorted(QUICK_MUTANTS))
    kills, finding = kills_until_found(name, seed)
    assert finding, f"nobody noticed in {kills} kills that {MUTANTS[name].text}"
