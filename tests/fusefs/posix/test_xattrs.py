"""setxattr(2), getxattr(2), listxattr(2), removexattr(2)."""

from __future__ import annotations

import errno
import os

import pytest
from posixplaces import OTHER_USER, USER, Place, opened, outcome, refused


def test_set_get_list_remove(place: Place, age: str) -> None:
    path = place.aged(age, b"content")
    (place.path / "d").mkdir()
    for target in (path, place.path / "d"):
        os.setxattr(target, "user.one", b"1")
        os.setxattr(target, "user.empty", b"")
        os.setxattr(target, "user.raw", bytes(range(256)))
        assert sorted(os.listxattr(target)) == ["user.empty", "user.one", "user.raw"]
        assert os.getxattr(target, "user.raw") == bytes(range(256))
        assert os.getxattr(target, "user.empty") == b""
        os.setxattr(target, "user.one", b"replaced")
        assert os.getxattr(target, "user.one") == b"replaced"
        os.removexattr(target, "user.one")
        with refused(errno.ENODATA):
            os.getxattr(target, "user.one")
        with refused(errno.ENODATA):
            os.removexattr(target, "user.one")
    place.let_store(path)
    assert os.getxattr(path, "user.raw") == bytes(range(256))


def test_create_and_replace_flags(place: Place) -> None:
    path = place.file()
    with refused(errno.ENODATA):
        os.setxattr(path, "user.a", b"1", os.XATTR_REPLACE)
    os.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    with refused(errno.EEXIST):
        os.setxattr(path, "user.a", b"2", os.XATTR_CREATE)
    os.setxattr(path, "user.a", b"3", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.a") == b"3"


def test_names(place: Place) -> None:
    path = place.file()
    os.setxattr(path, "user." + "n" * 250, b"1")
    assert os.listxattr(path) == ["user." + "n" * 250]
    assert outcome(os.setxattr, path, "user." + "n" * 251, b"1") == "ERANGE"
    assert outcome(os.setxattr, path, "nonsense", b"1") == "EOPNOTSUPP"
    assert outcome(os.getxattr, path, "nonsense.x") == "EOPNOTSUPP"
    assert outcome(os.setxattr, path, "user.", b"1") == "EINVAL"


def test_user_attributes_are_for_files_and_directories(place: Place) -> None:
    os.symlink("nowhere", place.path / "s")
    os.mkfifo(place.path / "p")
    for name in ("s", "p"):
        with refused(errno.EPERM):
            os.setxattr(place.path / name, "user.a", b"1", follow_symlinks=False)
        assert os.listxattr(place.path / name, follow_symlinks=False) == []


def test_rights(place: Place) -> None:
    path = place.file(mode=0o644)
    os.chown(path, USER, 0)
    os.setxattr(path, "trusted.roots", b"1")
    assert place.as_user(lambda: outcome(os.setxattr, "file", "user.a", b"1")) == "ok"
    assert place.as_user(lambda: outcome(os.getxattr, "file", "user.a"), uid=OTHER_USER) == "ok"
    assert place.as_user(lambda: outcome(os.setxattr, "file", "user.a", b"1"), uid=OTHER_USER) == "EACCES"
    assert place.as_user(lambda: outcome(os.setxattr, "file", "trusted.a", b"1")) == "EPERM"
    assert place.as_user(lambda: outcome(os.getxattr, "file", "trusted.roots")) == "ENODATA"
    path.chmod(0o600)
    assert place.as_user(lambda: outcome(os.getxattr, "file", "user.a"), uid=OTHER_USER) == "EACCES"


def test_security_capability(place: Place) -> None:
    path = place.file(mode=0o755)
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    with refused(errno.ENODATA):
        os.getxattr(path, "security.capability")
    os.setxattr(path, "security.capability", capability)
    assert os.getxattr(path, "security.capability") == capability
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"new program")
    with refused(errno.ENODATA):
        os.getxattr(path, "security.capability")


def test_through_a_descriptor_and_hard_links(place: Place) -> None:
    path = place.file()
    os.link(path, place.path / "other")
    with opened(path, os.O_RDONLY) as fd:
        os.setxattr(fd, "user.a", b"shared")
    assert os.getxattr(place.path / "other", "user.a") == b"shared"
    path.rename(place.path / "moved")
    assert os.getxattr(place.path / "moved", "user.a") == b"shared"


@pytest.mark.parametrize("size", [1, 100, 3000])
def test_sizes(place: Place, size: int) -> None:
    path = place.file()
    os.setxattr(path, "user.big", b"v" * size)
    assert os.getxattr(path, "user.big") == b"v" * size


def test_too_large(place: Place) -> None:
    assert outcome(os.setxattr, place.file(), "user.big", bytes(65_537)) == "E2BIG"


def test_up_to_64_kib(mounted: Place) -> None:
    """Where ext4 has room for 4 KiB only."""
    path = mounted.file()
    os.setxattr(path, "user.big", b"v" * 65_536)
    assert os.getxattr(path, "user.big") == b"v" * 65_536


def test_our_own_names(mounted: Place) -> None:
    path = mounted.file(content=b"content")
    with opened(path, os.O_WRONLY):
        assert outcome(os.getxattr, path, "user.ckptfs.cid") == "ENODATA"
    mounted.let_store(path)
    assert os.getxattr(path, "user.ckptfs.cid").startswith(b"bafk")
    assert len(os.getxattr(path, "user.ckptfs.root")) == 64
    assert os.listxattr(path) == []
    for name in ("cid", "root", "version"):
        assert outcome(os.setxattr, path, f"user.ckptfs.{name}", b"1") == "EPERM"
