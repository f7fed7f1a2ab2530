"""git on the mount: clone with hard links and without, commits, repack and gc, a worktree, push and fetch."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

from asking import let_settle
from clients.recovery import Save, assert_all_recoverable, digest_tree, wait_until_recoverable
from clients.writepaths import BOTH_PATHS
from mounting import Mount

COMMITS = 15
IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


@BOTH_PATHS
def test_a_clone_works_is_packed_and_can_be_had_back(
    quick_mount: Mount, tmp_path: Path, rng: random.Random
) -> None:
    origin, run = plant(tmp_path / "origin", rng), quick_mount.path / "run"
    run.mkdir()
    for name, option in (("copied", "--no-local"), ("linked", "--local")):
        git(run, "clone", option, str(origin if name == "copied" else run / "copied"), name)
        assert head(run / name) == head(origin)
        assert_clean(run / name)
    loose = change(run / "linked", rng, 10)
    save = Save.of(run, "linked")
    wait_until_recoverable(quick_mount, "run", save)

    git(run / "linked", "gc", "--aggressive", "--prune=now")
    assert_clean(run / "linked")
    assert head(run / "linked") == loose
    packed = Save.of(run, "linked")
    wait_until_recoverable(quick_mount, "run", packed)
    shutil.rmtree(run)
    assert_all_recoverable(quick_mount, "run", [save, packed])
    assert quick_mount.verified("run")
    bring_back(quick_mount, packed)
    assert head(run / "linked") == loose
    assert_clean(run / "linked")


@BOTH_PATHS
def test_pushing_fetching_and_a_worktree(quick_mount: Mount, tmp_path: Path, rng: random.Random) -> None:
    """A bare repository on the mount between a clone on it and one beside it, through a restart."""
    origin, hub, run = plant(tmp_path / "origin", rng), quick_mount.path / "hub.git", quick_mount.path / "run"
    git(quick_mount.path, "clone", "--bare", str(origin), str(hub))
    git(quick_mount.path, "clone", str(hub), str(run))
    git(run, "worktree", "add", "-b", "side", str(run / "side"))
    inside = change(run, rng, 3)
    git(run, "push", "origin", "main")
    let_settle(quick_mount.settle_s)
    git(origin, "fetch", str(hub), "main")
    assert git(origin, "rev-parse", "FETCH_HEAD") == inside
    quick_mount.stop()
    quick_mount.restart()
    git(origin, "reset", "--hard", "FETCH_HEAD")
    outside = change(origin, rng, 3)
    git(origin, "push", str(hub), "main")
    git(hub, "gc", "--prune=now")
    git(run, "pull", "--ff-only", "origin", "main")
    assert head(run) == outside
    git(run / "side", "merge", "main")
    assert {path: each for path, each in digest_tree(run / "side").items() if path != ".git"} == {
        path: each for path, each in digest_tree(origin).items() if not path.startswith(".git/")
    }
    for repository in (run, hub):
        git(repository, "fsck", "--strict")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "gc.auto=0", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **IDENTITY},
    )
    assert done.returncode == 0, f"git {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def plant(folder: Path, rng: random.Random) -> Path:
    """A repository with some history on `main`."""
    folder.mkdir()
    git(folder, "init", "-b", "main")
    change(folder, rng, COMMITS)
    return folder


def change(folder: Path, rng: random.Random, commits: int) -> str:
    """So many commits, each of a few files; the id of the last one."""
    for number in range(commits):
        for name in ("large.bin", f"folder-{number % 4}/text.txt", f"file-{rng.randrange(10)}"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(rng.randbytes(50_000 if name == "large.bin" else 300))
        git(folder, "add", "--all")
        git(folder, "commit", "-m", f"change {number}")
    return head(folder)


def head(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD")


def assert_clean(folder: Path) -> None:
    git(folder, "fsck", "--strict")
    assert git(folder, "status", "--porcelain") == ""


def bring_back(mount: Mount, save: Save) -> None:
    """Copy a save out of the version that holds it to where it was."""
    version = wait_until_recoverable(mount, "run", save)
    shutil.copytree(mount.history("run") / version / save.path, mount.path / "run" / save.path, symlinks=True)
