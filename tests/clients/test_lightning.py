"""Lightning ModelCheckpoint with save_last: single files without a commit point, last.ckpt overwritten."""

from __future__ import annotations

import shutil

from clients.clientproc import named, run_script
from clients.recovery import assert_all_recoverable, reported
from mounting import Mount

FIRST, LAST = 3, 5


def test_each_lightning_checkpoint_can_be_had_back_after_rotation_and_resume(quick_mount: Mount) -> None:
    output = quick_mount.path / "run"
    pause = ["--pause-s", str(quick_mount.settle_s * 1.1 + 0.1)]
    said = run_script("lightning_run.py", str(output), "--max-steps", str(FIRST), *pause)
    saves = reported(said)
    said = run_script("lightning_run.py", str(output), "--max-steps", str(LAST), "--resume", *pause)
    saves += reported(said)
    assert named(said, "started")[0]["step"] == FIRST

    live = {path.name for path in output.iterdir()}
    assert live == {"last.ckpt", f"step={LAST - 1}.ckpt", f"step={LAST}.ckpt"}
    assert len(saves) == 2 * LAST
    # The last save has had no step after it in which to settle.
    assert_all_recoverable(quick_mount, "run", saves[-2:])
    shutil.rmtree(output)
    assert_all_recoverable(quick_mount, "run", saves)
    assert quick_mount.verified("run")
