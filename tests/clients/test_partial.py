"""A half-written checkpoint never looks whole: what is missing is named, `latest-complete` does not move."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import Version
from clients.clientproc import run_ranks, run_script
from clients.recovery import Save, reported, versions_with, wait_until_recoverable
from mounting import Mount

GOOD, BAD = 1, 2


@pytest.fixture(scope="session")
def dcp_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain directory with step-1 and step-2 as two ranks saved them, two files a rank."""
    folder = tmp_path_factory.mktemp("dcp")
    arguments = [str(folder / "run"), str(folder / "rendezvous"), "--steps", "2", "--files-per-rank", "2"]
    run_ranks("dcp_rank.py", *arguments)
    return folder / "run"


def truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


def empty(shard: Path) -> None:
    os.truncate(shard, 0)


@pytest.mark.parametrize("damage", [truncate, empty, Path.unlink], ids=["truncated", "empty", "absent"])
def test_a_dcp_step_with_a_damaged_shard_is_partial_and_names_the_shard(
    quick_mount: Mount, dcp_run: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run = quick_mount.path / "run"
    good = save_step(dcp_run, run, GOOD)
    name = wait_until_recoverable(quick_mount, "run", good)
    complete = quick_mount.wait_for_version("run", lambda version: version.name == name)
    assert (complete.state, complete.step) == ("complete", GOOD), complete

    source = tmp_path / "damaged"
    shutil.copytree(dcp_run, source)
    shard = sorted((source / f"step-{BAD}").glob("*.distcp"))[-1]
    damage(shard)
    bad = save_step(source, run, BAD)
    name = wait_until_recoverable(quick_mount, "run", bad)
    partial = quick_mount.wait_for_version("run", lambda version: version.name == name)
    assert partial.state == "partial", partial
    assert shard.name in partial.missing, partial
    assert_latest_complete_is(quick_mount, complete, good)


@pytest.mark.parametrize("file_name", ["optimizer.pt", "scheduler.pt"])
def test_a_trainer_killed_in_the_middle_of_a_save_leaves_a_partial_version(
    quick_mount: Mount, file_name: str
) -> None:
    """It saves checkpoint-1 whole, and dies when half of a file of checkpoint-2 is written."""
    run = quick_mount.path / "run"
    die = ["--max-steps", str(BAD), "--die-in", file_name]
    [good] = reported(run_script("trainer_run.py", str(run), *die, expected=-signal.SIGKILL))
    name = wait_until_recoverable(quick_mount, "run", Save.of(run, f"checkpoint-{BAD}"))
    partial = quick_mount.wait_for_version("run", lambda version: version.name == name)
    assert partial.state == "partial", partial
    assert f"checkpoint-{BAD}" in partial.missing, partial
    assert file_name in partial.missing or "trainer_state.json" in partial.missing, partial

    complete = quick_mount.wait_for_version("run", lambda version: version.state == "complete")
    assert complete.step == GOOD and complete.number < partial.number, complete
    assert_latest_complete_is(quick_mount, complete, good)


def test_a_checkpoint_is_never_listed_complete_before_its_metadata(quick_mount: Mount, dcp_run: Path) -> None:
    """All shards are there and settled, .metadata is not: whatever is listed then is not complete."""
    run = quick_mount.path / "run"
    shards = save_shards(dcp_run, run, GOOD)
    name = wait_until_recoverable(quick_mount, "run", shards)
    assert all(version.state != "complete" for version in quick_mount.versions("run"))
    assert not os.path.lexists(run / ".versions" / "latest-complete")

    whole = commit_metadata(dcp_run, run, GOOD)
    later = wait_until_recoverable(quick_mount, "run", whole)
    version = quick_mount.wait_for_version("run", lambda version: version.name == later)
    assert version.state == "complete", version
    assert later > name


def save_step(source: Path, run: Path, step: int) -> Save:
    """Write a step as DCP does: the shards, then .metadata, whose rename commits it."""
    save_shards(source, run, step)
    return commit_metadata(source, run, step)


def save_shards(source: Path, run: Path, step: int) -> Save:
    name = f"step-{step}"
    shutil.copytree(source / name, run / name, ignore=shutil.ignore_patterns(".metadata"))
    return Save.of(run, name)


def commit_metadata(source: Path, run: Path, step: int) -> Save:
    folder = run / f"step-{step}"
    shutil.copy(source / folder.name / ".metadata", folder / ".metadata.tmp")
    os.rename(folder / ".metadata.tmp", folder / ".metadata")
    return Save.of(run, folder.name)


def assert_latest_complete_is(mount: Mount, version: Version, save: Save) -> None:
    """`latest-complete` still leads to this version, and through it to the whole save."""
    link = mount.path / "run" / ".versions" / "latest-complete"
    assert os.path.realpath(link) == str(mount.path / "run" / ".versions" / version.name)
    assert version.name in versions_with(mount, "run", save)
