"""Directories that ckptfs does not hold: looked at, read, and, for a move, cleared.

One rule: only what lies in the directory itself is touched: no symbolic link is followed, no other file
system entered, and only a regular file that is still the one that was seen is opened. The directory may
belong to somebody else, who may change it at any moment.

Everything blocks: for a worker thread, so that a directory on our own mount, which is refused, is answered.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckptfs.daemon.import_plan import Found, with_names
from ckptfs.daemon.mounts import mount_over, mount_table
from ckptfs.fusefs.mutations import VERSIONS_NAME
from ckptfs.store.disk import Disk
from ckptfs.store.errors import InvalidRequest, NotFound, Unavailable

MOST_DEPTH = 100
ASIDE_PREFIX = b".ckptfs-removing-"
"""Directories of ours, for what is about to be removed: FORMAT.md, "Importing"."""
_OF_THE_STORE = "{} has to do with the store itself; that is not imported"
_XATTRS = ("user.", "trusted.")
_XATTR_NAMES = ("security.capability",)
_NO_XATTRS = {errno.EOPNOTSUPP, errno.EPERM, errno.EACCES}
_ELSEWHERE = (
    *("nfs", "cifs", "smb", "lustre", "ceph", "fuse"),
    *("gluster", "9p", "afs", "gpfs", "beegfs", "orangefs"),
)
"""File systems whose files are open on other machines as well; NFS refuses every lease with EAGAIN."""
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Aside:
    """Something that was set aside: the directory that it is in, under its own name. `stays_in` is the path
    of that directory if it could not be put back."""

    directory: int
    name: bytes
    is_removed: bool = False
    stays_in: str | None = None

    def remove(self) -> None:
        """Remove it."""
        with suppress(FileNotFoundError):  # another import has put it back
            os.unlink(self.name, dir_fd=self.directory)
        self.is_removed = True


class Outside:
    """One such directory, held open, so that renaming it or its parents changes nothing. Any one thread."""

    def __init__(self, path: str, store: str | None = None) -> None:
        """NotFound or InvalidRequest: there is no such directory, or it lies in that store."""
        self.path = path
        self._store = frozenset() if store is None else _identities_of(store)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"there is no directory {path}") from None
        except NotADirectoryError:
            raise InvalidRequest(f"{path} is not a directory; name the directory that it lies in") from None
        self.status = os.fstat(self._fd)
        self.real_path = os.path.realpath(path)
        table = mount_table()
        kind = mount_over(self.real_path, table).file_system
        self._knows_writers = not kind.startswith(_ELSEWHERE)
        self._disk = Disk("/")
        ours = {os.makedev(0, entry.minor) for entry in table if entry.is_ckptfs}
        if self.status.st_dev in ours:
            self.close()
            raise InvalidRequest(f"{path} is on a ckptfs mount already; use `cp` or `mv` there")
        if self._store and _lies_in(self._fd, self._store):
            self.close()
            raise InvalidRequest(_OF_THE_STORE.format(path))

    def require_identity(self, device: int, inode: int) -> None:
        """InvalidRequest unless this is the directory that the caller means; inode 0: any."""
        if inode and (self.status.st_dev, self.status.st_ino) != (device, inode):
            raise InvalidRequest(
                f"the daemon sees another directory at {self.path} than you do (is this a container?); "
                "run it where the daemon runs"
            )

    def close(self) -> None:
        """Let it go."""
        os.close(self._fd)

    def scan(self) -> Found:
        """All that is in it. What vanishes meanwhile is left out; InvalidRequest if another file system is
        mounted in it, it holds the store, or it is too deep."""
        return with_names(_scanned(self._fd, b"", _Bounds(self.status.st_dev, self._store), self.path, 0))

    @contextmanager
    def opened(self, path: tuple[bytes, ...], found: Found) -> Iterator[int]:
        """A descriptor to read the file that `found` is. Unavailable: it has been replaced or removed."""
        with self._parent(path) as parent:
            try:
                fd = os.open(path[-1], _FILE, dir_fd=parent)
            except FileNotFoundError:
                raise self._moved(path) from None
            try:
                now = os.fstat(fd)
                if (now.st_dev, now.st_ino) != (found.device, found.inode) or not stat.S_ISREG(now.st_mode):
                    raise self._moved(path)
                yield fd
            finally:
                os.close(fd)

    @contextmanager
    def opened_now(self, path: tuple[bytes, ...]) -> Iterator[int]:
        """A descriptor to ask what a file is, whichever has the name now."""
        with self._parent(path) as parent:
            fd = os.open(path[-1], _FILE, dir_fd=parent)
            try:
                yield fd
            finally:
                os.close(fd)

    @contextmanager
    def set_aside(self, path: tuple[bytes, ...]) -> Iterator[Aside | None]:
        """Move a name into a directory that is nobody else's, beside it; None if it is gone. What is not
        removed by the end is put back, where the name is still free."""
        with self._parent(path) as parent:
            private = ASIDE_PREFIX + os.urandom(8).hex().encode()
            os.mkdir(private, 0o700, dir_fd=parent)
            directory = os.open(private, _DIRECTORY, dir_fd=parent)
            aside = Aside(directory, path[-1])
            try:
                try:
                    os.rename(path[-1], path[-1], src_dir_fd=parent, dst_dir_fd=directory)
                except FileNotFoundError:
                    yield None
                else:
                    try:
                        yield aside
                    finally:
                        if not aside.is_removed and not _moved_back(directory, parent, path[-1]):
                            aside.stays_in = self.text((*path[:-1], private))
            finally:
                os.close(directory)
                with suppress(OSError):
                    os.rmdir(private, dir_fd=parent)

    def put_back(self, path: tuple[bytes, ...], name: bytes) -> bool:
        """Move `name` out of the directory at `path` to beside that; whether that name was free."""
        with self._parent(path) as parent, self._parent((*path, name)) as directory:
            return _moved_back(directory, parent, name)

    def remove_directory(self, path: tuple[bytes, ...]) -> bool:
        """Remove a directory if nothing is in it; whether it is gone."""
        with self._parent(path) as parent:
            try:
                os.rmdir(path[-1], dir_fd=parent)
            except FileNotFoundError:
                return True
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False
        return True

    def has_no_writer(self, fd: int) -> bool:
        """Whether nobody has the file open for writing, as far as its file system knows: one whose files can
        be open elsewhere does not, and might say no of every file."""
        if not self._knows_writers:
            return True
        try:
            if not self._disk.lease(fd, "read"):
                return False
            self._disk.unlease(fd)
        except OSError:
            pass  # no leases there, or the file is somebody else's
        return True

    def text(self, path: tuple[bytes, ...]) -> str:
        """A path in it, for people."""
        return os.path.join(self.path, os.fsdecode(b"/".join(path)))

    def _moved(self, path: tuple[bytes, ...]) -> Unavailable:
        return Unavailable(f"{self.text(path)} was replaced or removed meanwhile; import it again")

    @contextmanager
    def _parent(self, path: tuple[bytes, ...]) -> Iterator[int]:
        fd = os.dup(self._fd)
        try:
            for name in path[:-1]:
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=fd)
                except (FileNotFoundError, NotADirectoryError):
                    raise self._moved(path) from None
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


def _moved_back(directory: int, parent: int, name: bytes) -> bool:
    """Move a name up from a directory of ours, replacing nothing; whether it is gone from there."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            # This replaces an empty directory at the most.
            os.rename(name, name, src_dir_fd=directory, dst_dir_fd=parent)
        else:
            os.link(name, name, src_dir_fd=directory, dst_dir_fd=parent, follow_symlinks=False)
            os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError as e:
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


