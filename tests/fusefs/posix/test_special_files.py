"""mknod(2): fifos, sockets, device nodes, and regular files made without being opened."""

from __future__ import annotations

import os
import socket
import stat

from posixplaces import Place, opened, outcome


def test_kinds_and_numbers(place: Place) -> None:
    os.mknod(place.path / "fifo", stat.S_IFIFO | 0o640)
    os.mknod(place.path / "socket", stat.S_IFSOCK | 0o640)
    os.mknod(place.path / "char", stat.S_IFCHR | 0o640, os.makedev(1, 3))
    os.mknod(place.path / "block", stat.S_IFBLK | 0o640, os.makedev(7, 300))
    os.mknod(place.path / "regular", stat.S_IFREG | 0o640)
    kinds = {name: os.lstat(place.path / name) for name in os.listdir(place.path)}
    assert {name: oct(stat.S_IFMT(s.st_mode)) for name, s in kinds.items()} == {
        "fifo": "0o10000",
        "socket": "0o140000",
        "char": "0o20000",
        "block": "0o60000",
        "regular": "0o100000",
    }
    assert kinds["char"].st_rdev == os.makedev(1, 3)
    assert kinds["block"].st_rdev == os.makedev(7, 300)
    assert {stat.S_IMODE(s.st_mode) for s in kinds.values()} == {0o640}


def test_what_is_refused(place: Place) -> None:
    place.file("f")
    place.path.chmod(0o777)
    assert outcome(os.mkfifo, place.path / "f") == "EEXIST"
    assert place.as_user(lambda: outcome(os.mknod, "char", stat.S_IFCHR | 0o600, os.makedev(1, 3))) == "EPERM"
    assert place.as_user(lambda: outcome(os.mkfifo, "fifo")) == "ok"


def test_a_device_node_is_the_device(place: Place) -> None:
    os.mknod(place.path / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    with opened(place.path / "zero", os.O_RDONLY) as fd:
        assert os.read(fd, 16) == bytes(16)


def test_a_bound_socket(place: Place) -> None:
    here = os.getcwd()
    os.chdir(place.path)  # sun_path holds 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind("s")
            server.listen()
            client.settimeout(10)
            client.connect("s")
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hello")
                assert client.recv(10) == b"hello"
    finally:
        os.chdir(here)
    assert stat.S_ISSOCK(os.lstat(place.path / "s").st_mode)


def test_a_regular_file_without_an_open(place: Place) -> None:
    path = place.path / "made"
    os.mknod(path, stat.S_IFREG | 0o644)
    assert path.read_bytes() == b"" and path.stat().st_blocks == 0
    path.write_bytes(b"content")
    assert path.read_bytes() == b"content"


def test_they_are_renamed_linked_and_removed(place: Place) -> None:
    os.mkfifo(place.path / "p")
    os.rename(place.path / "p", place.path / "q")
    os.link(place.path / "q", place.path / "r")
    assert os.stat(place.path / "r").st_nlink == 2
    os.unlink(place.path / "q")
    os.unlink(place.path / "r")
    assert os.listdir(place.path) == []
