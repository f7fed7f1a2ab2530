"""Operations that change names: create, mkdir, mknod, symlink, link, unlink, rmdir, rename.

One rule: check everything, pin what would be lost, then commit one draft. The kernel has checked
permissions (`default_permissions`) and most types; what it checks against its cache is checked
again here where being wrong would break the tree.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable, Iterable

import msgspec

from ckptfs.fusefs.draft import Draft, Drafts, inherited
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import NAME_MAX, Namespace
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.quiet import Quiet
from ckptfs.fusefs.units import Units
from ckptfs.store.errors import NoSpace
from ckptfs.store.inode import ROOT_INO, Content, Inode, durable_recipe
from ckptfs.store.staging import Staging

VERSIONS_NAME = b".versions"
LINK_MAX = 4096
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2


class Mutations:
    """Changes of the live tree's names. Belongs to the trio thread.

    `on_renamed(ino, old parent, old name)` is called behind every rename, `on_directory_gone(ino)`
    before a directory is removed. `is_known(ino)` tells whether the kernel may still ask for it.
    """

    def __init__(
        self,
        namespace: Namespace,
        drafts: Drafts,
        staging: Staging,
        files: Files,
        preimages: Preimages,
        units: Units,
        quiet: Quiet,
        is_known: Callable[[int], bool],
    ) -> None:
        self._namespace = namespace
        self._drafts = drafts
        self._staging = staging
        self._files = files
        self._preimages = preimages
        self._units = units
        self._quiet = quiet
        self._is_known = is_known
        self.on_renamed: Callable[[int, int, bytes], None] = lambda ino, parent, name: None
        self.on_directory_gone: Callable[[int], None] = lambda ino: None

    def new_mode(
        self, parent: int, mode: int, uid: int, gid: int, groups: Callable[[], Iterable[int]]
    ) -> int:
        """The mode of what `uid` makes in a directory. As inode_init_owner(9): a set-gid executable in a
        set-gid directory keeps the bit only for members of the directory's group. `groups()` are the
        caller's further groups."""
        directory = self._namespace.inode(parent)
        both = stat.S_ISGID | stat.S_IXGRP
        if mode & both != both or not directory.mode & stat.S_ISGID or uid == 0:
            return mode
        if directory.gid == gid or directory.gid in groups():
            return mode
        return mode & ~stat.S_ISGID

    def create(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> int:
        """A new regular file, open for writing. Returns its inode number."""
        ino, content, fd = self._new_file(parent, name, mode, uid, gid)
        self._files.opened_new(ino, content, fd)
        return ino

    def make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        *,
        rdev: int = 0,
        target: bytes | None = None,
    ) -> int:
        """A new directory, special file, symbolic link or empty regular file."""
        if stat.S_ISREG(mode):
            ino, _, fd = self._new_file(parent, name, mode, uid, gid)
            self._files.close_descriptor(fd)
            return ino
        directory = self._check_new(parent, name)
        mode, gid = inherited(directory, mode, gid)
        draft = self._drafts.begin()
        size = len(target) if target is not None else 0
        ino = draft.new_inode(_fresh(mode, uid, gid, draft.now_ns, rdev=rdev, target=target, size=size))
        self._link_new(draft, parent, name, ino)
        return ino

    def link(self, ino: int, parent: int, name: bytes) -> None:
        """One more name for a file."""
        self._check_new(parent, name)
        inode = self._namespace.inode(ino)
        if inode.is_dir:
            raise PosixError(errno.EPERM)
        if len(inode.links) >= LINK_MAX:
            raise PosixError(errno.EMLINK)
        draft = self._drafts.begin()
        draft.add_entry(parent, name, ino)
        draft.mark_changed(ino)
        draft.answer(ino)
        draft.commit()
        self._quiet.major(parent, ino, time.monotonic())

    def unlink(self, parent: int, name: bytes) -> int:
        """Take a file's name away; its bytes go with the last name and the last handle."""
        ino = self._existing(parent, name)
        if self._namespace.inode(ino).is_dir:
            raise PosixError(errno.EISDIR)
        draft = self._drafts.begin()
        self._take_away(draft, parent, name, ino)
        draft.answer(ino)
        draft.commit()
        self._quiet.major(parent, ino, time.monotonic())
        return ino

    def rmdir(self, parent: int, name: bytes) -> int:
        """Remove an empty directory."""
        ino = self._existing(parent, name)
        if not self._namespace.inode(ino).is_dir:
            raise PosixError(errno.ENOTDIR)
        if not self._namespace.is_empty(ino):
            raise PosixError(errno.ENOTEMPTY)
        draft = self._drafts.begin()
        self.on_directory_gone(ino)
        self._take_away(draft, parent, name, ino)
        draft.answer(ino)
        draft.commit()
        self._quiet.forget(ino)
        self._quiet.major(parent, ino, time.monotonic())
        return ino

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        """Rename, with RENAME_NOREPLACE and RENAME_EXCHANGE. One transaction, whatever is replaced."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE):
            raise PosixError(errno.EINVAL)
        _check_name(new_name)
        ino = self._existing(parent, name)
        self._namespace.directory(new_parent)
        other = self._namespace.child(new_parent, new_name)
        if flags & RENAME_EXCHANGE:
            self._exchange((parent, name, ino), (new_parent, new_name, self._existing(new_parent, new_name)))
            return
        if other is not None and flags & RENAME_NOREPLACE:
            raise PosixError(errno.EEXIST)
        if other == ino:
            return
        if other is not None:
            await self._sync_before_replacing(ino, other)
            if self._namespace.child(parent, name) != ino:
                raise PosixError(errno.ENOENT)
            self._namespace.directory(new_parent)  # a rollback may have removed it meanwhile
        self._move(parent, name, new_parent, new_name, ino)

    def reap(self, ino: int) -> None:
        """Remove an inode without a name once nobody has it open and the kernel has forgotten it."""
        inode = self._namespace.find(ino)
        if inode is None or inode.links or ino == ROOT_INO or self._files.is_open(ino) or self._is_known(ino):
            return
        draft = self._drafts.begin()
        draft.remove_inode(ino)
        try:
            draft.commit()
        except NoSpace:
            return  # the call that led here was made all the same; recovery removes what is left
        self._preimages.closed_at.pop(ino, None)
        self._files.forget_pages(ino)

    def _new_file(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> tuple[int, Content, int]:
        directory = self._check_new(parent, name)
        mode, gid = inherited(directory, mode, gid)
        number, fd = self._staging.create()
        try:
            draft = self._drafts.begin()
            content = Content(staging=number)
            ino = draft.new_inode(_fresh(mode, uid, gid, draft.now_ns, content=content))
            self._link_new(draft, parent, name, ino)
        except BaseException:
            self._files.close_descriptor(fd)
            self._staging.drop(number)
            raise
        return ino, content, fd

    def _move(self, parent: int, name: bytes, new_parent: int, new_name: bytes, ino: int) -> None:
        draft = self._drafts.begin()
        other = self._namespace.child(new_parent, new_name)
        if other is not None:
            self._check_replace(ino, other)
            if self._namespace.inode(other).is_dir:
                self.on_directory_gone(other)
                self._quiet.forget(other)
            replaced = self._namespace.inode(other)
            self._take_away(draft, new_parent, new_name, other)
            self._inherit_fallback(draft, ino, replaced)
        draft.remove_entry(parent, name, ino)
        draft.add_entry(new_parent, new_name, ino)
        draft.mark_changed(ino)
        self._notice(draft, new_parent, new_name)
        draft.answer(ino)
        draft.commit()
        now = time.monotonic()
        self._quiet.major(parent, ino, now)
        self._quiet.major(new_parent, ino, now)
        self.on_renamed(ino, parent, name)
        if other is not None:
            self.reap(other)

    def _exchange(self, one: tuple[int, bytes, int], two: tuple[int, bytes, int]) -> None:
        for (directory, _, _), (_, _, ino) in ((one, two), (two, one)):
            if ino in self._namespace.ancestors(directory):
                raise PosixError(errno.EINVAL)
        draft = self._drafts.begin()
        draft.remove_entry(*one)
        draft.remove_entry(*two)
        draft.add_entry(one[0], one[1], two[2])
        draft.add_entry(two[0], two[1], one[2])
        draft.mark_changed(one[2])
        draft.mark_changed(two[2])
        draft.answer(one[2])
        draft.commit()
        now = time.monotonic()
        self._quiet.major(one[0], two[2], now)
        self._quiet.major(two[0], one[2], now)
        self.on_renamed(one[2], one[0], one[1])
        self.on_renamed(two[2], two[0], two[1])

    def _check_replace(self, ino: int, other: int) -> None:
        source, target = self._namespace.inode(ino), self._namespace.inode(other)
        if target.is_dir and not source.is_dir:
            raise PosixError(errno.EISDIR)
        if source.is_dir and not target.is_dir:
            raise PosixError(errno.ENOTDIR)
        if target.is_dir and not self._namespace.is_empty(other):
            raise PosixError(errno.ENOTEMPTY)

    async def _sync_before_replacing(self, ino: int, other: int) -> None:
        """Keep "old or new, but whole" through a power cut.

        A new file that is not synced falls back to what the old one durably was. It is synced first
        where that cannot be: the old one is durable in a staging file, which the rename lets go; the
        new one has other names, under which the old content would be wrong; or it was synced before,
        so that it is believed, with or without what was written since.
        """
        inode, target = self._namespace.inode(ino), self._namespace.inode(other)
        if not inode.content.staging:
            return
        is_over_synced = target.content.staging != 0 and target.content.synced
        is_named_twice = len(inode.links) > 1 and durable_recipe(target) is not None
        if inode.content.synced or is_over_synced or is_named_twice:
            await self._files.sync_closed(ino)

    def _inherit_fallback(self, draft: Draft, ino: int, replaced: Inode) -> None:
        content = draft.inode(ino).content
        durable = durable_recipe(replaced)
        if content.staging and not content.synced and durable is not None:
            draft.update(ino, content=msgspec.structs.replace(content, fallback=durable))

    def _take_away(self, draft: Draft, parent: int, name: bytes, ino: int) -> None:
        if len(self._namespace.inode(ino).links) == 1:
            self._preimages.before_destroying(ino, draft)
        draft.remove_entry(parent, name, ino)
        draft.mark_changed(ino)

    def _link_new(self, draft: Draft, parent: int, name: bytes, ino: int) -> None:
        draft.add_entry(parent, name, ino)
        draft.mark_changed(ino)
        self._notice(draft, parent, name)
        draft.answer(ino)
        draft.commit()
        self._quiet.major(parent, ino, time.monotonic())

    def _notice(self, draft: Draft, parent: int, name: bytes) -> None:
        if parent == ROOT_INO:
            self._units.notice_root_entry(name, draft.change)

    def _check_new(self, parent: int, name: bytes) -> Inode:
        _check_name(name)
        directory = self._namespace.directory(parent)
        if self._namespace.child(parent, name) is not None:
            raise PosixError(errno.EEXIST)
        return directory

    def _existing(self, parent: int, name: bytes) -> int:
        if name == VERSIONS_NAME:
            raise PosixError(errno.EROFS)
        ino = self._namespace.child(parent, name)
        if ino is None:
            raise PosixError(errno.ENOENT)
        return ino


def _check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise PosixError(errno.ENAMETOOLONG)
    if name == VERSIONS_NAME:
        raise PosixError(errno.EEXIST)


def _fresh(
    mode: int,
    uid: int,
    gid: int,
    now_ns: int,
    *,
    content: Content | None = None,
    rdev: int = 0,
    target: bytes | None = None,
    size: int = 0,
) -> Inode:
    assert stat.S_IFMT(mode), "a mode has a file type"
    return Inode(
        mode=mode,
        uid=uid,
        gid=gid,
        links=(),
        atime_ns=now_ns,
        mtime_ns=now_ns,
        ctime_ns=now_ns,
        size=size,
        rdev=rdev,
        content=content or Content(),
        target=target,
    )
