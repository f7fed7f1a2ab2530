"""One client of handover.py: a process that works on the mount while its daemon is killed and replaced.

    handover_client.py ROLE DIRECTORY NAME SEED [waits]

One rule: every call must do what it does on ext4, so each answer and each content is compared with what the
client knows; the first difference ends it with a traceback. What two clients share (names that only one of
them can make, a counter under a lock) is told to whoever started them, who adds up.

Works until a line comes on stdin; then prints what it did, as JSON: the number of calls, those that took
long (begin and end by the monotonic clock), and what it shares. With `waits`, a call that finds no room
(ENOSPC) is made again until there is some, as an operator would have it; a short write is gone on with.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import random
import select
import sys
import time
from collections.abc import Callable
from typing import TypeVar

LONG_S = 0.02
MOST_FULL_S = 60.0
Answer = TypeVar("Answer")


class Client:
    """Counts and times calls. One step of a role is a few of them."""

    waits_for_room = False

    def __init__(self, directory: str, name: str, seed: str) -> None:
        self.directory = directory
        self.name = name
        self.chance = random.Random(seed)
        self.calls = 0
        self.long: list[tuple[float, float]] = []
        self.shared: list[int] = []

    def at(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def call(self, function: Callable[..., Answer], *arguments: object) -> Answer:
        begun = time.monotonic()
        try:
            while True:
                try:
                    return function(*arguments)
                except OSError as e:
                    is_full = e.errno == errno.ENOSPC and self.waits_for_room
                    if not is_full or time.monotonic() - begun > MOST_FULL_S:
                        raise
                time.sleep(0.05)
        finally:
            ended = time.monotonic()
            self.calls += 1
            if ended - begun > LONG_S:
                self.long.append((begun, ended))

    def refused(self, number: int, function: Callable[..., object], *arguments: object) -> None:
        """The call must fail with this errno."""
        try:
            self.call(function, *arguments)
        except OSError as e:
            assert e.errno == number, e
            return
        raise AssertionError(f"{function} {arguments} was not refused")

    def payload(self, most: int = 300_000) -> bytes:
        return self.chance.randbytes(self.chance.choice((1, 100, 4096, 70_000, most)))

    def write_all(self, fd: int, content: bytes) -> None:
        view, at = memoryview(content), 0
        while at < len(content):
            step = self.chance.choice((4096, 65_536, 1 << 20))
            at += self.call(os.write, fd, view[at : at + step])

    def append(self, fd: int, content: bytes) -> None:
        """One write on ext4, unless the disk is full."""
        written = self.call(os.write, fd, content)
        assert written == len(content) or self.waits_for_room
        if written < len(content):
            self.append(fd, content[written:])

    def put(self, fd: int, content: bytes, at: int) -> None:
        """The same at a place."""
        written = self.call(os.pwrite, fd, content, at)
        assert written == len(content) or self.waits_for_room
        if written < len(content):
            self.put(fd, content[written:], at + written)

    def read_all(self, path: str) -> bytes:
        fd = self.call(os.open, path, os.O_RDONLY)
        parts = []
        while part := self.call(os.read, fd, 1 << 17):
            parts.append(part)
        self.call(os.close, fd)
        return b"".join(parts)


class Saver(Client):
    """Saves a file beside the old one, syncs it and renames it over; unlinks what it has open."""

    def __init__(self, directory: str, name: str, seed: str) -> None:
        super().__init__(directory, name, seed)
        self._held: dict[str, bytes] = {}
        os.mkdir(directory)

    def step(self) -> None:
        name, content = f"model-{self.chance.randrange(6)}.bin", self.payload(1_500_000)
        fd = self.call(os.open, self.at(name + ".tmp"), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o640)
        self.write_all(fd, content)
        self.call(os.fsync, fd)
        assert self.call(os.fstat, fd).st_size == len(content)
        self.call(os.rename, self.at(name + ".tmp"), self.at(name))
        assert self.call(os.pread, fd, 5000, 0) == content[:5000]
        self.call(os.close, fd)
        self._held[name] = content
        self._unlink_one()
        if self.chance.random() < 0.2:
            self.check()

    def _unlink_one(self) -> None:
        name = self.chance.choice(sorted(self._held))
        content = self._held.pop(name)
        fd = self.call(os.open, self.at(name), os.O_RDWR)
        self.call(os.unlink, self.at(name))
        self.refused(errno.ENOENT, os.stat, self.at(name))
        more = self.payload(9000)
        self.put(fd, more, len(content))
        assert (
            self.call(os.pread, fd, 10_000, max(len(content) - 1000, 0))
            == (content + more)[max(len(content) - 1000, 0) :][:10_000]
        )
        assert self.call(os.fstat, fd).st_nlink == 0
        self.call(os.close, fd)

    def check(self) -> None:
        assert sorted(self.call(os.listdir, self.directory)) == sorted(self._held)
        for name, content in self._held.items():
            assert self.read_all(self.at(name)) == content, name


class Appender(Client):
    """Appends to a file that stays open, cuts it at times, reads what it wrote through another descriptor."""

    def __init__(self, directory: str, name: str, seed: str) -> None:
        super().__init__(directory, name, seed)
        os.mkdir(directory)
        self._fd = os.open(self.at("train.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._content = b""

    def step(self) -> None:
        line = f"step {self.calls}\n".encode() * self.chance.choice((1, 3, 500))
        self.append(self._fd, line)
        self._content += line
        what = self.chance.random()
        if what < 0.05:
            self.call(os.fsync, self._fd)
        elif what < 0.1:
            kept = self.chance.randrange(len(self._content) + 1)
            self.call(os.truncate, self.at("train.log"), kept)
            self._content = self._content[:kept]
        elif what < 0.15:
            self.call(os.close, self._fd)
            self._fd = self.call(os.open, self.at("train.log"), os.O_WRONLY | os.O_APPEND)
        elif what < 0.3:
            self.check()

    def check(self) -> None:
        assert self.read_all(self.at("train.log")) == self._content


class Maker(Client):
    """Makes names that another client tries to make, too: of each, one of them must be told that it did."""

    def step(self) -> None:
        number = self.calls
        try:
            fd = self.call(os.open, self.at(str(number)), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return
        self.append(fd, self.name.encode())
        self.call(os.close, fd)
        self.shared.append(number)

    def check(self) -> None:
        for number in self.shared[-20:]:
            assert self.read_all(self.at(str(number))) == self.name.encode(), number


class Mover(Client):
    """Makes, links, moves, exchanges and removes names of all kinds; changes attributes."""

    def __init__(self, directory: str, name: str, seed: str) -> None:
        super().__init__(directory, name, seed)
        os.mkdir(directory)
        self._count = 0
        self._nameless, self._content = -1, b""

    def step(self) -> None:
        self._count += 1
        self._reach_nameless()
        a, b, c = (self.at(f"{what}{self._count}") for what in "abc")
        self.call(os.mkdir, a)
        self.refused(errno.EEXIST, os.mkdir, a)
        self.call(os.symlink, "a target", a + "/link")
        self.call(os.mknod, a + "/fifo", 0o010600)
        self.call(os.rename, a, b)
        assert self.call(os.readlink, b + "/link") == "a target"
        self.call(os.link, b + "/fifo", b + "/other")
        assert self.call(os.stat, b + "/fifo").st_nlink == 2
        self.call(os.mkdir, c)
        self._exchange(b, c)
        assert sorted(self.call(os.listdir, c)) == ["fifo", "link", "other"]
        self._change_attributes(c)
        for name in ("fifo", "link", "other"):
            self.call(os.unlink, f"{c}/{name}")
        self.refused(errno.ENOENT, os.unlink, c + "/link")
        self.call(os.rmdir, c)
        self.call(os.rmdir, b)
        assert self.call(os.listdir, self.directory) == []

    def _reach_nameless(self) -> None:
        """A file without a name that nobody has open, and that can be opened all the same."""
        if self._nameless < 0 or self.chance.random() < 0.05:
            if self._nameless >= 0:
                os.close(self._nameless)
            self._content, path = self.payload(9000), self.at("nameless")
            fd = self.call(os.open, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            self.write_all(fd, self._content)
            self.call(os.close, fd)
            self._nameless = self.call(os.open, path, os.O_PATH)
            self.call(os.unlink, path)
        assert self.read_all(f"/proc/self/fd/{self._nameless}") == self._content

    def _exchange(self, one: str, two: str) -> None:
        flags = 2
        self.call(renameat2, one, two, flags)

    def _change_attributes(self, path: str) -> None:
        self.call(os.chmod, path, 0o751)
        assert self.call(os.stat, path).st_mode & 0o7777 == 0o751
        self.call(os.setxattr, path, "user.note", b"1", os.XATTR_CREATE)
        self.call(os.setxattr, path, "user.note", b"2", os.XATTR_REPLACE)
        assert self.call(os.getxattr, path, "user.note") == b"2"
        self.call(os.removexattr, path, "user.note")
        self.refused(errno.ENODATA, os.getxattr, path, "user.note")
        self.call(os.utime, path, (1000, 2000))
        assert self.call(os.stat, path).st_mtime == 2000

    def check(self) -> None:
        assert self.call(os.listdir, self.directory) == []


class Reader(Client):
    """Reads through mappings and `.versions`, keeps descriptors and a working directory over many kills."""

    _SIZE = 3_000_000

    def __init__(self, directory: str, name: str, seed: str) -> None:
        super().__init__(directory, name, seed)
        os.mkdir(directory)
        self._content = self.chance.randbytes(self._SIZE)
        with open(self.at("weights"), "wb") as file:
            file.write(self._content)
        os.mkdir(self.at("busy"))
        with open(self.at("busy/scratch"), "wb") as file:
            file.write(bytes(1 << 16))
        self._mapped = self._map("weights", writable=False)
        self._written = self._map("busy/scratch", writable=True)
        self._saved = -1
        self._saved_folder = -1

    def _map(self, name: str, *, writable: bool) -> mmap.mmap:
        fd = os.open(self.at(name), os.O_RDWR if writable else os.O_RDONLY)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            return mmap.mmap(fd, 0, mmap.MAP_SHARED, protection)
        finally:
            os.close(fd)

    def step(self) -> None:
        at = self.chance.randrange(self._SIZE - 9000)
        assert self.call(self._mapped.__getitem__, slice(at, at + 9000)) == self._content[at : at + 9000]
        fd = self.call(os.open, self.at("weights"), os.O_RDONLY)
        self.call(os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert self.call(os.pread, fd, 9000, at) == self._content[at : at + 9000]
        self.call(os.close, fd)
        note = self.chance.randbytes(16)
        self._written[at % 60_000 : at % 60_000 + 16] = note
        if self.chance.random() < 0.2:
            self.call(self._written.flush)
            assert self.read_all(self.at("busy/scratch"))[at % 60_000 :][:16] == note
        self._look_back(at)

    def _look_back(self, at: int) -> None:
        try:
            self._look_into_version(at)
        except FileNotFoundError:
            if not self.waits_for_room:
                raise
            # A full disk, or gc, lets versions go: their folders are gone then, but not what is open of them.
            if self._saved >= 0:
                assert self.call(os.pread, self._saved, 9000, at) == self._content[at : at + 9000]
            self._leave_version()

    def _leave_version(self) -> None:
        for fd in (self._saved, self._saved_folder):
            if fd >= 0:
                os.close(fd)
        self._saved = self._saved_folder = -1

    def _look_into_version(self, at: int) -> None:
        if self._saved < 0:
            versions = self.at(".versions")
            if not os.path.exists(versions + "/latest"):
                return
            self._saved_folder = self.call(os.open, versions + "/latest", os.O_RDONLY | os.O_DIRECTORY)
            if "weights" not in self.call(os.listdir, self._saved_folder):
                self._leave_version()
                return
            self._saved = os.open("weights", os.O_RDONLY, dir_fd=self._saved_folder)
            self.shared.append(self.calls)
        assert self.call(os.pread, self._saved, 9000, at) == self._content[at : at + 9000]
        names = self.call(os.listdir, self._saved_folder)
        if not names and self.waits_for_room:
            raise FileNotFoundError  # to readdir(3) a directory that is gone is one that has ended
        assert "weights" in names
        assert self.call(lambda: os.stat("weights", dir_fd=self._saved_folder)).st_size == self._SIZE
        if self.chance.random() < 0.02:
            self._leave_version()

    def check(self) -> None:
        assert self.read_all(self.at("weights")) == self._content
        assert self._mapped[:] == self._content


class Locker(Client):
    """Counts under a lock that another client takes, too: no count may be lost."""

    def __init__(self, directory: str, name: str, seed: str) -> None:
        super().__init__(directory, name, seed)
        self._fd = os.open(self.at("counter"), os.O_RDWR)

    def step(self) -> None:
        lock = self.chance.choice((fcntl.flock, fcntl.lockf))
        # Both kinds, in this order: they do not see each other.
        self.call(fcntl.flock, self._fd, fcntl.LOCK_EX)
        self.call(fcntl.lockf, self._fd, fcntl.LOCK_EX)
        count = int(self.call(os.pread, self._fd, 20, 0))
        self.put(self._fd, f"{count + 1:020d}".encode(), 0)
        lock(self._fd, fcntl.LOCK_UN)
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.shared = [sum(self.shared) + 1]
        # A passthrough file is the kernel's alone: two of us would take both cores from the next daemon.
        time.sleep(0.001)

    def check(self) -> None:
        return None


ROLES = {
    "saver": Saver,
    "appender": Appender,
    "maker": Maker,
    "mover": Mover,
    "reader": Reader,
    "locker": Locker,
}


def renameat2(one: str, two: str, flags: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(two), flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), one)


def main(role: str, directory: str, name: str, seed: str, waits: str = "") -> None:
    """The process."""
    Client.waits_for_room = bool(waits)
    client = ROLES[role](directory, name, seed)
    print("begun", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        client.step()
    client.check()
    print(json.dumps({"calls": client.calls, "long": client.long, "shared": client.shared}))


if __name__ == "__main__":
    main(*sys.argv[1:])
