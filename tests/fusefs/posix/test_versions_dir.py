"""`.versions` is a read-only place: what may be done there, and that nobody walks into it unasked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from posixplaces import Place, opened, outcome, renameat2


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture
def saved(mounted: Place) -> Path:
    """The directory of a version, as tag "one" shows it: run/{model,sub/deep,link}."""
    (mounted.path / "sub").mkdir()
    (mounted.path / "model").write_bytes(b"weights" * 1000)
    (mounted.path / "sub" / "deep").write_bytes(b"deep")
    os.symlink("model", mounted.path / "link")
    os.setxattr(mounted.path / "model", "user.note", b"kept")
    os.mkdir(mounted.path / ".versions" / "one")
    (mounted.path / "model").write_bytes(b"changed")
    return mounted.path / ".versions" / "one"


def test_it_shows_what_was_saved(mounted: Place, saved: Path) -> None:
    assert (saved / "model").read_bytes() == b"weights" * 1000
    assert (saved / "sub" / "deep").read_bytes() == b"deep"
    assert os.readlink(saved / "link") == "model"
    assert os.getxattr(saved / "model", "user.note") == b"kept"
    assert sorted(os.listdir(saved)) == ["link", "model", "sub"]
    assert os.stat(saved / "model").st_size == 7000
    assert (mounted.path / "model").read_bytes() == b"changed"


def test_every_mutating_call_is_refused(mounted: Place, saved: Path) -> None:
    live = mounted.file("live")
    model = saved / "model"
    calls = {
        "open for writing": outcome(os.open, model, os.O_WRONLY),
        "open and truncate": outcome(os.open, model, os.O_RDONLY | os.O_TRUNC),
        "create": outcome(os.open, saved / "new", os.O_CREAT | os.O_WRONLY),
        "truncate": outcome(os.truncate, model, 0),
        "mkdir": outcome(os.mkdir, saved / "new"),
        "rmdir": outcome(os.rmdir, saved / "sub"),
        "unlink": outcome(os.unlink, model),
        "rename within": outcome(os.rename, model, saved / "other"),
        "rename out": outcome(os.rename, model, mounted.path / "out"),
        "rename in": outcome(os.rename, live, saved / "in"),
        "exchange": outcome(renameat2, model, live, 2),
        "link within": outcome(os.link, model, saved / "other"),
        "link in": outcome(os.link, live, saved / "in"),
        "symlink": outcome(os.symlink, "x", saved / "new"),
        "mknod": outcome(os.mkfifo, saved / "new"),
        "chmod": outcome(os.chmod, model, 0o600),
        "chown": outcome(os.chown, model, 1, 1),
        "utime": outcome(os.utime, model, (1, 1)),
        "setxattr": outcome(os.setxattr, model, "user.a", b"1"),
        "removexattr": outcome(os.removexattr, model, "user.note"),
        "mkdir deeper": outcome(os.mkdir, saved / "sub" / "new"),
        "unlink deeper": outcome(os.unlink, saved / "sub" / "deep"),
        "file beside versions": outcome(os.open, mounted.path / ".versions" / "f", os.O_CREAT | os.O_WRONLY),
        "symlink beside versions": outcome(os.symlink, "x", mounted.path / ".versions" / "s"),
        "remove a tag": outcome(os.unlink, mounted.path / ".versions" / "one"),
        "chmod .versions": outcome(os.chmod, mounted.path / ".versions", 0o700),
        "rmdir .versions": outcome(os.rmdir, mounted.path / ".versions"),
        "rename .versions": outcome(os.rename, mounted.path / ".versions", mounted.path / "v"),
    }
    assert calls == dict.fromkeys(calls, "EROFS")


def test_links_between_live_and_saved_are_refused(mounted: Place, saved: Path) -> None:
    assert outcome(os.link, saved / "model", mounted.path / "linked") in ("EXDEV", "EROFS")


def test_the_name_is_taken(mounted: Place) -> None:
    name = mounted.path / ".versions"
    mounted.file("f")
    (mounted.path / "d").mkdir()
    assert outcome(os.mkdir, name) == "EEXIST"
    assert outcome(os.symlink, "x", name) == "EEXIST"
    assert outcome(os.mkfifo, name) == "EEXIST"
    assert outcome(os.link, mounted.path / "f", name) == "EEXIST"
    assert outcome(os.rename, mounted.path / "f", name) in ("EEXIST", "EISDIR", "EROFS")
    assert outcome(os.rename, mounted.path / "d", name) in ("EEXIST", "ENOTEMPTY", "EROFS")
    assert outcome(os.open, name, os.O_CREAT | os.O_EXCL | os.O_WRONLY) == "EEXIST"


def test_mkdir_makes_a_version_and_names_it(mounted: Place) -> None:
    mounted.file("f", b"content")
    os.mkdir(mounted.path / ".versions" / "mine")
    assert (mounted.path / ".versions" / "mine" / "f").read_bytes() == b"content"
    assert outcome(os.mkdir, mounted.path / ".versions" / "mine") == "EEXIST"
    assert outcome(os.mkdir, mounted.path / ".versions" / "no/such") == "ENOENT"


def test_nobody_walks_into_it(mounted: Place, saved: Path) -> None:
    assert ".versions" not in os.listdir(mounted.path)
    assert ".versions" not in run("find", mounted.path)
    assert sum(len(files) for _, _, files in os.walk(mounted.path)) == 3
    shutil.rmtree(mounted.path / "sub")
    run("rm", "-rf", mounted.path / "model", mounted.path / "link")
    assert os.listdir(mounted.path) == []
    assert (saved / "model").read_bytes() == b"weights" * 1000
    mounted.path.rmdir()
    unit = mounted.path.parent / ".versions" / mounted.path.name
    assert (unit / "one" / "model").read_bytes() == b"weights" * 1000


def test_programs_that_read_trees(saved: Path, tmp_path: Path) -> None:
    assert len(run("find", f"{saved}/", "-type", "f").splitlines()) == 2
    run("tar", "-C", saved, "-cf", tmp_path / "t.tar", ".")
    run("cp", "-a", f"{saved}/.", tmp_path / "cp")
    run("diff", "-r", f"{saved}/", tmp_path / "cp")
    assert int(run("du", "-sb", "--apparent-size", f"{saved}/").split()[0]) >= 7004
    assert "model" in run("ls", "-laR", f"{saved}/")
    run("rsync", "-a", f"{saved}/", tmp_path / "rsync")
    run("diff", "-r", f"{saved}/", tmp_path / "rsync")


def test_inode_numbers_are_stable_and_files_keep_one(mounted: Place, saved: Path) -> None:
    version = Path(os.path.realpath(saved))
    first = {name: os.lstat(version / name).st_ino for name in ("model", "sub", "link", "sub/deep")}
    assert len(set(first.values())) == 4
    Path("/proc/sys/vm/drop_caches").write_text("2")
    again = {name: os.lstat(version / name).st_ino for name in first}
    assert again == first
    through = mounted.path / "sub" / ".versions" / version.name
    assert os.stat(through / "deep").st_ino == first["sub/deep"]
    assert os.stat(through).st_ino != first["sub"]


def test_dots_lead_up(saved: Path) -> None:
    version = os.path.realpath(saved)
    assert os.stat(f"{version}/sub/..").st_ino == os.stat(version).st_ino


def test_an_open_file_of_a_version(saved: Path) -> None:
    with opened(saved / "model", os.O_RDONLY) as fd:
        assert os.pread(fd, 7, 6993) == b"weights"
        assert outcome(os.write, fd, b"x") == "EBADF"
        assert outcome(os.fchmod, fd, 0o600) == "EROFS"


def test_a_mapping_of_a_version(saved: Path) -> None:
    import mmap

    with opened(saved / "model", os.O_RDONLY) as fd:
        with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as shared:
            assert shared[:] == b"weights" * 1000
        with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private:
            private[:2] = b"xx"
    assert (saved / "model").read_bytes() == b"weights" * 1000
