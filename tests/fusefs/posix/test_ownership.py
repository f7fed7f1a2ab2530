"""chmod(2), chown(2), and when suid, sgid and sticky bits go away."""

from __future__ import annotations

import os
import stat

import pytest
from posixplaces import GROUP, OTHER_GROUP, OTHER_USER, USER, Place, mode_of, opened, outcome


def theirs(place: Place, mode: int, content: bytes = b"content") -> None:
    """A file of USER's with exactly these bits."""
    path = place.file("theirs", content)
    os.chown(path, USER, GROUP)
    path.chmod(mode)


def test_only_the_owner_may_chmod(place: Place) -> None:
    theirs(place, 0o644)
    assert place.as_user(lambda: outcome(os.chmod, "theirs", 0o600)) == "ok"
    assert place.as_user(lambda: outcome(os.chmod, "theirs", 0o666), uid=OTHER_USER) == "EPERM"
    assert mode_of(place.path / "theirs") == 0o600


@pytest.mark.parametrize("mode", [0o000, 0o644, 0o4755, 0o2755, 0o1644, 0o7777, 0o2644])
def test_root_sets_any_mode(place: Place, mode: int) -> None:
    path = place.file()
    path.chmod(mode)
    assert mode_of(path) == mode
    directory = place.path / "d"
    directory.mkdir()
    directory.chmod(mode)
    assert mode_of(directory) == mode


def test_set_group_needs_membership(place: Place) -> None:
    theirs(place, 0o755)
    os.chown(place.path / "theirs", USER, OTHER_GROUP)
    place.as_user(lambda: os.chmod("theirs", 0o2755))
    assert mode_of(place.path / "theirs") == 0o755
    place.as_user(lambda: os.chmod("theirs", 0o2755), groups=[OTHER_GROUP])
    assert mode_of(place.path / "theirs") == 0o2755


def test_who_may_chown(place: Place) -> None:
    theirs(place, 0o644)
    assert place.as_user(lambda: outcome(os.chown, "theirs", OTHER_USER, -1)) == "EPERM"
    assert place.as_user(lambda: outcome(os.chown, "theirs", -1, OTHER_GROUP)) == "EPERM"
    assert place.as_user(lambda: outcome(os.chown, "theirs", -1, OTHER_GROUP), groups=[OTHER_GROUP]) == "ok"
    assert place.as_user(lambda: outcome(os.chown, "theirs", USER, -1)) == "ok"
    assert os.stat(place.path / "theirs").st_gid == OTHER_GROUP


def test_root_chowns_files_directories_and_links(place: Place) -> None:
    path = place.file()
    os.symlink("file", place.path / "s")
    os.mkdir(place.path / "d")
    for name in ("file", "d"):
        os.chown(place.path / name, 12, 34)
        assert (os.stat(place.path / name).st_uid, os.stat(place.path / name).st_gid) == (12, 34)
    os.lchown(place.path / "s", 56, 78)
    assert (os.lstat(place.path / "s").st_uid, path.stat().st_uid) == (56, 12)
    os.chown(path, -1, 99)
    assert (path.stat().st_uid, path.stat().st_gid) == (12, 99)


@pytest.mark.parametrize(
    ("before", "after"),
    [(0o6755, 0o755), (0o4755, 0o755), (0o2755, 0o755), (0o2644, 0o2644), (0o1755, 0o1755)],
)
def test_chown_by_another_than_root_takes_privileges(place: Place, before: int, after: int) -> None:
    theirs(place, before)
    place.as_user(lambda: os.chown("theirs", -1, GROUP))
    assert mode_of(place.path / "theirs") == after


