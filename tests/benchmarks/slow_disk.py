"""A store on a disk that does 150 MB/s: what a writer feels of it, and what waits.

    ./dev bench --only slow-disk [--mib 700] [--rounds 9]

As root, on a kernel that can hold a block device back (blkio of cgroup v1), the disk is an ext4 in a file
of `--folder` behind a loop device; otherwise it is that of `--folder` itself, which should then be slow. A
save is twice what the daemon may have in memory: 16 files, each written, synced and closed. A second one
follows at once, while the first is stored.

One rule: native is written on the same disk in the same round, while nothing waits to be stored.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kernelmounts
from client_run import run_client
from places import Asked, Place, ckptfs
from report import Figure

MEMORY_MIB = 350
DISK_BYTES_A_SECOND = 150_000_000
WRITER = 0.85
SAVES = 2
_FILES = 16
_STORED_WITHIN_S = 300.0
_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
_MIB = 1 << 20


def figures(asked: Asked) -> Iterator[Figure]:
    """All of them; nothing is known before the last round."""
    save_mib = min(asked.mib, 2 * MEMORY_MIB)
    source = asked.folder / "source"
    save_bytes = _make_source(source, save_mib)
    native = Figure("slow disk: a save, synced", "native", data_bytes=save_bytes)
    saves = [
        Figure(f"slow disk: a save, synced, {which}", "ckptfs auto", goal=WRITER, data_bytes=save_bytes)
        for which in ("nothing waits", "the one before waits")
    ]
    stored = Figure("slow disk: from the last close to all stored", "ckptfs auto")
    backlog = Figure("slow disk: most that waits", "ckptfs auto", unit="MiB")
    memory = Figure("slow disk: most RssAnon", "ckptfs auto", unit="MiB")
    with _slow_disk(asked.folder, (SAVES + 1) * save_mib + 256) as disk:
        for number in range(asked.rounds):
            native.seconds.append(run_client("save_synced", disk / "native", str(source))[0])
            shutil.rmtree(disk / "native")
            with ckptfs(disk, "auto", settle_s=1.0, settle_max_s=5.0) as place:
                _round(place, source, number, saves, stored, backlog, memory)
            shutil.rmtree(disk / "ckptfs-auto")
    for figure in saves:
        figure.native_s = [*native.seconds]
    # Bounded: never more than what was saved since the first save, and all of it gone at the end.
    backlog.goal, backlog.in_seconds = SAVES * save_bytes / _MIB, True
    memory.goal, memory.in_seconds = MEMORY_MIB, True
    yield from (native, *saves, stored, backlog, memory)


def _round(
    place: Place,
    source: Path,
    number: int,
    saves: list[Figure],
    stored: Figure,
    backlog: Figure,
    memory: Figure,
) -> None:
    mount = place.mount
    assert mount is not None
    run = mount.path / "run"
    run.mkdir()
    waiting, rss = [0.0], [0.0]

    def look() -> float:
        waiting.append(mount.count("status", "ingest_pending_bytes", str(mount.path)) / _MIB)
        rss.append(mount.rss_anon_bytes() / _MIB)
        return waiting[-1]

    for save, figure in enumerate(saves):
        cpu_s = place.cpu_s()
        wall_s, client_s = run_client("save_synced", run / f"step{save}", str(source))
        figure.seconds.append(wall_s)
        figure.client_cpu_s.append(client_s)
        figure.daemon_cpu_s.append(place.cpu_s() - cpu_s)
        look()
    closed = time.perf_counter()
    while look() > 0:
        if time.perf_counter() - closed > _STORED_WITHIN_S:
            raise TimeoutError(f"{waiting[-1]:.0f} MiB still wait after {_STORED_WITHIN_S:.0f} s")
        time.sleep(0.2)
    stored.seconds.append(time.perf_counter() - closed)
    backlog.seconds.append(max(waiting))
    memory.seconds.append(max(rss))


def _make_source(folder: Path, mib: int) -> int:
    folder.mkdir(parents=True)
    chance = random.Random(7)
    each = max(1, mib // _FILES)
    for number in range(_FILES):
        with (folder / f"shard-{number:02d}.bin").open("wb") as file:
            for _ in range(each):
                file.write(chance.randbytes(_MIB))
    return each * _FILES * _MIB


@contextmanager
def _slow_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A file system on a disk that is held back, or `folder` itself."""
    if os.geteuid() != 0 or not _THROTTLE.exists():
        print(f"no block device can be held back here; measured is the disk of {folder}")
        yield folder
        return
    image, path = folder / "disk.img", folder / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(mib * _MIB)
    _run("mkfs.ext4", "-q", "-m", "0", str(image))
    device = _run("losetup", "--show", "--find", str(image))
    numbers = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
    try:
        _run("mount", "-o", "discard", device, str(path))
        _THROTTLE.write_text(f"{numbers} {DISK_BYTES_A_SECOND}")
        yield path
    finally:
        _THROTTLE.write_text(f"{numbers} 0")
        kernelmounts.remove(path)
        _run("losetup", "--detach", device)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()
