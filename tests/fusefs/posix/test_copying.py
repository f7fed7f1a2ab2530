"""copy_file_range(2), sendfile(2), splice(2)."""

from __future__ import annotations

import os
import shutil
import socket

from posixplaces import Place, opened, outcome


def test_copy_file_range(place: Place, age: str) -> None:
    content = os.urandom(300_000)
    path = place.aged(age, content)
    with opened(path, os.O_RDONLY) as source, opened(place.path / "copy", os.O_CREAT | os.O_RDWR) as target:
        copied = 0
        while copied < len(content):
            step = os.copy_file_range(source, target, len(content) - copied, copied, copied)
            assert step > 0
            copied += step
        assert os.copy_file_range(source, target, 10, len(content)) == 0
        assert os.pread(target, 400_000, 0) == content
    place.let_store(place.path / "copy")
    assert (place.path / "copy").read_bytes() == content


def test_copy_file_range_within_one_file(place: Place) -> None:
    path = place.file(content=b"abc" + bytes(97))
    with opened(path, os.O_RDWR) as fd:
        assert os.copy_file_range(fd, fd, 3, 0, 50) == 3
        assert outcome(os.copy_file_range, fd, fd, 60, 0, 10) == "EINVAL"
    assert path.read_bytes()[50:53] == b"abc"


def test_copy_file_range_to_another_file_system(place: Place) -> None:
    path = place.file(content=b"content")
    with opened(path, os.O_RDONLY) as source, opened("/dev/shm", os.O_TMPFILE | os.O_RDWR) as target:
        assert outcome(os.copy_file_range, source, target, 7) in ("ok", "EXDEV")


def test_sendfile_out_and_in(place: Place, age: str) -> None:
    content = os.urandom(200_000)
    path = place.aged(age, content)
    ours, theirs = socket.socketpair()
    with ours, theirs, opened(path, os.O_RDONLY) as fd:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        received = b""
        offset = 0
        while offset < len(content):
            offset += os.sendfile(ours.fileno(), fd, offset, 50_000)
            while len(received) < offset:
                received += theirs.recv(1 << 20)
        assert received == content
    with opened(path, os.O_RDONLY) as fd, opened(place.path / "copy", os.O_CREAT | os.O_WRONLY) as target:
        assert os.sendfile(target, fd, 0, 100_000) == 100_000
    assert (place.path / "copy").read_bytes() == content[:100_000]


def test_splice_through_a_pipe(place: Place, age: str) -> None:
    content = os.urandom(60_000)
    path = place.aged(age, content)
    read_end, write_end = os.pipe()
    with opened(path, os.O_RDONLY) as source, opened(place.path / "copy", os.O_CREAT | os.O_WRONLY) as target:
        copied = 0
        while step := os.splice(source, write_end, 30_000, copied):
            assert os.splice(read_end, target, step, offset_dst=copied) == step
            copied += step
    os.close(read_end)
    os.close(write_end)
    assert (place.path / "copy").read_bytes() == content


def test_the_ways_of_python(place: Place) -> None:
    path = place.file(content=os.urandom(500_000))
    os.utime(path, ns=(10**18, 10**18))
    shutil.copy2(path, place.path / "copy")
    shutil.copytree(place.path, place.path.parent / (place.path.name + "-tree"))
    assert (place.path / "copy").read_bytes() == path.read_bytes()
    assert (place.path / "copy").stat().st_mtime_ns == 10**18
