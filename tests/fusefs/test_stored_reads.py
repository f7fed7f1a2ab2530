"""Stored files that the kernel reads by itself: which, and what readers see while others change them.

What the kernel does by itself shows in `status` alone (kernel_reads), so the tests wait for it there, and
then look at bytes. A file is looked for in the background; until that is done it is read the ordinary way.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_reading import MIB, is_read_by_kernel, kernel_reads, read_by_kernel, saved, tensors, whole
from kernelmounts import poll
from mounting import Mount
from small_store import safetensors


@pytest.fixture
def mount(mount_factory: Callable[..., Mount]) -> Mount:
    """A mount whose kernel session is ours, that settles fast."""
    place = mount_factory(config={"settle_s": 0.2, "write_path": "auto"})
    assert place.facts("status", str(place.path))["write_path"] == "passthrough"
    return place


def test_a_saved_tensor_file_is(mount: Mount) -> None:
    content = tensors(1)
    path = saved(mount, "m.safetensors", content)
    with read_by_kernel(mount, path) as fd:
        assert whole(fd) == content
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
            assert view[:] == content
        assert kernel_reads(mount) == 1
        assert path.read_bytes() == content  # a second reader
    poll(lambda: kernel_reads(mount) == 0, 30)


def test_so_is_a_save_whose_header_an_older_one_has(mount: Mount) -> None:
    """Its header is stored once, with the older save, and yet stays in this one's segment."""
    saved(mount, "step1.safetensors", tensors(1))
    content = tensors(2)
    path = saved(mount, "step2.safetensors", content)
    with read_by_kernel(mount, path) as fd:
        assert whole(fd) == content


def test_so_is_a_file_of_a_version(mount: Mount) -> None:
    content = tensors(1)
    saved(mount, "m.safetensors", content)
    saved(mount, "m.safetensors", tensors(2))
    old = next(mount.history("run").glob("v000001*")) / "m.safetensors"
    with read_by_kernel(mount, old) as fd:
        assert whole(fd) == content
        mount.cli("forget", f"{mount.path}/run@1")
        mount.cli("gc", str(mount.path))
        assert whole(fd) == content
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
            assert view[:] == content


def test_a_file_that_duplicates_another_is_not(mount: Mount) -> None:
    first = random.Random(1).randbytes(4 * MIB)
    saved(mount, "a.safetensors", safetensors({"w": first}))
    content = safetensors({"w": first, "x": random.Random(2).randbytes(4 * MIB)})
    path = saved(mount, "b.safetensors", content)
    assert not is_read_by_kernel(mount, path)
    assert path.read_bytes() == content


def test_what_is_edited_in_place_is_not(mount: Mount) -> None:
    """Of a database or a log a reader sees what a writer adds."""
    path = saved(mount, "data.db", random.Random(1).randbytes(4 * MIB))
    assert not is_read_by_kernel(mount, path)
    with path.open("rb") as reader:
        with path.open("ab") as writer:
            writer.write(b"added")
        reader.seek(4 * MIB)
        assert reader.read() == b"added"


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"changed")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"changed")


def save_over(path: Path) -> None:
    path.write_bytes(b"changed")


def create_over(path: Path) -> None:
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
    os.write(fd, b"changed")
    os.close(fd)


def cut(path: Path) -> None:
    os.truncate(path, 1000)


def copy_over(path: Path) -> None:
    subprocess.run(["cp", "/proc/self/status", str(path)], check=True, timeout=60)


CHANGES = (overwrite, append, save_over, create_over, cut, copy_over)


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_reader_keeps_the_bytes_that_it_opened(mount: Mount, change: Callable[[Path], None]) -> None:
    """As after a rename over it; whoever opens the file now has the new ones, under the same number."""
    content = tensors(1)
    path = saved(mount, "m.safetensors", content)
    expected = mount.path.parent / "expected"
    expected.write_bytes(content)
    with read_by_kernel(mount, path) as fd, mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
        number = os.fstat(fd).st_ino
        change(path)
        change(expected)
        assert whole(fd) == content and view[:] == content
        assert os.fstat(fd).st_size == len(content)
        now = os.stat(path)
        assert now.st_ino == os.fstat(fd).st_ino == number
        if change is not copy_over:
            assert path.read_bytes() == expected.read_bytes()
        assert now.st_size == len(path.read_bytes())
        mount.publish("run")
        assert whole(fd) == content
        change(path)  # a second one meets no reader of its node
    poll(lambda: kernel_reads(mount) == 0, 30)
    if change is not append and change is not copy_over:
        assert path.read_bytes() == expected.read_bytes()
    first = next(mount.history("run").glob("v000001*"))
    assert (first / "m.safetensors").read_bytes() == content


