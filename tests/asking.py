"""What the tests ask of a running ckptfs, through its command line (ARCHITECTURE.md §8) and its `.versions`.

The one rule: each question is a process of its own with a time limit, as a user's script would ask it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kernelmounts import poll

DAEMON = (sys.executable, "-m", "ckptfs.daemon")


@dataclass(frozen=True, slots=True)
class Version:
    """One entry of `log --json`; `missing` is kept as the text that people would read."""

    number: int
    name: str
    step: int | None
    state: str
    missing: str
    tags: tuple[str, ...]
    root: str

    @classmethod
    def from_log(cls, entry: Mapping[str, object]) -> Self:
        number, step, tags = entry["number"], entry["step"], entry["tags"]
        assert isinstance(number, int)
        assert isinstance(tags, list)
        assert step is None or isinstance(step, int)
        missing = json.dumps(entry["missing"]) if entry["missing"] else ""
        words = (str(entry["name"]), step, str(entry["state"]), missing)
        return cls(number, *words, tuple(tags), str(entry["root"]))


class CommandLine:
    """Questions about the mount at `path`; `environment` and `log` are those of its daemon."""

    def __init__(self, path: Path, environment: Mapping[str, str], log: Path) -> None:
        self.path = path
        self.environment = environment
        self.log = log

    def cli(
        self, *arguments: str, timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run one command; with `check`, exit 0 is required."""
        done = subprocess.run(
            [*DAEMON, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=self.environment,
        )
        if check and done.returncode != 0:
            said = f"exit {done.returncode}: {done.stderr.strip()}"
            raise AssertionError(f"ckptfs {' '.join(arguments)}: {said}\n{self.log_tail()}")
        return done

    def ask(self, command: str, *arguments: str, timeout_s: float = 60.0) -> object:
        """`ckptfs COMMAND ARGUMENTS --json`, decoded."""
        return json.loads(self.cli(command, *arguments, "--json", timeout_s=timeout_s).stdout)

    def facts(self, command: str, *arguments: str, timeout_s: float = 60.0) -> dict[str, object]:
        """The same for commands that answer with one object (status, du, verify)."""
        answer = self.ask(command, *arguments, timeout_s=timeout_s)
        assert isinstance(answer, dict), answer
        return answer

    def count(self, command: str, key: str, *arguments: str) -> int:
        """One whole number out of such an object."""
        value = self.facts(command, *arguments)[key]
        assert isinstance(value, int), (command, key, value)
        return value

    def verified(self, unit: str) -> bool:
        """Whether `verify` reads something of the unit and finds nothing wrong."""
        answer = self.facts("verify", str(self.path / unit))
        return answer["corrupt"] == [] and answer["checked_bytes"] != 0

    def versions(self, unit: str) -> list[Version]:
        """All listed versions of a unit, oldest first; none if the unit has none yet."""
        if not self.version_names(unit):
            return []
        answer = self.ask("log", str(self.path / unit))
        assert isinstance(answer, list), answer
        return sorted((Version.from_log(entry) for entry in answer), key=lambda version: version.number)

    def version_names(self, unit: str) -> list[str]:
        """Names of the version directories as `ls` shows them, oldest first. Starts no process."""
        try:
            names = os.listdir(self.history(unit))
        except FileNotFoundError:
            return []
        return sorted(name for name in names if name.startswith("v0"))

    def history(self, unit: str) -> Path:
        """The directory of a unit's versions at the root of the mount; it outlives the unit."""
        return self.path / ".versions" / unit

    def wait_for_version(
        self, unit: str, predicate: Callable[[Version], bool], timeout_s: float = 20.0
    ) -> Version:
        """The newest version for which `predicate` holds, as soon as there is one."""
        seen: list[Version] = []

        def look() -> Version | None:
            seen[:] = self.versions(unit)
            return next((version for version in reversed(seen) if predicate(version)), None)

        found = poll(look, timeout_s, every_s=0.2)
        if found is None:
            listed = "\n".join(map(str, seen))
            raise AssertionError(
                f"no such version of {unit} within {timeout_s} s; listed:\n{listed}\n{self.log_tail()}"
            )
        return found

    def publish(
        self, unit: str, *, tag: str | None = None, step: int | None = None, timeout_s: float = 120.0
    ) -> object:
        options = [
            *(["--tag", tag] if tag is not None else []),
            *(["--step", str(step)] if step is not None else []),
        ]
        return self.ask("publish", str(self.path / unit), *options, timeout_s=timeout_s)

    def wait_until_ingested(self, timeout_s: float = 60.0) -> None:
        """Return when no closed file waits for ingest any more."""
        status = ("status", str(self.path))

        def is_ingested() -> bool:
            return self.facts(*status)["ingest_pending_bytes"] == 0

        if not poll(is_ingested, timeout_s, every_s=0.3):
            raise AssertionError(
                f"not ingested after {timeout_s} s: {self.facts(*status)}\n{self.log_tail()}"
            )

    def log_tail(self, lines: int = 40) -> str:
        if not self.log.exists():
            return "(no daemon log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def let_settle(settle_s: float) -> None:
    """Let `settle_s` pass on the clock: the promise's own time (§1.2), not a wait for a state."""
    time.sleep(settle_s * 1.1 + 0.1)
