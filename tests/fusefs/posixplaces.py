"""Where a conformance test runs: on the mount, or on the host's own file system beside it.

The one rule: a test says nothing of which of the two it is on, so that what it expects is what the kernel's
own file system does. Other users are forked children that enter the place before they give up root, since
pytest's temporary folders are closed to everybody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from kernelmounts import poll

T = TypeVar("T")
USER, GROUP, OTHER_USER, OTHER_GROUP = 61001, 61002, 61003, 61004
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
CHILD_S = 30.0
libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Place:
    """A fresh directory, owned by root, mode 0755."""

    path: Path
    is_mount: bool

    def let_store(self, *paths: Path) -> None:
        """On the mount: return when ckptfs has these files out of staging. On the host: at once."""
        if not self.is_mount:
            return
        try:
            os.mkdir(self.path / ".versions" / f"stored{time.monotonic_ns()}")
        except FileNotFoundError:
            pass  # nothing to publish any more: the settled state has just been
        for path in paths:
            assert poll(lambda path=path: is_stored(path), 60), f"{path} was never stored"  # type: ignore[misc]

    def file(self, name: str = "file", content: bytes = b"", mode: int = 0o644) -> Path:
        """A new file of root's with this content."""
        path = self.path / name
        path.write_bytes(content)
        path.chmod(mode)
        return path

    def aged(self, age: str, content: bytes, name: str = "file") -> Path:
        """A new file that is "fresh", or "stored" already."""
        path = self.file(name, content)
        if age == "stored":
            self.let_store(path)
        return path

    def as_user(
        self,
        work: Callable[[], T],
        *,
        uid: int = USER,
        gid: int = GROUP,
        groups: Sequence[int] = (),
        umask: int = 0o022,
    ) -> T:
        """The result of `work` in a child of that user, with this place as working directory."""

        def become_and_work() -> T:
            os.chdir(self.path)
            os.umask(umask)
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            return work()

        return in_child(become_and_work)


def is_stored(path: Path) -> bool:
    """Whether ckptfs knows the content's id: not while the file is in staging."""
    try:
        return bool(os.getxattr(path, "user.ckptfs.cid", follow_symlinks=False))
    except OSError as e:
        if e.errno == errno.ENODATA:
            return False
        raise


@contextlib.contextmanager
def refused(*codes: int) -> Iterator[None]:
    """The block must fail with one of these errnos."""
    try:
        yield
    except OSError as e:
        expected = [errno.errorcode[code] for code in codes]
        assert e.errno in codes, f"{errno.errorcode.get(e.errno or 0)} instead of {expected}: {e}"
    else:
        pytest.fail(f"was not refused with {[errno.errorcode[code] for code in codes]}")


def outcome(call: Callable[..., object], *arguments: object) -> str:
    """The name of the errno that a call fails with, or "ok"."""
    try:
        call(*arguments)
    except OSError as e:
        return "EOPNOTSUPP" if e.errno == errno.EOPNOTSUPP else errno.errorcode[e.errno or 0]
    return "ok"


def in_child(work: Callable[[], T], timeout_s: float = CHILD_S) -> T:
    """Run `work` in a forked child: its result, its OSError, or its traceback as an AssertionError."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(work, write_end)
    os.close(write_end)
    try:
        kind, answer = pickle.loads(_read_all(read_end, timeout_s))
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if kind == "errno":
        raise OSError(answer, os.strerror(answer))
    assert kind == "result", answer
    return answer  # type: ignore[no-any-return]


def _answer(work: Callable[[], object], write_end: int) -> None:
    try:
        answer: tuple[str, object] = ("result", work())
    except OSError as e:
        answer = ("errno", e.errno)
    except BaseException:
        answer = ("failure", traceback.format_exc())
    try:
        os.write(write_end, pickle.dumps(answer))
    finally:
        os._exit(0)


def _read_all(fd: int, timeout_s: float) -> bytes:
    parts = []
    deadline = time.monotonic() + timeout_s
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"the child did not answer within {timeout_s} s"
        part = os.read(fd, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


@contextlib.contextmanager
def opened(path: Path | str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """A descriptor, closed afterwards."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def renameat2(old: Path, new: Path, flags: int) -> None:
    """rename(2) with flags."""
    at_cwd = -100
    if libc.renameat2(at_cwd, os.fsencode(old), at_cwd, os.fsencode(new), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def mode_of(path: Path | str) -> int:
    """Permission bits with suid, sgid and sticky."""
    return os.lstat(path).st_mode & 0o7777
