"""`kill -9` of the daemon under clients who must not notice: the mount is taken over by the next daemon.

    python tests/crash/handover.py [--kills 1000] [--seed N] [--json FILE] [--kills-per-store 50]

One rule: the clients know what they wrote, and go on over all kills of a store; an answer or a byte that is
not what it would be on ext4, in any of them, is a finding.

One round: eight clients work; at a moment that chance has chosen the daemon is killed; whoever keeps its
descriptors (daemon/keeper.py, which speaks systemd's protocol) starts the next one, which one time in eight
is killed too before it is ready; one time in ten it is told to leave the mount to the next. The pause of a
round is the longest time from the (last) kill to the end of a call, of any client, that was under way then.
Prints the seed first: the same seed makes the same calls.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import kernelmounts  # noqa: E402  # the folder of the tests' own modules comes first
from asking import DAEMON  # noqa: E402

from ckptfs.fusefs.kept_notes import Kind  # noqa: E402
from ckptfs.fusefs.kept_state import KeptState  # noqa: E402

DYING_DAEMON = (sys.executable, str(HERE / "dying_daemon.py"))
WRITE_PATHS = ("auto", "plain")
ROLES = ("saver", "appender", "maker", "maker", "mover", "reader", "locker", "locker")
SETTLE_S = 0.3
_READY_S = 30.0
_END_S = 60.0
_SHORT_END_S = 10.0
_LIMIT_S = 1200.0
_STEPS_S = 5.0


@dataclass(slots=True)
class Result:
    """What the rounds on one store showed."""

    write_path: str
    kills: int = 0
    handed_over: int = 0
    calls: int = 0
    pauses_s: list[float] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


class Daemons:
    """A mount, and one daemon after another that serves it."""

    def __init__(
        self,
        folder: Path,
        write_path: str,
        daemon: Sequence[str] = DAEMON,
        *,
        dies_by_itself: bool = False,
        store: Path | None = None,
        more: str = 'min_free = "64MiB"\n',
        limit_s: float = _LIMIT_S,
    ) -> None:
        """`store` may lie elsewhere, `more` stands in the configuration; after `limit_s` all is aborted."""
        self._dies_by_itself = dies_by_itself
        self._limit_s = limit_s
        self.path = folder / "mnt"
        self.store = folder / "store" if store is None else store
        self._log = folder / "daemon.stderr"
        self.path.mkdir(parents=True)
        config = folder / "ckptfs.toml"
        config.write_text(
            f'key = "{folder}/signing.pem"\nsettle_s = {SETTLE_S}\nsettle_max_s = 1.5\n'
            f'log_level = "warning"\nwrite_path = "{write_path}"\n{more}'
        )
        mount = ["mount", str(self.path), "--store", str(self.store), "--config", str(config)]
        with self._log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "ckptfs.daemon.keeper", *daemon, *mount],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=_environment(folder),
            )
        self._watchdog: subprocess.Popen[bytes] | None = None

    def wait_until_ready(self) -> None:
        """Returns when the present daemon has said that it serves the mount."""
        assert self._keeper.stdout is not None
        deadline = time.monotonic() + _READY_S
        os.set_blocking(self._keeper.stdout.fileno(), False)
        while not (line := self._keeper.stdout.readline()).startswith(b"ready"):
            assert self._keeper.poll() is None, f"the keeper has ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"not ready, said {line!r}:\n{self.log()}"
            time.sleep(0.005)
        if self._watchdog is None:
            self._watchdog = kernelmounts.start_watchdog(self.path, self._limit_s)

    def kill(self) -> float:
        """SIGKILL the present daemon; returns when that was."""
        pid = kernelmounts.poll(self.pid, 10, every_s=0.001)
        assert pid, "there is no daemon"
        if self._dies_by_itself:
            kernelmounts.poll(lambda: self.pid() != pid, _STEPS_S, every_s=0.001)
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        kernelmounts.poll(lambda: self.pid() != pid, 10, every_s=0.001)
        return at

    def hand_over(self) -> float:
        """Have the present daemon leave the mount to the next; returns when that was."""
        at = time.monotonic()
        os.kill(self._keeper.pid, signal.SIGUSR1)
        return at

    @contextlib.contextmanager
    def state(self) -> Iterator[KeptState | None]:
        """What is kept of the session, as the present daemon has it; None if that has just died."""
        try:
            fds = Path(f"/proc/{self.pid()}/fd").iterdir()
            fd = os.open(next(fd for fd in fds if os.readlink(fd).startswith("/memfd:ckptfs")), os.O_RDWR)
        except (OSError, StopIteration):
            yield None
            return
        try:
            yield KeptState.adopt(fd)
        finally:
            os.close(fd)

    def left_open(self) -> int:
        """How many handles and backing files the present daemon keeps account of; -1 if it has just died."""
        with self.state() as state:
            if state is None:
                return -1
            return sum(len([*state.notes.items(kind)]) for kind in (Kind.HANDLE, Kind.BACKING, Kind.SEGMENT))

    def keeper_fds(self) -> int:
        """How many descriptors whoever keeps them has."""
        return len(os.listdir(f"/proc/{self._keeper.pid}/fd"))

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._keeper.terminate()
        return self._keeper.wait(_END_S)

    def clean_up(self) -> None:
        """Leave nothing: no process, no mount."""
        if self._watchdog is not None:
            kernelmounts.stop_watchdog(self._watchdog)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._keeper.pid, signal.SIGKILL)
        kernelmounts.remove(self.path)
        self._keeper.wait(_END_S)
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()

    def log(self) -> str:
        """The end of what the daemons logged."""
        return self._log.read_text(errors="replace")[-6000:]

    def pid(self) -> int:
        """That of the present daemon, 0 if there is none just now."""
        keeper = self._keeper.pid
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        return int(children[0]) if children else 0


class Clients:
    """The eight processes. `findings` is what they found."""

    def __init__(self, mount: Path, chance: random.Random, *, wait_for_room: bool = False) -> None:
        self._mount = mount
        self._more = ["waits"] if wait_for_room else []
        self.findings: list[str] = []
        self.calls = 0
        self.versions_opened = 0
        for folder in ("made", "locked"):
            (mount / folder).mkdir()
        (mount / "locked" / "counter").write_bytes(b"0" * 20)
        self._clients = [
            self._start(role, f"{role}{n}", chance.getrandbits(64)) for n, role in enumerate(ROLES)
        ]

    def _start(self, role: str, name: str, seed: int) -> subprocess.Popen[str]:
        directory = str(self._mount / {"maker": "made", "locker": "locked"}.get(role, name))
        return subprocess.Popen(
            [sys.executable, str(HERE / "handover_client.py"), role, directory, name, str(seed), *self._more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_begun(self) -> None:
        """All are at work."""
        for client in self._clients:
            assert client.stdout is not None
            client.stdout.readline()

    def are_well(self) -> bool:
        """Whether all are at work still."""
        return all(client.poll() is None for client in self._clients)

    def end(self, most_s: float = _END_S) -> list[tuple[float, float]]:
        """Stop them and add up; returns their long calls. Who does not end in `most_s` hangs."""
        for client in self._clients:
            assert client.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                client.stdin.write("stop\n")
                client.stdin.flush()
        said, deadline = [], time.monotonic() + most_s
        for client, role in zip(self._clients, ROLES, strict=True):
            try:
                left_s = max(deadline - time.monotonic(), 0.1)
                out, errors = client.communicate(timeout=left_s)
            except subprocess.TimeoutExpired:
                # Who waits for an answer that never comes ends with the mount, and not before.
                client.kill()
                self.findings.append(f"{role} hangs")
                continue
            if client.returncode:
                self.findings.append(f"{role} ended with {client.returncode}: {errors.strip()[-1500:]}")
            else:
                said.append((role, json.loads(out.splitlines()[-1])))
        self.calls = sum(one["calls"] for _, one in said)
        self.versions_opened = sum(len(one["shared"]) for role, one in said if role == "reader")
        if not self.findings:
            self._add_up(said)
        return [(begun, ended) for _, one in said for begun, ended in one["long"]]

    def kill(self) -> None:
        """Whatever happens; who waits for the mount ends with it."""
        for client in self._clients:
            client.kill()

    def wait(self) -> None:
        """Once the mount is gone: nothing of them stays."""
        for client in self._clients:
            client.wait(_END_S)
            for pipe in (client.stdin, client.stdout, client.stderr):
                if pipe is not None:
                    pipe.close()

    def _add_up(self, said: list[tuple[str, dict[str, list[int]]]]) -> None:
        counted = sum(sum(one["shared"]) for role, one in said if role == "locker")
        found = int((self._mount / "locked" / "counter").read_bytes())
        if found != counted:
            self.findings.append(f"the counter is {found} after {counted} counts")
        made = sorted(number for role, one in said if role == "maker" for number in one["shared"])
        names = sorted(int(name) for name in os.listdir(self._mount / "made"))
        if made != names:
            wrong = [*({*made} ^ {*names}), *(n for n in {*made} if made.count(n) > 1)][:10]
            self.findings.append(f"{len(names)} names, {len(made)} told to have been made; wrong: {wrong}")


def _environment(folder: Path) -> dict[str, str]:
    """That of an installed daemon: its modules are compiled once, not at each start."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compiled = str(folder / "compiled")
    return {**kept, "HOME": str(folder), "PYTHONUNBUFFERED": "1", "PYTHONPYCACHEPREFIX": compiled}


