"""Hugging Face Trainer: save_total_limit=2, resume_from_checkpoint; trainer_state.json commits a save."""

from __future__ import annotations

import os

from clients.clientproc import named, run_script
from clients.recovery import assert_all_recoverable, reported
from mounting import Mount

FIRST, LAST = 4, 6


def test_each_trainer_checkpoint_can_be_had_back_after_rotation_and_resume(quick_mount: Mount) -> None:
    """The saves come as fast as the Trainer can: each is a commit point, none may need the time to settle."""
    output = quick_mount.path / "run"
    said = run_script("trainer_run.py", str(output), "--max-steps", str(FIRST))
    saves = reported(said)
    said = run_script("trainer_run.py", str(output), "--max-steps", str(LAST), "--resume")
    saves += reported(said)
    assert named(said, "started")[0]["step"] == FIRST

    assert sorted(os.listdir(output)) == [f"checkpoint-{step}" for step in (LAST - 1, LAST)]
    assert [save.path for save in saves] == [f"checkpoint-{step}" for step in range(1, LAST + 1)]
    assert_all_recoverable(quick_mount, "run", saves)
    newest = quick_mount.wait_for_version("run", lambda version: version.step == LAST)
    assert newest.state == "complete", newest
    history = output / ".versions"
    assert os.readlink(history / "latest-complete").rstrip("/").endswith(newest.name)
    assert (history / f"step-{LAST}" / f"checkpoint-{LAST}" / "trainer_state.json").is_file()
    assert quick_mount.verified("run")
