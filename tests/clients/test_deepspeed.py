"""DeepSpeed ZeRO-1 with two gloo ranks: each writes its part of the optimizer, `latest` commits the save."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from clients.clientproc import named, run_ranks
from clients.recovery import assert_all_recoverable, reported
from clients.writepaths import BOTH_PATHS
from mounting import Mount

FIRST, LAST = 3, 5


@pytest.mark.heavy
@BOTH_PATHS
def test_each_deepspeed_checkpoint_can_be_had_back_after_rotation_and_resume(
    quick_mount: Mount, more_frameworks: Mapping[str, str], tmp_path: Path
) -> None:
    output = quick_mount.path / "run"
    first = [str(output), str(tmp_path / "first"), "--max-steps", str(FIRST)]
    saves = reported(run_ranks("deepspeed_rank.py", *first, environment=more_frameworks))
    second = [str(output), str(tmp_path / "second"), "--max-steps", str(LAST), "--resume"]
    said = run_ranks("deepspeed_rank.py", *second, environment=more_frameworks)
    saves += reported(said)
    assert named(said, "started") == [{"event": "started", "step": FIRST, "correct": True}]

    tags = [f"global_step{step}" for step in range(1, LAST + 1)]
    assert sorted(name for name in os.listdir(output) if name.startswith("global_step")) == tags[-2:]
    assert (output / "latest").read_text() == tags[-1]
    assert [save.path for save in saves] == tags
    assert_all_recoverable(quick_mount, "run", saves)
    newest = quick_mount.wait_for_version("run", lambda version: version.step == LAST)
    assert newest.state == "complete", newest
    assert quick_mount.verified("run")
