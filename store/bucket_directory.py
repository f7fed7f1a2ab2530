"""A bucket in a plain directory: another disk, a mounted server.

One rule: an object gets its name by link(2), once its bytes are synced: so it is there whole or not at all,
a name is taken once, and what was answered for survives power loss.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

from ckptfs.store.bucket import ObjectMeta, Payload, Unfinished, check_key, same_bytes
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Conflict, Corrupt, NoSpace, NotFound, NotPermitted, Unavailable

T = TypeVar("T")
# No key begins with a dot and a dash, so no list shows it.
_WORK = ".-new"
_RANDOM_BYTES = 16
_WORK_NAME = re.compile(r"[0-9a-f]{32}")
_PIECE_BYTES = 1 << 20


class DirectoryBucket:
    """Objects as files below a directory, which has to exist. Any task may call."""

    def __init__(self, path: str, url: str) -> None:
        self._disk = Disk(path)
        self._url = url

    @property
    def url(self) -> str:
        """The URL that it was opened with."""
        return self._url

    @property
    def checks_uploads(self) -> bool:
        """A disk keeps what it gets, or does not."""
        return False

    async def create(self, key: str, payload: Payload) -> None:
        """As Bucket.create."""
        await self._do(key, lambda: self._write(check_key(key), payload, self._disk.link))

    async def overwrite(self, key: str, payload: Payload) -> None:
        """As Bucket.overwrite."""
        await self._do(key, lambda: self._write(check_key(key), payload, self._disk.rename))

    def _write(self, key: str, payload: Payload, name: Callable[[str, str], None]) -> None:
        self._make_dirs(_WORK)
        self._make_dirs(os.path.dirname(key))
        work = f"{_WORK}/{os.urandom(_RANDOM_BYTES).hex()}"
        fd = self._disk.create(work)
        try:
            self._disk.pwrite(fd, payload, 0)
            self._disk.sync(fd)
            self._give_name(name, work, key)
        finally:
            self._disk.close(fd)
            if self._disk.exists(work):
                self._disk.unlink(work)
        self._disk.sync_dir(os.path.dirname(key))

    def _give_name(self, name: Callable[[str, str], None], work: str, key: str) -> None:
        try:
            name(work, key)
        except FileNotFoundError:
            if self._disk.exists(work):
                raise
            # We stood still for so long that a sweep took us for dead.
            raise Unavailable(f"{self._url}/{key}: what was written of it was swept away") from None

    def _make_dirs(self, path: str) -> None:
        """The folders on the way; each new name is synced."""
        made, parts = "", path.split("/") if path else []
        if not self._disk.exists(""):
            raise FileNotFoundError(errno.ENOENT, "the directory of the remote is not there")
        for part in parts:
            parent, made = made, f"{made}/{part}" if made else part
            if not self._disk.exists(made):
                self._disk.make_dir(made)
                self._disk.sync_dir(parent)

    async def read(self, key: str) -> bytes:
        """As Bucket.read."""
        return await self._do(key, lambda: self._disk.read_file(check_key(key)))

    async def read_range(self, key: str, offset: int, length: int) -> bytes:
        """As Bucket.read_range."""

        def pread() -> bytes:
            fd = self._disk.open_read(check_key(key))
            try:
                # A length that rotted must not make us reserve gigabytes for it.
                if self._disk.fstat(fd).st_size < offset + length:
                    return b""
                return self._disk.pread(fd, length, offset)
            finally:
                self._disk.close(fd)

        found = await self._do(key, pread)
        if len(found) != length:
            raise Corrupt(f"{self._url}/{key} ends before byte {offset + length}")
        return found

    async def holds(self, key: str, payload: Payload) -> bool:
        """As Bucket.holds."""
        return await self._do(key, lambda: self._compare(check_key(key), memoryview(payload)))

    def _compare(self, key: str, expected: memoryview) -> bool:
        fd = self._disk.open_read(key)
        try:
            if self._disk.fstat(fd).st_size != len(expected):
                return False
            starts = range(0, len(expected), _PIECE_BYTES)
            pieces = ((start, expected[start : start + _PIECE_BYTES]) for start in starts)
            return all(same_bytes(self._disk.pread(fd, len(piece), start), piece) for start, piece in pieces)
        finally:
            self._disk.close(fd)

    async def stat(self, key: str) -> ObjectMeta:
        """As Bucket.stat."""
        return await self._do(key, lambda: self._meta(check_key(key)))

    def _meta(self, key: str) -> ObjectMeta:
        found = self._disk.stat(key)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no file")
        return ObjectMeta(key, found.st_size, found.st_mtime_ns)

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        """As Bucket.list_objects."""
        return await self._do(prefix, lambda: sorted(self._walk(prefix), key=lambda meta: meta.key))

    def _walk(self, folder: str) -> list[ObjectMeta]:
        found: list[ObjectMeta] = []
        for name in self._disk.list_dir(folder):
            path = f"{folder}/{name}" if folder else name
            try:
                if stat.S_ISDIR(self._disk.stat(path).st_mode):
                    found += self._walk(path) if path != _WORK else []
                else:
                    found.append(self._meta(path))
            except FileNotFoundError:
                continue  # removed meanwhile
        return found

    async def remove(self, key: str) -> None:
        """As Bucket.remove. The name may be back after a power cut."""

        def unlink() -> None:
            if self._disk.exists(check_key(key)):
                self._disk.unlink(key)

        await self._do(key, unlink)

    async def sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        """As Bucket.sweep.

        No lock tells whether a writer is alive: it may sit on another node, where locks of many shared file
        systems are not seen. None is needed: an object gets its name from the file that is swept, so a
        writer that stood still for longer than that age fails there, with nothing made, and tries again.
        """
        return await self._do(_WORK, lambda: self._sweep(before_ns, dry_run=dry_run))

    def _sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        count = size_bytes = 0
        names = self._disk.list_dir(_WORK) if self._disk.exists(_WORK) else []
        for name in filter(_WORK_NAME.fullmatch, names):
            # Gone meanwhile, or another user's: then it is for that one to sweep.
            with suppress(FileNotFoundError, PermissionError):
                found = self._disk.stat(f"{_WORK}/{name}")
                if stat.S_ISREG(found.st_mode) and found.st_mtime_ns < before_ns:
                    if not dry_run:
                        self._disk.unlink(f"{_WORK}/{name}")
                    count, size_bytes = count + 1, size_bytes + found.st_size
        return Unfinished(count, size_bytes)

    async def _do(self, key: str, call: Callable[[], T]) -> T:
        try:
            return await trio.to_thread.run_sync(call)
        except CkptfsError:
            raise
        except OSError as e:
            raise _translated(e, f"{self._url}/{key}") from None


def _translated(error: OSError, what: str) -> CkptfsError:
    if isinstance(error, FileExistsError):
        return Conflict(f"{what} is there already")
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NotFound(f"{what} is not there")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return NotPermitted(f"{what}: {error.strerror}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"{what}: {error.strerror}")
    return Unavailable(f"{what}: {error.strerror or error}")
