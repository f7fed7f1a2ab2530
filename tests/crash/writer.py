"""One writer of the crash tests: a process that works in its directory on the mount until the mount dies.

One rule: a call is written to the journal, which lies outside of the mount, before it is made, and its
answer after; so what the writer was promised is known to the byte, whatever happens to the daemon.

    writer.py DIRECTORY JOURNAL STATE SEED [CLI...]

Ends with 0 when the mount is gone, with 3 after an error that nothing explains. Journal lines:
">" + the call, "<" + its result, "!" + errno and the clock, "#" + the clock after a write that came
back short.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import subprocess
import sys
import time
from typing import Any

from livetree import FILE, LINK, Part, Tree, payload_bytes, payload_length, tree_of_lengths

# EIO is what a fault or a page cache says of a dead daemon; the oracle believes it only after the kill.
GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.EIO, errno.ESHUTDOWN}
_POOL = 7
_KEPT = 3
_WRITE_BYTES = (4 << 10, 64 << 10, 300 << 10, 1 << 20)
_MAX_FILE_BYTES = 1_500_000


class Ended(Exception):
    """The mount is gone."""


class Writer:
    """Chooses calls by chance, makes them and records them."""

    def __init__(self, directory: str, journal: str, state: str, seed: str, cli: list[str]) -> None:
        self._directory = directory
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(state) as f:
            begun = json.load(f)
        self.tree: Tree = tree_of_lengths(begun["names"])
        self._count: int = begun["count"]
        self._round = begun["round"]
        self._shared_seed: int = begun["shared_seed"]
        self.random = random.Random(seed)
        self._cli = cli
        self._fds: dict[int, int] = {}
        self._log: int | None = None
        self._held: list[int] = []

    # -- one call --------------------------------------------------------------------------

    def call(self, op: dict[str, Any]) -> int:
        """Make a call and record it before and after; what it returned."""
        os.write(self._journal, b">" + json.dumps(op).encode() + b"\n")
        try:
            result = getattr(self, f"_{op['op']}")(op)
        except OSError as e:
            os.write(self._journal, f"!{e.errno} {time.monotonic()}\n".encode())
            if e.errno in GONE:
                raise Ended from None
            raise
        os.write(self._journal, f"<{result or 0}\n".encode())
        if op["op"] == "write" and result < payload_length(op["parts"]):
            os.write(self._journal, f"#{time.monotonic()}\n".encode())
            raise Ended
        self.tree.apply(op)
        return result or 0

    def _at(self, path: str) -> str:
        return f"{self._directory}/{path}" if path else self._directory

    def _create(self, op: dict[str, Any]) -> None:
        flags = os.O_CREAT | os.O_EXCL | (os.O_RDWR if op.get("both") else os.O_WRONLY)
        self._fds[op["fd"]] = os.open(self._at(op["path"]), flags, 0o644)

    def _open(self, op: dict[str, Any]) -> None:
        flags = (
            os.O_RDWR | (os.O_TRUNC if op.get("truncate") else 0) | (os.O_APPEND if op.get("append") else 0)
        )
        self._fds[op["fd"]] = os.open(self._at(op["path"]), flags)

    def _write(self, op: dict[str, Any]) -> int:
        payload = payload_bytes(op["parts"])
        return os.pwrite(self._fds[op["fd"]], payload, op["offset"])

    def _map(self, op: dict[str, Any]) -> None:
        payload = payload_bytes(op["parts"])
        with mmap.mmap(self._fds[op["fd"]], op["size"]) as mapping:
            mapping[op["offset"] : op["offset"] + len(payload)] = payload
            if op["sync"]:
                mapping.flush()

    def _ftruncate(self, op: dict[str, Any]) -> None:
        os.ftruncate(self._fds[op["fd"]], op["size"])

    def _truncate(self, op: dict[str, Any]) -> None:
        os.truncate(self._at(op["path"]), op["size"])

    def _fsync(self, op: dict[str, Any]) -> None:
        os.fsync(self._fds[op["fd"]])

    def _fsyncdir(self, op: dict[str, Any]) -> None:
        fd = os.open(self._at(op["path"]), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _close(self, op: dict[str, Any]) -> None:
        os.close(self._fds.pop(op["fd"]))

    def _mkdir(self, op: dict[str, Any]) -> None:
        os.mkdir(self._at(op["path"]), 0o755)

    def _rmdir(self, op: dict[str, Any]) -> None:
        os.rmdir(self._at(op["path"]))

    def _symlink(self, op: dict[str, Any]) -> None:
        os.symlink(op["target"], self._at(op["path"]))

    def _link(self, op: dict[str, Any]) -> None:
        os.link(self._at(op["path"]), self._at(op["new"]))

    def _unlink(self, op: dict[str, Any]) -> None:
        os.unlink(self._at(op["path"]))

    def _rename(self, op: dict[str, Any]) -> None:
        os.rename(self._at(op["path"]), self._at(op["new"]))

    def _chmod(self, op: dict[str, Any]) -> None:
        os.chmod(self._at(op["path"]), op["mode"])

    def _setxattr(self, op: dict[str, Any]) -> None:
        os.setxattr(self._at(op["path"]), op["name"], op["value"].encode())

    def _publish(self, op: dict[str, Any]) -> None:
        if not op["cli"]:
            os.mkdir(self._at(f".versions/{op['tag']}"))
            return
        done = subprocess.run(
            [*self._cli, "publish", self._directory, "--tag", op["tag"]],
            check=False,
            capture_output=True,
            timeout=60,
        )
        if done.returncode:
            os.statvfs(self._directory)  # never cached: a mount that is gone answers with its own error
            raise OSError(errno.EPROTO, done.stderr.decode(errors="replace"))

    # -- what a job does -------------------------------------------------------------------

    def work(self) -> None:
        """Do what jobs do, until the mount is gone."""
        tasks = (
            (self.save_over, 6),
            (self.save_directory, 3),
            (self.save_in_place, 3),
            (self.append_to_log, 8),
            (self.save_again, 4),
            (self.cut, 3),
            (self.patch, 4),
            (self.map_and_write, 3),
            (self.make_links, 3),
            (self.remove, 3),
            (self.mark, 2),
            (self.hold_unlinked, 1),
            (self.publish, 2),
            (self.rest, 5),
        )
        weighted = [task for task, weight in tasks for _ in range(weight)]
        while True:
            self.random.choice(weighted)()

    def save_over(self) -> None:
        """A whole file, written beside its name and renamed over it."""
        temporary = self._new_name("tmp")
        self._write_file(temporary, self._payload())
        self.call({"op": "rename", "path": temporary, "new": f"model-{self.random.randrange(3)}.bin"})

    def save_directory(self) -> None:
        """A checkpoint directory, renamed into place; the oldest one goes."""
        temporary = self._new_name("tmp-checkpoint")
        self.call({"op": "mkdir", "path": temporary})
        for name in ("model.safetensors", "optimizer.pt", "trainer_state.json")[: self.random.randint(1, 3)]:
            self._write_file(f"{temporary}/{name}", self._payload())
        if self.random.random() < 0.3:
            self.call({"op": "fsyncdir", "path": temporary})
        self.call({"op": "rename", "path": temporary, "new": f"checkpoint-{self._next()}"})
        saved = sorted(
            (n for n in self.tree.names if n.startswith("checkpoint-") and "/" not in n), key=_number
        )
        for folder in saved[:-_KEPT]:
            self._remove_folder(folder)

    def save_in_place(self) -> None:
        """A name that is truncated and written anew, as torch.save does."""
        path = f"state-{self.random.randrange(3)}.pt"
        if path not in self.tree.names:
            self._write_file(path, self._payload())
            return
        fd = self._open_again(path, truncate=True)
        self._fill(fd, self._payload())
        self.call({"op": "close", "fd": fd})

    def save_again(self) -> None:
        """The bytes that everybody saves, or half of them: the store has them already."""
        parts = self._common()
        if self.random.random() < 0.5:
            parts = [parts[0], [self._seed(), self.random.randint(50_000, 400_000)]]
        path = f"copy-{self.random.randrange(3)}.bin"
        if path in self.tree.names:
            self.call({"op": "unlink", "path": path})
        self._write_file(path, parts)

    def append_to_log(self) -> None:
        """Some lines for a log that stays open."""
        if self._log is None:
            path = "train.log"
            if path in self.tree.names:
                self._log = self._open_again(path, append=True)
            else:
                self._log = self._create_file(path)
        node = self.tree.open[self._log]
        for _ in range(self.random.randint(1, 4)):
            line = f"step {self._next()} loss {self.random.random()}\n" * self.random.choice((1, 1, 40))
            self.call({"op": "write", "fd": self._log, "offset": node.content.size, "parts": [line]})
        chance = self.random.random()
        if chance < 0.2:
            self.call({"op": "fsync", "fd": self._log})
        elif chance < 0.4:
            self.call({"op": "close", "fd": self._log})
            self._log = None
        elif node.content.size > 200_000:
            self.call({"op": "ftruncate", "fd": self._log, "size": 0})

    def cut(self) -> None:
        """Another length, by name."""
        if path := self._some_file():
            size = self.tree.names[path].content.size
            chosen = self.random.choice((0, size // 2, self.random.randint(0, size), size + 10_000))
            self.call({"op": "truncate", "path": path, "size": min(chosen, _MAX_FILE_BYTES)})

    def patch(self) -> None:
        """Bytes in the middle of a file that may be stored already; perhaps a shorter or longer file."""
        path = self._some_file()
        if path is None:
            return
        fd = self._open_again(path)
        size = self.tree.open[fd].content.size
        for _ in range(self.random.randint(1, 3)):
            length = self.random.choice((10, 4096, 70_000))
            offset = self.random.randint(0, max(0, min(size, _MAX_FILE_BYTES) + 5_000))
            self.call({"op": "write", "fd": fd, "offset": offset, "parts": [[self._seed(), length]]})
            if self.random.random() < 0.3:
                cut_to = self.random.randint(0, size)
                self.call({"op": "ftruncate", "fd": fd, "size": cut_to})
        self._perhaps_sync(fd)
        self.call({"op": "close", "fd": fd})

    def map_and_write(self) -> None:
        """A shared mapping that is written to."""
        path = f"mapped-{self.random.randrange(2)}.bin"
        if path in self.tree.names:
            fd = self._open_again(path)
        else:
            fd = self._create_file(path, both=True)
        size = self.tree.open[fd].content.size
        if size < 8192:
            size = self.random.choice((8192, 150_000, 600_000))
            self.call({"op": "ftruncate", "fd": fd, "size": size})
        for _ in range(self.random.randint(1, 2)):
            offset = self.random.randrange(size - 4096)
            length = min(self.random.choice((100, 9000, 100_000)), size - offset)
            sync = self.random.random() < 0.5
            parts: list[Part] = [[self._seed(), length]]
            op = {"op": "map", "fd": fd, "offset": offset, "size": size, "parts": parts, "sync": sync}
            self.call(op)
        self.call({"op": "close", "fd": fd})

    def make_links(self) -> None:
        """A hard link or a symbolic one."""
        path, new = self._some_file(), f"link-{self.random.randrange(4)}"
        if path is None or new == path:
            return
        if new in self.tree.names:
            self.call({"op": "unlink", "path": new})
        if path not in self.tree.names:
            return
        if self.random.random() < 0.5:
            self.call({"op": "link", "path": path, "new": new})
        else:
            self.call({"op": "symlink", "path": new, "target": path})

    def remove(self) -> None:
        """A file goes."""
        if path := self._some_file():
            self.call({"op": "unlink", "path": path})

    def mark(self) -> None:
        """Modes and attributes."""
        if path := self._some_file():
            if self.random.random() < 0.5:
                self.call({"op": "chmod", "path": path, "mode": self.random.choice((0o600, 0o640, 0o644))})
            else:
                value = str(self._next())
                self.call({"op": "setxattr", "path": path, "name": "user.note", "value": value})

    def hold_unlinked(self) -> None:
        """A file that is open and has no name."""
        path = self._new_name("scratch")
        fd = self._create_file(path)
        self.call({"op": "unlink", "path": path})
        self._fill(fd, self._payload())
        self._held.append(fd)
        if len(self._held) > 2:
            self.call({"op": "close", "fd": self._held.pop(0)})

    def publish(self) -> None:
        """A version with a name, of a state in which nothing is open."""
        for fd in list(self.tree.open):
            self.call({"op": "close", "fd": fd})
        self._log, self._held = None, []
        if not self.tree.names:
            return  # a directory that never held anything has no version
        tag = f"t{self._round}-{self._next()}-{os.path.basename(self._directory)}"
        self.call({"op": "publish", "tag": tag, "cli": bool(self._cli) and self.random.random() < 0.1})

    def rest(self) -> None:
        """Long enough to settle, sometimes."""
        time.sleep(self.random.choice((0.01, 0.05, 0.2, 0.7)))
        os.stat(self._directory)

    # -- pieces ----------------------------------------------------------------------------

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _seed(self) -> int:
        return self.random.getrandbits(48)

    def _new_name(self, stem: str) -> str:
        return f"{stem}-{self._next()}"

    def _common(self) -> list[Part]:
        number = self.random.randrange(_POOL)
        seed = self._shared_seed * 1000 + number
        return [[seed, (90_000, 150_000, 260_000, 400_000)[number % 4]], [seed + 500, 120_000]]

    def _payload(self) -> list[Part]:
        if self.random.random() < 0.4:
            return self._common()
        size = self.random.choice((0, 50, 3_000, 60_000, 140_000, 350_000, 900_000))
        parts: list[Part] = [[self._seed(), self.random.randint(size // 2, size)]]
        if self.random.random() < 0.3:
            count = 100_000
            header = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}})
            length = len(header).to_bytes(8, "little").decode("latin-1")
            parts = [length + header, [self._shared_seed * 1000 + self.random.randrange(_POOL), count]]
        return parts

    def _create_file(self, path: str, *, both: bool = False) -> int:
        fd = self._next()
        self.call({"op": "create", "path": path, "fd": fd, "both": both})
        return fd

    def _open_again(self, path: str, *, truncate: bool = False, append: bool = False) -> int:
        fd = self._next()
        self.call({"op": "open", "path": path, "fd": fd, "truncate": truncate, "append": append})
        return fd

    def _write_file(self, path: str, parts: list[Part]) -> None:
        fd = self._create_file(path, both=self.random.random() < 0.5)
        self._fill(fd, parts)
        self._perhaps_sync(fd)
        self.call({"op": "close", "fd": fd})

    def _fill(self, fd: int, parts: list[Part]) -> None:
        """Write a payload part by part: large parts in one call, which the kernel may divide."""
        offset = 0
        for part in parts:
            length = payload_length([part])
            self.call({"op": "write", "fd": fd, "offset": offset, "parts": [part]})
            offset += length

    def _perhaps_sync(self, fd: int) -> None:
        if self.random.random() < 0.4:
            self.call({"op": "fsync", "fd": fd})

    def _some_file(self) -> str | None:
        files = [name for name, node in self.tree.names.items() if node.kind in (FILE, LINK)]
        files = [n for n in files if self.tree.names[n].kind == FILE and n != "train.log"]
        return self.random.choice(files) if files else None

    def _remove_folder(self, folder: str) -> None:
        for path in sorted(self.tree.below(folder), reverse=True):
            self.call({"op": "unlink", "path": path})
        self.call({"op": "rmdir", "path": folder})


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def main(arguments: list[str]) -> int:
    """The program."""
    directory, journal, state, seed, *cli = arguments
    os.umask(0)
    writer = Writer(directory, journal, state, seed, cli)
    try:
        writer.work()
    except Ended:
        return 0
    except OSError as e:
        if e.errno in GONE:
            return 0
        print(f"{directory}: {e}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Descriptors on a dead mount are left to the kernel.
    os._exit(code)
