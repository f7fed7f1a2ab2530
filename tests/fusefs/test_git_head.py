"""The commit of a work tree: as git says it, and never what its user could not read."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ckptfs.fusefs.git_head import User, commit_of

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which needs root")
ME = User(os.geteuid(), frozenset({os.getegid()}))
STRANGER = User(4711, frozenset({4711}))
SECRET = "5ec2e7" * 6 + "5ec2"


def git(tree: Path, *words: str) -> str:
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tree), "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    }  # fmt: skip
    command = ["git", "-C", str(tree), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A work tree with one commit."""
    tree = tmp_path / "tree"
    tree.mkdir()
    git(tree, "init", "-q", "-b", "main")
    git(tree, "commit", "-q", "--allow-empty", "-m", "one")
    return tree


def commit(directory: Path, user: User = ME) -> str:
    return commit_of(str(directory), "/", user)


@needs_git
def test_the_commit_is_what_git_says(tree: Path) -> None:
    one = git(tree, "rev-parse", "HEAD")
    assert commit(tree) == one
    below = tree / "a" / "b"
    below.mkdir(parents=True)
    assert commit(below) == one
    git(tree, "commit", "-q", "--allow-empty", "-m", "two")
    two = git(tree, "rev-parse", "HEAD")
    assert commit(below) == two != one
    git(tree, "pack-refs", "--all")
    assert commit(tree) == two
    git(tree, "checkout", "-q", "--detach", one)
    assert commit(tree) == one
    git(tree, "checkout", "-q", "-b", "feature/x-1.0")
    assert commit(tree) == one


@needs_git
def test_a_further_work_tree(tree: Path, tmp_path: Path) -> None:
    git(tree, "worktree", "add", "-q", "-b", "other", str(tmp_path / "other"))
    git(tmp_path / "other", "commit", "-q", "--allow-empty", "-m", "there")
    assert commit(tmp_path / "other") == git(tmp_path / "other", "rev-parse", "HEAD") != commit(tree)


@needs_git
def test_a_repository_with_sha256(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "--object-format=sha256")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    assert len(commit(tmp_path)) == 64 and commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD")


def make(tree: Path, head: str = SECRET, **refs: str) -> Path:
    """A `.git` made by hand."""
    (tree / ".git" / "refs" / "heads").mkdir(parents=True)
    (tree / ".git" / "HEAD").write_text(head)
    for name, content in refs.items():
        (tree / ".git" / "refs" / "heads" / name).write_text(content)
    return tree


@pytest.mark.parametrize(
    "head",
    [
        "", "ref: refs/heads/none", "ref: ../../secret", "ref: refs/../../../secret", "ref: /etc/passwd",
        "a" * 39, "A" * 40, "ref: refs/heads", "\0",
    ],
)  # fmt: skip
def test_no_commit(tmp_path: Path, head: str) -> None:
    (tmp_path / "secret").write_text(SECRET)
    assert commit(make(tmp_path / "tree", head)) == ""


def test_no_work_tree(tmp_path: Path) -> None:
    assert commit_of(str(tmp_path), str(tmp_path), ME) == ""
    assert commit(tmp_path / "missing") == ""


def test_symbolic_links_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secrets" / "heads").mkdir(parents=True)
    (tmp_path / "secrets" / "HEAD").write_text(SECRET)
    (tmp_path / "secrets" / "heads" / "main").write_text(SECRET)
    one = make(tmp_path / "one")
    (one / ".git" / "HEAD").unlink()
    (one / ".git" / "HEAD").symlink_to(tmp_path / "secrets" / "HEAD")
    two = make(tmp_path / "two", "ref: refs/heads/main")
    shutil.rmtree(two / ".git" / "refs")
    (two / ".git" / "refs").symlink_to(tmp_path / "secrets")
    three = tmp_path / "three"
    three.mkdir()
    (three / ".git").symlink_to(tmp_path / "secrets")
    assert [commit(one), commit(two), commit(three)] == ["", "", ""]


def test_a_fifo_holds_nobody_up(tmp_path: Path) -> None:
    tree = make(tmp_path / "tree", "ref: refs/heads/pipe")
    os.mkfifo(tree / ".git" / "refs" / "heads" / "pipe")
    assert commit(tree) == ""


@needs_root
def test_what_a_user_cannot_read_is_not_read_for_him(tmp_path: Path) -> None:
    for above in [tmp_path, *tmp_path.parents]:
        if above.stat().st_mode & 0o001 == 0 and above != Path("/tmp"):
            above.chmod(above.stat().st_mode | 0o011)
    tree = make(tmp_path / "tree")
    head = tree / ".git" / "HEAD"
    assert commit(tree, STRANGER) == SECRET, "all may read it"
    head.chmod(0o600)
    assert commit(tree, STRANGER) == ""
    head.chmod(0o640)
    os.chown(head, 0, 4711)
    assert commit(tree, STRANGER) == SECRET, "his group may"
    (tree / ".git").chmod(0o700)
    assert commit(tree, STRANGER) == ""
    os.chown(tree / ".git", 4711, 0)
    assert commit(tree, STRANGER) == SECRET


@needs_root
def test_a_git_file_leads_into_no_closed_directory(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "HEAD").write_text(SECRET)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {secret}")
    assert commit(tree) == SECRET
    assert commit(tree, STRANGER) == ""
    (tree / ".git").write_text("gitdir: ../secret\n")
    assert commit(tree) == SECRET
    assert commit(tree, STRANGER) == ""
