"""What `cp -a`, rsync and tar bring in and take out again is the same tree (no ACLs)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from posixplaces import Place


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def plant(root: Path) -> Path:
    """A tree with one of everything."""
    (root / "checkpoint-1" / "empty").mkdir(parents=True)
    (root / "checkpoint-1" / "model.bin").write_bytes(os.urandom(400_000))
    (root / "checkpoint-1" / "small").write_bytes(b"small")
    (root / "checkpoint-1" / "zero").write_bytes(b"")
    with open(root / "sparse", "wb") as f:
        f.seek(5_000_000)
        f.write(b"end")
    os.link(root / "checkpoint-1" / "model.bin", root / "linked.bin")
    os.symlink("checkpoint-1", root / "latest-link")
    os.symlink("nowhere", root / "dangling")
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.setxattr(root / "checkpoint-1" / "small", "user.note", b"kept")
    os.setxattr(root / "checkpoint-1", "user.note", b"on a directory")
    os.chown(root / "checkpoint-1" / "small", 1234, 5678)
    (root / "checkpoint-1" / "small").chmod(0o4751)
    (root / "checkpoint-1").chmod(0o2750)
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, ns=(10**18, 10**18 + number), follow_symlinks=False)
    return root


def differences(one: Path, two: Path) -> str:
    return run("rsync", "-aHXnci", "--delete", f"{one}/", f"{two}/")


@pytest.mark.parametrize("by", ["cp", "rsync", "tar"])
def test_in_and_out(place: Place, tmp_path: Path, by: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    plant(source)
    inside = place.path / "tree"
    copy(by, source, inside)
    assert differences(source, inside) == ""
    place.let_store(inside / "checkpoint-1" / "model.bin", inside / "checkpoint-1" / "small")
    assert differences(source, inside) == ""
    copy(by, inside, out)
    assert differences(source, out) == ""


def copy(by: str, source: Path, target: Path) -> None:
    if by == "cp":
        run("cp", "-a", source, target)
    elif by == "rsync":
        run("rsync", "-aHX", f"{source}/", f"{target}/")
    else:
        target.mkdir()
        run("sh", "-c", f"tar -C {source} --xattrs -cf - . | tar -C {target} --xattrs -xpf -")


def test_out_of_a_version(mounted: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    plant(source)
    run("cp", "-a", source, mounted.path / "run")
    os.mkdir(mounted.path / ".versions" / "saved")
    saved = mounted.path / ".versions" / "saved" / "run"
    assert differences(source, saved) == ""
    shutil.rmtree(mounted.path / "run")
    assert differences(source, saved) == ""
    run("cp", "-a", saved, tmp_path / "out")
    assert differences(source, tmp_path / "out") == ""
    run("cp", "-a", saved, mounted.path / "restored")
    assert differences(source, mounted.path / "restored") == ""


def test_mirroring_with_delete(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    plant(source)
    inside = place.path / "tree"
    run("rsync", "-aHX", "--delete", f"{source}/", f"{inside}/")
    shutil.rmtree(source / "checkpoint-1" / "empty")
    (source / "checkpoint-1" / "small").write_bytes(b"changed")
    (source / "new").write_bytes(b"new")
    run("rsync", "-aHX", "--delete", f"{source}/", f"{inside}/")
    assert differences(source, inside) == ""
