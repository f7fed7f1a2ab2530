"""The request handlers that pyfuse3 calls: kernel terms in, our terms inside, kernel terms out.

One rule: each handler is `answered` (answers.py), so that no exception ends the daemon.

A file handle is the node id times two, plus one if it was opened for writing: nothing of it is remembered.
Node ids from 2^62 are those of `.versions`, below they are inode numbers or second nodes (see nodes.py).
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Sequence

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, RequestContext, SetattrFields, StatvfsData

from ckptfs.fusefs.answers import Answers, answered
from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.attributes_change import AttributeChanges
from ckptfs.fusefs.browse import Browse
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.failures import Failures
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.kernel_reads import KernelReads
from ckptfs.fusefs.mutations import VERSIONS_NAME, Mutations
from ckptfs.fusefs.namespace import NAME_MAX, Namespace
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO
from ckptfs.fusefs.nodes import Nodes
from ckptfs.fusefs.opens import Opens
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.fusefs.provenance import Provenance
from ckptfs.fusefs.replies import Replies, negative, statfs_of, wanted_change
from ckptfs.fusefs.request_times import RequestTimes
from ckptfs.fusefs.requests import Requests
from ckptfs.fusefs.seams import Room, Snapshots
from ckptfs.fusefs.stored_reads import StoredReads
from ckptfs.fusefs.versioned_files import VersionedFiles
from ckptfs.store.hashing import Buffer

log = logging.getLogger(__name__)


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
        nodes: Nodes,
        browse: Browse,
        versioned: VersionedFiles,
        reads: KernelReads,
        snapshots: Snapshots,
        passthrough: Passthrough,
        stored_reads: StoredReads,
        provenance: Provenance,
        requests: Requests,
        room: Room,
    ) -> None:
        super().__init__()
        self._requests = requests
        self._namespace = namespace
        self._files = files
        self._mutations = mutations
        self._attributes = attribute_changes
        self._nodes = nodes
        self._stored_reads = stored_reads
        self._provenance = provenance
        self._replies = Replies(namespace, browse, nodes, passthrough, requests)
        self._browse = browse
        self._versioned = versioned
        self._reads = reads
        self._snapshots = snapshots
        self._opens = Opens(namespace, files, attribute_changes, self._replies, provenance, requests, room)
        self.times = RequestTimes()
        failures = Failures(namespace, browse, versioned)
        self.answers = Answers(requests, failures, stored_reads, self.times)
        self._space = room.space

    @property
    def strips_privileges(self) -> bool:
        """Whether the kernel leaves it to us to clear suid and sgid."""
        return self._opens.strips_privileges

    @strips_privileges.setter
    def strips_privileges(self, strips: bool) -> None:
        self._opens.strips_privileges = strips

    # -- names -----------------------------------------------------------------------------

    @answered
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        attributes = self._found(parent_inode, name)
        if attributes is None:
            return negative()
        if stat.S_ISREG(attributes.mode) and self._stored_reads.comes_again(ctx.pid):
            await self._files.give_way(attributes.ino)
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
                elif self._nodes.forget(ino, count):
                    self._mutations.reap(Nodes.ino_of(ino))
            except Exception:
                log.exception("forget of inode %d failed", ino)

    @answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        _live(parent_inode)
        if self._requests.made is not None:
            return await self._opens.created_before(self._requests.made, flags, ctx.uid)
        process = await self._provenance.met(ctx)
        existing = self._namespace.child(parent_inode, name)
        if existing is not None:
            if flags & os.O_EXCL:
                raise PosixError(errno.EEXIST)
            info = await self._opens.live(existing, flags, ctx)
            return info, self._replies.remembered(self._namespace.attributes(existing))
        await self._opens.room_for_writing()
        mode = self._new_mode(parent_inode, stat.S_IFREG | stat.S_IMODE(mode), ctx)
        ino = self._mutations.create(parent_inode, name, mode, ctx.uid, ctx.gid)
        return self._opens.created(ino, flags, ctx.uid, process)

    @answered
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        if parent_inode >= FIRST_VIRTUAL_INO:
            directory = self._browse.is_versions_dir(parent_inode)
            if directory is None:
                raise PosixError(errno.EROFS)
            if self._requests.comes_again and self._browse.has(parent_inode, name):
                made = self._snapshots.snapshot_made(directory, name)
                return self._replies.remembered(made, timeout_s=0)
            if self._browse.has(parent_inode, name):
                raise PosixError(errno.EEXIST)
            return self._replies.remembered(await self._snapshots.snapshot(directory, name), timeout_s=0)
        mode = stat.S_IFDIR | stat.S_IMODE(mode)
        ino = self._requests.made
        if ino is None:
            ino = self._mutations.make(parent_inode, name, mode, ctx.uid, ctx.gid)
        return self._replies.remembered(self._namespace.attributes(ino))

    @answered
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        _live(parent_inode)
        ino = self._requests.made
        if ino is None:
            mode = self._new_mode(parent_inode, mode, ctx)
            ino = self._mutations.make(parent_inode, name, mode, ctx.uid, ctx.gid, rdev=rdev)
        return self._replies.remembered(self._namespace.attributes(ino))

    @answered
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        _live(parent_inode)
        ino = self._requests.made
        if ino is None:
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
        ino = Nodes.ino_of(inode)
        if self._requests.made is None:
            await self._files.leave_readers(ino)
            self._mutations.link(ino, new_parent_inode, new_name)
        return self._replies.remembered(self._namespace.attributes(ino))

    @answered
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        _live(parent_inode)
        gone = self._requests.made
        self._mutations.reap(self._mutations.unlink(parent_inode, name) if gone is None else gone)

    @answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        _live(parent_inode)
        gone = self._requests.made
        self._mutations.reap(self._mutations.rmdir(parent_inode, name) if gone is None else gone)

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
        if self._requests.made is None:
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
        wanted = wanted_change(attr, fields)
        if wanted.size is not None:
            self._stored_reads.require_present(inode)
        ino = Nodes.ino_of(inode)
        if self.strips_privileges and wanted.moves_privileges:
            self._attributes.strip_privileges(ino, set_ids=wanted.size is None or ctx.uid != 0)
        await self._attributes.set(ino, wanted)
        return self._replies.entry(self._attributes_of(inode))

    @answered
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if self._requests.made is not None:
            # Asked before a setxattr which was done, and that may not fail now for what it did itself.
            if self._requests.replaces:
                return b""
            raise PosixError(errno.ENODATA)
        if inode >= FIRST_VIRTUAL_INO:
            value = self._browse.xattr(inode, name)
            if value is None:
                raise PosixError(errno.ENODATA)
            return value
        return self._attributes.get_xattr(Nodes.ino_of(inode), name)

    @answered
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        _live(inode)
        if self._requests.made is None:
            self._attributes.set_xattr(Nodes.ino_of(inode), name, value)

    @answered
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        _live(inode)
        if self._requests.made is None:
            self._attributes.set_xattr(Nodes.ino_of(inode), name, None)

    @answered
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        if inode >= FIRST_VIRTUAL_INO:
            return self._browse.listxattr(inode)
        return list(self._namespace.xattrs(Nodes.ino_of(inode)))

    @answered
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return statfs_of(self._space())

    # -- bytes -----------------------------------------------------------------------------

    @answered
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if self._nodes.is_left(inode):
            return await self._opens.left(inode, flags, ctx.pid)
        if inode < FIRST_VIRTUAL_INO:
            return await self._opens.live(Nodes.ino_of(inode), flags, ctx, inode)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise PosixError(errno.EROFS)
        if self._requests.handle is None:
            await self._versioned.open(inode)
        return self._replies.opened_saved(inode, flags)

    @answered
    async def read(self, fh: int, off: int, size: int) -> Buffer:  # type: ignore[override]  # it takes any
        found = await self._reads.read(fh >> 1, off, size)
        self.times.read_bytes += len(found)
        return found

    @answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        ino = Nodes.ino_of(fh >> 1)
        if self.strips_privileges and (set_ids := self._files.writers.privileges_at_write(ino)) is not None:
            self._attributes.strip_privileges(ino, set_ids=set_ids)
        written = await self._files.write(ino, off, buf)
        self.times.written_bytes += written
        return written

    @answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        node = fh >> 1
        if node < FIRST_VIRTUAL_INO and not self._nodes.is_left(node):
            await self._files.fsync(Nodes.ino_of(node))

    @answered
    async def release(self, fh: int) -> None:
        node = fh >> 1
        if self._requests.handle is not None or not self._requests.is_open(fh):
            return  # the daemon before us has done it
        if node >= FIRST_VIRTUAL_INO:
            self._versioned.release(node)
        elif self._nodes.is_left(node):
            self._stored_reads.release_left(node)
        else:
            self._files.release(Nodes.ino_of(node), write=bool(fh & 1))
            self._provenance.released(Nodes.ino_of(node))
        self._replies.released(fh)
        if node < FIRST_VIRTUAL_INO:
            self._mutations.reap(Nodes.ino_of(node))

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

    def _attributes_of(self, node: int) -> Attributes:
        if node >= FIRST_VIRTUAL_INO:
            return self._versioned.attributes(node)
        live = self._namespace.attributes(Nodes.ino_of(node))
        return self._stored_reads.left_attributes(node, live) if self._nodes.is_left(node) else live

    def _new_mode(self, parent: int, mode: int, ctx: RequestContext) -> int:
        groups = functools.partial(pyfuse3.get_sup_groups, ctx.pid)
        return self._mutations.new_mode(parent, mode, ctx.uid, ctx.gid, groups)


def _live(ino: int) -> None:
    """Nothing under `.versions` can be changed."""
    if ino >= FIRST_VIRTUAL_INO:
        raise PosixError(errno.EROFS)
