"""PEFT under accelerate: save_state rotates its directories, the adapter is saved over the one before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import pytest
from clients.clientproc import named, run_script
from clients.recovery import assert_all_recoverable, reported
from clients.writepaths import BOTH_PATHS
from mounting import Mount

FIRST, LAST = 3, 5


@pytest.mark.heavy
@BOTH_PATHS
def test_each_adapter_and_state_can_be_had_back_after_rotation_and_resume(
    quick_mount: Mount, more_frameworks: Mapping[str, str]
) -> None:
    """Neither has a commit point, so each is given the time to settle."""
    output = quick_mount.path / "run"
    pause = ["--pause-s", str(quick_mount.settle_s * 1.1 + 0.1)]
    arguments = [str(output), *pause, "--max-steps"]
    saves = reported(run_script("peft_run.py", *arguments, str(FIRST), environment=more_frameworks))
    said = run_script("peft_run.py", *arguments, str(LAST), "--resume", environment=more_frameworks)
    saves += reported(said)
    assert named(said, "started") == [{"event": "started", "step": FIRST, "correct": True}]

    assert sorted(os.listdir(output / "checkpoints")) == [f"checkpoint_{step}" for step in (LAST - 1, LAST)]
    assert len(saves) == 2 * LAST
    shutil.rmtree(output)
    assert_all_recoverable(quick_mount, "run", saves)
    assert quick_mount.verified("run")
