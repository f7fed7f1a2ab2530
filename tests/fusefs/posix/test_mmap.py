"""mmap(2): shared and private mappings against read and write, truncate and rename."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from posixplaces import Place, in_child, opened

SIZE = 300_000


@contextmanager
def mapped(path: Path, flags: int, *, write: bool = False) -> Iterator[mmap.mmap]:
    """A mapping of the whole file; its descriptor is closed at once, as loaders do."""
    with opened(path, os.O_RDWR if write else os.O_RDONLY) as fd:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        mapping = mmap.mmap(fd, 0, flags, protection)
    try:
        yield mapping
    finally:
        mapping.close()


def test_reading(place: Place, age: str) -> None:
    content = os.urandom(SIZE)
    path = place.aged(age, content)
    for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        with mapped(path, flags) as mapping:
            assert mapping[:] == content


def test_shared_writes_are_read_and_stay(place: Place, age: str) -> None:
    path = place.aged(age, bytes(SIZE))
    with opened(path, os.O_RDONLY) as reader, mapped(path, mmap.MAP_SHARED, write=True) as mapping:
        mapping[100_000:100_005] = b"hello"
        assert os.pread(reader, 5, 100_000) == b"hello"
        mapping.flush()
        mapping[299_995:] = b"tail!"
    assert path.read_bytes()[99_999:100_006] == b"\0hello\0"
    place.let_store(path)
    assert path.read_bytes()[-5:] == b"tail!"


def test_private_writes_are_nobody_elses(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * SIZE)
    with opened(path, os.O_RDONLY) as fd:
        mapping = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    mapping[0:5] = b"mine!"
    assert path.read_bytes() == b"x" * SIZE
    mapping.close()
    place.let_store(path)
    assert path.read_bytes() == b"x" * SIZE


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_writes_show_in_a_mapping(place: Place, age: str, flags: int) -> None:
    path = place.aged(age, b"x" * SIZE)
    with mapped(path, mmap.MAP_SHARED) as mapping:
        assert mapping[150_000:150_003] == b"xxx"
        with opened(path, flags) as fd:
            if flags & os.O_APPEND:
                os.write(fd, b"appended")
                assert mapping[:] == b"x" * SIZE
                return
            os.pwrite(fd, b"new", 150_000)
        assert mapping[150_000:150_003] == b"new"


def test_two_processes_share_a_mapping(place: Place) -> None:
    path = place.file(content=bytes(8192))

    def write_here() -> None:
        with mapped(path, mmap.MAP_SHARED, write=True) as mapping:
            mapping[5000:5005] = b"child"

    with mapped(path, mmap.MAP_SHARED, write=True) as mapping:
        in_child(write_here)
        assert mapping[5000:5005] == b"child"


def test_a_mapping_outlives_descriptor_and_name(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * SIZE)
    with mapped(path, mmap.MAP_SHARED) as mapping:
        path.unlink()
        assert mapping[:] == b"x" * SIZE
    path.write_bytes(b"new")
    assert path.read_bytes() == b"new"


def test_a_writable_mapping_goes_on_after_the_close(place: Place) -> None:
    path = place.file(content=bytes(SIZE))
    with mapped(path, mmap.MAP_SHARED, write=True) as mapping:
        time.sleep(0.6)  # the file was closed long ago, and is not to be ingested behind the mapping
        mapping[200_000:200_005] = b"later"
        assert path.read_bytes()[200_000:200_005] == b"later"
    place.let_store(path)
    assert path.read_bytes()[200_000:200_005] == b"later"


def test_a_mapped_reader_and_a_rename_over(place: Place, age: str) -> None:
    """safetensors 0.8 saves so: the old reader keeps the old bytes."""
    path = place.aged(age, b"old" * 100_000)
    with mapped(path, mmap.MAP_SHARED) as mapping:
        (place.path / "tmp").write_bytes(b"new" * 100_000)
        (place.path / "tmp").rename(path)
        place.let_store(path)
        assert mapping[:] == b"old" * 100_000
        assert path.read_bytes() == b"new" * 100_000


def test_a_mapped_reader_and_a_truncate_in_place(place: Place, age: str) -> None:
    """safetensors 0.7 saves so: the old mapping shows the new bytes, or SIGBUS while there are none."""
    path = place.aged(age, b"old" * 100_000)
    with mapped(path, mmap.MAP_SHARED) as mapping:
        assert mapping[:3] == b"old"
        path.write_bytes(b"new" * 100_000)
        assert mapping[:] == b"new" * 100_000
    assert path.read_bytes() == b"new" * 100_000


def test_beyond_the_end_is_sigbus(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 100_000)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        with mapped(path, mmap.MAP_SHARED) as mapping:
            os.truncate(path, 10)
            os._exit(mapping[90_000])
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS


def test_the_rest_of_the_last_page_is_zeros(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 5000)
    with opened(path, os.O_RDONLY) as fd:
        mapping = mmap.mmap(fd, 5000, mmap.MAP_SHARED, mmap.PROT_READ)
    os.truncate(path, 4500)
    os.truncate(path, 5000)
    assert mapping[4490:5000] == b"x" * 10 + bytes(500)
    mapping.close()
