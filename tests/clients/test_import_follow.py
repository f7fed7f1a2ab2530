"""`ckptfs import --follow` beside jobs that save to a directory which ckptfs does not mount."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from asking import DAEMON
from clients.clientproc import Client
from clients.recovery import Save, reported, versions_with
from kernelmounts import poll
from mounting import Mount

SAVES = 4


class Follower:
    """The process, and what it has said of versions so far."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self._process = process
        self._out = out

    def wait_for_step(self, step: int) -> None:
        def has_said() -> bool:
            assert self._process.poll() is None, "it ended by itself"
            said = [json.loads(line) for line in self._out.read_text().splitlines()]
            return any((one["step"], one["state"]) == (step, "complete") for one in said)

        assert poll(has_said, 120), self._out.read_text()


@contextmanager
def following(mount: Mount, run: Path, unit: str) -> Iterator[Follower]:
    out, toml = run.parent / "follow.out", run.parent / "follow.toml"
    toml.write_text("settle_s = 0.3")
    place = ("--as", str(mount.path / unit), "--config", str(toml))
    command = [*DAEMON, "import", str(run), *place, "--follow", "--every", "0.1", "--json"]
    with out.open("wb") as stdout, (run.parent / "follow.err").open("w+b") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=mount.environment)
        try:
            yield Follower(process, out)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == -signal.SIGTERM
        finally:
            process.kill()
            process.wait(30)
        stderr.seek(0)
        assert b"Traceback" not in stderr.read()


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("rotating_run.py", ("--last", str(SAVES), "--size-bytes", "300000")),
        pytest.param("trainer_run.py", ("--max-steps", str(SAVES)), marks=pytest.mark.heavy),
    ],
    ids=["like-trainer", "trainer"],
)
def test_every_save_of_a_rotating_run_becomes_a_version(
    mount: Mount, tmp_path: Path, script: str, arguments: tuple[str, ...]
) -> None:
    """Two checkpoints are kept there, all of them here; the job knows nothing of it."""
    run = tmp_path / "scratch" / "run"
    run.mkdir(parents=True)
    saves: list[Save] = []
    with following(mount, run, "far") as follower, Client(script, str(run), *arguments, "--wait") as job:
        while len(saves) < SAVES:
            line = job.next_line(240)
            assert line is not None, job.errors()
            saves += reported([line])
            if line["event"] == "saved":
                follower.wait_for_step(len(saves))
                job.go_on()
        job.finish()
        assert sorted(os.listdir(run))[:2] == [f"checkpoint-{step}" for step in (SAVES - 1, SAVES)]
    whole = {one.name: one.step for one in mount.versions("far") if one.state == "complete"}
    assert set(whole.values()) == set(range(1, SAVES + 1))
    # What was taken while a save was being made is called partial, if it is taken at all.
    for step, save in enumerate(saves, 1):
        assert {name for name, one in whole.items() if one == step} <= {*versions_with(mount, "far", save)}
    assert mount.facts("log", str(mount.path / "far"), "--verify")["findings"] == []
