"""read(2), write(2), pread, pwrite, O_APPEND, lseek, holes and limits."""

from __future__ import annotations

import errno
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from posixplaces import Place, in_child, opened, refused

MIB = 1 << 20


def test_write_then_read_through_one_descriptor(place: Place) -> None:
    with opened(place.path / "f", os.O_CREAT | os.O_RDWR) as fd:
        assert os.write(fd, b"hello world") == 11
        assert os.lseek(fd, 0, os.SEEK_CUR) == 11
        assert os.read(fd, 10) == b""
        assert os.pread(fd, 5, 6) == b"world"
        assert os.pread(fd, 50, 6) == b"world"
        assert os.pread(fd, 5, 11) == b""
        assert os.pread(fd, 5, 1 << 40) == b""
        assert os.lseek(fd, -5, os.SEEK_END) == 6
        with refused(errno.EINVAL):
            os.lseek(fd, -1, os.SEEK_SET)


def test_access_mode_is_kept(place: Place) -> None:
    path = place.file(content=b"x")
    with opened(path, os.O_RDONLY) as fd, refused(errno.EBADF):
        os.write(fd, b"y")
    with opened(path, os.O_WRONLY) as fd, refused(errno.EBADF):
        os.read(fd, 1)


@pytest.mark.parametrize("offset", [0, 4095, 5000, 131_072, 262_143, 300_000])
def test_overwriting_a_part(place: Place, age: str, offset: int) -> None:
    content = bytearray(random.Random(offset).randbytes(262_144))
    path = place.aged(age, bytes(content))
    with opened(path, os.O_RDWR) as fd:
        os.pwrite(fd, b"new bytes", offset)
    content += bytes(max(0, offset - len(content)))
    content[offset : offset + 9] = b"new bytes"
    assert path.read_bytes() == content
    place.let_store(path)
    assert path.read_bytes() == content


def test_a_write_beyond_the_end_leaves_zeros(place: Place, age: str) -> None:
    path = place.aged(age, b"start")
    with opened(path, os.O_WRONLY) as fd:
        os.pwrite(fd, b"end", 10_000)
    assert path.read_bytes() == b"start" + bytes(9_995) + b"end"
    place.let_store(path)
    assert path.read_bytes() == b"start" + bytes(9_995) + b"end"


def test_a_sparse_file_occupies_what_was_written(place: Place) -> None:
    path = place.path / "sparse"
    with opened(path, os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"end", 1 << 30)
        os.fsync(fd)
        assert os.fstat(fd).st_size == (1 << 30) + 3
        assert 8 <= os.fstat(fd).st_blocks <= 32
        assert os.pread(fd, 100, 1 << 29) == bytes(100)
    place.let_store(path)
    assert path.stat().st_size == (1 << 30) + 3
    assert path.stat().st_blocks <= 32
    with opened(path, os.O_RDONLY) as fd:
        assert os.pread(fd, 4, (1 << 30) - 1) == b"\0end"
        assert os.pread(fd, 100, 1 << 29) == bytes(100)


def test_a_dense_file_occupies_its_size(place: Place) -> None:
    path = place.file("dense", random.Random(1).randbytes(MIB))
    with opened(path, os.O_RDWR) as fd:
        os.fsync(fd)
        assert os.fstat(fd).st_blocks * 512 == MIB
    place.let_store(path)
    assert MIB <= path.stat().st_blocks * 512 <= MIB + 4096


def test_a_write_moves_st_blocks_of_a_stored_file_by_little(place: Place) -> None:
    path = place.file("dense", random.Random(1).randbytes(MIB))
    place.let_store(path)
    with opened(path, os.O_RDWR) as fd:
        os.pwrite(fd, b"x" * 5000, 5000)
        os.fsync(fd)
    assert path.stat().st_blocks * 512 == MIB


def test_huge_offsets_are_refused_and_cost_nothing(place: Place) -> None:
    with opened(place.path / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"x")
        for offset in ((1 << 63) - 4096, 1 << 62, 1 << 50):
            with refused(errno.EFBIG):
                os.pwrite(fd, b"far", offset)
        with refused(errno.EINVAL):
            os.pwrite(fd, b"far", -1)
        assert os.fstat(fd).st_size == 1


def test_size_limit_of_the_process(place: Place) -> None:
    import resource
    import signal

    def write_beyond() -> tuple[int, str]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with opened(place.path / "f", os.O_CREAT | os.O_RDWR) as fd:
            short = os.write(fd, bytes(2000))
            with refused(errno.EFBIG):
                os.write(fd, b"x")
        return short, "ok"

    assert in_child(write_beyond) == (1000, "ok")


