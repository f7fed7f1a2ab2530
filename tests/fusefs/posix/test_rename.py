"""rename(2), renameat2(2) with NOREPLACE and EXCHANGE."""

from __future__ import annotations

import os

import pytest
from posixplaces import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    Place,
    opened,
    outcome,
    renameat2,
)


def test_over_an_existing_file(place: Place, age: str) -> None:
    old = place.aged(age, b"new content", "new")
    target = place.aged(age, b"old content", "target")
    inode = old.stat().st_ino
    with opened(target, os.O_RDONLY) as reader:
        old.rename(target)
        assert os.read(reader, 100) == b"old content"
        assert os.fstat(reader).st_nlink == 0
    assert target.read_bytes() == b"new content"
    assert target.stat().st_ino == inode
    assert os.listdir(place.path) == ["target"]


def test_before_the_new_file_is_closed(place: Place) -> None:
    target = place.file("target", b"old")
    with opened(place.path / "tmp", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"first,")
        (place.path / "tmp").rename(target)
        os.write(fd, b"second")
    assert target.read_bytes() == b"first,second"
    place.let_store(target)
    assert target.read_bytes() == b"first,second"


def test_directories(place: Place) -> None:
    (place.path / "full" / "x").mkdir(parents=True)
    (place.path / "empty").mkdir()
    (place.path / "d").mkdir()
    (place.path / "d" / "inside").write_bytes(b"x")
    place.file("f")
    assert outcome(os.rename, place.path / "d", place.path / "full") == "ENOTEMPTY"
    assert outcome(os.rename, place.path / "d", place.path / "f") == "ENOTDIR"
    assert outcome(os.rename, place.path / "f", place.path / "d") == "EISDIR"
    assert outcome(os.rename, place.path / "full", place.path / "full" / "x" / "y") == "EINVAL"
    assert outcome(os.rename, place.path / "full", place.path / "full" / "x") == "EINVAL"
    assert outcome(os.rename, place.path / "full" / "x", place.path / "full") == "ENOTEMPTY"
    assert outcome(os.rename, place.path / "d", place.path / "empty") == "ok"
    assert (place.path / "empty" / "inside").read_bytes() == b"x"
    assert not (place.path / "d").exists()


def test_what_is_refused(place: Place) -> None:
    place.file("f")
    assert outcome(os.rename, place.path / "missing", place.path / "x") == "ENOENT"
    assert outcome(os.rename, place.path / "f", place.path / "missing" / "x") == "ENOENT"
    assert outcome(os.rename, place.path / "f", place.path / "f" / "x") == "ENOTDIR"
    assert outcome(os.rename, place.path / "f", "/dev/shm/ckptfs-never") == "EXDEV"
    assert outcome(os.rename, os.fspath(place.path) + "/.", place.path / "x") == "EBUSY"


def test_to_itself_and_to_another_link_of_itself(place: Place) -> None:
    path = place.file(content=b"x")
    os.link(path, place.path / "other")
    os.rename(path, path)
    os.rename(path, place.path / "other")  # POSIX: nothing happens
    assert sorted(os.listdir(place.path)) == ["file", "other"]


def test_symbolic_links_are_moved_themselves(place: Place) -> None:
    place.file("f", b"x")
    os.symlink("f", place.path / "s")
    os.rename(place.path / "s", place.path / "t")
    assert os.readlink(place.path / "t") == "f"
    os.rename(place.path / "f", place.path / "t")
    assert (place.path / "t").read_bytes() == b"x"


def test_times(place: Place, age: str) -> None:
    path = place.aged(age, b"x")
    before = path.stat()
    path.rename(place.path / "moved")
    after = (place.path / "moved").stat()
    assert after.st_mtime_ns == before.st_mtime_ns
    assert after.st_ctime_ns > before.st_ctime_ns


def test_no_replace(place: Place) -> None:
    one, two = place.file("one", b"1"), place.file("two", b"2")
    assert outcome(renameat2, one, two, RENAME_NOREPLACE) == "EEXIST"
    assert outcome(renameat2, one, one, RENAME_NOREPLACE) == "EEXIST"
    assert outcome(renameat2, one, place.path / "three", RENAME_NOREPLACE) == "ok"
    assert (place.path / "three").read_bytes() == b"1"


