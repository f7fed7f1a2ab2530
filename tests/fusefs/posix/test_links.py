"""link(2), unlink(2), symlink(2), readlink(2), and files that are open without a name."""

from __future__ import annotations

import errno
import os

from posixplaces import Place, opened, outcome, refused


def test_hard_links_are_one_file(place: Place, age: str) -> None:
    (place.path / "d").mkdir()
    path = place.aged(age, b"shared")
    other = place.path / "d" / "other"
    before = path.stat()
    os.link(path, other)
    assert path.stat().st_ino == other.stat().st_ino
    assert path.stat().st_nlink == other.stat().st_nlink == 2
    assert path.stat().st_ctime_ns > before.st_ctime_ns
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with opened(other, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"!")
    assert path.read_bytes() == b"shared!"
    other.chmod(0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    assert other.read_bytes() == b"shared!"
    assert other.stat().st_nlink == 1


def test_what_link_refuses(place: Place) -> None:
    place.file("f")
    place.file("g")
    (place.path / "d").mkdir()
    assert outcome(os.link, place.path / "f", place.path / "g") == "EEXIST"
    assert outcome(os.link, place.path / "f", place.path / "f") == "EEXIST"
    assert outcome(os.link, place.path / "d", place.path / "e") == "EPERM"
    assert outcome(os.link, place.path / "missing", place.path / "e") == "ENOENT"
    assert outcome(os.link, place.path / "f", place.path / "missing" / "e") == "ENOENT"
    assert outcome(os.link, place.path / "f", "/dev/shm/e") == "EXDEV"


def test_links_to_symbolic_links_and_special_files(place: Place) -> None:
    os.symlink("nowhere", place.path / "s")
    os.link(place.path / "s", place.path / "s2", follow_symlinks=False)
    assert os.readlink(place.path / "s2") == "nowhere"
    os.mkfifo(place.path / "p")
    os.link(place.path / "p", place.path / "p2")
    assert os.stat(place.path / "p").st_nlink == 2


def test_unlink(place: Place) -> None:
    path = place.file()
    path.unlink()
    assert outcome(os.unlink, path) == "ENOENT"
    assert outcome(os.stat, path) == "ENOENT"
    os.symlink("nowhere", place.path / "s")
    os.unlink(place.path / "s")
    assert os.listdir(place.path) == []


def test_only_the_owner_may_unlink_in_a_sticky_directory(place: Place) -> None:
    place.path.chmod(0o1777)
    place.file("roots")
    place.as_user(lambda: os.close(os.open("theirs", os.O_CREAT | os.O_WRONLY)))
    place.as_user(lambda: os.mkdir("theirdir"))

    def try_all() -> list[str]:
        return [
            outcome(os.unlink, "theirs"),
            outcome(os.rename, "theirs", "x"),
            outcome(os.rmdir, "theirdir"),
            outcome(os.unlink, "roots"),
        ]

    assert place.as_user(try_all, uid=62000, gid=62000) == ["EPERM"] * 4
    assert place.as_user(lambda: outcome(os.unlink, "theirs")) == "ok"


def test_symbolic_links(place: Place) -> None:
    target = "t" * 4095
    os.symlink(target, place.path / "long")
    assert os.readlink(place.path / "long") == target
    assert os.lstat(place.path / "long").st_size == 4095
    assert os.lstat(place.path / "long").st_mode == 0o120777
    assert outcome(os.symlink, "t" * 4096, place.path / "longer") == "ENAMETOOLONG"
    assert outcome(os.symlink, "", place.path / "empty") == "ENOENT"
    assert outcome(os.symlink, "x", place.path / "long") == "EEXIST"
    place.file("f")
    assert outcome(os.readlink, place.path / "f") == "EINVAL"
    assert outcome(os.readlink, place.path) == "EINVAL"


def test_relative_links_are_followed(place: Place) -> None:
    (place.path / "d").mkdir()
    place.file("f", b"found")
    os.symlink("../f", place.path / "d" / "up")
    os.symlink("d", place.path / "dir")
    assert (place.path / "dir" / "up").read_bytes() == b"found"
    assert os.path.realpath(place.path / "dir" / "up") == os.path.realpath(place.path / "f")


def test_open_file_outlives_its_name(place: Place, age: str) -> None:
    path = place.aged(age, b"still here")
    with opened(path, os.O_RDWR) as fd:
        path.unlink()
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, 100, 0) == b"still here"
        os.pwrite(fd, b" and written", 10)
        assert os.pread(fd, 100, 0) == b"still here and written"
        os.ftruncate(fd, 5)
        os.fchmod(fd, 0o600)
        assert os.fstat(fd).st_size == 5
        os.fsync(fd)
        with opened(path, os.O_CREAT | os.O_EXCL | os.O_RDWR) as other:
            os.write(other, b"new")
            assert os.fstat(other).st_ino != os.fstat(fd).st_ino
        assert os.pread(fd, 100, 0) == b"still"
    assert path.read_bytes() == b"new"


def test_open_file_without_a_name_can_be_opened_through_proc(place: Place) -> None:
    path = place.file(content=b"hidden")
    with opened(path, os.O_RDONLY) as fd:
        path.unlink()
        with opened(f"/proc/self/fd/{fd}", os.O_RDWR) as again:
            os.pwrite(again, b"H", 0)
        assert os.pread(fd, 10, 0) == b"Hidden"
        with opened(place.path, os.O_RDONLY) as here, refused(errno.ENOENT):
            os.link(f"/proc/self/fd/{fd}", "back", dst_dir_fd=here, follow_symlinks=True)


def test_open_unlink_link_of_a_second_name(place: Place) -> None:
    path = place.file(content=b"x")
    os.link(path, place.path / "second")
    with opened(path, os.O_RDWR) as fd:
        path.unlink()
        os.link(place.path / "second", path)
        (place.path / "second").unlink()
        os.write(fd, b"written through the old descriptor")
    assert path.read_bytes() == b"written through the old descriptor"


def test_no_hidden_files_are_left_behind(place: Place) -> None:
    (place.path / "d").mkdir()
    fds = []
    for number in range(10):
        path = place.path / "d" / str(number)
        path.write_bytes(b"x")
        fds.append(os.open(path, os.O_RDONLY))
        path.unlink()
    assert os.listdir(place.path / "d") == []
    (place.path / "d").rmdir()
    for fd in fds:
        assert os.read(fd, 10) == b"x"
        os.close(fd)


def test_many_links(place: Place) -> None:
    path = place.file(content=b"x")
    for number in range(500):
        os.link(path, place.path / f"l{number}")
    assert path.stat().st_nlink == 501
    for number in range(500):
        os.unlink(place.path / f"l{number}")
    assert path.stat().st_nlink == 1


def test_trailing_slash(place: Place) -> None:
    place.file("f")
    name = os.fspath(place.path / "f") + "/"
    assert outcome(os.open, name, os.O_RDONLY) == "ENOTDIR"
    assert outcome(os.unlink, name) == "ENOTDIR"
    assert outcome(os.open, os.fspath(place.path / "new") + "/", os.O_CREAT | os.O_WRONLY) == "EISDIR"
    os.mkdir(os.fspath(place.path / "d") + "/")
    assert outcome(os.rmdir, os.fspath(place.path / "d") + "/") == "ok"
