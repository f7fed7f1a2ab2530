"""fusefs/native/replies.c: how requests are read and answers given.

A request that was taken back before it was read does not stop the event loop; a daemon that is killed while a
request is copied, or its answer, costs the caller no error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import Mount

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, which needs root")
# A session of libfuse's whose kernel is the other end of a socket. In a process of its own, which a read that
# waits would keep for ever.
SESSION = """
import ctypes, errno, mmap, os, socket, struct
from ckptfs.fusefs import REPLIES

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

class Args(ctypes.Structure):
    _fields_ = [("argc", ctypes.c_int), ("argv", ctypes.POINTER(ctypes.c_char_p)), ("own", ctypes.c_int)]

class Buffer(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("flags", ctypes.c_int), ("mem", ctypes.c_void_p),
                ("fd", ctypes.c_int), ("pos", ctypes.c_int64), ("more", ctypes.c_byte * 64)]

def request(opcode, content):
    return struct.pack("<IIQQIIIHH", 40 + len(content), opcode, 7, 1, 0, 0, 0, 0, 0) + content

def present(address, size):
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // 4096 * 8)
        return [page >> 63 for page, in struct.iter_unpack("<Q", pages.read(size // 4096 * 8))]

libfuse, native = ctypes.CDLL("libfuse3.so.3"), ctypes.CDLL(REPLIES.__file__)
native.fuse_reply_buf.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
names = (ctypes.c_char_p * 2)(b"test", None)
args, calls, buffer = Args(1, names, 0), (ctypes.c_void_p * 128)(), Buffer()
libfuse.fuse_session_new.restype = ctypes.c_void_p

def begin():
    session = libfuse.fuse_session_new(ctypes.byref(args), calls, ctypes.sizeof(calls), None)
    assert session
    assert libfuse.fuse_session_mount(ctypes.c_void_p(session), f"/dev/fd/{theirs.fileno()}".encode()) == 0
    return ctypes.c_void_p(session)

def receive(session):
    return native.fuse_session_receive_buf(session, ctypes.byref(buffer))

def serve(session, opcode, content):
    ours.send(request(opcode, content))
    assert receive(session) == 40 + len(content)
    native.fuse_session_process_buf(session, ctypes.byref(buffer))
    assert not buffer.mem, "pyfuse3 frees what it finds there"
"""
# The poll has said that there is a request, and then there is none: the caller was killed.
READS_NOTHING = """
ours_too, theirs_too = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
session = begin()
assert receive(session) == -errno.EINTR and not buffer.mem
os.dup2(theirs_too.fileno(), theirs.fileno())
assert receive(session) == -errno.EINTR, "what lies below the number was exchanged"
ours_too.send(b"x" * 48)
assert receive(session) == 48
ours_too.send(b"x" * 15)
assert receive(session) == -errno.EIO
"""
READS_INTO_PAGES_THAT_ARE_THERE = """
session = begin()
ours.send(request(0, b""))
assert receive(session) == 40
room = buffer.mem
assert all(present(room, (1 << 20) + (4 << 10))), "the next may be a write of a MiB"
native.fuse_session_process_buf(session, ctypes.byref(buffer))
serve(session, 0, b"")
ours.send(request(0, b""))
assert receive(session) == 40 and buffer.mem == room
"""
# An answer that the socket refuses for its size, before it looks at it.
ANSWERS_FROM_PAGES_THAT_ARE_THERE = """
fd = os.memfd_create("segment")
os.write(fd, bytes(4 << 20))
mapped = mmap.mmap(fd, 4 << 20, mmap.MAP_PRIVATE)
address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
answered = []

@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
def getattr_of(req, node, info):
    assert not any(present(address, 4 << 20))
    answered.append(native.fuse_reply_buf(req, address + 4096 * 10 + 5, 4096 * 256))

calls[4] = ctypes.cast(getattr_of, ctypes.c_void_p)
session = begin()
serve(session, 26, struct.pack("<IIII", 7, 31, 1 << 17, 0))
serve(session, 3, bytes(16))
assert answered == [-errno.EMSGSIZE], answered
assert all(present(address + 4096 * 10, 4096 * 257)) and not all(present(address, 4 << 20))
"""
# Pages may be larger, and so may what the kernel sends at once: here 4 MiB.
READS_LARGE_REQUESTS = """
import tempfile
place, kernel = tempfile.mkdtemp(), os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={kernel},rootmode=40000,user_id=0,group_id=0".encode()
assert libc.mount(b"test", place.encode(), b"fuse.test", 0, options) == 0
try:
    init = os.read(kernel, 1 << 20)
    answer = struct.pack("<IIIIHHIIHHIIII", 7, 31, 0, 0, 1, 1, 4 << 20, 1, 0, 0, 0, 0, 0, 0).ljust(64, b"\\0")
    os.write(kernel, struct.pack("<IiQ", 16 + len(answer), 0, *struct.unpack_from("<Q", init, 8)) + answer)
    os.dup2(kernel, theirs.fileno())
    assert receive(begin()) == -errno.EINTR, "nothing is asked, and that is no error"
finally:
    assert libc.umount2(place.encode(), 2) == 0
    os.rmdir(place)
"""


@pytest.mark.parametrize(
    "does",
    [
        READS_NOTHING,
        READS_INTO_PAGES_THAT_ARE_THERE,
        ANSWERS_FROM_PAGES_THAT_ARE_THERE,
        pytest.param(READS_LARGE_REQUESTS, marks=needs_root),
    ],
)
def test_a_session(does: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION + does], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_mount_reads_its_requests_without_waiting(mount_factory: Callable[..., Mount]) -> None:
    """On the descriptor itself, whatever it was before."""
    mount = mount_factory()
    os.listdir(mount.path)
    flags = []
    for fd in Path(f"/proc/{mount.pid}/fd").iterdir():
        if os.readlink(fd) == "/dev/fuse":
            fields = (Path(f"/proc/{mount.pid}/fdinfo") / fd.name).read_text().split()
            flags.append(int(fields[fields.index("flags:") + 1], 8))
    assert flags and all(one & os.O_NONBLOCK for one in flags)