@contextlib.contextmanager
def daemons(folder: Path, write_path: str, daemon: Sequence[str] = DAEMON, **more: Any) -> Iterator[Daemons]:
    """A mount that is served, as Daemons has it; nothing of it is left."""
    one = Daemons(folder, write_path, daemon, **more)
    try:
        one.wait_until_ready()
        yield one
    finally:
        one.clean_up()


def run_store(
    folder: Path,
    write_path: str,
    kills: int,
    chance: random.Random,
    *,
    daemon: Sequence[str] = DAEMON,
    dies_by_itself: bool = False,
    is_patient: bool = True,
) -> Result:
    """The rounds on one new store; `daemon` is the command, `dies_by_itself` says that it will (and has only
    to be killed if it takes too long). Not patient: who waits for 10 s waits for ever."""
    result = Result(write_path)
    with (
        contextlib.ExitStack() as afterwards,
        daemons(folder, write_path, daemon, dies_by_itself=dies_by_itself) as mount,
    ):
        clients = Clients(mount.path, chance)
        afterwards.callback(clients.wait)
        try:
            clients.wait_until_begun()
            killed_at = _kill_again_and_again(mount, clients, kills, chance, result)
            time.sleep(2 * SETTLE_S)
            long = clients.end() if is_patient else clients.end(_SHORT_END_S)
        finally:
            clients.kill()
        result.findings += clients.findings
        result.calls = clients.calls
        result.pauses_s = [
            max((end - at for begin, end in long if begin <= at <= end), default=0.0) for at in killed_at
        ]
        if not result.findings:
            _look_at_the_end(mount, clients, result, dies_by_itself=dies_by_itself)
        if "Traceback" in mount.log() or result.findings:
            result.findings.append(f"the daemons' log:\n{mount.log()}")
    return result


