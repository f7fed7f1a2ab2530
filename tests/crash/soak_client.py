"""A client of gcsoak.py: saves, or reads what was saved, until its stdin ends.

    soak_client.py write DIRECTORY SEED      saves checkpoints into it, old contents again and again
    soak_client.py read MOUNT SEED           reads and maps files of versions and of the live tree

One rule: a file's name says what is in it (the numbers of its blobs), so whoever reads a file knows what it
must hold and asks nobody; of tensor files, which are changed in place, see soak_tensors.py. The last line on
stdout is JSON: what was done, and every finding.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import random
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from soak_tensors import SUFFIX, TensorFile, lasting_wrong

_BLOB_BYTES = (30_000, 120_000, 300_000, 700_000)
_KEPT_SAVES = 2
_HELD = 6
_HELD_S = 8.0
_FINDINGS = 20


@functools.lru_cache(maxsize=256)
def blob(number: int) -> bytes:
    """A content that everybody can make from its number."""
    return random.Random(number).randbytes(_BLOB_BYTES[number % len(_BLOB_BYTES)])


@functools.lru_cache(maxsize=2048)
def digest_of(name: str) -> str:
    """What a file of this name must hold."""
    hasher = hashlib.blake2b(digest_size=16)
    for number in name.removesuffix(".bin").split("-"):
        hasher.update(blob(int(number)))
    return hasher.hexdigest()


def wrong(name: str, read: Callable[[], bytes | mmap.mmap]) -> str | None:
    """What is wrong in a file of this name; None if it holds what it must."""
    if name.endswith(SUFFIX):
        return lasting_wrong(name, read)
    found = hashlib.blake2b(read(), digest_size=16).hexdigest()
    return None if found == digest_of(name) else "other bytes than it must have"


def is_over() -> bool:
    """Whether gcsoak.py wants an end."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def write(directory: Path, chance: random.Random) -> dict[str, object]:
    """Save after save; a third of the blobs are old ones, which may just be being collected."""
    saves = resaved = changed = 0
    newest = chance.randrange(1 << 30)
    first = newest
    tensors: list[int] = []
    findings: list[str] = []
    while not is_over():
        part = directory / f".tmp-{saves}"
        part.mkdir()
        for _ in range(chance.randrange(1, 4)):
            numbers = []
            for _ in range(chance.randrange(1, 4)):
                if newest > first and chance.random() < 0.35:
                    numbers.append(chance.randrange(max(first, newest - 120), newest))
                    resaved += 1
                else:
                    newest += 1
                    numbers.append(newest)
            name = "-".join(map(str, numbers)) + ".bin"
            with open(part / name, "wb") as file:
                for number in numbers:
                    file.write(blob(number))
        if tensors and chance.random() < 0.3:
            number = chance.choice(tensors[-10:])
        else:
            newest += 1
            tensors.append(number := newest)
        tensor = TensorFile(part / f"{number}{SUFFIX}", number)
        part.rename(directory / f"checkpoint-{saves}")
        tensor.path = directory / f"checkpoint-{saves}" / tensor.path.name
        if saves >= _KEPT_SAVES:
            shutil.rmtree(directory / f"checkpoint-{saves - _KEPT_SAVES}")
        saves += 1
        time.sleep(chance.uniform(0.05, 0.6))
        while chance.random() < 0.5:
            changed += 1
            findings += tensor.change(chance)
            time.sleep(chance.uniform(0, 0.8))
    return {"saves": saves, "resaved": resaved, "changed": changed, "findings": findings[:_FINDINGS]}


