"""Rollback on a mount: the tree of a version comes back, what was there stays reachable, and who has files
open keeps them.

The one rule: what a tree is, is seen by a client (lstat, read, readlink, listxattr), before and after.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernelmounts import poll
from mounting import Mount, may_pass_through

SETTLE_S = 0.3


@pytest.fixture(params=["auto", "plain"])
def place(request: pytest.FixtureRequest, mount_factory: Callable[..., Mount]) -> Mount:
    """A mount that settles fast, on each write path."""
    return mount_factory(config={"settle_s": SETTLE_S, "write_path": request.param})


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client sees of one name; `twin` is the first other name of the same inode."""

    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    size: int
    nlink: int
    content: str
    xattrs: tuple[tuple[str, bytes], ...]
    twin: str


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def look(top: Path) -> dict[str, Seen]:
    """Everything at and below a directory, by relative path; the kernel's caches are used as they are."""
    seen: dict[str, Seen] = {}
    names: dict[int, str] = {}
    for folder, directories, files in os.walk(top):
        for path in [Path(folder), *(Path(folder, name) for name in (*directories, *files))]:
            facts, relative = path.lstat(), str(path.relative_to(top))
            if stat.S_ISREG(facts.st_mode):
                content = digest(path.read_bytes())
            else:
                content = os.readlink(path) if path.is_symlink() else ""
            seen[relative] = Seen(
                facts.st_mode,
                (facts.st_uid, facts.st_gid),
                facts.st_mtime_ns,
                facts.st_size if not path.is_dir() or path.is_symlink() else 0,
                facts.st_nlink,
                content,
                tuple(
                    (name, os.getxattr(path, name, follow_symlinks=False))
                    for name in sorted(os.listxattr(path, follow_symlinks=False))
                ),
                names.setdefault(facts.st_ino, relative) if stat.S_ISREG(facts.st_mode) else relative,
            )
    return seen


