"""One of the two directories that the model test compares, and every operation it can be asked for.

The one rule: an operation returns a value that says all that a program can see of it: what came back, or the
name of the errno. The same operation on a plain directory must return the same value.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# Times at and above this were set by the clock, not by utime: the two sides differ in them.
CLOCK_NS = 10**15
# Readers of larger files may keep what they opened, while others change it.
LARGE_BYTES = 1 << 20


class Side:
    """A directory with descriptors opened in it, by the number of their slot; `kept` counts the readers
    who kept older bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slots: dict[int, tuple[int, str, int]] = {}
        self.kept = 0

    def ask(self, operation: str, *arguments: object) -> object:
        """What the operation gives, or the name of its errno."""
        try:
            answer: object = getattr(self, operation)(*arguments)
        except OSError as e:
            return errno.errorcode.get(e.errno or 0, str(e))
        except ValueError as e:  # an empty file cannot be mapped
            return str(e)
        return "ok" if answer is None else answer

    # -- names --------------------------------------------------------------------------------

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rename(self, old: str, new: str, flags: int) -> None:
        at_cwd = -100
        done = _libc.renameat2(at_cwd, os.fsencode(self._at(old)), at_cwd, os.fsencode(self._at(new)), flags)
        if done != 0:
            raise OSError(ctypes.get_errno(), "renameat2")

    def link(self, old: str, new: str) -> None:
        os.link(self._at(old), self._at(new), follow_symlinks=False)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, self._at(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def mknod(self, path: str, mode: int) -> None:
        os.mknod(self._at(path), mode)

    def remove_tree(self, path: str) -> None:
        if os.path.islink(self._at(path)) or not os.path.isdir(self._at(path)):
            raise OSError(errno.ENOTDIR, "not a tree")
        shutil.rmtree(self._at(path))

    def listing(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))

    # -- attributes ---------------------------------------------------------------------------

    def stat(self, path: str) -> object:
        return shown(os.lstat(self._at(path)))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(self._at(path), uid, gid, follow_symlinks=False)

    def utime(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        os.utime(self._at(path), ns=(atime_ns, mtime_ns), follow_symlinks=False)

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        os.setxattr(self._at(path), name, value, flags, follow_symlinks=False)

    def removexattr(self, path: str, name: str) -> None:
        os.removexattr(self._at(path), name, follow_symlinks=False)

    def xattrs(self, path: str) -> list[tuple[str, bytes]]:
        here = self._at(path)
        names = sorted(os.listxattr(here, follow_symlinks=False))
        return [(name, os.getxattr(here, name, follow_symlinks=False)) for name in names]

    # -- bytes by name ------------------------------------------------------------------------

    def write_whole(self, path: str, content: bytes) -> None:
        _write(self._at(path), content)

    def replace_whole(self, path: str, content: bytes) -> None:
        """As careful programs save: a temporary file, renamed into place."""
        temporary = self._at(path) + ".tmp"
        _write(temporary, content)
        os.rename(temporary, self._at(path))

    def read_whole(self, path: str) -> bytes:
        fd = os.open(self._at(path), os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, "rb") as f:
            return f.read()

    def change_under_reader(self, path: str, offset: int, payload: bytes, cut: bool) -> bytes:
        """Overwrite a part, or truncate at open, while somebody has it open; what who comes then reads.

        The reader may have kept the older bytes of a large file (SEMANTICS.md, "Write paths"), all of them.
        """
        here = self._at(path)
        fd = os.open(here, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EISDIR, "not a file")
            before = os.pread(fd, os.fstat(fd).st_size, 0)
            writer = os.open(here, os.O_RDWR | (os.O_TRUNC if cut else 0))
            try:
                os.pwrite(writer, payload, offset)
            finally:
                os.close(writer)
            after = self.read_whole(path)
            kept = os.pread(fd, os.fstat(fd).st_size, 0)
            assert kept in (before, after), f"the reader of {path} has neither the older nor the newer bytes"
            self.kept += kept != after
            assert kept == after or len(before) >= LARGE_BYTES, f"the reader of {path} has older bytes"
        finally:
            os.close(fd)
        return after

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self._at(path), size)

    # -- descriptors --------------------------------------------------------------------------

    def open(self, slot: int, path: str, flags: int, mode: int) -> None:
        self.slots[slot] = (os.open(self._at(path), flags | os.O_NONBLOCK, mode), path, flags)

    def close(self, slot: int) -> None:
        os.close(self.slots.pop(slot)[0])

    def pread(self, slot: int, length: int, offset: int) -> bytes:
        return os.pread(self.slots[slot][0], length, offset)

    def pwrite(self, slot: int, payload: bytes, offset: int) -> int:
        return os.pwrite(self.slots[slot][0], payload, offset)

    def read(self, slot: int, length: int) -> bytes:
        return os.read(self.slots[slot][0], length)

    def write(self, slot: int, payload: bytes) -> int:
        return os.write(self.slots[slot][0], payload)

    def seek(self, slot: int, offset: int, whence: int) -> int:
        if stat.S_ISDIR(os.fstat(self.slots[slot][0]).st_mode):
            raise OSError(errno.EISDIR, "what this gives is the file system's own affair")
        return os.lseek(self.slots[slot][0], offset, whence)

    def ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.slots[slot][0], size)

    def fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self.slots[slot][0], mode)

    def fstat(self, slot: int) -> object:
        return shown(os.fstat(self.slots[slot][0]))

    def fsync(self, slot: int) -> None:
        os.fsync(self.slots[slot][0])

    def map_read(self, slot: int, offset: int, length: int) -> bytes:
        fd = self.slots[slot][0]
        with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
            return mapping[offset : offset + length]

    def map_write(self, slot: int, offset: int, payload: bytes) -> int:
        """Through a shared mapping, synced: what is only in the page cache dies with a killed daemon."""
        fd = self.slots[slot][0]
        with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
            part = payload[: max(0, len(mapping) - offset)]
            mapping[offset : offset + len(part)] = part
            mapping.flush()
        return len(part)

    def copy_range(self, source: int, target: int, length: int, at: int, to: int) -> int:
        return os.copy_file_range(self.slots[source][0], self.slots[target][0], length, at, to)

    # -- the whole ----------------------------------------------------------------------------

    def close_all(self) -> None:
        for slot in list(self.slots):
            os.close(self.slots.pop(slot)[0])

    def tree(self) -> dict[str, object]:
        """Everything below the root: attributes, content, xattrs; hard links by their first name."""
        found: dict[str, object] = {}
        first_names: dict[int, str] = {}
        for folder, names in self._walk():
            for name in names:
                path = f"{folder}/{name}".lstrip("/")
                seen = os.lstat(self._at(path))
                content: object = None
                if stat.S_ISREG(seen.st_mode):
                    content = self.read_whole(path)
                elif stat.S_ISLNK(seen.st_mode):
                    content = self.readlink(path)
                first = first_names.setdefault(seen.st_ino, path)
                found[path] = (shown(seen), content, first, self.ask("xattrs", path))
        return found

    def _walk(self) -> list[tuple[str, list[str]]]:
        found = []
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            names = sorted(os.listdir(self._at(folder)))
            found.append((folder, names))
            for name in names:
                path = f"{folder}/{name}".lstrip("/")
                if stat.S_ISDIR(os.lstat(self._at(path)).st_mode):
                    waiting.append(path)
        return found

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}"


def _write(path: str, content: bytes) -> None:
    """O_NONBLOCK: the name may be a fifo, at which an open for writing waits for a reader."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
    with open(fd, "wb") as f:
        f.write(content)


def shown(seen: os.stat_result) -> tuple[object, ...]:
    """What of stat(2) the two sides must agree on."""
    size = None if stat.S_ISDIR(seen.st_mode) else seen.st_size
    # What is written into a fifo moves the fifo's time on ext4 and not on FUSE (SEMANTICS.md).
    is_told = seen.st_mtime_ns < CLOCK_NS and not stat.S_ISFIFO(seen.st_mode)
    mtime_ns = seen.st_mtime_ns if is_told else "clock"
    return oct(seen.st_mode), seen.st_nlink, seen.st_uid, seen.st_gid, size, mtime_ns