class Reader:
    """Reads at random, and holds some files open or mapped for longer than their versions live."""

    def __init__(self, mount: Path, chance: random.Random) -> None:
        self._mount, self._chance = mount, chance
        self._held: list[tuple[float, str, str, int | mmap.mmap]] = []
        self.counts = {"read": 0, "mapped": 0, "live": 0, "held": 0, "gone": 0, "tensors": 0}
        self.findings: list[str] = []

    def step(self) -> None:
        """One file, and the ends of those that were held long enough."""
        while self._held and self._held[0][0] <= time.monotonic():
            self._let_go(self._held.pop(0))
        kind = self._chance.choice(("read", "mapped", "live"))
        try:
            found = self._choose(kind)
            if found is None:
                return
            fd = os.open(found, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            self.counts["gone"] += 1  # its version was let go, or the save rotated away
            return
        try:
            self._look(kind, found, fd)
        except OSError as e:
            self.find(f"{kind} of {found}: {e!r}")

    def end(self) -> None:
        """Look at all that is held once more."""
        while self._held:
            self._let_go(self._held.pop(0))

    def find(self, what: str) -> None:
        if len(self.findings) < _FINDINGS:
            self.findings.append(what)

    def _choose(self, kind: str) -> Path | None:
        units = [name for name in os.listdir(self._mount) if not name.startswith(".")]
        if not units:
            return None
        top = self._mount / self._chance.choice(units)
        if kind != "live":
            versions = [name for name in os.listdir(top / ".versions") if name.startswith("v0")]
            if not versions:
                return None
            # The oldest is the next to go.
            top = (
                top
                / ".versions"
                / (min(versions) if self._chance.random() < 0.5 else self._chance.choice(versions))
            )
        folder = self._pick(top)
        return None if folder is None else self._pick(folder)

    def _pick(self, folder: Path) -> Path | None:
        names = [
            name
            for name in os.listdir(folder)
            if name.endswith((".bin", SUFFIX)) or name.startswith("checkpoint")
        ]
        return folder / self._chance.choice(names) if names else None

    def _look(self, kind: str, path: Path, fd: int) -> None:
        if kind == "mapped" and os.fstat(fd).st_size:
            mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            os.close(fd)
            self._check("mapped", path.name, str(path), lambda: mapping)
            self._hold(path, mapping)
            return
        self._check(kind, path.name, str(path), lambda: read_all(fd))
        if self._chance.random() < 0.3:
            self._hold(path, fd)
        else:
            os.close(fd)

    def _hold(self, path: Path, held: int | mmap.mmap) -> None:
        until = time.monotonic() + self._chance.uniform(0.5, _HELD_S)
        self._held.append((until, path.name, str(path), held))
        self._held.sort(key=lambda one: one[0])
        if len(self._held) > _HELD:
            self._let_go(self._held.pop(0))

    def _let_go(self, one: tuple[float, str, str, int | mmap.mmap]) -> None:
        _, name, where, held = one
        try:
            if isinstance(held, int):
                self._check("held", name, where, lambda: read_all(held))
                os.close(held)
            else:
                held.madvise(mmap.MADV_DONTNEED)
                self._check("held", name, where, lambda: held)
                held.close()
        except OSError as e:
            self.find(f"{where}, held: {e!r}")

    def _check(self, kind: str, name: str, where: str, read: Callable[[], bytes | mmap.mmap]) -> None:
        self.counts[kind] += 1
        self.counts["tensors"] += name.endswith(SUFFIX)
        if (found := wrong(name, read)) is not None:
            self.find(f"{where}: {kind}: {found}")


def read_all(fd: int) -> bytes:
    """The bytes of an open file, asked of the file system and not of the page cache."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return b"".join(_parts(fd))


def _parts(fd: int) -> Iterator[bytes]:
    at = 0
    while part := os.pread(fd, 1 << 20, at):
        at += len(part)
        yield part


def read(mount: Path, chance: random.Random) -> dict[str, object]:
    """Read until the end."""
    reader = Reader(mount, chance)
    while not is_over():
        reader.step()
        time.sleep(chance.uniform(0, 0.05))
    reader.end()
    return {**reader.counts, "findings": reader.findings}


if __name__ == "__main__":
    work = {"write": write, "read": read}[sys.argv[1]]
    print(json.dumps(work(Path(sys.argv[2]), random.Random(sys.argv[3]))), flush=True)
