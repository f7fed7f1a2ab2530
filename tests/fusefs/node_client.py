"""One of several clients that save, change, read, hold and rename the same few files of tensors.

    node_client.py DIRECTORY SEED SECONDS

The one rule: others do the same at the same time, so a name may lead nowhere; every other error is a finding.
The last line on stdout is JSON: how often what was done, and how often each error was met.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from small_store import safetensors

MIB = 1 << 20
NAMES = ("a.safetensors", "b.safetensors", "c.safetensors")
_HELD = 4
_libc = ctypes.CDLL(None, use_errno=True)


class Client:
    """Does one thing after the other. `held` are descriptors of files that others go on changing."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._seed = seed
        self._chance = random.Random(seed)
        self._held: list[int] = []
        self._saves = 0
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._steps: dict[Callable[[Path], None], int] = {
            self.save_and_read: 5,
            self.read: 5,
            self.hold: 5,
            self.overwrite: 2,
            self.write_only: 1,
            self.append: 1,
            self.rewrite: 1,
            self.cut: 1,
            self.link: 1,
            self.exchange: 1,
            self.rename: 1,
            self.look: 1,
        }

    def run(self, until: float) -> None:
        steps, weights = list(self._steps), list(self._steps.values())
        while time.monotonic() < until:
            step = self._chance.choices(steps, weights)[0]
            self.counts[step.__name__] += 1
            try:
                step(self._any())
            except OSError as e:
                self.errors[f"{step.__name__}: {errno.errorcode.get(e.errno or 0, str(e))}"] += 1
        while self._held:
            self._let_go()

    def _any(self) -> Path:
        return self._directory / self._chance.choice(NAMES)

    def save_and_read(self, path: Path) -> None:
        """Store a new file in its place, and hold it as soon as the kernel may read it by itself."""
        part = self._directory / f".part{self._seed}"
        part.write_bytes(safetensors({"w": self._chance.randbytes(MIB)}))
        part.rename(path)
        self._saves += 1
        (self._directory / ".versions" / f"t{self._seed}-{self._saves}").mkdir()
        for _ in range(3):
            path.read_bytes()
        self.hold(path)

    def read(self, path: Path) -> None:
        path.read_bytes()

    def hold(self, path: Path) -> None:
        self._held.append(os.open(path, os.O_RDONLY))
        if len(self._held) > _HELD:
            self._let_go()

    def _let_go(self) -> None:
        fd = self._held.pop(self._chance.randrange(len(self._held)))
        try:
            os.pread(fd, 4096, 0), os.fstat(fd)
        finally:
            os.close(fd)

    def overwrite(self, path: Path) -> None:
        self._write(path, os.O_RDWR)

    def write_only(self, path: Path) -> None:
        self._write(path, os.O_WRONLY)

    def append(self, path: Path) -> None:
        self._write(path, os.O_WRONLY | os.O_APPEND)

    def rewrite(self, path: Path) -> None:
        self._write(path, os.O_WRONLY | os.O_TRUNC | os.O_CREAT)

    def _write(self, path: Path, flags: int) -> None:
        fd = os.open(path, flags, 0o644)
        try:
            os.pwrite(fd, self._chance.randbytes(5000), self._chance.randrange(MIB))
        finally:
            os.close(fd)

    def cut(self, path: Path) -> None:
        os.truncate(path, self._chance.randrange(MIB))

    def link(self, path: Path) -> None:
        os.link(path, self._any())

    def exchange(self, path: Path) -> None:
        here, there, at_cwd, exchange = os.fsencode(path), os.fsencode(self._any()), -100, 2
        if _libc.renameat2(at_cwd, here, at_cwd, there, exchange):
            raise OSError(ctypes.get_errno(), "renameat2")

    def rename(self, path: Path) -> None:
        path.rename(self._any())

    def look(self, path: Path) -> None:
        path.chmod(0o644)
        for entry in os.scandir(self._directory):
            entry.stat()


if __name__ == "__main__":
    client = Client(Path(sys.argv[1]), int(sys.argv[2]))
    client.run(time.monotonic() + float(sys.argv[3]))
    print(json.dumps({"counts": client.counts, "errors": client.errors}), flush=True)
