"""open(2), creat(2): modes, flags, names, and what each refuses."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from posixplaces import GROUP, USER, Place, in_child, mode_of, opened, outcome, refused


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_mode_of_a_new_file_is_masked(place: Place, umask: int) -> None:
    def create() -> None:
        os.umask(umask)
        os.close(os.open(place.path / "new", os.O_CREAT | os.O_WRONLY, 0o6777))
        os.mkdir(place.path / "newdir", 0o777)

    in_child(create)
    assert mode_of(place.path / "new") == 0o6777 & ~umask
    assert mode_of(place.path / "newdir") == 0o777 & ~umask


def test_new_file_belongs_to_its_creator(place: Place) -> None:
    place.path.chmod(0o777)
    place.as_user(lambda: os.close(os.open("mine", os.O_CREAT | os.O_WRONLY, 0o600)))
    made = os.stat(place.path / "mine")
    assert (made.st_uid, made.st_gid, made.st_size, made.st_nlink) == (USER, GROUP, 0, 1)


def test_create_exclusive(place: Place) -> None:
    path = place.path / "one"
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        os.write(fd, b"x")
    with refused(errno.EEXIST):
        os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.symlink("nowhere", place.path / "dangling")
    with refused(errno.EEXIST):
        os.open(place.path / "dangling", os.O_CREAT | os.O_EXCL | os.O_WRONLY)


def test_create_through_a_dangling_link(place: Place) -> None:
    os.symlink("target", place.path / "link")
    with opened(place.path / "link", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"through")
    assert (place.path / "target").read_bytes() == b"through"


def test_open_of_directories(place: Place) -> None:
    (place.path / "d").mkdir()
    place.file("f")
    assert outcome(os.open, place.path / "d", os.O_RDWR) == "EISDIR"
    assert outcome(os.open, place.path / "d", os.O_WRONLY) == "EISDIR"
    assert outcome(os.open, place.path / "d", os.O_RDONLY | os.O_CREAT) == "EISDIR"
    assert outcome(os.open, place.path / "f", os.O_RDONLY | os.O_DIRECTORY) == "ENOTDIR"
    assert outcome(os.open, place.path / "f" / "x", os.O_RDONLY) == "ENOTDIR"
    assert outcome(os.open, place.path / "missing" / "x", os.O_RDONLY | os.O_CREAT) == "ENOENT"
    with opened(place.path / "d", os.O_RDONLY) as fd, refused(errno.EISDIR):
        os.read(fd, 10)


def test_no_follow_and_loops(place: Place) -> None:
    os.symlink("loop2", place.path / "loop1")
    os.symlink("loop1", place.path / "loop2")
    place.file("f")
    os.symlink("f", place.path / "good")
    assert outcome(os.open, place.path / "loop1", os.O_RDONLY) == "ELOOP"
    assert outcome(os.stat, place.path / "loop1") == "ELOOP"
    assert outcome(os.open, place.path / "good", os.O_RDONLY | os.O_NOFOLLOW) == "ELOOP"


def test_forty_links_can_be_followed_and_forty_one_cannot(place: Place) -> None:
    place.file("0", b"end")
    for number in range(1, 42):
        os.symlink(str(number - 1), place.path / str(number))
    assert (place.path / "40").read_bytes() == b"end"
    assert outcome(os.open, place.path / "41", os.O_RDONLY) == "ELOOP"


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127 + "x", " ", "\n", "-", "...", ".hidden", "a\\b*?[c]"])
def test_every_name_of_255_bytes_works(place: Place, name: str) -> None:
    path = place.path / name
    path.write_bytes(b"named")
    assert os.listdir(place.path) == [name]
    path.rename(place.path / "other")
    (place.path / "other").rename(path)
    assert path.read_bytes() == b"named"
    path.unlink()
    assert os.listdir(place.path) == []


def test_names_that_are_no_text(place: Place) -> None:
    name = b"\xff\xfe\x01raw"
    directory = os.fsencode(place.path)
    with open(directory + b"/" + name, "wb") as f:
        f.write(b"raw")
    assert os.listdir(directory) == [name]


def test_names_of_256_bytes_are_too_long(place: Place) -> None:
    long = place.path / ("n" * 256)
    place.file("f")
    calls = [
        outcome(os.open, long, os.O_CREAT | os.O_WRONLY),
        outcome(os.mkdir, long),
        outcome(os.symlink, "x", long),
        outcome(os.mknod, long, stat.S_IFIFO | 0o600),
        outcome(os.link, place.path / "f", long),
        outcome(os.rename, place.path / "f", long),
        outcome(os.unlink, long),
        outcome(os.rmdir, long),
        outcome(os.stat, long),
    ]
    assert calls == ["ENAMETOOLONG"] * len(calls)


def test_paths_of_4096_bytes_are_too_long(place: Place) -> None:
    path = os.fsencode(place.path) + b"/." * 2048
    assert outcome(os.stat, path) == "ENAMETOOLONG"


def test_deep_directories(place: Place) -> None:
    here = os.open(place.path, os.O_RDONLY)
    for _ in range(100):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    fd = os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=here)
    os.write(fd, b"deep")
    os.close(fd)
    assert os.stat("bottom", dir_fd=here).st_size == 4
    os.close(here)


def test_truncating_open(place: Place, age: str) -> None:
    path = place.file(content=b"old content")
    if age == "stored":
        place.let_store(path)
    before = os.stat(path)
    with opened(path, os.O_WRONLY | os.O_TRUNC):
        after = os.stat(path)
        assert after.st_size == after.st_blocks == 0
        assert after.st_mtime_ns > before.st_mtime_ns
    assert path.read_bytes() == b""


def test_truncating_open_for_reading_truncates(place: Place, age: str) -> None:
    path = place.file(content=b"old content")
    if age == "stored":
        place.let_store(path)
    with opened(path, os.O_RDONLY | os.O_TRUNC) as fd:
        assert os.read(fd, 100) == b""
    assert path.stat().st_size == 0


def test_permission_is_checked_at_open_only(place: Place) -> None:
    path = place.file(content=b"readable", mode=0o644)

    def read_after_chmod() -> bytes:
        assert outcome(os.open, "file", os.O_RDWR) == "EACCES"
        return b"ok"

    assert place.as_user(read_after_chmod) == b"ok"
    with opened(path, os.O_RDONLY) as fd:
        path.chmod(0)
        assert os.read(fd, 8) == b"readable"
    assert place.as_user(lambda: outcome(os.open, "file", os.O_RDONLY)) == "EACCES"


def test_new_file_without_rights_is_writable_through_its_own_descriptor(place: Place) -> None:
    place.path.chmod(0o777)

    def write_to_it() -> int:
        with opened("readonly", os.O_CREAT | os.O_RDWR, 0o400) as fd:
            os.write(fd, b"git does this")
            return os.pread(fd, 20, 0) == b"git does this"

    assert place.as_user(write_to_it)


def test_directory_without_search_right(place: Place) -> None:
    (place.path / "closed").mkdir()
    (place.path / "closed" / "f").write_bytes(b"x")
    (place.path / "closed").chmod(0o644)

    def look() -> list[str]:
        return [
            outcome(os.stat, "closed/f"),
            outcome(os.listdir, "closed"),
            outcome(os.open, "closed/new", os.O_CREAT | os.O_WRONLY),
        ]

    assert place.as_user(look) == ["EACCES", "ok", "EACCES"]


def test_directory_without_write_right(place: Place) -> None:
    place.file("f")
    (place.path / "d").mkdir()

    def change() -> list[str]:
        return [
            outcome(os.open, "new", os.O_CREAT | os.O_WRONLY),
            outcome(os.mkdir, "newdir"),
            outcome(os.unlink, "f"),
            outcome(os.rmdir, "d"),
            outcome(os.rename, "f", "g"),
            outcome(os.symlink, "x", "s"),
            outcome(os.utime, "f", None),
            outcome(os.truncate, "f", 0),
        ]

    assert set(place.as_user(change)) == {"EACCES"}


def test_opening_a_device_or_fifo_does_not_reach_the_file_system(place: Place) -> None:
    os.mkfifo(place.path / "fifo")
    with refused(errno.ENXIO):
        os.open(place.path / "fifo", os.O_WRONLY | os.O_NONBLOCK)
    with (
        opened(place.path / "fifo", os.O_RDONLY | os.O_NONBLOCK) as reader,
        opened(place.path / "fifo", os.O_WRONLY | os.O_NONBLOCK) as writer,
    ):
        os.write(writer, b"through")
        assert os.read(reader, 10) == b"through"


def test_path_descriptor(place: Place) -> None:
    path = place.file(content=b"x", mode=0o000)
    with opened(path, os.O_PATH) as fd:
        assert os.fstat(fd).st_size == 1
        with refused(errno.EBADF):
            os.read(fd, 1)
