"""Bytes of a file, mapped, whose pages cannot go away while somebody looks at them.

One rule: what `loaded` hands out is in memory and stays there. Touching a page that the disk does not give
would be a SIGBUS, so each page gets a reference before it is shown.

The reference is that of a pipe: vmsplice(2) puts the pages themselves into one, without a copy, and fails
with EFAULT where a page cannot be had; a page that is in a pipe is not evicted. mlock(2) does the same and
takes twice as long (each page moves to another list, and two threads wait for each other there: 256 KiB
chunks are hashed in two threads at 0.5 of the speed of pages that are mapped already, and at 0.65 so).

Source: vmsplice(2), splice(2), pipe(7); measured on Linux 6.18, tmpfs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

import numpy as np

PIPE_BYTES = 1 << 20
"""What anybody may have in one pipe (fs.pipe-max-size)."""
_NONBLOCK = 0x02


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_vmsplice = ctypes.CDLL(None, use_errno=True).vmsplice
_vmsplice.argtypes = (ctypes.c_int, ctypes.POINTER(_IoVec), ctypes.c_size_t, ctypes.c_uint)
_vmsplice.restype = ctypes.c_ssize_t


_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_LOOKED_AT = 64


def is_in_memory(fd: int, size: int) -> bool:
    """Whether the first `size` bytes of a file are in the page cache, as far as some pages tell."""
    if size <= 0:
        return True
    try:
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return False
    with mapped, memoryview(mapped) as view:
        address: int = np.frombuffer(view, np.uint8).ctypes.data
        present = ctypes.create_string_buffer(1)
        pages = range(0, size, mmap.PAGESIZE)
        for page in pages[:: max(1, len(pages) // _LOOKED_AT)]:
            if _mincore(address + page, 1, present) != 0 or not present.raw[0] & 1:
                return False
    return True


class MappedFile:
    """Bytes of a file, mapped for reading. Belongs to one thread at a time."""

    __slots__ = ("_address", "_held", "_mmap", "_pipes", "_sink", "_start", "_view")

    def __init__(self, fd: int, length: int, offset: int) -> None:
        """OSError: the file ends before (EFAULT), or there are no descriptors left."""
        skip = offset % mmap.ALLOCATIONGRANULARITY
        try:
            self._mmap = mmap.mmap(fd, skip + length, prot=mmap.PROT_READ, offset=offset - skip)
        except ValueError as e:
            raise OSError(errno.EFAULT, f"a file ends before byte {offset + length}") from e
        self._start = offset - skip
        self._view = memoryview(self._mmap)
        self._address: int = np.frombuffer(self._view, np.uint8).ctypes.data
        self._pipes: list[tuple[int, int]] = []
        self._held: list[int] = []
        self._sink = -1

    def loaded(self, length: int, offset: int) -> memoryview:
        """`length` bytes from byte `offset` of the file, which lie in this mapping, with their pages in
        memory until the next call or `close`; to be released before either.

        OSError: the disk does not give them, or this process may not have so many pages in pipes (EPERM).
        """
        self._let_go()
        at = offset - self._start
        end = at + length
        for number, page in enumerate(range(at - at % mmap.PAGESIZE, end, PIPE_BYTES)):
            if number == len(self._pipes):
                self._add_pipe()
            self._hold(self._pipes[number][1], page, min(PIPE_BYTES, end - page))
        return self._view[at:end]

    def close(self) -> None:
        """Unmap."""
        for pipe in self._pipes:
            for fd in pipe:
                os.close(fd)
        if self._sink >= 0:
            os.close(self._sink)
        self._view.release()
        self._mmap.close()

    def _add_pipe(self) -> None:
        if self._sink < 0:
            self._sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._pipes.append(os.pipe())
        fcntl.fcntl(self._pipes[-1][1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def _hold(self, pipe: int, at: int, length: int) -> None:
        """Take a reference to the pages of bytes that begin with a page."""
        # It takes the GIL away from nobody while the disk is read.
        taken = _vmsplice(pipe, ctypes.byref(_IoVec(self._address + at, length)), 1, _NONBLOCK)
        code = ctypes.get_errno() if taken < 0 else errno.EFAULT
        self._held.append(max(0, taken))
        if taken != length:
            raise OSError(code, os.strerror(code))

    def _let_go(self) -> None:
        for (source, _), held in zip(self._pipes, self._held, strict=False):
            while held:
                held -= os.splice(source, self._sink, held)
        self._held.clear()
