"""Owning the kernel session: /dev/fuse, mount(2) and FUSE_INIT in our own hands.

One rule: pyfuse3 and libfuse stay unmodified. libfuse takes the mount point `/dev/fd/N` for an fd
that is mounted already; it is given one end of a socket pair first, answers the kernel's INIT
there, the answer is amended (passthrough, KILLPRIV_V2) and sent to the kernel by us, and then the
fd below libfuse is replaced by the real one.

Needs root. Source: the kernel's FUSE protocol (fuse_init_in, fuse_init_out); KERNEL facts in
SEMANTICS.md, "Write paths".
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

_INIT_IN = struct.Struct("<IIQQIIIIIIII")
_IN_HEADER_BYTES = 40
_INIT_ANSWER_BYTES = 80
_OUT_HEADER_BYTES = 16
_FLAGS_AT = _OUT_HEADER_BYTES + 12
_FLAGS2_AT = _OUT_HEADER_BYTES + 32
_STACK_DEPTH_AT = _OUT_HEADER_BYTES + 36
_INIT_EXT = 1 << 30
_HANDLE_KILLPRIV_V2 = 1 << 28
_PASSTHROUGH_FLAGS2 = 1 << (37 - 32)
_HAS_RESEND_FLAGS2 = 1 << (39 - 32)
_NOTIFY_RESEND = struct.pack("<IiQ", 16, 7, 0)
_FUSE_INIT = 26
_OVERLAYFS = 0x794C7630
_READ_BYTES = 1 << 17

_BACKING_MAP = struct.Struct("<iIQ")
_BACKING_OPEN = (1 << 30) | (_BACKING_MAP.size << 16) | (229 << 8) | 1
_BACKING_CLOSE = (1 << 30) | (4 << 16) | (229 << 8) | 2


@dataclass(frozen=True, slots=True)
class Offer:
    """What the kernel's INIT request says that it can do."""

    request: bytes
    passthrough: bool
    killpriv_v2: bool
    resend: bool


def open_mounted(mountpoint: str, source: str, subtype: str, options: list[str]) -> int:
    """Open /dev/fuse and mount it. Returns the fd; OSError says what the kernel refused."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        owner = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        _mount(source, mountpoint, f"fuse.{subtype}", ",".join([owner, *options]))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_offer(fd: int) -> Offer:
    """Take the kernel's INIT request, which waits from the moment of the mount."""
    request = os.read(fd, _READ_BYTES)
    length, opcode = struct.unpack_from("<II", request)
    if opcode != _FUSE_INIT or length != len(request):
        raise OSError("the first request of the kernel is not FUSE_INIT")
    _, _, _, flags = struct.unpack_from("<IIII", request, _IN_HEADER_BYTES)
    has_more = len(request) >= _IN_HEADER_BYTES + 20 and flags & _INIT_EXT
    flags2 = struct.unpack_from("<I", request, _IN_HEADER_BYTES + 16)[0] if has_more else 0
    return Offer(
        request,
        bool(flags2 & _PASSTHROUGH_FLAGS2),
        bool(flags & _HANDLE_KILLPRIV_V2),
        bool(flags2 & _HAS_RESEND_FLAGS2),
    )


def amended(answer: bytes, offer: Offer, stack_depth: int) -> bytes:
    """libfuse's answer to INIT with what it does not know added."""
    if len(answer) != _INIT_ANSWER_BYTES or struct.unpack_from("<i", answer, 4)[0] != 0:
        raise OSError("libfuse answered FUSE_INIT in an unknown way")
    out = bytearray(answer)
    (flags,) = struct.unpack_from("<I", out, _FLAGS_AT)
    (flags2,) = struct.unpack_from("<I", out, _FLAGS2_AT)
    if offer.killpriv_v2:
        flags |= _HANDLE_KILLPRIV_V2
    if offer.passthrough:
        flags |= _INIT_EXT
        flags2 |= _PASSTHROUGH_FLAGS2
        struct.pack_into("<I", out, _STACK_DEPTH_AT, stack_depth)
    struct.pack_into("<I", out, _FLAGS_AT, flags)
    struct.pack_into("<I", out, _FLAGS2_AT, flags2)
    return bytes(out)


def within(request: bytes, answer: bytes) -> bytes:
    """The kernel's INIT with nothing offered but what was taken when it was answered: another libfuse, or
    another ckptfs, must not take more now."""
    out = bytearray(request)
    for offered_at, taken_at in ((_IN_HEADER_BYTES + 12, _FLAGS_AT), (_IN_HEADER_BYTES + 16, _FLAGS2_AT)):
        if offered_at + 4 <= len(out):
            (offered,) = struct.unpack_from("<I", out, offered_at)
            (taken,) = struct.unpack_from("<I", answer, taken_at)
            struct.pack_into("<I", out, offered_at, offered & (taken | _INIT_EXT * (taken_at == _FLAGS_AT)))
    return bytes(out)


def agree(answer: bytes, before: bytes) -> bool:
    """Whether libfuse takes what it took before, up to what `amended` adds by itself."""
    ours, ours2 = _HANDLE_KILLPRIV_V2 | _INIT_EXT, _PASSTHROUGH_FLAGS2
    taken = [(_word(one, _FLAGS_AT) & ~ours, _word(one, _FLAGS2_AT) & ~ours2) for one in (answer, before)]
    return taken[0] == taken[1]


def _word(message: bytes, at: int) -> int:
    return int.from_bytes(message[at : at + 4], "little")


def stack_depth_for(store: str) -> int:
    """How deep file systems are stacked if the store's files back the mount's: 2 on overlayfs."""

    class StatFs(ctypes.Structure):
        _fields_ = [("f_type", ctypes.c_long), ("rest", ctypes.c_byte * 256)]

    found = StatFs()
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(store), ctypes.byref(found)):
        raise OSError(ctypes.get_errno(), f"statfs of {store} failed")
    return 2 if found.f_type == _OVERLAYFS else 1


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends on which libfuse and we exchange INIT: one message, one packet."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def ask_again(fd: int) -> None:
    """Have the kernel send all requests again that were read and not answered, before any other."""
    os.write(fd, _NOTIFY_RESEND)


def open_backing(fuse_fd: int, fd: int) -> int:
    """Register a file as a backing file of this mount; returns its id (at least 1)."""
    argument = bytearray(_BACKING_MAP.pack(fd, 0, 0))
    return int(fcntl.ioctl(fuse_fd, _BACKING_OPEN, argument))


def close_backing(fuse_fd: int, backing_id: int) -> None:
    """Let go of a backing id; files that are open keep it alive."""
    fcntl.ioctl(fuse_fd, _BACKING_CLOSE, struct.pack("<I", backing_id))


def _mount(source: str, target: str, kind: str, data: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [os.fsencode(word) for word in (source, target, kind)]
    if libc.mount(words[0], words[1], words[2], ctypes.c_ulong(0), os.fsencode(data)):
        code = ctypes.get_errno()
        raise OSError(code, f"{target} cannot be mounted: {os.strerror(code)}")
