"""rsync and tar as people back runs up with them: mirrored both ways, archived, added to, taken out again."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from clients.recovery import Save, assert_all_recoverable, wait_until_recoverable
from clients.writepaths import BOTH_PATHS
from mounting import Mount

KEEP, STEPS = 2, 5
# By nanoseconds: without it a second save within the same second is the same to rsync.
RSYNC = ["rsync", "-a", "--delete", "--modify-window=-1"]
MIRRORING = {
    "rename": RSYNC,
    "in place": [*RSYNC, "--inplace", "--no-whole-file"],
    "delayed": [*RSYNC, "--delete-after", "--delay-updates"],
}


@BOTH_PATHS
@pytest.mark.parametrize("way", MIRRORING)
def test_a_run_that_is_mirrored_into_the_mount_and_out_again(
    quick_mount: Mount, tmp_path: Path, rng: random.Random, way: str
) -> None:
    """The run rotates beside the mount; its mirror on the mount follows and forgets nothing."""
    source, mirror, back = tmp_path / "source", quick_mount.path / "run", tmp_path / "back"
    saves = []
    for step in range(1, STEPS + 1):
        save_step(source, step, rng)
        for start, end in ((source, mirror), (mirror, back)):
            run(*MIRRORING[way], f"{start}/", f"{end}/")
            assert differences(source, end) == ""
        saves += [Save.of(source, f"checkpoint-{step}"), Save.of(source, "last.bin")]
        for save in saves[-2:]:
            wait_until_recoverable(quick_mount, "run", save)
    # The other way round: what was lost beside the mount comes back, what is new there goes.
    shutil.rmtree(source / f"checkpoint-{STEPS}")
    (source / "new").write_bytes(b"new")
    run(*MIRRORING[way], f"{mirror}/", f"{source}/")
    assert differences(mirror, source) == ""
    shutil.rmtree(mirror)
    assert_all_recoverable(quick_mount, "run", saves)
    assert quick_mount.verified("run")


@BOTH_PATHS
def test_an_archive_on_the_mount_grows_and_is_unpacked_there(
    quick_mount: Mount, tmp_path: Path, rng: random.Random
) -> None:
    """`tar -r` overwrites the end of a stored archive in place and appends to it."""
    source, run_folder, restored = (
        tmp_path / "source",
        quick_mount.path / "run",
        quick_mount.path / "restored",
    )
    run_folder.mkdir()
    restored.mkdir()
    archive = run_folder / "run.tar"
    saves = []
    for step in range(1, STEPS + 1):
        save_step(source, step, rng)
        names = [f"checkpoint-{step}", "last.bin"]
        run("tar", "-C", str(source), "-rf", str(archive), *names)
        run("tar", "-C", str(source), "-df", str(archive), names[0])
        saves.append(Save.of(run_folder, archive.name))
        wait_until_recoverable(quick_mount, "run", saves[-1])
    listed = run("tar", "-tf", str(archive)).splitlines()
    assert listed.count("last.bin") == STEPS
    run("tar", "-C", str(restored), "-xpf", str(archive))
    shutil.rmtree(restored / "checkpoint-1")
    run("tar", "-C", str(restored), "-xpf", str(archive), "--recursive-unlink")
    for step in range(1, STEPS - KEEP + 1):
        shutil.rmtree(restored / f"checkpoint-{step}")
    shutil.copystat(source, restored)  # the folder itself is not in the archive
    assert differences(source, restored) == ""
    shutil.rmtree(run_folder)
    assert_all_recoverable(quick_mount, "run", saves)
    assert quick_mount.verified("run")


@BOTH_PATHS
def test_incremental_archives_of_the_mount(quick_mount: Mount, tmp_path: Path, rng: random.Random) -> None:
    """`tar -g` goes by times and inode numbers: what was not changed must not look changed."""
    source, out = quick_mount.path / "run", tmp_path / "out"
    out.mkdir()
    snapshot = str(tmp_path / "snapshot")
    for step in range(1, STEPS + 1):
        save_step(source, step, rng)
        quick_mount.publish("run")
        quick_mount.wait_until_ingested()
        archive = tmp_path / f"{step}.tar"
        run("tar", "-C", str(source), "-g", snapshot, "-cf", str(archive), ".")
        files = [name for name in run("tar", "-tf", str(archive)).splitlines() if not name.endswith("/")]
        fresh = {f"./checkpoint-{step}/{name}" for name in ("model.bin", "state.json", "link")}
        assert set(files) == fresh | {"./last.bin"}
        run("tar", "-C", str(out), "-g", "/dev/null", "-xpf", str(archive))
    assert differences(source, out) == ""


def save_step(run_folder: Path, step: int, rng: random.Random) -> None:
    """A checkpoint directory, `last.bin` written over, the oldest one removed."""
    folder = run_folder / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(rng.randbytes(400_000))
    (folder / "state.json").write_text(f'{{"step": {step}}}')
    os.symlink("model.bin", folder / "link")
    (run_folder / "last.bin").write_bytes(rng.randbytes(200_000))
    shutil.rmtree(run_folder / f"checkpoint-{step - KEEP}", ignore_errors=True)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def differences(one: Path, two: Path) -> str:
    return run("rsync", "-aHXnci", "--delete", f"{one}/", f"{two}/")
