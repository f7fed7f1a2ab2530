"""The soaks of gcsoak.py: clients work, the collector runs all the time, and everything is checked.

One rule: what a file must hold is told by its name (soak_client.py), what the store must hold by a walk that
knows nothing of the collector (storecheck.py beside the daemon, liveset.py at the end).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mounting import Mount

from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.messages import Gc, Status

HERE = Path(__file__).parent
WRITERS, READERS = 3, 2
WRITE_PATHS = ("auto", "plain")
CONFIG = {
    "settle_s": 0.2,
    "settle_max_s": 1.0,
    "min_free": "64MiB",
    "log_level": "warning",
    "policy": [{"path": "/*", "keep_last": 4}],
}
_TOLERANCE = 0.02
_CHECK_EVERY_S = 45.0
_CLIENT_END_S = 60.0
_CHECK_S = 600.0


@dataclass(slots=True)
class SoakResult:
    """What a soak on one write path showed; bytes are those of the store at its end, `kernel_reads` the
    stored files that were read by the kernel itself, summed over looks."""

    write_path: str
    seconds: float = 0.0
    cycles: int = 0
    idle_cycles: int = 0
    freed_bytes: int = 0
    forgotten: int = 0
    kernel_reads: int = 0
    checks: int = 0
    clients: dict[str, int] = field(default_factory=dict)
    live_bytes: int = 0
    payload_bytes: int = 0
    disk_bytes: int = 0
    versions: int = 0
    findings: list[str] = field(default_factory=list)


class Soak:
    """One store, its daemon, and the clients. `tell` gets a line now and then."""

    def __init__(self, folder: Path, seed: str, write_path: str, tell: Callable[[str], None]) -> None:
        self._store = folder / "store"
        config = {**CONFIG, "write_path": write_path}
        self._mount = Mount(folder / "mnt", self._store, logs=folder / "logs", config=config, limit_s=7200)
        self._chance = random.Random(seed)
        self._tell = tell
        self.result = SoakResult(write_path)

    def run(self, seconds: float) -> SoakResult:
        """Soak, then look at what is left."""
        begun = time.monotonic()
        try:
            self._mount.start()
            with self._clients():
                self._cycle(begun + seconds)
            self._come_to_rest()
            self._mount.stop()
            self._look_at_the_end()
        finally:
            self._mount.clean_up()
        self.result.seconds = round(time.monotonic() - begun, 1)
        return self.result

    @contextlib.contextmanager
    def _clients(self) -> Iterator[None]:
        processes = []
        for number in range(WRITERS):
            directory = self._mount.path / f"run{number}"
            directory.mkdir()
            processes.append(self._client("write", str(directory)))
        processes += [self._client("read", str(self._mount.path)) for _ in range(READERS)]
        try:
            yield
        finally:
            for process in processes:
                self._end(process)

    def _client(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(HERE / "soak_client.py"), *arguments, str(self._chance.getrandbits(40))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._mount.environment,
        )

    def _end(self, process: subprocess.Popen[str]) -> None:
        try:
            said, errors = process.communicate(timeout=_CLIENT_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.result.findings.append("a client hung")
            return
        if process.returncode:
            self.result.findings.append(f"a client ended with {process.returncode}: {errors.strip()[-600:]}")
            return
        counts = json.loads(said)
        self.result.findings += counts.pop("findings")
        for what, count in counts.items():
            self.result.clients[what] = self.result.clients.get(what, 0) + count

    def _cycle(self, until: float) -> None:
        check_due = time.monotonic() + _CHECK_EVERY_S
        holder = json.loads((self._store / "lock").read_bytes())
        while time.monotonic() < until:
            with ControlClient(holder["socket"], os.geteuid()) as client:
                self._collect(client)
            with ControlClient(holder["socket"], os.geteuid()) as client:
                self._look_at_status(client)
            if time.monotonic() >= check_due:
                self._check_beside()
                check_due = time.monotonic() + _CHECK_EVERY_S
                self._tell(f"{self.result.write_path}: {self._so_far()}")
            time.sleep(self._chance.uniform(0.1, 1.5))

    def _collect(self, client: ControlClient) -> None:
        answer = client.ask(Gc())
        assert isinstance(answer, dict)
        self.result.cycles += 1
        self.result.idle_cycles += not answer["freed_bytes"]
        self.result.freed_bytes += answer["freed_bytes"]
        self.result.forgotten += len(answer["forgotten"])

    def _look_at_status(self, client: ControlClient) -> None:
        status = client.ask(Status())
        assert isinstance(status, dict)
        self.result.kernel_reads += status["kernel_reads"]

    def _so_far(self) -> str:
        return (
            f"{self.result.cycles} cycles, {self.result.freed_bytes / 1e6:.0f} MB freed, "
            f"{self.result.checks} checks, {len(self.result.findings)} findings"
        )

    def _check_beside(self) -> None:
        """Read all that the store has, beside the daemon at work."""
        found = self._look("storecheck.py")
        self.result.checks += 1
        self.result.findings += [str(one) for one in _listed(found, "findings")]

    def _come_to_rest(self) -> None:
        """Everything is stored, and what nobody needs is given back."""
        self._mount.wait_until_ingested(120.0)
        for number in range(WRITERS):
            self._mount.publish(f"run{number}")
        for _ in range(2):  # the second takes what was open or pinned at the first
            self._mount.facts("gc", str(self._mount.path))
        log = self._mount.log_tail(lines=100_000)
        if "Traceback (most recent call last)" in log or " ERROR " in log:
            self.result.findings.append(f"the daemon logged an error:\n{self._mount.log_tail()}")

    def _look_at_the_end(self) -> None:
        found, result = self._look("liveset.py"), self.result
        result.findings += [str(one) for one in _listed(found, "missing")]
        result.live_bytes, result.payload_bytes, result.disk_bytes, result.versions = (
            int(str(found[key])) for key in ("live_bytes", "payload_bytes", "disk_bytes", "versions")
        )
        for what, stored in (("stored", result.payload_bytes), ("occupied", result.disk_bytes)):
            if abs(stored - result.live_bytes) > _TOLERANCE * result.live_bytes:
                result.findings.append(f"{stored} bytes are {what}, {result.live_bytes} are reachable")

    def _look(self, script: str) -> dict[str, object]:
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(self._store)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHECK_S,
            env=self._mount.environment,
        )
        assert done.returncode == 0, f"{script}: {done.stderr[-800:]}"
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found


def _listed(found: dict[str, object], key: str) -> list[object]:
    value = found[key]
    assert isinstance(value, list)
    return value


def soak(
    seconds: float, seed: int, place: Path, write_path: str, tell: Callable[[str], None] = lambda _: None
) -> SoakResult:
    """One soak below `place`, which is outside of any mount."""
    folder = place / write_path
    folder.mkdir(parents=True)
    return Soak(folder, f"{seed}:{write_path}", write_path, tell).run(seconds)