@contextlib.contextmanager
def mapped_and_closed(path: Path, length: int) -> Iterator[int]:
    """The address of a shared mapping of a new file without an open descriptor (Python's own keeps one)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with path.open("w+b") as file:
        file.truncate(length)
        address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    try:
        yield address
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def roll_back(mount: Mount, *units: str, to: str) -> list[dict[str, object]]:
    answer = mount.ask("rollback", *(str(mount.path / unit) for unit in units), "--to", to)
    assert isinstance(answer, list)
    return answer


def make_run(run: Path) -> None:
    """One of everything that a version holds."""
    (run / "deep/er").mkdir(parents=True)
    (run / "empty").mkdir(mode=0o750)
    (run / "large").write_bytes(os.urandom(900_000))
    (run / "small").write_bytes(b"small")
    (run / "nothing").write_bytes(b"")
    (run / "deep/er/file").write_bytes(b"deep" * 1000)
    (run / "script").write_bytes(b"#!/bin/sh\n")
    (run / "script").chmod(0o755)
    os.setxattr(run / "large", "user.kept", b"value")
    os.setxattr(run / "deep", "user.of-a-directory", b"d")
    (run / "pointer").symlink_to("deep/er/file")
    os.link(run / "small", run / "deep/twin")
    with (run / "sparse").open("wb") as sparse:
        sparse.seek(1 << 20)
        sparse.write(b"end")
    os.mkfifo(run / "pipe")


def wreck(run: Path) -> None:
    """Change everything that can be changed."""
    (run / "large").write_bytes(b"overwritten")
    with (run / "small").open("ab") as small:
        small.write(b" appended")
    shutil.rmtree(run / "deep")
    (run / "deep").write_bytes(b"a file where a directory was")
    (run / "empty").rmdir()
    (run / "empty").symlink_to("large")
    (run / "pointer").unlink()
    (run / "pointer").mkdir()
    (run / "pointer/new").write_bytes(b"new")
    (run / "script").chmod(0o600)
    (run / "nothing").rename(run / "renamed")
    os.setxattr(run / "sparse", "user.new", b"n")
    (run / "pipe").unlink()
    (run / "added/below").mkdir(parents=True)
    (run / "added/below/file").write_bytes(b"added")
    run.chmod(0o711)


def test_everything_that_a_version_holds_comes_back_and_a_rollback_can_be_undone(place: Mount) -> None:
    run = place.path / "run"
    run.mkdir()
    make_run(run)
    place.publish("run", tag="good")
    before = look(run)
    wreck(run)
    wrecked = look(run)
    (answer,) = roll_back(place, "run", to="good")
    assert look(run) == before
    *others, last = place.versions("run")
    good = next(version for version in others if "good" in version.tags)
    assert answer["origin"] == "rollback" and answer["number"] == last.number
    assert (last.root, last.state) == (good.root, good.state)
    roll_back(place, "run", to=str(answer["before"]))
    assert look(run) == wrecked
    roll_back(place, "run", to="good")
    assert look(run) == before
    place.kill9()
    place.restart()
    assert look(run) == before
    assert place.verified("run")


def test_what_did_not_change_keeps_its_inode_and_what_did_gets_another(place: Mount) -> None:
    run = place.path / "run"
    (run / "kept").mkdir(parents=True)
    (run / "kept/same").write_bytes(b"same" * 5000)
    (run / "kept/other").write_bytes(b"other")
    place.publish("run", tag="good")
    (run / "kept/other").write_bytes(b"changed")
    inos = {name: (run / name).lstat().st_ino for name in (".", "kept", "kept/same", "kept/other")}
    roll_back(place, "run", to="good")
    moved = [name for name, ino in inos.items() if (run / name).lstat().st_ino != ino]
    assert moved == ["kept/other"]


def test_who_has_a_file_open_or_mapped_keeps_it_and_who_writes_writes_to_nobody(place: Mount) -> None:
    run = place.path / "run"
    run.mkdir()
    old, new = os.urandom(300_000), os.urandom(300_000)
    (run / "file").write_bytes(old)
    (run / "same").write_bytes(old)
    place.publish("run", tag="good")
    (run / "next").write_bytes(new)
    (run / "next").rename(run / "file")
    with (run / "file").open("rb") as reader, (run / "open").open("w+b", buffering=0) as writer:
        mapping = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
        writer.write(b"\x00written")
        with (run / "same").open("r+b", buffering=0) as second:
            roll_back(place, "run", to="good")
            second.write(b"too late")
            assert os.fstat(second.fileno()).st_nlink == 0
        writer.write(b" and on")
        writer.seek(0)
        assert writer.read() == b"\x00written and on"
        assert os.fstat(writer.fileno()).st_nlink == 0
        assert digest(reader.read()) == digest(new) == digest(bytes(mapping))
        mapping.close()
    assert sorted(os.listdir(run)) == ["file", "same"]
    assert digest((run / "file").read_bytes()) == digest(old) == digest((run / "same").read_bytes())


def test_a_process_stays_in_a_directory_that_is_there_before_and_after(place: Mount) -> None:
    run = place.path / "run"
    (run / "work").mkdir(parents=True)
    (run / "work/a").write_bytes(b"a")
    place.publish("run", tag="good")
    (run / "work/a").unlink()
    (run / "work/b").write_bytes(b"b")
    directory = os.open(run / "work", os.O_PATH)
    try:
        roll_back(place, "run", to="good")
        inside = os.open("a", os.O_RDONLY, dir_fd=directory)
        os.close(inside)
        with pytest.raises(FileNotFoundError):
            os.stat("b", dir_fd=directory)
    finally:
        os.close(directory)


def test_what_was_closed_just_now_is_in_a_version_although_a_file_beside_it_is_being_written(
    place: Mount,
) -> None:
    run = place.path / "run"
    run.mkdir()
    (run / "a").write_bytes(b"first")
    place.publish("run", tag="good")
    with (run / "slow").open("wb", buffering=0) as slow:
        slow.write(b"\x00\x01binary")
        (run / "fresh").write_bytes(b"closed a moment ago")
        (answer,) = roll_back(place, "run", to="good")
    assert sorted(os.listdir(run)) == ["a"]
    saved = place.history("run") / str(answer["before"]) / "fresh"
    assert saved.read_bytes() == b"closed a moment ago"


@pytest.mark.skipif(not may_pass_through(), reason="on the plain path a mapped file is an open one")
def test_what_is_mapped_and_closed_is_in_a_pre_image(mount_factory: Callable[..., Mount]) -> None:
    """By passthrough; on the plain path a mapping keeps its descriptor, so the file is an open one."""
    place = mount_factory(config={"settle_s": SETTLE_S})
    assert place.facts("status", str(place.path))["write_path"] == "passthrough"
    run = place.path / "run"
    run.mkdir()
    (run / "a").write_bytes(b"first")
    place.publish("run", tag="good")
    with mapped_and_closed(run / "mapped", 1 << 16) as mapping:
        ctypes.memmove(mapping, b"mapped", 6)
        roll_back(place, "run", to="good")
    assert sorted(os.listdir(run)) == ["a"]

    def saved() -> bool:
        return any((place.history("run") / name / "mapped").exists() for name in place.version_names("run"))

    assert poll(saved, 60), place.log_tail()


def test_several_units_are_one_step_or_nothing(place: Mount) -> None:
    for name in ("one", "two"):
        (place.path / name).mkdir()
        (place.path / name / "file").write_bytes(name.encode())
        place.publish(name, tag="good")
        (place.path / name / "file").write_bytes(b"bad")
    roll_back(place, "one", "two", to="good")
    assert [(place.path / name / "file").read_bytes() for name in ("one", "two")] == [b"one", b"two"]
    place.cli("untag", str(place.path / "two"), "good")
    (place.path / "one/file").write_bytes(b"bad again")
    paths = [str(place.path / name) for name in ("one", "two")]
    refused = place.cli("rollback", *paths, "--to", "good", check=False)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert (place.path / "one/file").read_bytes() == b"bad again"


def test_a_removed_unit_comes_back_and_goes_on_with_its_history(place: Mount) -> None:
    run = place.path / "run"
    run.mkdir(mode=0o750)
    make_run(run)
    place.publish("run", tag="good")
    before = look(run)
    shutil.rmtree(run)
    assert not run.exists()
    roll_back(place, "run", to="good")
    assert look(run) == before
    shutil.rmtree(run)
    run.mkdir()
    roll_back(place, "run", to="good")
    assert look(run) == before
    (run / "more").write_bytes(b"more")
    place.publish("run")
    place.stop()
    place.restart()
    assert (run / "more").read_bytes() == b"more"
    assert len(place.versions("run")) >= 2


def test_units_that_lie_in_a_unit_and_unversioned_directories_stay(
    mount_factory: Callable[..., Mount],
) -> None:
    mount = mount_factory(config={"settle_s": SETTLE_S, "units": ["/*", "/*/inner/*"]})
    run = mount.path / "run"
    run.mkdir()
    (run / "file").write_bytes(b"old")
    mount.publish("run", tag="good")
    (run / "file").write_bytes(b"new")
    (run / "inner/unit").mkdir(parents=True)
    (run / "inner/unit/own").write_bytes(b"own")
    (run / "inner/between").write_bytes(b"goes")
    (run / "scratch").mkdir()
    os.setxattr(run / "scratch", "user.ckptfs.versions", b"off")
    (run / "scratch/tmp").write_bytes(b"tmp")
    roll_back(mount, "run", to="good")
    assert (run / "file").read_bytes() == b"old"
    assert (run / "inner/unit/own").read_bytes() == b"own"
    assert (run / "scratch/tmp").read_bytes() == b"tmp"
    assert os.listdir(run / "inner") == ["unit"]


def test_files_of_the_root_are_rolled_back_alone(place: Mount) -> None:
    (place.path / "notes").write_bytes(b"old")
    place.publish("", tag="good")
    (place.path / "run").mkdir()
    (place.path / "run/file").write_bytes(b"stays")
    (place.path / "notes").unlink()
    roll_back(place, "", to="good")
    assert (place.path / "notes").read_bytes() == b"old"
    assert (place.path / "run/file").read_bytes() == b"stays"


def test_a_hard_link_to_another_unit_survives_there(place: Mount) -> None:
    for name in ("one", "two"):
        (place.path / name).mkdir()
        (place.path / name / "own").write_bytes(b"own")
        place.publish(name, tag="good")
    (place.path / "one/shared").write_bytes(b"shared")
    os.link(place.path / "one/shared", place.path / "two/shared")
    roll_back(place, "one", to="good")
    assert (place.path / "two/shared").read_bytes() == b"shared"
    assert (place.path / "two/shared").stat().st_nlink == 1
    assert os.listdir(place.path / "one") == ["own"]


@pytest.mark.parametrize("asked", ["run/file", "run@good", "absent", "run run"])
def test_what_is_no_unit_is_refused_with_one_line(mount: Mount, asked: str) -> None:
    run = mount.path / "run"
    run.mkdir()
    (run / "file").write_bytes(b"old")
    mount.publish("run", tag="good")
    refused = mount.cli(
        "rollback", *(str(mount.path / one) for one in asked.split()), "--to", "good", check=False
    )
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert mount.cli("rollback", str(run), "--to", "99", check=False).returncode == 1
    assert mount.cli("rollback", str(run), check=False).returncode == 2


def test_a_rollback_beside_busy_writers_and_readers(place: Mount) -> None:
    run = place.path / "run"
    run.mkdir()
    contents = {f"file{n}": os.urandom(40_000) for n in range(20)}
    for name, content in contents.items():
        (run / name).write_bytes(content)
    place.publish("run", tag="good")
    ended, errors = threading.Event(), []
    known = {digest(content) for content in contents.values()} | {digest(b"new" * 20_000)}

    def work(number: int) -> None:
        at = 0
        while not ended.is_set():
            at += 1
            path = run / f"file{(at + number) % 20}"
            try:
                part = run / f".part{number}"
                part.write_bytes(b"new" * 20_000)
                part.rename(path)
                if digest(path.read_bytes()) not in known:
                    errors.append(f"{path.name} is a mixture")
            except FileNotFoundError:
                pass  # a rollback came in between
            except OSError as e:
                errors.append(repr(e))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for _ in range(5):
        roll_back(place, "run", to="good")
    ended.set()
    for worker in workers:
        worker.join()
    assert errors == []
    roll_back(place, "run", to="good")
    found = {path.name: digest(path.read_bytes()) for path in run.iterdir()}
    assert found == {name: digest(content) for name, content in contents.items()}
