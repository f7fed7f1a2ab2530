"""One ckptfs daemon under test: started as its users start it, watched from outside, always cleaned up.

The one rule: nothing here can hang for ever. What may touch the mount has a bound, and behind every daemon
stands a watchdog process that aborts the FUSE connection when `limit_s` is over, so that a client (or pytest
itself) that waits for a wedged daemon gets an error instead. Source of the traps: KERNEL_NOTES.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import kernelmounts
from asking import DAEMON, CommandLine
from kernelmounts import poll

READY_S = 20.0
STOP_S = 60.0
Value = str | int | float | bool | Sequence[str] | Sequence[Mapping[str, "str | int | float | bool"]]
Config = Mapping[str, Value]


class Mount(CommandLine):
    """A daemon process and its mount.

    All fields belong to the test's thread. `path` and `store` are created if they are not there. The daemon
    leads a process group of its own; its stdout and stderr go to files in `logs`, over all restarts.
    """

    def __init__(
        self, path: Path, store: Path, *, logs: Path, config: Config | None = None, limit_s: float = 180.0
    ) -> None:
        super().__init__(path, _environment(logs / "home"), logs / "daemon.stderr")
        self.store = store
        self.config = dict(config or {})
        self.settle_s = float(str(self.config.get("settle_s", 2)))
        self.limit_s = limit_s
        self._stdout = logs / "daemon.stdout"
        self._config_file = logs / "ckptfs.toml"
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        for folder in (path, store.parent, logs / "home"):
            folder.mkdir(parents=True, exist_ok=True)
        self.configure(self.config)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._process is not None:
                self.stop()
        finally:
            self.clean_up()

    def configure(self, config: Config) -> None:
        """Write the configuration file; a daemon that runs reads it after `reload`."""
        # Root's key would lie in /etc.
        written = {"key": str(self._config_file.parent.absolute() / "signing.pem"), **config}
        lines = [f"{key} = {_toml(value)}\n" for key, value in written.items()]
        self._config_file.write_text("".join(lines))

    def reload(self) -> str:
        """SIGHUP; the line of the log that says what came of it."""
        before = len(self.log_tail(lines=100_000))
        self._running().send_signal(signal.SIGHUP)

        def told() -> str | None:
            lines = self.log_tail(lines=100_000)[before:].splitlines()
            return next((one for one in lines if "configuration" in one), None)

        said = poll(told, READY_S)
        assert said, f"nothing came of it:\n{self.log_tail()}"
        return said

    def start(self) -> None:
        """Start the daemon; returns when it has said that the mount answers, at the latest after READY_S."""
        assert self._process is None, "this daemon runs already"
        said_bytes = self._stdout.stat().st_size if self._stdout.exists() else 0
        command = ["mount", str(self.path), "--store", str(self.store), "--config", str(self._config_file)]
        with self._stdout.open("ab") as stdout, self.log.open("ab") as stderr:
            self._process = process = subprocess.Popen(
                [*DAEMON, *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                env=self.environment,
            )
        poll(lambda: process.poll() is not None or self._is_ready(said_bytes), READY_S)
        if process.poll() is not None or not self._is_ready(said_bytes):
            code = process.poll()
            raise AssertionError(f"not ready after {READY_S} s (exit {code}):\n{self.log_tail()}")
        self._watchdog = kernelmounts.start_watchdog(self.path, self.limit_s)

    def stop(self) -> None:
        """SIGTERM; the daemon must end with 0, leave no mount and have logged no traceback."""
        self._running().terminate()
        self._expect_end("SIGTERM")

    def unmount(self) -> None:
        """`ckptfs umount`; the daemon must end by itself, with the same duties."""
        self.cli("umount", str(self.path), timeout_s=STOP_S)
        self._expect_end("umount")

    def kill9(self) -> None:
        """SIGKILL the daemon, then what is left of its process group. The mount stays behind, dead."""
        process = self._running()
        process.kill()
        process.wait(STOP_S)
        _kill_group(process)
        self._process = None
        self._stop_watchdog()

    def restart(self) -> None:
        """Start again on the same store after stop, unmount or kill9; takes a dead mount away first."""
        kernelmounts.remove(self.path)
        self.start()

    def clean_up(self) -> None:
        """Leave nothing: no process of this daemon, no mount. Never waits for the mount."""
        self._stop_watchdog()
        if self._process is not None:
            _kill_group(self._process)
            kernelmounts.abort(self.path)
            self._process.wait(STOP_S)
            self._process = None
        kernelmounts.remove(self.path)

    @property
    def pid(self) -> int:
        return self._running().pid

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def rss_anon_bytes(self) -> int:
        """Anonymous memory of the daemon together with every process that it started."""
        return sum(kernelmounts.rss_anon_bytes(pid) for pid in kernelmounts.family(self.pid))

    def _is_ready(self, said_bytes: int) -> bool:
        return any(line.startswith(b"ready") for line in self._stdout.read_bytes()[said_bytes:].splitlines())

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "this daemon is not running"
        return self._process

    def _expect_end(self, reason: str) -> None:
        process = self._running()
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.clean_up()
            raise AssertionError(f"still there {STOP_S} s after {reason}:\n{self.log_tail()}") from None
        self._process = None
        left = kernelmounts.find(self.path)
        self.clean_up()
        _kill_group(process)
        assert code == 0, f"exit {code} after {reason}:\n{self.log_tail()}"
        assert left is None, f"the daemon ended after {reason} and left its mount"
        log = self.log_tail(lines=100_000)
        assert "Traceback (most recent call last)" not in log, log

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            kernelmounts.stop_watchdog(self._watchdog)
            self._watchdog = None


@contextlib.contextmanager
def sized_tmpfs(path: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of that size for a store that can be full; gone afterwards, whatever happened."""
    path.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "ckptfs-test", str(path)]
    subprocess.run(["mount", *options], check=True, timeout=20)
    try:
        yield path
    finally:
        kernelmounts.remove(path)


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder on /dev/shm (where there is none, in the usual temporary folder), removed afterwards."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="ckptfs-test-", dir=place) as name:
        yield Path(name)


def _toml(value: object) -> str:
    """A value of the configuration file; a table in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def may_pass_through() -> bool:
    """Whether passthrough is to be had here: then a mount without it is a fault, and no reason to skip."""
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return os.geteuid() == 0 and (major, minor) >= (6, 9)


def _environment(home: Path) -> dict[str, str]:
    """The user's own key and configuration stay out of the tests."""
    return {
        **os.environ,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "PYTHONUNBUFFERED": "1",
    }


def _kill_group(leader: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
