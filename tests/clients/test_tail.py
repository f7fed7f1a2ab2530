"""`tail -F` of a log that is stored, appended to, stored again and rotated, as people watch a run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.writepaths import BOTH_PATHS
from kernelmounts import poll
from mounting import Mount


@BOTH_PATHS
def test_tail_shows_each_line_once_through_storing_and_rotation(quick_mount: Mount, tmp_path: Path) -> None:
    log, shown = quick_mount.path / "run" / "train.log", tmp_path / "shown"
    log.parent.mkdir()
    expected = append(log, 0)
    store(quick_mount)
    with tailing(log, shown):
        wait_until_shown(shown, expected)
        for number in range(1, 7):
            if number == 4:
                log.rename(log.with_suffix(".1"))
            expected += append(log, number)
            wait_until_shown(shown, expected)
            if number % 2 == 0:
                store(quick_mount)


def append(log: Path, number: int) -> str:
    """A few lines more, through an open of their own."""
    lines = "".join(f"epoch {number} line {line}\n" for line in range(5))
    with log.open("a") as file:
        file.write(lines)
    return lines


def store(mount: Mount) -> None:
    """Return when the log is out of staging and in a version."""
    mount.publish("run")
    mount.wait_until_ingested()


def wait_until_shown(shown: Path, expected: str) -> None:
    found = poll(lambda: shown.read_text() == expected, 20)
    assert found, f"{shown.read_text()!r} instead of {expected!r}"


@contextmanager
def tailing(log: Path, shown: Path) -> Iterator[None]:
    """What `tail -F` shows from the first line on goes to the file `shown`."""
    command, quiet = ["tail", "-s", "0.1", "-n", "+1", "-F", str(log)], subprocess.DEVNULL
    with shown.open("wb") as out, subprocess.Popen(command, stdin=quiet, stdout=out, stderr=quiet) as tail:
        try:
            yield
        finally:
            tail.kill()
