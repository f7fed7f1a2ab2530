"""Replies in pyfuse3's terms: entries, file handles, file system facts; and the listing of directories.

One rule: this turns our values into the kernel's, and decides nothing but how long the kernel may
believe them.
"""

from __future__ import annotations

import os
import re

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, ReaddirToken, SetattrFields, StatvfsData

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.attributes_change import AttributeChange
from ckptfs.fusefs.browse import Browse
from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.namespace import NAME_MAX, Namespace
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO
from ckptfs.fusefs.nodes import Nodes
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.fusefs.requests import Requests
from ckptfs.store.disk import Space

LIVE_TIMEOUT_S = 3600.0
_DOTS = 2
_LISTED_AT_ONCE = 128
_BLOCK_BYTES = 4096
_DIRECT_IS_COHERENT = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2]) >= (6, 18)


def file_info(node: int, flags: int, *, write: bool) -> FileInfo:
    """The reply to an open: a handle is the node id times two, plus one for writers."""
    # direct_io spares the page cache of data that nobody reads back through this handle
    # (measured: 0.29 -> 0.35 of native); a descriptor that can be mapped must not have it. Kernels
    # before 6.18 drop cached pages only before such a write: a reader in between keeps old bytes.
    direct = _DIRECT_IS_COHERENT and flags & os.O_ACCMODE == os.O_WRONLY
    return FileInfo(fh=node << 1 | write, direct_io=direct, keep_cache=True)


def entry_of(attributes: Attributes, timeout_s: float, node: int | None = None) -> EntryAttributes:
    """Attributes as an entry that the kernel may believe for `timeout_s`; `node` is the node id where that
    is not the inode number. pyfuse3 has one field for both, native/replies.c tells them apart."""
    entry = EntryAttributes()
    entry.st_ino = attributes.ino if node is None else node
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.nlink
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_rdev = attributes.rdev
    entry.st_size = attributes.size
    entry.st_blocks = attributes.blocks
    entry.st_atime_ns = attributes.atime_ns
    entry.st_mtime_ns = attributes.mtime_ns
    entry.st_ctime_ns = attributes.ctime_ns
    entry.entry_timeout = entry.attr_timeout = timeout_s
    return entry


def wanted_change(attr: EntryAttributes, fields: SetattrFields) -> AttributeChange:
    """What a setattr asks for."""
    return AttributeChange(
        mode=attr.st_mode if fields.update_mode else None,
        uid=attr.st_uid if fields.update_uid else None,
        gid=attr.st_gid if fields.update_gid else None,
        size=attr.st_size if fields.update_size else None,
        atime_ns=attr.st_atime_ns if fields.update_atime else None,
        mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
    )


def negative() -> EntryAttributes:
    """No such name; the kernel may believe that, since every name is made through it."""
    entry = EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = LIVE_TIMEOUT_S
    return entry


def statfs_of(space: Space) -> StatvfsData:
    """What df shows."""
    answer = StatvfsData()
    answer.f_bsize = answer.f_frsize = _BLOCK_BYTES
    answer.f_blocks = space.total // _BLOCK_BYTES
    answer.f_bfree = space.free // _BLOCK_BYTES
    answer.f_bavail = space.available // _BLOCK_BYTES
    answer.f_files = space.inodes
    answer.f_ffree = answer.f_favail = space.inodes_free
    answer.f_namemax = NAME_MAX
    return answer


