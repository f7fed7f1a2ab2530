"""All at once, and long: kills with take-over, full disks, scrub, gc and publishes, under eight clients.

    python tests/crash/lifesoak.py [--minutes 30] [--seed N] [--json FILE] [--write-path auto|plain]

One rule: a client sees what it would see on ext4: a pause now and then, and a full disk while it is full (it
then waits for room). Anything else is a finding, and so are memory, descriptors and what is kept of the
session if they are more at the end than at the start.

Rounds on one store, which lies on a tmpfs of its own. In a round clients work (handover_client.py), and what
chance has chosen is done to the daemon; then they add up, all is removed, and the daemon is measured. The
store's own commands run beside the kills: one that a kill has met may fail, and no other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import kernelmounts  # noqa: E402  # the folder of the tests' own modules comes first
from asking import DAEMON  # noqa: E402
from handover import WRITE_PATHS, Clients, Daemons, daemons  # noqa: E402
from mounting import sized_tmpfs  # noqa: E402

DISK_BYTES = 768 << 20
MIN_FREE_MIB = 32
ROUND_S = 100.0
QUIET_SHARE = 0.25
MORE_FDS = 12
MORE_BYTES = 24 << 20
_REST_S = 30.0
_COMMAND_S = 180.0
_CONFIG = '[[policy]]\npath = "/*"\nkeep_last = 3\n'


@dataclass(frozen=True, slots=True)
class Figures:
    """What there is between two rounds, when nobody has anything open. Bytes, but for counts."""

    anonymous_bytes: int
    fds: int
    keeper_fds: int
    state_bytes: int
    staging_files: int
    occupied_bytes: int


@dataclass(slots=True)
class Soaked:
    """What came of it."""

    write_path: str
    rounds: int = 0
    kills: int = 0
    handed_over: int = 0
    full: int = 0
    calls: int = 0
    commands: dict[str, int] = field(default_factory=dict)
    cut_off: int = 0
    pauses_s: list[float] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


class Commands:
    """The store's own commands, one at a time, beside whatever else is done."""

    def __init__(self, mount: Daemons, result: Soaked) -> None:
        self._mount = mount
        self._result = result
        self._running: tuple[str, subprocess.Popen[str], tuple[int, int]] | None = None

    def begin(self, name: str, path: Path) -> None:
        """Start one, unless another runs still."""
        self.look()
        if self._running is None:
            process = subprocess.Popen(
                [*DAEMON, name, str(path), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._running = name, process, self._deaths()

    def look(self, *, waits: bool = False) -> None:
        """Take the answer of the one that runs, if it has ended."""
        if self._running is None or (not waits and self._running[1].poll() is None):
            return
        (name, process, before), self._running = self._running, None
        try:
            out, errors = process.communicate(timeout=_COMMAND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self._result.findings.append(f"{name} hung")
            return
        # A unit of which everything is being written has nothing that a version could have.
        if process.returncode == 0 or "nothing to publish here yet" in errors:
            self._result.commands[name] = self._result.commands.get(name, 0) + 1
        elif self._deaths() != before:
            self._result.cut_off += 1
        else:
            self._result.findings.append(f"{name} ended with {process.returncode}: {errors}{out[-500:]}")

    def _deaths(self) -> tuple[int, int]:
        """What can have met a command: a daemon's end, a full disk."""
        return self._result.kills + self._result.handed_over, self._result.full


class Soak:
    """One store and its daemons."""

    def __init__(
        self, mount: Daemons, disk: Path, chance: random.Random, result: Soaked, tell: Callable[[str], None]
    ) -> None:
        self._mount = mount
        self._disk = disk
        self._chance = chance
        self._tell = tell
        self._commands = Commands(mount, result)
        self.result = result

    def run(self, seconds: float) -> None:
        """Rounds until the time is over, or something was found."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.result.findings:
            self._round(min(ROUND_S, max(until - time.monotonic(), 10.0)))
            self.result.rounds += 1
            figures = self._measured()
            self.result.figures.append(figures)
            self._tell(
                f"{self.result.write_path} round {self.result.rounds}: {self.result.kills} kills, "
                f"{self.result.full} full disks, {self.result.calls} calls, {figures}"
            )
            for finding in self.result.findings:
                self._tell(f"  ! {finding}")

    def _round(self, seconds: float) -> None:
        clients = Clients(self._mount.path, self._chance, wait_for_room=True)
        killed_at: list[float] = []
        try:
            clients.wait_until_begun()
            begun = time.monotonic()
            while time.monotonic() < begun + seconds and clients.are_well():
                is_quiet = time.monotonic() > begun + (1 - QUIET_SHARE) * seconds
                self._something(killed_at, may_kill=not is_quiet)
                self._commands.look()
            self._commands.look(waits=True)
            long = clients.end()
        finally:
            clients.kill()
            (self._disk / "ballast").unlink(missing_ok=True)
            clients.wait()
        self.result.calls += clients.calls
        self.result.findings += clients.findings
        self.result.pauses_s += [
            max((end - at for begin, end in long if begin <= at <= end), default=0.0) for at in killed_at
        ]
        if not self.result.findings:
            for entry in os.scandir(self._mount.path):
                shutil.rmtree(entry.path)

    def _something(self, killed_at: list[float], *, may_kill: bool) -> None:
        time.sleep(self._chance.uniform(0.2, 2.0))
        what = self._chance.random()
        if what < 0.35:
            if may_kill:
                self._kill(killed_at)
        elif what < 0.5:
            self._fill(killed_at, may_kill=may_kill)
        elif what < 0.65:
            self._commands.begin("gc", self._mount.path)
        elif what < 0.75:
            self._commands.begin("scrub", self._mount.path)
        else:
            self._publish()

    def _kill(self, killed_at: list[float]) -> None:
        if self._chance.random() < 0.1:
            killed_at.append(self._mount.hand_over())
            self.result.handed_over += 1
        else:
            killed_at.append(self._mount.kill())
            self.result.kills += 1
        self._mount.wait_until_ready()

    def _fill(self, killed_at: list[float], *, may_kill: bool) -> None:
        """The disk is full for a while; perhaps a daemon dies meanwhile, and another one has to start."""
        self.result.full += 1
        ballast, left = self._disk / "ballast", self._chance.choice((0, 4096, 200_000, MIN_FREE_MIB << 19))
        begun, most_s = time.monotonic(), self._chance.uniform(2.0, 6.0)
        with ballast.open("ab") as file:
            kills = may_kill and self._chance.random() < 0.4
            while time.monotonic() < begun + most_s:
                found = os.statvfs(self._disk)
                room = found.f_bavail * found.f_frsize - left
                with contextlib.suppress(OSError):
                    if room > 0:
                        os.posix_fallocate(file.fileno(), file.seek(0, 2), room)
                if kills and time.monotonic() > begun + most_s / 2:
                    kills = False
                    self._kill(killed_at)
                time.sleep(0.02)
        ballast.unlink()

    def _publish(self) -> None:
        names = [name for name in os.listdir(self._mount.path) if name != "locked"]
        if names:
            self._commands.begin("publish", self._mount.path / self._chance.choice(names))

    def _measured(self) -> Figures:
        """What is there at rest. Nobody has anything open, so nothing may be left of it."""
        if not kernelmounts.poll(lambda: self._mount.left_open() == 0, _REST_S):
            self.result.findings.append(f"{self._mount.left_open()} handles or backing files are left")
        self._commands.begin("gc", self._mount.path)
        self._commands.look(waits=True)
        pid = self._mount.pid()
        with self._mount.state() as state:
            state_bytes = 0 if state is None else os.fstat(state.fd).st_blocks * 512
        return Figures(
            kernelmounts.rss_anon_bytes(pid),
            _descriptors(pid),
            self._mount.keeper_fds(),
            state_bytes,
            len(os.listdir(self._mount.store / "staging")),
            sum(path.lstat().st_blocks for path in self._mount.store.rglob("*")) * 512,
        )


def _descriptors(pid: int) -> int:
    """How many a process has; but for those of segments, of which the last 256 that were read stay open."""
    count = 0
    for fd in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += "/segments/" not in os.readlink(fd.path)
    return count


def is_flat(figures: list[Figures]) -> list[str]:
    """What was more at the end than at the start; the first round is for getting warm."""
    if len(figures) < 4:
        return []
    third = max(len(figures) // 3, 1)
    first, last = figures[1 : 1 + third], figures[-third:]
    found = []
    for name, more in (
        ("anonymous_bytes", MORE_BYTES),
        ("fds", MORE_FDS),
        ("keeper_fds", 0),
        ("state_bytes", 1 << 20),
        ("staging_files", MORE_FDS),
    ):
        before = max(getattr(one, name) for one in first)
        after = min(getattr(one, name) for one in last)
        if after > before + more:
            found.append(f"{name} grew from {before} to {after}")
    return found


def soak(
    seconds: float, seed: int, place: Path, write_path: str, tell: Callable[[str], None] = lambda _: None
) -> Soaked:
    """One soak below `place`."""
    result, chance = Soaked(write_path), random.Random(f"{seed}:{write_path}")
    with _mounted(place, write_path, seconds) as (mount, disk):
        one = Soak(mount, disk, chance, result, tell)
        one.run(seconds)
        result.findings += is_flat(result.figures)
        if not result.findings and (code := mount.stop()):
            result.findings.append(f"the last daemon ended with {code}")
        if "Traceback" in mount.log() or result.findings:
            result.findings.append(f"the daemons' log:\n{mount.log()}")
    return result


@contextlib.contextmanager
def _mounted(place: Path, write_path: str, seconds: float) -> Iterator[tuple[Daemons, Path]]:
    with (
        sized_tmpfs(place / "disk", DISK_BYTES) as disk,
        daemons(
            place / "served",
            write_path,
            store=disk / "store",
            more=f'min_free = "{MIN_FREE_MIB}MiB"\n{_CONFIG}',
            limit_s=seconds + 600,
        ) as mount,
    ):
        yield mount, disk


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--write-path", choices=WRITE_PATHS, default=None, help="default: half on each")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    paths = [asked.write_path] if asked.write_path else list(WRITE_PATHS)
    results = []
    for write_path in paths:
        with tempfile.TemporaryDirectory(prefix="ckptfs-lifesoak-", ignore_cleanup_errors=True) as place:
            seconds = asked.minutes * 60 / len(paths)
            results.append(soak(seconds, seed, Path(place), write_path, lambda line: print(line, flush=True)))
    facts = {"seed": seed, "results": [asdict(one) for one in results]}
    print(json.dumps(facts, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(facts, indent=1))
    for one in results:
        print(*one.findings, sep="\n")
    return 1 if any(one.findings for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
