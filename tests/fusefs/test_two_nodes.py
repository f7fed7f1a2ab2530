"""One inode, two nodes: what readers who were left with the older bytes and everybody else see of each other.

The one rule: rights and names belong to the inode, so whatever changes them is seen, and obeyed, through both
nodes at once; only bytes, size and mtime differ.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kernel_reading import MIB, kernel_reads, read_by_kernel, saved, tensors, whole
from kernelmounts import poll
from mounting import Mount

CLIENTS_S = 10.0
_NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def mount(mount_factory: Callable[..., Mount]) -> Mount:
    """A mount whose kernel session is ours, that settles fast."""
    return mount_factory(config={"settle_s": 0.2, "write_path": "auto"})


def change(path: Path) -> None:
    """Give its inode a second node, and close that again."""
    with path.open("r+b") as file:
        file.write(b"changed")


def may_read(path: Path) -> bool:
    """Whether somebody else than root may."""
    command = ["head", "-c1", path.name]
    return subprocess.call(command, user=_NOBODY, cwd=path.parent, stderr=subprocess.DEVNULL, timeout=60) == 0


def test_rights_and_names_are_the_same_through_both(mount: Mount) -> None:
    content = tensors(1)
    path = saved(mount, "m.safetensors", content)
    second = path.with_name("second")
    with read_by_kernel(mount, path) as fd:
        os.fstat(fd), os.stat(path)
        path.open("r+b").close()
        assert may_read(path)
        os.stat(path)
        os.fchmod(fd, 0o600)
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert not may_read(path)
        os.chmod(path, 0o640)
        assert os.fstat(fd).st_mode & 0o777 == 0o640
        os.chown(path, 1, 2)
        assert (os.fstat(fd).st_uid, os.fstat(fd).st_gid) == (1, 2)
        os.link(path, second)
        assert os.fstat(fd).st_nlink == os.stat(path).st_nlink == 2
        path.unlink()
        assert os.fstat(fd).st_nlink == os.stat(second).st_nlink == 1
        second.unlink()
        assert os.fstat(fd).st_nlink == 0
        assert whole(fd) == content


def test_rollback_of_rights_is_seen_through_both(mount: Mount) -> None:
    path = saved(mount, "m.safetensors", tensors(1))
    os.chmod(path, 0o600)
    mount.publish("run")
    with read_by_kernel(mount, path) as fd:
        path.open("r+b").close()
        assert os.stat(path).st_mode & 0o777 == os.fstat(fd).st_mode & 0o777 == 0o600
        mount.cli("rollback", f"{mount.path}/run", "--to", "1")
        assert os.stat(path).st_mode & 0o777 == os.fstat(fd).st_mode & 0o777 == 0o644


def test_they_are_counted_until_their_last_close(mount: Mount) -> None:
    path = saved(mount, "m.safetensors", tensors(1))
    with read_by_kernel(mount, path):
        for _ in range(3):
            change(path)
        assert path.read_bytes()[:7] == b"changed"
        assert kernel_reads(mount) == 1
    poll(lambda: kernel_reads(mount) == 0, 30)


def test_a_path_descriptor_outlives_them(mount: Mount) -> None:
    """O_PATH opens nothing: what it leads to can always be asked for its attributes."""
    path = saved(mount, "m.safetensors", tensors(1))
    where = os.open(path, os.O_PATH)
    try:
        with read_by_kernel(mount, path):
            change(path)
            os.truncate(path, 12345)
        poll(lambda: kernel_reads(mount) == 0, 30)
        assert os.fstat(where).st_size == os.stat(path).st_size == 12345
    finally:
        os.close(where)


@contextmanager
def bound(path: Path, at: Path) -> Iterator[None]:
    """A file as a container gets it: mounted alone."""
    at.touch()
    subprocess.run(["mount", "--bind", str(path), str(at)], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True, timeout=60)


def test_a_file_that_is_mounted_alone(mount: Mount) -> None:
    """Its mount holds the first node, and looks no name up: when nobody keeps older bytes any more, it has
    the new ones."""
    path, alone = saved(mount, "m.safetensors", tensors(1)), mount.path.parent / "alone"
    with bound(path, alone):
        with read_by_kernel(mount, alone) as fd:
            assert whole(fd) == tensors(1)
            change(path)
            assert whole(fd) == tensors(1)
        poll(lambda: kernel_reads(mount) == 0, 30)
        for turn in range(2):
            now = path.read_bytes()
            assert alone.read_bytes() == now and alone.stat().st_size == len(now)
            with alone.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as view:
                assert view[:] == now
            path.write_bytes(tensors(2 + turn, 1 + turn))
            with path.open("r+b") as writer, alone.open("rb") as reader:
                for number in range(3):
                    writer.seek(MIB // 2)
                    writer.write(b"%d" % number)
                    writer.flush()
                    assert os.pread(reader.fileno(), 1, MIB // 2) == b"%d" % number
            mount.publish("run")
        with pytest.raises(OSError) as refused:
            alone.open("r+b")
        assert refused.value.errno == errno.ESTALE


class _Handle(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint), ("kind", ctypes.c_int), ("bytes", ctypes.c_ubyte * 128)]


def handle_of(path: Path) -> _Handle:
    handle, mount_id = _Handle(size=128), ctypes.c_int()
    done = _libc.name_to_handle_at(-100, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount_id), 0)
    assert done == 0, os.strerror(ctypes.get_errno())
    return handle


def open_handle(mount: Mount, handle: _Handle) -> int:
    at = os.open(mount.path, os.O_RDONLY)
    try:
        fd = int(_libc.open_by_handle_at(at, ctypes.byref(handle), os.O_RDONLY))
        if fd < 0:
            raise OSError(ctypes.get_errno(), "open_by_handle_at")
        return fd
    finally:
        os.close(at)


def test_a_file_handle_of_an_earlier_node_is_stale(mount: Mount) -> None:
    path = saved(mount, "m.safetensors", tensors(1))
    first = handle_of(path)
    os.close(open_handle(mount, first))
    poll(lambda: kernel_reads(mount) == 0, 30)
    with read_by_kernel(mount, path):
        change(path)
        with pytest.raises(OSError) as refused:
            open_handle(mount, first)
        assert refused.value.errno == errno.ESTALE
        second = handle_of(path)
        os.close(open_handle(mount, second))
    path.unlink()
    for handle in (first, second):
        with pytest.raises(OSError) as refused:
            open_handle(mount, handle)
        assert refused.value.errno == errno.ESTALE
    assert "unexpectedly" not in mount.log_tail()


def test_what_a_scrub_finds_damaged_is_refused_from_then_on(mount: Mount) -> None:
    """Also while somebody has it open whom the kernel reads it for."""
    path = saved(mount, "m.safetensors", tensors(1))
    old = next(mount.history("run").glob("v000001*")) / "m.safetensors"
    segment = max((mount.store / "segments").rglob("*.seg"), key=lambda one: one.stat().st_size)
    with read_by_kernel(mount, path), read_by_kernel(mount, old):
        with segment.open("r+b") as file:
            file.seek(3 * MIB)
            byte = file.read(1)[0]
            file.seek(3 * MIB)
            file.write(bytes([byte ^ 0xFF]))
        assert mount.cli("scrub", str(mount.path), check=False).returncode == 1
        for one in (path, old):
            with pytest.raises(OSError) as refused:
                one.read_bytes()
            assert refused.value.errno == errno.EIO
        saved(mount, "copy.safetensors", tensors(1))
        assert path.read_bytes() == tensors(1), "a healthy copy heals it"
    poll(lambda: kernel_reads(mount) == 0, 30)
    assert old.read_bytes() == tensors(1)


def test_no_client_sees_an_error_whatever_others_do(mount: Mount, seed: int) -> None:
    directory = mount.path / "run"
    directory.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("node_client.py")), str(directory)]
    clients = [
        subprocess.Popen([*command, str(seed + number), str(CLIENTS_S)], stdout=subprocess.PIPE, text=True)
        for number in range(4)
    ]
    errors: Counter[str] = Counter()
    for client in clients:
        said = json.loads(client.communicate(timeout=60 + CLIENTS_S)[0])
        assert client.returncode == 0
        errors.update(said["errors"])
    nameless = {what for what in errors if what.endswith(": ENOENT")}
    assert errors.keys() - nameless <= {"link: EEXIST"}
    poll(lambda: kernel_reads(mount) == 0, 30)
    assert " ERROR " not in mount.log_tail(lines=1000)
