"""inotify(7) sees what is done on this machine."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posixplaces import Place, libc

IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x2, 0x4, 0x8
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200
ALL = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE


class Watch:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def events(self) -> list[tuple[int, str]]:
        """What has happened so far: (kind, name)."""
        found = []
        while select.select([self._fd], [], [], 0.1)[0]:
            buffer = os.read(self._fd, 1 << 16)
            while buffer:
                _, mask, _, length = struct.unpack_from("iIII", buffer)
                name = buffer[16 : 16 + length].rstrip(b"\0").decode()
                found.append((mask & ALL, name))
                buffer = buffer[16 + length :]
        return found


@contextmanager
def watched(path: Path) -> Iterator[Watch]:
    fd = libc.inotify_init1(0)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    try:
        assert libc.inotify_add_watch(fd, os.fsencode(path), ALL) >= 0
        yield Watch(fd)
    finally:
        os.close(fd)


def test_a_save(place: Place) -> None:
    with watched(place.path) as watch:
        (place.path / "f").write_bytes(b"x")
        (place.path / "f").rename(place.path / "g")
        (place.path / "g").chmod(0o600)
        (place.path / "g").unlink()
        (place.path / "d").mkdir()
        kinds = [event for event in watch.events() if event[0]]
    assert kinds == [
        (IN_CREATE, "f"),
        (IN_MODIFY, "f"),
        (IN_CLOSE_WRITE, "f"),
        (IN_MOVED_FROM, "f"),
        (IN_MOVED_TO, "g"),
        (IN_ATTRIB, "g"),
        (IN_DELETE, "g"),
        (IN_CREATE, "d"),
    ]


def test_ingest_is_no_event(place: Place) -> None:
    path = place.file(content=b"content")
    with watched(path) as watch:
        place.let_store(path)
        assert watch.events() == []
