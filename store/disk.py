"""The one door to the file system that holds a store.

One rule: every call that touches the store's files goes through here, with paths relative to
the store's root, so that tests can put a disk below that forgets unsynced bytes, fails or dies
at the Nth call. A method does one thing and raises OSError as the kernel gave it.

What is assumed of the hardware: FORMAT.md, "What is assumed of the disk".
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ckptfs.store.mapped_file import MappedFile, is_in_memory

BLOCK_BYTES = 4096
_FALLOC_KEEP_SIZE = 0x01
_FALLOC_PUNCH_HOLE = 0x02
_CANNOT_PUNCH = {errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV, errno.EINVAL}
_FICLONE = 0x40049409
_CANNOT_CLONE = _CANNOT_PUNCH | {errno.EXDEV, errno.ENOTTY, errno.EPERM, errno.EBADF}
_COPY_BYTES = 4 << 20
_F_SETSIG = 10
_LEAST_SET_ASIDE = 1 << 20
_LEASE_KINDS = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK}


@dataclass(frozen=True, slots=True)
class Space:
    """Room on the file system, in bytes; `free` is what root may still use, `available` anybody."""

    total: int
    free: int
    available: int
    inodes: int
    inodes_free: int


def _libc(name: str, *arguments: type) -> Callable[..., int]:
    """A call of the C library that returns an int; it sets ctypes' errno and releases the GIL."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    call.argtypes = arguments
    call.restype = ctypes.c_int
    return call  # type: ignore[no-any-return]


class ShortWrite(OSError):
    """A write that failed on its way: `written` bytes of it are there."""

    def __init__(self, cause: OSError, written: int) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.written = written


