"""The request handlers that pyfuse3 calls: kernel terms in, our terms inside, kernel terms out.

One rule: no exception ends the daemon. `answered` is the one place where an error becomes an
errno; what nobody foresaw is logged with its operation and path, and the mount goes on.

A file handle is the inode number times two, plus one if it was opened for writing, so that
nothing about handles needs to be remembered. Inode numbers from 2^62 are those of `.versions`.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, SetattrFields, StatvfsData

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.attributes_change import AttributeChange, AttributeChanges
from ckptfs.fusefs.browse import Browse
from ckptfs.fusefs.browse_nodes import FIRST_VIRTUAL_INO
from ckptfs.fusefs.errnos import PosixError, errno_of, is_expected
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.lookups import Lookups
from ckptfs.fusefs.mutations import VERSIONS_NAME, Mutations
from ckptfs.fusefs.namespace import NAME_MAX, Namespace
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.fusefs.replies import Replies, file_info, negative, statfs_of
from ckptfs.fusefs.seams import Room, Snapshots
from ckptfs.fusefs.versioned_files import VersionedFiles
from ckptfs.store.errors import Corrupt
from ckptfs.store.inode import ROOT_INO

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def answered(
    handler: Callable[Concatenate[CkptfsOperations, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[CkptfsOperations, P], Coroutine[Any, Any, R]]:
    """Turn what a handler raises into an errno for the client, and never let it go further."""

    @functools.wraps(handler)
    async def answer(self: CkptfsOperations, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(self, *args, **kwargs)
        except FUSEError:
            raise
        except Exception as e:
            self.report(handler.__name__, args, e)
            raise FUSEError(errno_of(e)) from None

    return answer


class CkptfsOperations(pyfuse3.Operations):
    """Handlers of one mount. All of it belongs to the trio thread."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        namespace: Namespace,
        files: Files,
        mutations: Mutations,
        attribute_changes: AttributeChanges,
        lookups: Lookups,
        browse: Browse,
        versioned: VersionedFiles,
        snapshots: Snapshots,
        passthrough: Passthrough,
        room: Room,
    ) -> None:
        super().__init__()
        self._namespace = namespace
        self._files = files
        self._mutations = mutations
        self._attributes = attribute_changes
        self._lookups = lookups
        self._replies = Replies(namespace, browse, lookups, passthrough)
        self._browse = browse
        self._versioned = versioned
        self._snapshots = snapshots
        self.strips_privileges = False
        self._space = room.space
        self._room_for_writing = room.before_writing

    def report(self, operation: str, args: Sequence[object], error: Exception) -> None:
        """Log an error that is not an ordinary answer, with the path that it is about."""
        if is_expected(error):
            return
        number = next((a for a in args if isinstance(a, int)), ROOT_INO)
        ino = number >> 1 if operation in _BY_HANDLE else number
        try:
            path = self._path_of(ino)
        except Exception:  # the report must not fail where the operation did
            path = f"inode {ino}"
        if isinstance(error, Corrupt):
            if (what := self._versioned.describe(ino, path, error)) is not None:
                log.error("%s of %s refused: %s", operation, path, what)
        else:
            log.error("%s of %s failed unexpectedly", operation, path, exc_info=error)

    def _path_of(self, ino: int) -> str:
        if ino >= FIRST_VIRTUAL_INO:
            return os.fsdecode(self._browse.path_of(ino))
        return os.fsdecode(self._namespace.path_of(ino))

    # -- names -----------------------------------------------------------------------------

    @answered
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        attributes = self._found(parent_inode, name)
        if attributes is None:
            return negative()
        return self._replies.remembered(attributes)

    def _found(self, parent: int, name: bytes) -> Attributes | None:
        if len(name) > NAME_MAX:
            raise PosixError(errno.ENAMETOOLONG)
        if parent >= FIRST_VIRTUAL_INO:
            return self._browse.lookup(parent, name)
        if name == b".":
            return self._namespace.attributes(parent)
        if name == b"..":
            return self._namespace.attributes(self._namespace.inode(parent).links[0][0])
        if name == VERSIONS_NAME:
            return self._browse.versions_dir(parent)
        ino = self._namespace.child(parent, name)
        return None if ino is None else self._namespace.attributes(ino)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            try:
                if ino >= FIRST_VIRTUAL_INO:
                    self._browse.forget(ino, count)
                elif self._lookups.forget(ino, count):
                    self._mutations.reap(ino)
            except Exception:
                log.exception("forget of inode %d failed", ino)

    @answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        _live(parent_inode)
        existing = self._namespace.child(parent_inode, name)
        if existing is not None:
            if flags & os.O_EXCL:
                raise PosixError(errno.EEXIST)
            info = await self._open_live(existing, flags, ctx.uid)
            return info, self._replies.remembered(self._namespace.attributes(existing))
        await self._room_for_writing()
        mode = self._without_foreign_setgid(parent_inode, stat.S_IFREG | stat.S_IMODE(mode), ctx)
        ino = self._mutations.create(parent_inode, name, mode, ctx.uid, ctx.gid)
        if ctx.uid and self.strips_privileges:
            self._files.note_unprivileged_writer(ino)
        entry = self._replies.remembered(self._namespace.attributes(ino))
        return self._replies.opened(ino, flags, write=True), entry

    @answered
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        if parent_inode >= FIRST_VIRTUAL_INO:
            directory = self._browse.is_versions_dir(parent_inode)
            if directory is None:
                raise PosixError(errno.EROFS)
            if self._browse.has(parent_inode, name):
                raise PosixError(errno.EEXIST)
            return self._replies.remembered(await self._snapshots.snapshot(directory, name), timeout_s=0)
        mode = stat.S_IFDIR | stat.S_IMODE(mode)
        ino = self._mutations.make(parent_inode, name, mode, ctx.uid, ctx.gid)
        return self._replies.remembered(self._namespace.attributes(ino))

    @answered
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        _live(parent_inode)
        mode = self._without_foreign_setgid(parent_inode, mode, ctx)
        ino = self._mutations.make(parent_inode, name, mode, ctx.uid, ctx.gid, rdev=rdev)
        return self._replies.remembered(self._namespace.attributes(ino))

    @answered
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        _live(parent_inode)
        mode = stat.S_IFLNK | 0o777
        ino = self._mutations.make(parent_inode, name, mode, ctx.uid, ctx.gid, target=target)
        return self._replies.remembered(self._namespace.attributes(ino))

    @answered
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        _live(new_parent_inode)
        if inode >= FIRST_VIRTUAL_INO:
            raise PosixError(errno.EXDEV)
        self._mutations.link(inode, new_parent_inode, new_name)
        return self._replies.remembered(self._namespace.attributes(inode))

    @answered
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        _live(parent_inode)
        self._mutations.reap(self._mutations.unlink(parent_inode, name))

    @answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        _live(parent_inode)
        self._mutations.reap(self._mutations.rmdir(parent_inode, name))

    @answered
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        _live(parent_inode_old)
        _live(parent_inode_new)
        await self._mutations.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)

    @answered
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        if inode >= FIRST_VIRTUAL_INO:
            return self._browse.readlink(inode)
        target = self._namespace.inode(inode).target
        if target is None:
            raise PosixError(errno.EINVAL)
        return target

    # -- attributes ------------------------------------------------------------------------

    @answered
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._replies.entry(self._attributes_of(inode))

    @answered
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        _live(inode)
        wanted = AttributeChange(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        if self.strips_privileges and wanted.moves_privileges:
            self._attributes.strip_privileges(inode, set_ids=wanted.size is None or ctx.uid != 0)
        await self._attributes.set(inode, wanted)
        return self._replies.entry(self._namespace.attributes(inode))

    @answered
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if inode >= FIRST_VIRTUAL_INO:
            value = self._browse.xattr(inode, name)
            if value is None:
                raise PosixError(errno.ENODATA)
            return value
        return self._attributes.get_xattr(inode, name)

    @answered
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        _live(inode)
        self._attributes.set_xattr(inode, name, value)

    @answered
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        _live(inode)
        self._attributes.set_xattr(inode, name, None)

    @answered
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        if inode >= FIRST_VIRTUAL_INO:
            return self._browse.listxattr(inode)
        return list(self._namespace.xattrs(inode))

    @answered
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return statfs_of(self._space())

    # -- bytes -----------------------------------------------------------------------------

    @answered
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if inode < FIRST_VIRTUAL_INO:
            return await self._open_live(inode, flags, ctx.uid)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise PosixError(errno.EROFS)
        self._versioned.open(inode)
        return file_info(inode, flags, write=False)

    @answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        ino = fh >> 1
        if ino >= FIRST_VIRTUAL_INO:
            return self._versioned.read(ino, off, size)
        return self._files.read(ino, off, size)

    @answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        ino = fh >> 1
        if self.strips_privileges and (set_ids := self._files.privileges_at_write(ino)) is not None:
            self._attributes.strip_privileges(ino, set_ids=set_ids)
        return await self._files.write(ino, off, buf)

    @answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        if fh >> 1 < FIRST_VIRTUAL_INO:
            await self._files.fsync(fh >> 1)

    @answered
    async def release(self, fh: int) -> None:
        ino = fh >> 1
        if ino >= FIRST_VIRTUAL_INO:
            self._versioned.release(ino)
        else:
            self._files.release(ino, write=bool(fh & 1))
            self._mutations.reap(ino)

    # -- directories -----------------------------------------------------------------------

    @answered
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return inode << 1

    @answered
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        ino = fh >> 1
        if ino >= FIRST_VIRTUAL_INO:
            self._replies.list_virtual(ino, start_id, token)
        else:
            self._replies.list_live(ino, start_id, token)

    @answered
    async def releasedir(self, fh: int) -> None:
        return None

    @answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        if fh >> 1 < FIRST_VIRTUAL_INO:
            self._namespace.index.sync_journal()

    # -- shared ----------------------------------------------------------------------------

    async def _open_live(self, ino: int, flags: int, uid: int) -> FileInfo:
        write = flags & os.O_ACCMODE != os.O_RDONLY
        if write:
            await self._room_for_writing()
        await self._files.open(ino, write=write, truncate=bool(flags & os.O_TRUNC))
        try:
            if self.strips_privileges:
                if flags & os.O_TRUNC:
                    self._attributes.strip_privileges(ino, set_ids=uid != 0)
                if write and uid:
                    self._files.note_unprivileged_writer(ino)
        except BaseException:
            self._files.release(ino, write=write)  # the kernel will not: to it nothing is open
            raise
        return self._replies.opened(ino, flags, write=write)

    def _attributes_of(self, ino: int) -> Attributes:
        if ino >= FIRST_VIRTUAL_INO:
            return self._versioned.attributes(ino)
        return self._namespace.attributes(ino)

    def _without_foreign_setgid(self, parent: int, mode: int, ctx: RequestContext) -> int:
        """As inode_init_owner(9): a set-gid executable in a set-gid directory keeps the bit only
        for members of the directory's group."""
        directory = self._namespace.inode(parent)
        both = stat.S_ISGID | stat.S_IXGRP
        if mode & both != both or not directory.mode & stat.S_ISGID or ctx.uid == 0:
            return mode
        if directory.gid == ctx.gid or directory.gid in pyfuse3.get_sup_groups(ctx.pid):
            return mode
        return mode & ~stat.S_ISGID


_BY_HANDLE = {"read", "write", "fsync", "release", "readdir", "releasedir", "fsyncdir"}


def _live(ino: int) -> None:
    """Nothing under `.versions` can be changed."""
    if ino >= FIRST_VIRTUAL_INO:
        raise PosixError(errno.EROFS)
