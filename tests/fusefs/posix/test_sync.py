"""fsync(2), fdatasync(2), syncfs(2): that they succeed. What they promise is tested in tests/crash."""

from __future__ import annotations

import os

from posixplaces import Place, libc, opened


def test_files(place: Place, age: str) -> None:
    path = place.aged(age, b"content")
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        with opened(path, flags) as fd:
            os.fsync(fd)
            os.fdatasync(fd)
    with opened(path, os.O_RDWR) as fd:
        os.write(fd, b"C")
        os.fsync(fd)
        os.fsync(fd)
        path.unlink()
        os.write(fd, b"O")
        os.fsync(fd)


def test_directories(place: Place) -> None:
    (place.path / "d").mkdir()
    with opened(place.path / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
        os.fdatasync(fd)
        assert libc.syncfs(fd) == 0


def test_a_file_without_content(place: Place) -> None:
    with opened(place.file(), os.O_RDWR) as fd:
        os.fsync(fd)
