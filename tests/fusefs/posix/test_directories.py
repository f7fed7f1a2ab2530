"""mkdir(2), rmdir(2), getdents(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil

import pytest
from posixplaces import Place, libc, mode_of, opened, outcome, refused


def test_what_mkdir_refuses(place: Place) -> None:
    place.file("f")
    (place.path / "d").mkdir()
    os.symlink("nowhere", place.path / "dangling")
    assert outcome(os.mkdir, place.path / "d") == "EEXIST"
    assert outcome(os.mkdir, place.path / "f") == "EEXIST"
    assert outcome(os.mkdir, place.path / "dangling") == "EEXIST"
    assert outcome(os.mkdir, place.path / "f" / "x") == "ENOTDIR"
    assert outcome(os.mkdir, place.path / "missing" / "x") == "ENOENT"


def test_what_rmdir_refuses(place: Place) -> None:
    place.file("f")
    (place.path / "d" / "e").mkdir(parents=True)
    os.symlink("d", place.path / "link")
    assert outcome(os.rmdir, place.path / "d") == "ENOTEMPTY"
    assert outcome(os.rmdir, place.path / "f") == "ENOTDIR"
    assert outcome(os.rmdir, place.path / "link") == "ENOTDIR"
    assert outcome(os.rmdir, place.path / "missing") == "ENOENT"
    assert outcome(os.rmdir, os.fspath(place.path / "d" / "e") + "/.") == "EINVAL"
    assert outcome(os.rmdir, os.fspath(place.path / "d" / "e") + "/..") == "ENOTEMPTY"
    assert outcome(os.unlink, place.path / "d") == "EISDIR"


def test_link_counts(place: Place) -> None:
    assert place.path.stat().st_nlink == 2
    (place.path / "a").mkdir()
    (place.path / "b").mkdir()
    place.file("f")
    assert place.path.stat().st_nlink == 4
    (place.path / "a").rename(place.path / "b" / "a")
    assert (place.path.stat().st_nlink, (place.path / "b").stat().st_nlink) == (3, 3)
    (place.path / "b" / "a").rmdir()
    assert (place.path / "b").stat().st_nlink == 2
    (place.path / "b").rmdir()
    assert place.path.stat().st_nlink == 2


def test_sticky_and_set_group_bits_are_inherited(place: Place) -> None:
    place.path.chmod(0o2777)
    os.chown(place.path, 0, 7000)
    place.path.chmod(0o3777)
    place.as_user(lambda: (os.mkdir("d", 0o755), os.close(os.open("f", os.O_CREAT | os.O_WRONLY, 0o644)))[0])
    assert (os.stat(place.path / "d").st_gid, mode_of(place.path / "d")) == (7000, 0o2755)
    assert (os.stat(place.path / "f").st_gid, mode_of(place.path / "f")) == (7000, 0o644)


def test_set_group_of_a_new_file_in_a_foreign_set_group_directory(place: Place) -> None:
    os.chown(place.path, 0, 7000)
    place.path.chmod(0o2777)

    def create(name: str) -> None:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o2775))

    place.as_user(lambda: create("stranger"), umask=0)
    place.as_user(lambda: create("member"), umask=0, groups=[7000])
    place.as_user(lambda: create("primary"), umask=0, gid=7000)
    assert mode_of(place.path / "stranger") == 0o775
    assert mode_of(place.path / "member") == 0o2775
    assert mode_of(place.path / "primary") == 0o2775


def test_times_of_the_parent(place: Place) -> None:
    def moves(change: object) -> bool:
        os.utime(place.path, ns=(10**9, 10**9))
        before = place.path.stat()
        change()  # type: ignore[operator]
        after = place.path.stat()
        return after.st_mtime_ns > before.st_mtime_ns and after.st_ctime_ns > before.st_ctime_ns

    assert moves((place.path / "d").mkdir)
    assert moves(lambda: place.file("f"))
    assert moves(lambda: os.link(place.path / "f", place.path / "g"))
    assert moves(lambda: os.symlink("x", place.path / "s"))
    assert moves(lambda: os.mkfifo(place.path / "p"))
    assert moves(lambda: (place.path / "f").rename(place.path / "h"))
    assert moves(lambda: (place.path / "h").rename(place.path / "d" / "h"))
    assert moves((place.path / "g").unlink)
    assert moves((place.path / "s").unlink)
    assert not moves(lambda: (place.path / "d" / "h").write_bytes(b"x"))
    assert not moves((place.path / "d" / "h").unlink)
    assert moves((place.path / "d").rmdir)


def test_a_directory_that_was_removed_while_open(place: Place) -> None:
    (place.path / "d").mkdir()
    with opened(place.path / "d", os.O_RDONLY) as fd:
        (place.path / "d").rmdir()
        assert os.fstat(fd).st_nlink == 0
        assert outcome(lambda: os.mkdir("x", dir_fd=fd)) == "ENOENT"
        assert outcome(lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd)) == "ENOENT"
        assert os.listdir(fd) == []
    assert outcome(os.stat, place.path / "d") == "ENOENT"


def test_listing_names_kinds_and_dots(place: Place) -> None:
    place.file("f")
    (place.path / "d").mkdir()
    os.symlink("f", place.path / "s")
    os.mkfifo(place.path / "p")
    with os.scandir(place.path) as listing:
        kinds = {e.name: (e.is_file(follow_symlinks=False), e.is_dir(), e.is_symlink()) for e in listing}
    assert kinds["f"] == (True, False, False)
    assert kinds["d"] == (False, True, False)
    assert kinds["s"] == (False, False, True)
    assert kinds["p"] == (False, False, False)
    names = raw_names(place.path / "d")
    assert sorted(names) == [b".", b".."]


class Dirent(ctypes.Structure):
    _fields_ = (
        ("d_ino", ctypes.c_uint64),
        ("d_off", ctypes.c_int64),
        ("d_reclen", ctypes.c_uint16),
        ("d_type", ctypes.c_uint8),
        ("d_name", ctypes.c_char * 256),
    )


libc.opendir.restype = ctypes.c_void_p
libc.readdir.restype = ctypes.POINTER(Dirent)
libc.readdir.argtypes = libc.closedir.argtypes = libc.telldir.argtypes = [ctypes.c_void_p]
libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
libc.telldir.restype = ctypes.c_long


def raw_names(path: object) -> list[bytes]:
    directory = libc.opendir(os.fsencode(path))  # type: ignore[arg-type]
    names = []
    while entry := libc.readdir(directory):
        names.append(entry.contents.d_name)
    libc.closedir(directory)
    return names


def test_inode_numbers_in_the_listing_are_those_of_stat(place: Place) -> None:
    place.file("f")
    (place.path / "d").mkdir()
    with os.scandir(place.path) as listing:
        for entry in listing:
            assert entry.inode() == os.lstat(entry.path).st_ino


def test_seekdir_goes_back_to_where_telldir_was(place: Place) -> None:
    for number in range(300):
        place.file(f"f{number}")
    directory = libc.opendir(os.fsencode(place.path))
    try:
        for _ in range(150):
            libc.readdir(directory)
        here = libc.telldir(directory)
        rest = []
        while entry := libc.readdir(directory):
            rest.append(entry.contents.d_name)
        libc.seekdir(directory, here)
        again = []
        while entry := libc.readdir(directory):
            again.append(entry.contents.d_name)
        assert rest == again and len(rest) == 152
    finally:
        libc.closedir(directory)


def test_entries_that_stay_are_listed_once_while_others_come_and_go(place: Place) -> None:
    staying = {f"stay{number}" for number in range(200)}
    for name in staying:
        place.file(name)
        place.file(f"go{name}")
    seen: list[str] = []
    with os.scandir(place.path) as listing:
        for position, entry in enumerate(listing):
            seen.append(entry.name)
            if position % 10 == 0:
                (place.path / f"new{position}").write_bytes(b"")
                gone = place.path / f"gostay{position // 2}"
                gone.unlink(missing_ok=True)
    assert len(seen) == len(set(seen))
    assert staying <= set(seen)


def test_removing_while_listing(place: Place) -> None:
    for number in range(400):
        place.file(f"f{number}")
    with os.scandir(place.path) as listing:
        for entry in listing:
            os.unlink(entry.path)
    assert os.listdir(place.path) == []


def test_remove_a_tree(place: Place) -> None:
    for a in range(4):
        for b in range(4):
            (place.path / "t" / str(a) / str(b)).mkdir(parents=True)
            (place.path / "t" / str(a) / str(b) / "f").write_bytes(b"x")
    with opened(place.path / "t" / "0" / "0" / "f", os.O_RDONLY) as fd:
        shutil.rmtree(place.path / "t")
        assert os.read(fd, 10) == b"x"
    assert os.listdir(place.path) == []


def test_five_hundred_entries(place: Place) -> None:
    for number in range(500):
        os.mknod(place.path / f"{number:05d}", 0o100644)
    assert sorted(os.listdir(place.path)) == [f"{number:05d}" for number in range(500)]


@pytest.mark.parametrize("name", [".", ".."])
def test_dots_cannot_be_made_or_removed(place: Place, name: str) -> None:
    (place.path / "d").mkdir()
    path = os.fspath(place.path / "d") + "/" + name
    assert outcome(os.mkdir, path) == "EEXIST"
    with refused(errno.EISDIR, errno.ENOTEMPTY):
        os.unlink(path)


def test_parent_of_a_moved_directory(place: Place) -> None:
    (place.path / "a" / "moving").mkdir(parents=True)
    (place.path / "b").mkdir()
    with opened(place.path / "a" / "moving", os.O_RDONLY) as fd:
        (place.path / "a" / "moving").rename(place.path / "b" / "moving")
        assert os.stat("..", dir_fd=fd).st_ino == os.stat(place.path / "b").st_ino
