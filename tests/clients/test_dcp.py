"""torch.distributed.checkpoint with two gloo ranks: save and async_save, rotation, resume."""

from __future__ import annotations

import os
from pathlib import Path

from clients.clientproc import named, run_ranks
from clients.recovery import assert_all_recoverable, reported
from mounting import Mount

FIRST, MORE = 4, 2


def test_each_dcp_checkpoint_can_be_had_back_after_rotation_and_resume(
    quick_mount: Mount, tmp_path: Path
) -> None:
    """Odd steps are saved by save, even ones by async_save; the rename of .metadata commits each."""
    output = quick_mount.path / "run"
    rendezvous = [str(tmp_path / "first"), str(tmp_path / "second")]
    said = run_ranks("dcp_rank.py", str(output), rendezvous[0], "--steps", str(FIRST))
    saves = reported(said)
    resume = ["--resume", str(FIRST), "--steps", str(MORE)]
    said = run_ranks("dcp_rank.py", str(output), rendezvous[1], *resume)
    saves += reported(said)
    assert named(said, "started") == [{"event": "started", "step": FIRST, "correct": True}]

    last = FIRST + MORE
    assert sorted(os.listdir(output)) == [f"step-{last - 1}", f"step-{last}"]
    assert [save.path for save in saves] == [f"step-{step}" for step in range(1, last + 1)]
    assert_all_recoverable(quick_mount, "run", saves)
    newest = quick_mount.wait_for_version("run", lambda version: version.step == last)
    assert newest.state == "complete", newest
    assert quick_mount.verified("run")