@pytest.mark.parametrize(("before", "after"), [(0o6755, 0o755), (0o2644, 0o2644)])
def test_chown_by_root_takes_privileges(place: Place, before: int, after: int) -> None:
    theirs(place, before)
    os.chown(place.path / "theirs", OTHER_USER, -1)
    assert mode_of(place.path / "theirs") == after


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR])
@pytest.mark.parametrize("who", ["root", "owner"])
def test_chown_of_a_special_file_takes_its_bits(place: Place, kind: int, who: str) -> None:
    path = place.path / "special"
    os.mknod(path, kind | 0o600, os.makedev(1, 3))
    os.chown(path, USER, GROUP)
    path.chmod(0o6755)
    if who == "root":
        os.chown(path, OTHER_USER, -1)
    else:
        place.as_user(lambda: os.chown("special", -1, GROUP))
    assert mode_of(path) == 0o755


def test_chown_of_a_directory_leaves_its_bits(place: Place) -> None:
    (place.path / "d").mkdir()
    (place.path / "d").chmod(0o7755)
    os.chown(place.path / "d", USER, GROUP)
    assert mode_of(place.path / "d") == 0o7755


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
@pytest.mark.parametrize(
    ("before", "after"),
    [(0o6777, 0o777), (0o4777, 0o777), (0o2777, 0o777), (0o2666, 0o2666), (0o1777, 0o1777)],
)
def test_a_write_by_another_than_root_takes_privileges(
    place: Place, age: str, before: int, after: int, flags: int
) -> None:
    theirs(place, before)
    if age == "stored":
        place.let_store(place.path / "theirs")

    def write() -> int:
        with opened("theirs", flags) as fd:
            unwritten = mode_of("theirs")
            os.write(fd, b"x")
            assert mode_of("theirs") == after
        return unwritten

    assert place.as_user(write) == before
    assert mode_of(place.path / "theirs") == after


def test_a_write_by_root_leaves_privileges(place: Place) -> None:
    theirs(place, 0o6777)
    with opened(place.path / "theirs", os.O_WRONLY) as fd:
        os.write(fd, b"x")
    assert mode_of(place.path / "theirs") == 0o6777


def test_a_bit_that_is_set_between_two_writes_goes_with_the_second(place: Place) -> None:
    theirs(place, 0o777)

    def write() -> tuple[int, int]:
        with opened("theirs", os.O_WRONLY) as fd:
            os.write(fd, b"x")
            os.chmod("theirs", 0o4777)
            between = mode_of("theirs")
            os.write(fd, b"y")
        return between, mode_of("theirs")

    assert place.as_user(write) == (0o4777, 0o777)


@pytest.mark.parametrize("how", ["truncate", "ftruncate", "open"])
def test_truncating_by_another_than_root_takes_privileges(place: Place, how: str) -> None:
    theirs(place, 0o6777)

    def cut() -> None:
        if how == "truncate":
            os.truncate("theirs", 3)
            return
        with opened("theirs", os.O_WRONLY | (os.O_TRUNC if how == "open" else 0)) as fd:
            if how == "ftruncate":
                os.ftruncate(fd, 3)

    place.as_user(cut)
    assert mode_of(place.path / "theirs") == 0o777


def test_group_and_others(place: Place) -> None:
    path = place.file(content=b"x", mode=0o640)
    os.chown(path, USER, GROUP)
    read = lambda: outcome(os.open, "file", os.O_RDONLY)  # noqa: E731
    write = lambda: outcome(os.open, "file", os.O_WRONLY)  # noqa: E731
    assert place.as_user(read, uid=OTHER_USER) == "ok"
    assert place.as_user(read, uid=OTHER_USER, gid=1, groups=[GROUP]) == "ok"
    assert place.as_user(read, uid=OTHER_USER, gid=1) == "EACCES"
    assert place.as_user(write, uid=OTHER_USER) == "EACCES"
    path.chmod(0o066)
    assert place.as_user(read) == "EACCES"


def test_access(place: Place) -> None:
    place.file(mode=0o654)
    asked = place.as_user(
        lambda: [os.access("file", mode) for mode in (os.F_OK, os.R_OK, os.W_OK, os.X_OK)], uid=OTHER_USER
    )
    assert asked == [True, True, False, False]
    assert not os.access(place.path / "missing", os.F_OK)