class Replies:
    """Entries and listings of one mount. Belongs to the trio thread.

    Whatever is handed to the kernel here is counted as known to it.
    """

    def __init__(
        self,
        namespace: Namespace,
        browse: Browse,
        nodes: Nodes,
        passthrough: Passthrough,
        requests: Requests,
    ) -> None:
        self._requests = requests
        self._namespace = namespace
        self._browse = browse
        self._nodes = nodes
        self._passthrough = passthrough

    def entry(self, attributes: Attributes) -> EntryAttributes:
        """An inode's attributes."""
        if attributes.ino >= FIRST_VIRTUAL_INO:
            return entry_of(attributes, self._browse.timeout_s(attributes.ino))
        entry = entry_of(attributes, LIVE_TIMEOUT_S, self._nodes.node_of(attributes.ino))
        if self._passthrough.is_attached(attributes.ino):
            entry.attr_timeout = 0  # a mapping changes the times without a word to anybody
        if self._nodes.are_two(attributes.ino):
            entry.attr_timeout = 0  # the kernel does not know that they share rights and names
        return entry

    def remembered(self, attributes: Attributes, timeout_s: float | None = None) -> EntryAttributes:
        """An inode that the kernel will know from this reply on."""
        if attributes.ino >= FIRST_VIRTUAL_INO:
            self._browse.remember(attributes.ino)
        else:
            self._nodes.remember(attributes.ino)
        entry = self.entry(attributes)
        if timeout_s is not None:
            entry.entry_timeout = timeout_s
        return entry

    def created(self, attributes: Attributes) -> EntryAttributes:
        """An inode that the kernel just made and opens now.

        Nobody can have it mapped before a write or a truncate, which make the kernel ask again; so it
        may be believed also where the kernel writes by itself, and the open need not ask for its mode.
        """
        entry = self.remembered(attributes)
        entry.attr_timeout = LIVE_TIMEOUT_S
        return entry

    def opened(self, ino: int, flags: int, *, write: bool) -> FileInfo:
        """The reply to an open of a live file; the last thing a handler does, so that what is armed
        for passthrough is used."""
        node = self._nodes.node_of(ino)
        info = file_info(node, flags, write=write)
        if self._passthrough.is_attached(ino):
            self._passthrough.arm(ino, info.fh)
        elif self._passthrough.reads_stored(node):
            assert not write, "a segment is never the backing file of a writer"
            self._passthrough.arm_stored(node, info.fh)
        else:
            self._passthrough.disarm()
            info.keep_cache = not self._passthrough.take_stale(ino)
        return self._counted(info)

    def opened_left(self, ino: int, flags: int, *, from_segment: bool) -> FileInfo:
        """The reply to an open of an inode's first node by somebody who did not come by a name; as `opened`.

        What is not read from a segment there is read through the second node's handle, and not kept in the
        kernel's cache: what is written to the second node does not reach the cache of the first.
        """
        if from_segment:
            info = file_info(ino, flags, write=False)
            self._passthrough.arm_stored(ino, info.fh)
            return self._counted(info)
        info = file_info(self._nodes.node_of(ino), flags, write=False)
        if self._passthrough.is_attached(ino):
            self._passthrough.arm(ino, info.fh)
        else:
            self._passthrough.disarm()
            info.direct_io = True
        return self._counted(info)

    def opened_saved(self, node: int, flags: int) -> FileInfo:
        """The reply to an open of a file of a version; as `opened`."""
        info = file_info(node, flags, write=False)
        if self._passthrough.reads_stored(node):
            self._passthrough.arm_stored(node, info.fh)
        else:
            self._passthrough.disarm()
        return self._counted(info)

    def released(self, fh: int) -> None:
        """A handle is let go: the last thing that may not be done twice."""
        self._requests.take(Kind.HANDLE, fh)

    def _counted(self, info: FileInfo) -> FileInfo:
        if self._requests.handle is None:
            self._requests.add(Kind.HANDLE, info.fh)
        return info

    def list_live(self, ino: int, start: int, token: ReaddirToken) -> None:
        """Fill a page of a live directory, from cookie `start` on."""
        links = self._namespace.inode(ino).links
        parent = links[0][0] if links else ino
        if not self._list_dots(
            self._namespace.attributes(ino), self._namespace.attributes(parent), start, token
        ):
            return
        after = max(start - _DOTS, -1)
        while rows := self._namespace.entries(ino, after, _LISTED_AT_ONCE):
            for position, name, child in rows:
                entry = self.entry(self._namespace.attributes(child))
                if not pyfuse3.readdir_reply(token, name, entry, position + _DOTS):
                    return
                self._nodes.remember(child)
                after = position

    def list_virtual(self, ino: int, start: int, token: ReaddirToken) -> None:
        """The same of a directory under `.versions`."""
        own = self._browse.attributes(ino)
        if not self._list_dots(own, own, start, token):
            return
        after = max(start - _DOTS, 0)
        while rows := self._browse.entries(ino, after, _LISTED_AT_ONCE):
            for cookie, name, attributes in rows:
                entry = entry_of(attributes, self._browse.timeout_s(attributes.ino))
                if not pyfuse3.readdir_reply(token, name, entry, cookie + _DOTS):
                    return
                self._browse.remember(attributes.ino)
                after = cookie

    def _list_dots(self, own: Attributes, parent: Attributes, start: int, token: ReaddirToken) -> bool:
        for cookie, name, attributes in ((1, b".", own), (2, b"..", parent)):
            if start < cookie and not pyfuse3.readdir_reply(token, name, entry_of(attributes, 0), cookie):
                return False
        return True