def test_exchange(place: Place) -> None:
    one, two = place.file("one", b"1"), place.file("two", b"2")
    (place.path / "d" / "e").mkdir(parents=True)
    assert outcome(renameat2, one, two, RENAME_EXCHANGE) == "ok"
    assert (one.read_bytes(), two.read_bytes()) == (b"2", b"1")
    assert outcome(renameat2, one, place.path / "d" / "e", RENAME_EXCHANGE) == "ok"
    assert (place.path / "d" / "e").read_bytes() == b"2"
    assert one.is_dir()
    assert (place.path / "d").stat().st_nlink == 2
    assert outcome(renameat2, one, place.path / "missing", RENAME_EXCHANGE) == "ENOENT"
    assert outcome(renameat2, place.path / "d", place.path / "d" / "e", RENAME_EXCHANGE) == "EINVAL"
    assert outcome(renameat2, one, two, RENAME_EXCHANGE | RENAME_NOREPLACE) == "EINVAL"
    assert outcome(renameat2, one, two, 1 << 20) == "EINVAL"


def test_a_directory_tree_between_units(place: Place) -> None:
    (place.path / "a" / "deep" / "er").mkdir(parents=True)
    content = place.path / "a" / "deep" / "er" / "f"
    content.write_bytes(b"content")
    place.let_store(content)
    elsewhere = place.path.parent / (place.path.name + "-elsewhere")
    elsewhere.mkdir()
    (place.path / "a").rename(elsewhere / "a")
    assert (elsewhere / "a" / "deep" / "er" / "f").read_bytes() == b"content"
    assert os.listdir(place.path) == []
    (elsewhere / "a").rename(place.path / "b")
    assert (place.path / "b" / "deep" / "er" / "f").read_bytes() == b"content"


def test_a_directory_with_a_working_directory_in_it(place: Place) -> None:
    (place.path / "a" / "b").mkdir(parents=True)
    here = os.getcwd()
    os.chdir(place.path / "a" / "b")
    try:
        (place.path / "a").rename(place.path / "moved")
        assert os.getcwd() == os.path.realpath(place.path / "moved" / "b")
        with open("made-here", "wb") as f:
            f.write(b"x")
    finally:
        os.chdir(here)
    assert (place.path / "moved" / "b" / "made-here").read_bytes() == b"x"


def test_rights_on_both_directories_are_needed(place: Place) -> None:
    (place.path / "from").mkdir()
    (place.path / "to").mkdir()
    (place.path / "from" / "f").write_bytes(b"x")
    move = lambda: outcome(os.rename, "from/f", "to/f")  # noqa: E731
    assert place.as_user(move) == "EACCES"
    (place.path / "to").chmod(0o777)
    assert place.as_user(move) == "EACCES"
    (place.path / "from").chmod(0o777)
    assert place.as_user(move) == "ok"


def test_a_foreign_directory_cannot_be_moved_to_another_parent(place: Place) -> None:
    """Its `..` would be written, so its own write bit counts."""
    (place.path / "from" / "d").mkdir(parents=True)
    (place.path / "to").mkdir()
    for name in ("from", "to"):
        (place.path / name).chmod(0o777)
    assert place.as_user(lambda: outcome(os.rename, "from/d", "to/d")) == "EACCES"
    assert place.as_user(lambda: outcome(os.rename, "from/d", "from/e")) == "ok"


@pytest.mark.parametrize("count", [200])
def test_replaced_again_and_again_there_is_always_one(place: Place, count: int) -> None:
    target = place.file("target", b"0" * 1000)
    pid = os.fork()
    if pid == 0:
        try:
            for number in range(count):
                temporary = place.path / f"tmp{number}"
                temporary.write_bytes(str(number % 10).encode() * 1000)
                temporary.rename(target)
        finally:
            os._exit(0)
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        content = target.read_bytes()
        assert len(content) == 1000 and content == content[:1] * 1000
    assert os.listdir(place.path) == ["target"]
