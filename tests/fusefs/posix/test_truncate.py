"""truncate(2) and ftruncate(2)."""

from __future__ import annotations

import errno
import os
import random

import pytest
from posixplaces import Place, opened, outcome, refused


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 150_000, 200_000, 200_001, 1 << 20])
def test_to_any_size(place: Place, age: str, size: int) -> None:
    content = random.Random(size).randbytes(200_000)
    path = place.aged(age, content)
    os.truncate(path, size)
    assert path.stat().st_size == size
    expected = content[:size].ljust(size, b"\0")
    assert path.read_bytes() == expected
    if size:
        place.let_store(path)
    assert path.read_bytes() == expected


def test_shorter_then_longer_shows_zeros(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 10_000)
    for short in (9_000, 4_096, 4_000, 1):
        os.truncate(path, short)
        os.truncate(path, 10_000)
        assert path.read_bytes() == b"x" * short + bytes(10_000 - short)


def test_through_descriptors(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 1000)
    with opened(path, os.O_RDWR) as fd:
        os.lseek(fd, 500, os.SEEK_SET)
        os.ftruncate(fd, 10)
        assert os.lseek(fd, 0, os.SEEK_CUR) == 500
        os.write(fd, b"y")
        assert os.pread(fd, 1000, 0) == b"x" * 10 + bytes(490) + b"y"
    with opened(path, os.O_RDONLY) as fd, refused(errno.EINVAL):
        os.ftruncate(fd, 0)


def test_what_is_refused(place: Place) -> None:
    path = place.file(content=b"x")
    (place.path / "d").mkdir()
    os.mkfifo(place.path / "fifo")
    assert outcome(os.truncate, place.path / "d", 0) == "EISDIR"
    assert outcome(os.truncate, place.path / "fifo", 0) == "EINVAL"
    assert outcome(os.truncate, path, -1) == "EINVAL"
    assert outcome(os.truncate, path, 1 << 62) == "EFBIG"
    assert outcome(os.truncate, place.path / "missing", 0) == "ENOENT"
    assert path.stat().st_size == 1


def test_through_a_symbolic_link(place: Place) -> None:
    path = place.file(content=b"x" * 100)
    os.symlink("file", place.path / "link")
    os.truncate(place.path / "link", 10)
    assert path.stat().st_size == 10


def test_times_move_even_if_the_size_stays(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 100)
    os.utime(path, ns=(10**9, 10**9))
    before = path.stat()
    os.truncate(path, 100)
    after = path.stat()
    assert after.st_mtime_ns > before.st_mtime_ns and after.st_ctime_ns > before.st_ctime_ns


def test_longer_is_sparse(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 4096)
    os.truncate(path, 1 << 30)
    assert path.stat().st_blocks <= 32
    place.let_store(path)
    assert path.stat().st_blocks <= 32


def test_to_nothing_frees(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 100_000)
    os.truncate(path, 0)
    assert path.stat().st_blocks == 0


def test_shorter_frees(place: Place, age: str) -> None:
    path = place.aged(age, random.Random(3).randbytes(1 << 20))
    os.truncate(path, 4096)
    assert path.stat().st_blocks <= 16


def test_truncated_under_an_open_reader(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 10_000)
    with opened(path, os.O_RDONLY) as fd:
        assert os.pread(fd, 10, 9_000) == b"x" * 10
        os.truncate(path, 9_005)
        assert os.pread(fd, 10, 9_000) == b"x" * 5
        os.truncate(path, 0)
        assert os.pread(fd, 10, 0) == b""
        path.write_bytes(b"new")
        assert os.pread(fd, 10, 0) == b"new"