def test_rights_and_names_of_a_file_that_readers_were_left_with(mount: Mount) -> None:
    content = tensors(1)
    path = saved(mount, "m.safetensors", content)
    with read_by_kernel(mount, path) as fd:
        overwrite(path)
        os.fchmod(fd, 0o600)
        os.setxattr(fd, "user.note", b"kept")
        assert os.stat(path).st_mode & 0o777 == 0o600 and os.getxattr(path, "user.note") == b"kept"
        other = path.with_name("other")
        os.link(path, other)
        assert os.stat(other).st_ino == os.fstat(fd).st_ino and os.stat(other).st_nlink == 2
        path.unlink()
        other.rename(path)
        assert whole(fd) == content
        with pytest.raises(OSError) as refused:  # a way round the name leads to what it was
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        assert refused.value.errno == errno.ESTALE
        path.unlink()
        assert whole(fd) == content
    assert not path.exists()


def test_a_second_name_of_a_file_that_is_read(mount: Mount) -> None:
    content = tensors(1)
    path = saved(mount, "m.safetensors", content)
    second = path.with_name("second")
    with read_by_kernel(mount, path) as fd:
        os.link(path, second)
        os.stat(second), os.stat(path)
        overwrite(second)
        assert path.read_bytes() == second.read_bytes() != content
        assert whole(fd) == content
    mount.publish("run")
    assert not is_read_by_kernel(mount, path), "a change must reach both names"


def test_many_writers_at_once_meet_one_reader(mount: Mount) -> None:
    content = tensors(1)
    path = saved(mount, "m.safetensors", content)
    script = "import os, sys; n = sys.argv[2]; os.pwrite(os.open(sys.argv[1], 2), n.encode(), 10 * int(n))"
    with read_by_kernel(mount, path) as fd:
        writers = [
            subprocess.Popen(["python3", "-c", script, str(path), str(one)], stderr=subprocess.PIPE)
            for one in range(8)
        ]
        readers = [os.open(path, os.O_RDONLY) for _ in range(4)]
        for writer in writers:
            said = writer.communicate(timeout=60)[1]
            assert writer.returncode == 0, said
        assert whole(fd) == content
        for reader in readers:
            os.close(reader)
    now = bytearray(content)
    for one in range(8):
        now[one * 10] = ord("0") + one
    assert path.read_bytes() == bytes(now)


def test_after_a_restart_it_is_verified_first(mount: Mount) -> None:
    content = tensors(1)
    path = saved(mount, "m.safetensors", content)
    mount.wait_until_ingested()
    mount.stop()
    mount.start()
    assert kernel_reads(mount) == 0
    with path.open("rb") as file:
        assert kernel_reads(mount) == 1, "it is in memory, so the first open waits until it is verified"
        assert file.read() == content


def test_a_damaged_file_never_is(mount: Mount) -> None:
    path = saved(mount, "m.safetensors", tensors(1))
    mount.wait_until_ingested()
    mount.stop()
    segment = max((mount.store / "segments").rglob("*.seg"), key=lambda one: one.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(3 * MIB)
        byte = file.read(1)[0]
        file.seek(3 * MIB)
        file.write(bytes([byte ^ 1]))
    mount.start()
    assert not is_read_by_kernel(mount, path)
    with path.open("rb") as file, pytest.raises(OSError) as refused:
        while file.read(MIB):
            pass
    assert refused.value.errno == errno.EIO


def test_a_rollback_while_it_is_read(mount: Mount) -> None:
    content, newer = tensors(1), tensors(2)
    path = saved(mount, "m.safetensors", content)
    saved(mount, "m.safetensors", newer)
    with read_by_kernel(mount, path) as fd:
        overwrite(path)
        mount.cli("rollback", f"{mount.path}/run", "--to", "1")
        assert whole(fd) == newer
        assert path.read_bytes() == content


def test_removed_files_are_forgotten(mount: Mount) -> None:
    """Splitting and removing leaves nothing behind: the same names, again and again."""
    for turn in range(3):
        path = saved(mount, "m.safetensors", tensors(turn))
        with read_by_kernel(mount, path):
            overwrite(path)
        shutil.rmtree(path.parent)
    poll(lambda: kernel_reads(mount) == 0, 30)
    assert os.listdir(mount.path) == []