def xattrs_of(fd: int) -> tuple[tuple[bytes, bytes], ...]:
    """The extended attributes that a version keeps; none where the file system has none."""
    try:
        names = os.listxattr(fd)
    except OSError as e:
        if e.errno in _NO_XATTRS:
            return ()
        raise
    pairs = []
    for name in names:
        if name.startswith(_XATTRS) or name in _XATTR_NAMES:
            try:
                pairs.append((os.fsencode(name), os.getxattr(fd, name)))
            except OSError:
                continue  # it went meanwhile, or is not for us
    return tuple(sorted(pairs))


def found_of(name: bytes, status: os.stat_result, **more: object) -> Found:
    """What lstat or fstat said."""
    return Found(
        name=name,
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        size=status.st_size if stat.S_ISREG(status.st_mode) else 0,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        device=status.st_dev,
        inode=status.st_ino,
        links=status.st_nlink,
        blocks=status.st_blocks,
        rdev=status.st_rdev if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode) else 0,
        **more,  # type: ignore[arg-type]
    )


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Of what is scanned: the device that it lies on, and the directories that it does not go into."""

    device: int
    store: frozenset[tuple[int, int]]


def _identities_of(store: str) -> frozenset[tuple[int, int]]:
    """(device, inode) of the store's directory and of those in it. Names would not do: the same directory may
    be mounted at several places, and a path may be exchanged between two looks at it."""
    root = os.stat(store)
    found = {(root.st_dev, root.st_ino)}
    with os.scandir(store) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def _lies_in(fd: int, directories: frozenset[tuple[int, int]]) -> bool:
    """Whether an open directory is one of these, or lies below one."""
    fd, below = os.dup(fd), None
    try:
        while True:
            status = os.fstat(fd)
            here = status.st_dev, status.st_ino
            if here in directories:
                return True
            if here == below:
                return False
            parent = os.open("..", _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd, below = parent, here
    finally:
        os.close(fd)


def _scanned(fd: int, name: bytes, bounds: _Bounds, text: str, depth: int) -> Found:
    if depth > MOST_DEPTH:
        raise InvalidRequest(f"{text} is more than {MOST_DEPTH} directories deep; what is that?")
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) in bounds.store:
        raise InvalidRequest(_OF_THE_STORE.format(text))
    if status.st_dev != bounds.device:
        raise InvalidRequest(f"another file system is mounted at {text}; unmount it, or import it by itself")
    children = []
    for child in sorted(map(os.fsencode, os.listdir(fd))):
        if child == VERSIONS_NAME:
            raise InvalidRequest(
                f"{text}/.versions has a name that is ckptfs's own; rename it, or import from it"
            )
        found = _child(fd, child, bounds, text, depth)
        if found is not None:
            children.append(found)
    return found_of(name, status, xattrs=xattrs_of(fd), children=tuple(children))


def _child(fd: int, name: bytes, bounds: _Bounds, text: str, depth: int) -> Found | None:
    try:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            return found_of(name, status, target=os.fsencode(os.readlink(name, dir_fd=fd)))
        if not stat.S_ISDIR(status.st_mode):
            return found_of(name, status)
        below = os.open(name, _DIRECTORY, dir_fd=fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _scanned(below, name, bounds, os.path.join(text, os.fsdecode(name)), depth + 1)
    finally:
        os.close(below)