def test_nothing_written_changes_nothing(place: Place) -> None:
    path = place.file(content=b"abc")
    before = path.stat()
    with opened(path, os.O_RDWR) as fd:
        assert os.write(fd, b"") == 0
        assert os.pwrite(fd, b"", 100) == 0
        assert os.pread(fd, 0, 0) == b""
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_append_goes_to_the_end_whatever_the_position(place: Place, age: str) -> None:
    path = place.aged(age, b"one,")
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"two,")
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"three,")
        os.pwrite(fd, b"four", 0)  # Linux appends here too
    assert path.read_bytes() == b"one,two,three,four"


def test_appends_of_many_processes_are_all_there(place: Place) -> None:
    path = place.file("log")
    pids = []
    for writer in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                fd = os.open(path, os.O_WRONLY | os.O_APPEND)
                for line in range(100):
                    os.write(fd, f"{writer} {line}\n".encode())
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    lines = [line.split() for line in path.read_text().splitlines()]
    assert len(lines) == 800
    for writer in range(8):
        assert [int(line) for who, line in lines if int(who) == writer] == list(range(100))


def test_gathered_and_scattered(place: Place) -> None:
    with opened(place.path / "f", os.O_CREAT | os.O_RDWR) as fd:
        assert os.writev(fd, [b"ab", b"", b"cdef"]) == 6
        assert os.pwritev(fd, [b"X", b"Y"], 2) == 2
        buffers = [bytearray(3), bytearray(10)]
        assert os.preadv(fd, buffers, 0) == 6
        assert bytes(buffers[0]) == b"abX" and bytes(buffers[1][:3]) == b"Yef"


def test_two_descriptors_see_each_other(place: Place, age: str) -> None:
    path = place.aged(age, b"0" * 10_000)
    with opened(path, os.O_RDONLY) as reader, opened(path, os.O_WRONLY) as writer:
        assert os.pread(reader, 4, 5000) == b"0000"
        os.pwrite(writer, b"1111", 5000)
        assert os.pread(reader, 4, 5000) == b"1111"
        os.pwrite(writer, b"tail", 10_000)
        assert os.pread(reader, 10, 9_998) == b"00tail"
        os.ftruncate(writer, 5002)
        assert os.pread(reader, 10, 4998) == b"0011"


def test_concurrent_writers_of_one_file(place: Place, age: str) -> None:
    size, parts = 64 * 1024, 16
    path = place.aged(age, bytes(size * parts))

    def write(part: int) -> None:
        with opened(path, os.O_WRONLY) as fd:
            for at in range(0, size, 4000):
                os.pwrite(fd, bytes([part + 1]) * min(4000, size - at), part * size + at)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(parts)))
    assert path.read_bytes() == b"".join(bytes([part + 1]) * size for part in range(parts))


def test_synchronous_writes(place: Place) -> None:
    with opened(place.path / "f", os.O_CREAT | os.O_WRONLY | os.O_SYNC) as fd:
        assert os.write(fd, b"synced") == 6
    with opened(place.path / "f", os.O_WRONLY | os.O_DSYNC) as fd:
        assert os.pwrite(fd, b"S", 0) == 1
    assert (place.path / "f").read_bytes() == b"Synced"


def test_a_file_written_again_and_again(place: Place) -> None:
    path = place.path / "f"
    for number in range(50):
        path.write_bytes(str(number).encode() * 100)
        assert path.read_bytes() == str(number).encode() * 100


def test_reads_across_the_whole_file_at_odd_sizes(place: Place, age: str) -> None:
    content = random.Random(7).randbytes(700_001)
    path = place.aged(age, content)
    for size in (1_000, 4_097, 65_536, 131_073):
        with opened(path, os.O_RDONLY) as fd:
            parts = []
            while part := os.read(fd, size):
                parts.append(part)
        assert b"".join(parts) == content


def test_tail_of_a_stored_file_that_is_then_appended_to(place: Place) -> None:
    path = place.file("file", b"\0first")
    with opened(path, os.O_RDONLY) as reader:
        assert os.read(reader, 100) == b"\0first"
        place.let_store(path)
        for number in range(20):
            line = f"line {number}\n".encode()
            with opened(path, os.O_WRONLY | os.O_APPEND) as writer:
                os.write(writer, line)
                assert os.read(reader, 100) == line
            if number == 10:
                place.let_store(path)
            assert os.read(reader, 100) == b""
