"""fusefs/native/replies.c: a request that was taken back before it was read does not stop the event loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import Mount

from ckptfs.fusefs import REPLIES

# The poll has said that there is a request, and then there is none: the caller was killed. In a process
# of its own, which a read that waits would keep for ever.
READS_NOTHING = """
import ctypes, errno, os, socket
from ckptfs.fusefs import REPLIES
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours_too, theirs_too = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

class Args(ctypes.Structure):
    _fields_ = [("argc", ctypes.c_int), ("argv", ctypes.POINTER(ctypes.c_char_p)), ("own", ctypes.c_int)]

class Buffer(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("flags", ctypes.c_int), ("mem", ctypes.c_void_p),
                ("fd", ctypes.c_int), ("pos", ctypes.c_int64), ("more", ctypes.c_byte * 64)]

names = (ctypes.c_char_p * 2)(b"test", None)
args, calls, buffer = Args(1, names, 0), (ctypes.c_char * 1024)(), Buffer()
libfuse = ctypes.CDLL("libfuse3.so.3")
libfuse.fuse_session_new.restype = ctypes.c_void_p
session = ctypes.c_void_p(libfuse.fuse_session_new(ctypes.byref(args), calls, len(calls), None))
assert session.value
assert libfuse.fuse_session_mount(session, f"/dev/fd/{theirs.fileno()}".encode()) == 0
receive = ctypes.CDLL(REPLIES.__file__).fuse_session_receive_buf
assert receive(session, ctypes.byref(buffer)) == -errno.EINTR
os.dup2(theirs_too.fileno(), theirs.fileno())
assert receive(session, ctypes.byref(buffer)) == -errno.EINTR, "what lies below the number was exchanged"
ours_too.send(b"x" * 48)
assert receive(session, ctypes.byref(buffer)) == 48
"""


@pytest.mark.skipif(REPLIES is None, reason="the reply extension is not built")
def test_a_request_that_is_gone_is_not_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READS_NOTHING], timeout=20, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(REPLIES is None, reason="the reply extension is not built")
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
