"""Orbax CheckpointManager over tensorstore (OCDBT), saving asynchronously; it removes old steps itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from clients.clientproc import named, run_script
from clients.recovery import assert_all_recoverable, reported
from clients.writepaths import BOTH_PATHS
from mounting import Mount

FIRST, LAST = 4, 6


@pytest.mark.heavy
@BOTH_PATHS
def test_each_orbax_checkpoint_can_be_had_back_after_rotation_and_resume(
    quick_mount: Mount, more_frameworks: Mapping[str, str]
) -> None:
    output = quick_mount.path / "run"
    said = run_script("orbax_run.py", str(output), "--max-steps", str(FIRST), environment=more_frameworks)
    saves = reported(said)
    said = run_script("orbax_run.py", str(output), "--max-steps", str(LAST), environment=more_frameworks)
    saves += reported(said)
    assert named(said, "started") == [{"event": "started", "step": FIRST, "correct": True}]

    assert sorted(os.listdir(output)) == [str(LAST - 1), str(LAST)]
    assert [save.path for save in saves] == [str(step) for step in range(1, LAST + 1)]
    assert_all_recoverable(quick_mount, "run", saves)
    newest = quick_mount.wait_for_version("run", lambda version: version.step == LAST)
    assert newest.state == "complete", newest
    assert quick_mount.verified("run")
