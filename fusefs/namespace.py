"""The live tree as it stands in the index: who is where, and what stat(2) shows of it.

One rule: a reader sees every operation that was answered. Nothing here writes.

Keys and values of the tables: store/FORMAT.md, "Live tree".
"""

from __future__ import annotations

import errno

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.errnos import PosixError
from ckptfs.store.disk import BLOCK_BYTES, Disk
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.inode import ROOT_INO, Inode, decode_inode
from ckptfs.store.staging import staging_path

_RESERVED_AT_ONCE = 1024
NAME_MAX = 255


def key_of(number: int) -> bytes:
    """The index key of an inode number, or of any other counter."""
    return number.to_bytes(8, "big")


class Counter:
    """Hands out numbers that are never handed out again, also after a crash.

    The index holds an upper bound that is raised by 1024 at a time, so most numbers cost no write.
    The bound has a change of its own: one that is given up must not take it along.
    """

    def __init__(self, index: Index, name: bytes, first: int) -> None:
        self._index = index
        self._name = name
        self._next = max(first, int.from_bytes(index.get(Table.META, name) or b"", "big"))
        self._reserved = self._next

    def take(self) -> int:
        """The next number. NoSpace if its bound cannot be recorded; then nothing was taken."""
        if self._next >= self._reserved:
            bound = self._next + _RESERVED_AT_ONCE
            change = Change()
            change.put(Table.META, self._name, key_of(bound))
            self._index.apply(change)
            self._reserved = bound
        self._next += 1
        return self._next - 1


class Namespace:
    """Questions about the live tree. Belongs to the index thread."""

    def __init__(self, index: Index, disk: Disk) -> None:
        self.index = index
        self.disk = disk

    def find(self, ino: int) -> Inode | None:
        """The record of an inode, or None."""
        encoded = self.index.get(Table.INODE, key_of(ino))
        return None if encoded is None else decode_inode(encoded)

    def inode(self, ino: int) -> Inode:
        """The record of an inode; ENOENT as PosixError if there is none."""
        inode = self.find(ino)
        if inode is None:
            raise PosixError(errno.ENOENT)
        return inode

    def directory(self, ino: int) -> Inode:
        """The record of a directory that is still linked; ENOTDIR or ENOENT else."""
        inode = self.inode(ino)
        if not inode.is_dir:
            raise PosixError(errno.ENOTDIR)
        if not inode.links:
            raise PosixError(errno.ENOENT)
        return inode

    def child(self, parent: int, name: bytes) -> int | None:
        """The inode under a name, or None."""
        value = self.index.get(Table.ENTRY, key_of(parent) + name)
        return None if value is None else int.from_bytes(value[:8], "big")

    def entry_position(self, parent: int, name: bytes) -> int:
        """The position of a name in its directory's order; ENOENT if there is none."""
        value = self.index.get(Table.ENTRY, key_of(parent) + name)
        if value is None:
            raise PosixError(errno.ENOENT)
        return int.from_bytes(value[8:], "big")

    def entries(
        self, directory: int, after: int = -1, limit: int | None = None
    ) -> list[tuple[int, bytes, int]]:
        """(position, name, inode) of entries behind position `after`, in order of creation.

        A name keeps its position as long as it exists, so a listing that goes on from a position
        neither repeats nor misses a name that stays.
        """
        prefix = key_of(directory)
        rows = self.index.scan(Table.ENTRY_SEQ, prefix, prefix + key_of(after + 1), limit)
        return [
            (int.from_bytes(key[8:], "big"), bytes(value[8:]), int.from_bytes(value[:8], "big"))
            for key, value in rows
        ]

    def is_empty(self, directory: int) -> bool:
        """Whether a directory has no entries."""
        return not self.index.scan(Table.ENTRY_SEQ, key_of(directory), limit=1)

    def path_of(self, ino: int) -> bytes:
        """One absolute path of an inode below the mount, b"/" for the root."""
        parts: list[bytes] = []
        while ino != ROOT_INO:
            links = self.inode(ino).links
            if not links:
                parts.append(b"(removed)")
                break
            ino, name = links[0]
            parts.append(name)
        return b"/" + b"/".join(reversed(parts))

    def ancestors(self, directory: int) -> list[int]:
        """The directory itself, its parent, … up to the root; ENOENT if it was removed."""
        chain = [directory]
        while chain[-1] != ROOT_INO:
            links = self.inode(chain[-1]).links
            if not links:
                raise PosixError(errno.ENOENT)
            chain.append(links[0][0])
        return chain

    def at_path(self, path: bytes) -> int | None:
        """The inode under an absolute path (no links followed), or None."""
        ino: int | None = ROOT_INO
        for part in path.split(b"/"):
            if part and ino is not None:
                ino = self.child(ino, part)
        return ino

    def xattrs(self, ino: int) -> dict[bytes, bytes]:
        """The extended attributes that somebody set."""
        return {key[8:]: value for key, value in self.index.scan(Table.XATTR, key_of(ino))}

    def attributes(self, ino: int) -> Attributes:
        """What stat(2) shows; ENOENT if there is no such inode."""
        return self.attributes_of(ino, self.inode(ino))

    def attributes_of(self, ino: int, inode: Inode) -> Attributes:
        """What stat(2) shows of a record; size, mtime and blocks of a file being written come
        from its staging file, because that is where they change."""
        size, blocks, mtime_ns, ctime_ns = inode.size, inode.blocks, inode.mtime_ns, inode.ctime_ns
        if inode.content.staging:
            real = self.disk.stat(staging_path(inode.content.staging))
            size, mtime_ns, ctime_ns = real.st_size, real.st_mtime_ns, max(ctime_ns, real.st_ctime_ns)
            blocks = real.st_blocks
            if inode.content.base:
                # Blocks of an overlay that hide some of its base are not counted twice.
                dense = -(-size // BLOCK_BYTES) * (BLOCK_BYTES // 512)
                blocks = max(blocks, min(blocks + inode.blocks, dense))
        return Attributes(
            ino=ino,
            mode=inode.mode,
            nlink=inode.nlink,
            uid=inode.uid,
            gid=inode.gid,
            rdev=inode.rdev,
            size=size,
            blocks=blocks,
            atime_ns=inode.atime_ns,
            mtime_ns=mtime_ns,
            ctime_ns=ctime_ns,
        )
