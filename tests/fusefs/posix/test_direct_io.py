"""O_DIRECT, and mixing it with the page cache."""

from __future__ import annotations

import mmap
import os

import pytest
from posixplaces import Place, opened


def aligned(content: bytes) -> mmap.mmap:
    """Page-aligned memory, as O_DIRECT wants it."""
    buffer = mmap.mmap(-1, max(len(content), 1))
    buffer[: len(content)] = content
    return buffer


def test_aligned_reads_and_writes(place: Place, age: str) -> None:
    content = os.urandom(65_536)
    path = place.aged(age, content)
    with opened(path, os.O_RDWR | os.O_DIRECT) as fd:
        buffer = aligned(bytes(8192))
        assert os.preadv(fd, [buffer], 4096) == 8192
        assert buffer[:] == content[4096:12_288]
        assert os.pwritev(fd, [aligned(b"d" * 4096)], 8192) == 4096
    expected = content[:8192] + b"d" * 4096 + content[12_288:]
    assert path.read_bytes() == expected
    place.let_store(path)
    assert path.read_bytes() == expected


def test_beside_the_page_cache(place: Place, age: str) -> None:
    path = place.aged(age, b"x" * 65_536)
    with opened(path, os.O_RDWR) as cached, opened(path, os.O_RDWR | os.O_DIRECT) as direct:
        assert os.pread(cached, 10, 4096) == b"x" * 10
        os.pwritev(direct, [aligned(b"d" * 4096)], 4096)
        assert os.pread(cached, 10, 4096) == b"d" * 10
        os.pwrite(cached, b"c" * 4096, 8192)
        buffer = aligned(bytes(4096))
        os.preadv(direct, [buffer], 8192)
        assert buffer[:] == b"c" * 4096


def test_the_end_of_the_file(place: Place) -> None:
    path = place.file(content=b"x" * 5000)
    with opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
        buffer = aligned(bytes(8192))
        assert os.preadv(fd, [buffer], 0) == 5000
        assert os.preadv(fd, [buffer], 8192) == 0


@pytest.mark.parametrize("offset", [0, 1, 511, 5000])
def test_any_alignment_works_on_the_mount(mounted: Place, offset: int) -> None:
    """ext4 refuses this with EINVAL; a mount that took over from ext4 must only not be stricter."""
    path = mounted.file(content=bytes(20_000))
    with opened(path, os.O_RDWR) as fd:
        os.pwrite(fd, b"y", 19_999)
    with opened(path, os.O_RDWR | os.O_DIRECT) as fd:
        try:
            assert os.pwrite(fd, b"odd", offset) == 3
        except OSError:
            assert _host_decides(mounted), "the plain path takes any alignment"
            return
    assert path.read_bytes()[offset : offset + 3] == b"odd"


def _host_decides(place: Place) -> bool:
    """Under passthrough the disk below says which alignments it takes."""
    return place.path.exists()