class Disk:
    """File-system calls below one store root. Holds no state but the root; any thread may call."""

    def __init__(self, root: str) -> None:
        self.root = root
        c_int, c_longlong = ctypes.c_int, ctypes.c_longlong
        self._fallocate = _libc("fallocate", c_int, c_int, c_longlong, c_longlong)

    def absolute(self, path: str) -> str:
        """The path as the kernel wants it."""
        return f"{self.root}/{path}" if path else self.root

    def below(self, path: str) -> Disk:
        """The same disk, seen from a folder below the root."""
        return Disk(self.absolute(path))

    def make_dir(self, path: str) -> None:
        """Make a directory (0700) unless it is there. Durable when: its parent is synced."""
        os.makedirs(self.absolute(path), mode=0o700, exist_ok=True)

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted; empty if it does not exist."""
        try:
            return sorted(os.listdir(self.absolute(path)))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        """Whether there is something under this name."""
        return os.path.lexists(self.absolute(path))

    def stat(self, path: str) -> os.stat_result:
        """lstat of a name."""
        return os.lstat(self.absolute(path))

    def size(self, path: str) -> int:
        """Length of a file in bytes."""
        return os.lstat(self.absolute(path)).st_size

    def allocated(self, path: str) -> int:
        """Bytes that a file really occupies."""
        return os.lstat(self.absolute(path)).st_blocks * 512

    def create(self, path: str) -> int:
        """A new file (0600), opened read-write; FileExistsError if the name is taken."""
        return os.open(self.absolute(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open_read(self, path: str, *, waits: bool = True) -> int:
        """A descriptor for reading; the caller closes it. While somebody has a lease that forbids it, this
        waits until that is given back, or, if it is not to wait, is a BlockingIOError; the holder is told."""
        flags = os.O_RDONLY | os.O_CLOEXEC | (0 if waits else os.O_NONBLOCK)
        return os.open(self.absolute(path), flags)

    def open_write(self, path: str) -> int:
        """A descriptor for reading and writing of a file that exists; the caller closes it."""
        return os.open(self.absolute(path), os.O_RDWR | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        part = os.pread(fd, length, offset)
        if len(part) == length or not part:
            return part
        parts = [part]
        have = len(part)
        while have < length and (part := os.pread(fd, length - have, offset + have)):
            parts.append(part)
            have += len(part)
        return b"".join(parts)

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""
        have = 0
        while have < len(buffer) and (n := os.preadv(fd, [buffer[have:]], offset + have)):
            have += n
        return have

    def map(self, fd: int, length: int, offset: int) -> MappedFile:
        """A mapping of `length` bytes (at least 1) from `offset`; the caller closes it.

        OSError (EFAULT): the file ends before.
        """
        return MappedFile(fd, length, offset)

    def is_in_memory(self, fd: int, size: int) -> bool:
        """Whether reading the first `size` bytes takes no disk, as far as some pages tell."""
        return is_in_memory(fd, size)

    def map_for_calls(self, fd: int) -> mmap.mmap:
        """All of a file, mapped for system calls to read; ValueError if it is empty. Where the disk does
        not give a page, such a call fails with EFAULT; anybody else would get a SIGBUS."""
        return mmap.mmap(fd, 0, prot=mmap.PROT_READ)

    def pwrite(self, fd: int, payload: bytes | bytearray | memoryview, offset: int) -> int:
        """Write all of `payload` or raise, ShortWrite if a part is there. Durable when: `sync` returned."""
        done = os.pwrite(fd, payload, offset)
        try:
            while done < len(payload):
                done += os.pwrite(fd, memoryview(payload)[done:], offset + done)
        except OSError as e:
            raise ShortWrite(e, done) from e
        return done

    def truncate(self, fd: int, size: int) -> None:
        """Set the length. Durable when: `sync` returned."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """fdatasync. After a failure the caller must treat the file's writer as broken for good."""
        os.fdatasync(fd)

    def drop_cached(self, fd: int) -> None:
        """Have what is read next come from the disk itself, as far as its file system does that."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync_dir(self, path: str) -> None:
        """fsync a directory, so that names made or removed in it survive power loss."""
        fd = os.open(self.absolute(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_all(self) -> None:
        """syncfs: bytes and names of everything on the file system of the store."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), self.root)
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        """A second name for a file. Durable when: the target's directory is synced."""
        os.link(self.absolute(source), self.absolute(target))

    def clone(self, source_fd: int, fd: int) -> bool:
        """Have `fd` share the blocks of another file; False where the file system cannot."""
        try:
            fcntl.ioctl(fd, _FICLONE, source_fd)
        except OSError as e:
            if e.errno in _CANNOT_CLONE:
                return False
            raise
        return True

    def copy_from(self, source_fd: int, fd: int, offset: int, length: int) -> int:
        """Copy a range of a file, of anybody, to the same place in `fd`; returns the bytes copied, fewer only
        where the source ends. Durable when: `sync` returned."""
        done = 0
        buffer: memoryview | None = None
        while done < length:
            count = min(_COPY_BYTES, length - done)
            if buffer is None:
                try:
                    n = os.copy_file_range(source_fd, fd, count, offset + done, offset + done)
                except OSError as e:
                    if e.errno not in _CANNOT_CLONE:
                        raise
                    buffer = memoryview(bytearray(_COPY_BYTES))
                    continue
            else:
                n = self.read_into(source_fd, buffer[:count], offset + done)
                self.pwrite(fd, buffer[:n], offset + done)
            if not n:
                break
            done += n
        return done

    def rename(self, source: str, target: str) -> None:
        """Rename over. Durable when: the directories are synced."""
        os.rename(self.absolute(source), self.absolute(target))

    def unlink(self, path: str) -> None:
        """Remove a name; FileNotFoundError if it is not there."""
        os.unlink(self.absolute(path))

    def remove_tree(self, path: str) -> None:
        """Remove a directory with all that is in it, as far as that can be; it need not be there."""
        shutil.rmtree(self.absolute(path), ignore_errors=True)

    def write_file(self, path: str, payload: bytes) -> None:
        """Replace a small file whole. Durable when: this returned."""
        temporary = path + ".tmp"
        if self.exists(temporary):
            self.unlink(temporary)
        fd = self.create(temporary)
        try:
            self.pwrite(fd, payload, 0)
            self.sync(fd)
        finally:
            self.close(fd)
        self.rename(temporary, path)
        self.sync_dir(os.path.dirname(path))

    def read_file(self, path: str) -> bytes:
        """All bytes of a file."""
        fd = self.open_read(path)
        try:
            return self.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            self.close(fd)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Give back a range (it then reads as zeros); False where the file system cannot."""
        if self._fallocate(fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, length) == 0:
            return True
        code = ctypes.get_errno()
        if code in _CANNOT_PUNCH:
            return False
        raise OSError(code, os.strerror(code))

    def allocate(self, fd: int, length: int) -> bool:
        """Have the first `length` bytes of a file occupy their blocks, so that writing them later
        needs no room; the file's length stays. False where that cannot be."""
        return self._fallocate(fd, _FALLOC_KEEP_SIZE, 0, length) == 0

    def lease(self, fd: int, kind: Literal["read", "write"]) -> bool:
        """Take a lease; False while somebody has the file open or mapped in a way that forbids it.

        "read" is refused while a writable descriptor or mapping exists, "write" while any other
        open or mapping exists. The probe is atomic; the caller holds the lease only as long as
        it needs the answer to stay true.
        """
        # The kernel tells of a broken lease by a signal, by default SIGIO, which would end the process.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, _LEASE_KINDS[kind])
        except OSError as e:
            if e.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                return False
            raise
        return True

    def is_lease_wanted(self, fd: int) -> bool:
        """Whether somebody waits for a "write" lease of ours: what it is held for should come to an end."""
        return fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK

    def unlease(self, fd: int) -> None:
        """Give a lease back."""
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def data_extents(self, fd: int, size: int) -> list[tuple[int, int]]:
        """(offset, length) of the allocated ranges below `size`, in order."""
        extents = []
        at = 0
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as e:
                if e.errno == errno.ENXIO:
                    break
                raise
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
            if start < size:
                extents.append((start, end - start))
            at = max(end, start + 1)
        return extents

    def fstat(self, fd: int) -> os.stat_result:
        """fstat."""
        return os.fstat(fd)

    def set_times(self, fd: int, atime_ns: int, mtime_ns: int) -> None:
        """Set access and modification time of an open file."""
        os.utime(fd, ns=(atime_ns, mtime_ns))

    def set_aside(self, most: int) -> int:
        """How many bytes may be kept aside for one purpose: `most`, less on a small disk."""
        return min(most, max(_LEAST_SET_ASIDE, self.space().total // 64))

    def space(self) -> Space:
        """Room on the file system below the store."""
        s = os.statvfs(self.root)
        return Space(
            s.f_blocks * s.f_frsize, s.f_bfree * s.f_frsize, s.f_bavail * s.f_frsize, s.f_files, s.f_ffree
        )
