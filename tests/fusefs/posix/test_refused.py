"""What ckptfs has no handler for gives the errno on which programs fall back."""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest
from posixplaces import Place, libc, opened, outcome

FALLOC_FL_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def test_tmpfile(mounted: Place) -> None:
    assert outcome(os.open, mounted.path, os.O_TMPFILE | os.O_RDWR) == "EOPNOTSUPP"


def test_fallocate(mounted: Place) -> None:
    path = mounted.file(content=b"x" * 10_000)
    with opened(path, os.O_RDWR) as fd:
        assert outcome(fallocate, fd, 0, 0, 20_000) == "EOPNOTSUPP"
        assert outcome(fallocate, fd, FALLOC_FL_PUNCH_HOLE_KEEP_SIZE, 0, 4096) == "EOPNOTSUPP"
        assert os.fstat(fd).st_size == 10_000


def test_posix_fallocate_is_emulated(place: Place) -> None:
    with opened(place.path / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.posix_fallocate(fd, 0, 100_000)
        assert os.fstat(fd).st_size == 100_000


def test_seeking_data_and_holes(mounted: Place) -> None:
    """One extent of data, a hole at the end: what the kernel says of file systems that do not know."""
    path = mounted.path / "sparse"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"x", 1 << 20)
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, 0, os.SEEK_HOLE) == (1 << 20) + 1
        assert outcome(os.lseek, fd, 1 << 30, os.SEEK_DATA) == "ENXIO"


@pytest.mark.parametrize("name", ["system.posix_acl_access", "system.posix_acl_default"])
def test_acls(mounted: Place, name: str) -> None:
    value = bytes.fromhex("02000000010006000000000004000400000000002000040000000000")
    assert outcome(os.setxattr, mounted.path, name, value) == "EOPNOTSUPP"
    assert outcome(os.getxattr, mounted.path, name) == "EOPNOTSUPP"


def test_selinux_labels(mounted: Place) -> None:
    assert outcome(os.setxattr, mounted.file(), "security.selinux", b"x") == "EOPNOTSUPP"


def test_cp_and_tar_fall_back(mounted: Place) -> None:
    path = mounted.path / "sparse"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"x", 1 << 20)
    subprocess.run(
        ["cp", "-a", "--reflink=auto", "--sparse=auto", path, mounted.path / "copy"], check=True, timeout=60
    )
    assert (mounted.path / "copy").read_bytes() == path.read_bytes()


@pytest.mark.heavy
def test_more_links_than_4096(mounted: Place) -> None:
    path = mounted.file()
    for number in range(4095):
        os.link(path, mounted.path / f"l{number}")
    assert outcome(os.link, path, mounted.path / "one-more") == "EMLINK"


def test_access_time_is_not_kept(mounted: Place) -> None:
    path = mounted.file(content=b"x")
    os.utime(path, ns=(5, 6))
    path.read_bytes()
    assert path.stat().st_atime_ns == 5


def test_seeking_in_a_directory(mounted: Place) -> None:
    """ext4 gives EINVAL for most positions behind the end."""
    with opened(mounted.path, os.O_RDONLY) as fd:
        assert os.lseek(fd, 0, os.SEEK_END) >= 0


def test_a_fifo_keeps_its_times(mounted: Place) -> None:
    path = mounted.path / "fifo"
    os.mkfifo(path)
    os.utime(path, ns=(5, 6))
    with opened(path, os.O_RDWR) as fd:
        os.write(fd, b"x")
        assert os.read(fd, 1) == b"x"
    assert path.stat().st_mtime_ns == 6