def _kill_again_and_again(
    mount: Daemons, clients: Clients, kills: int, chance: random.Random, result: Result
) -> list[float]:
    """Returns when daemons died, the last ones before the next was ready."""
    killed_at = []
    while result.kills < kills and clients.are_well():
        time.sleep(chance.uniform(0.05, 1.2))
        if chance.random() < 0.1:
            killed_at.append(mount.hand_over())
            result.handed_over += 1
        else:
            killed_at.append(mount.kill())
            result.kills += 1
            if chance.random() < 0.125:
                time.sleep(chance.uniform(0.05, 0.8))
                killed_at[-1] = mount.kill()
                result.kills += 1
        mount.wait_until_ready()
    return killed_at


def _look_at_the_end(mount: Daemons, clients: Clients, result: Result, *, dies_by_itself: bool) -> None:
    """What must be so when nobody has anything open any more, and the daemon is stopped."""
    if not clients.versions_opened and not dies_by_itself:  # a daemon may die too soon to publish
        result.findings.append("nobody saw a version")
    if not kernelmounts.poll(lambda: mount.left_open() == 0, 10):
        result.findings.append(f"{mount.left_open()} handles or backing files are left of no file")
    code = mount.stop()
    if code and not dies_by_itself:
        result.findings.append(f"the last daemon ended with {code}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--kills-per-store", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="default: a new one on /dev/shm")
    parser.add_argument("--write-path", choices=WRITE_PATHS, default=None, help="default: by turns")
    parser.add_argument("--at-steps", action="store_true", help="die where that could do harm")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    place = asked.folder or Path(tempfile.mkdtemp(prefix="ckptfs-handover-", dir=shared))
    results: list[Result] = []
    while (done := sum(one.kills for one in results)) < asked.kills:
        write_path = asked.write_path or WRITE_PATHS[len(results) % 2]
        folder = place / f"store{len(results):03d}"
        chance = random.Random(f"{seed}:{len(results)}")
        one = run_store(
            folder,
            write_path,
            min(asked.kills_per_store, asked.kills - done),
            chance,
            daemon=DYING_DAEMON if asked.at_steps else DAEMON,
            dies_by_itself=asked.at_steps,
        )
        results.append(one)
        print(
            f"{write_path:5s} {one.kills} kills, {one.calls} calls, longest pause {max(one.pauses_s):.2f} s",
            *(f"\n  ! {finding}" for finding in one.findings),
            flush=True,
        )
        if not one.findings:
            shutil.rmtree(folder)
    pauses = sorted(pause for one in results for pause in one.pauses_s)
    totals = {
        "seed": seed,
        "kills": sum(one.kills for one in results),
        "handed_over": sum(one.handed_over for one in results),
        "calls": sum(one.calls for one in results),
        "findings": sum(len(one.findings) for one in results),
        "pause_p50_s": round(pauses[len(pauses) // 2], 3),
        "pause_p99_s": round(pauses[min(len(pauses) * 99 // 100, len(pauses) - 1)], 3),
        "pause_max_s": round(pauses[-1], 3),
    }
    print(json.dumps(totals, indent=2))
    if asked.json is not None:
        asked.json.write_text(json.dumps(totals))
    if not totals["findings"] and asked.folder is None:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if totals["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
