"""What a saved entry is when it is live again, by a rollback or a rebuild.

One rule: everything that the entry says comes back as it was saved, times and blocks too; names and
attributes in other tables are the caller's affair. Pure.
"""

from __future__ import annotations

from ckptfs.store.inode import EMPTY_CONTENT, Content, Inode
from ckptfs.store.tree import Entry

VERSIONS_XATTR = b"user.ckptfs.versions"
_SECTOR_BYTES = 512
_BLOCK_SECTORS = 8


def saved_inode(entry: Entry) -> Inode:
    """The record of the entry, without a name yet. Its access time is that of its last change."""
    return Inode(
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        links=(),
        atime_ns=entry.mtime_ns,
        mtime_ns=entry.mtime_ns,
        ctime_ns=entry.ctime_ns,
        size=len(entry.target) if entry.target is not None else entry.size,
        blocks=_blocks(entry) if entry.recipe is not None else 0,
        rdev=entry.rdev,
        content=EMPTY_CONTENT if entry.recipe is None else Content(base=entry.recipe),
        root=entry.root,
        target=entry.target,
        versions_off=entry.is_dir and (VERSIONS_XATTR, b"off") in entry.xattrs,
    )


def _blocks(entry: Entry) -> int:
    """st_blocks: `holes` says what no data stands for; else whole blocks of 4 KiB."""
    if entry.holes:
        return -(-(entry.size - entry.holes) // _SECTOR_BYTES)
    return -(-entry.size // (_BLOCK_SECTORS * _SECTOR_BYTES)) * _BLOCK_SECTORS
