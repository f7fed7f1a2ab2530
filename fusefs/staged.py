"""Open inodes and their staging files: which descriptor, which mode, which record.

One rule: an open inode mirrors its record. Whatever gives it another staging file changes the
record first, and a record that was changed behind it is looked at again before the next use.
"""

from __future__ import annotations

import errno

import trio

from ckptfs.fusefs.draft import Draft, Drafts
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.kept_notes import Kind, Notes
from ckptfs.fusefs.namespace import Namespace
from ckptfs.fusefs.openfile import Growth, OpenFile, copy_sparse, load_overlay
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.store.disk import Disk
from ckptfs.store.inode import Content
from ckptfs.store.recipe import EMPTY, Recipe
from ckptfs.store.segments import Segments
from ckptfs.store.staging import Staging


class StagedFiles:
    """All open inodes by number. Belongs to the trio thread."""

    def __init__(
        self,
        disk: Disk,
        namespace: Namespace,
        drafts: Drafts,
        staging: Staging,
        segments: Segments,
        passthrough: Passthrough,
        notes: Notes,
    ) -> None:
        self._notes = notes
        self._disk = disk
        self._namespace = namespace
        self._drafts = drafts
        self._staging = staging
        self._segments = segments
        self._passthrough = passthrough
        self.open_files: dict[int, OpenFile] = {}

    def enter(self, ino: int) -> OpenFile:
        """The open inode; taken in if nobody has it open yet."""
        open_file = self.open_files.get(ino)
        if open_file is None:
            open_file = OpenFile(ino, Content())
            self.load(open_file, self._namespace.inode(ino).content)
            open_file.growth = Growth(self._namespace.attributes(ino).size)
            self.open_files[ino] = open_file
        return self.current(ino)

    def resume(self, ino: int, readers: int, writers: int) -> None:
        """Take in an inode that the daemon before had open. Raises as Namespace and the store do; if its
        recipe cannot be read, then who reads it is told."""
        inode = self._namespace.inode(ino)
        size = self._namespace.attributes_of(ino, inode).size
        open_file = OpenFile(ino, inode.content, readers, writers, growth=Growth(size), stale=True)
        open_file.unprivileged = self._notes.get(Kind.UNPRIVILEGED, ino) is not None
        self.open_files[ino] = open_file

    def note_unprivileged(self, open_file: OpenFile) -> None:
        """Somebody who is not root has it open for writing."""
        if not open_file.unprivileged:
            self._notes.put(Kind.UNPRIVILEGED, open_file.ino, b"")
        open_file.unprivileged, open_file.privileges_checked = True, False

    def leave_if_unused(self, ino: int) -> None:
        """Let go of an inode that nobody has open any more."""
        open_file = self.open_files.get(ino)
        if open_file is not None and not open_file.readers and not open_file.writers:
            self.close_fd(open_file)
            self._passthrough.detach(ino)
            self._notes.delete(Kind.UNPRIVILEGED, ino)
            del self.open_files[ino]

    def current(self, ino: int) -> OpenFile:
        """The open file, with what the inode record says now."""
        open_file = self.open_files[ino]
        if open_file.stale:
            self.load(open_file, self._namespace.inode(ino).content)
        return open_file

    def stored_recipe(self, ino: int) -> Recipe | None:
        """The recipe of an open file that is all in the store; None: a part of it is in staging.

        EBADF if it was closed while a read was on its way: the reader was interrupted.
        """
        if ino not in self.open_files:
            raise PosixError(errno.EBADF)
        open_file = self.current(ino)
        return None if open_file.content.staging else open_file.recipe

    def attach(self, open_file: OpenFile) -> None:
        """At the first open, for writing: let the kernel write to the staging file itself."""
        if not self._passthrough.enabled:
            return
        if not open_file.content.staging and self._namespace.inode(open_file.ino).size == 0:
            self.begin_staging(open_file)
            mtime_ns = self._namespace.inode(open_file.ino).mtime_ns
            self._disk.set_times(open_file.fd, mtime_ns, mtime_ns)  # nothing has been written yet
        if not open_file.content.staging or open_file.content.base is not None:
            return
        self.open_fd(open_file, writable=False)
        self._passthrough.attach(open_file.ino, open_file.fd)
        self.close_fd(open_file)

    def attach_if_mapped(self, open_file: OpenFile) -> None:
        """At the first open, for reading: a file that the kernel wrote by itself may still be written
        through a mapping whose descriptor is closed. Then readers, too, read what is below."""
        content = open_file.content
        if not content.staging or content.base is not None or not self._passthrough.is_stale(open_file.ino):
            return
        if self.is_mapped(content.staging):
            self.open_fd(open_file, writable=False)
            self._passthrough.attach(open_file.ino, open_file.fd)
            self.close_fd(open_file)

    def is_mapped(self, number: int) -> bool:
        """Whether somebody can still write to a staging file that we have closed."""
        fd = self._staging.open_read(number)
        try:
            if not self._disk.lease(fd, "read"):
                return True
            self._disk.unlease(fd)
            return False
        finally:
            self._disk.close(fd)

    def sample(self, open_file: OpenFile, ticks: float = 1.0) -> bool:
        """Account what the kernel wrote by itself; True if there was any."""
        fd = self._staging.open_read(open_file.content.staging)
        try:
            real = self._disk.fstat(fd)
            first = b"" if open_file.growth.first else self._disk.pread(fd, 64, 0)
        finally:
            self._disk.close(fd)
        return open_file.growth.sample(real.st_size, real.st_mtime_ns, first, ticks)

    def load(self, open_file: OpenFile, content: Content) -> None:
        """Mirror what a record says."""
        open_file.content = content
        open_file.stale = False
        open_file.extents = None
        open_file.recipe = EMPTY
        if content.base is not None and not content.staging:
            open_file.recipe = self._segments.read_recipe(content.base)

    def open_fd(self, open_file: OpenFile, *, writable: bool) -> None:
        """Open the staging file; the descriptor stays until `close_fd`."""
        number = open_file.content.staging
        self.close_fd(open_file)
        open_file.fd = self._staging.open_write(number) if writable else self._staging.open_read(number)
        open_file.writable = writable
        if open_file.content.base is not None and open_file.extents is None:
            load_overlay(self._disk, open_file, self._segments.read_recipe(open_file.content.base))

    def close_fd(self, open_file: OpenFile) -> None:
        """Close the staging descriptor, if there is one."""
        if open_file.fd >= 0:
            self._disk.close(open_file.fd)
            open_file.fd, open_file.writable = -1, False

    def writable(self, ino: int) -> OpenFile:
        """The open file with a writable staging descriptor, made at its first change."""
        open_file = self.current(ino)
        if not open_file.content.staging:
            self.begin_staging(open_file)
        elif open_file.fd < 0 or not open_file.writable:
            self.open_fd(open_file, writable=True)
        return open_file

    def begin_staging(self, open_file: OpenFile) -> None:
        """The first change of a stored or empty file: an overlay, or a plain staging file."""
        draft = self._drafts.begin()
        inode = draft.inode(open_file.ino)
        assert not inode.content.staging, "a file has one staging file at most"
        base = inode.content.base if inode.size else None
        number, fd = self.create(inode.mtime_ns, draft.now_ns)
        content = Content(number, base, inode.size if base else 0, False, inode.content.base)
        self._disk.truncate(fd, inode.size)
        draft.update(open_file.ino, content=content, root=None, ctime_ns=draft.now_ns)
        draft.mark_changed(open_file.ino)
        self.commit_or_close(draft, fd, number)
        open_file.content, open_file.fd, open_file.writable = content, fd, True
        if base is not None:
            load_overlay(self._disk, open_file, self._segments.read_recipe(base))

    def create(self, before_ns: int, now_ns: int) -> tuple[int, int]:
        """Number and descriptor of a new staging file, for an inode whose mtime was `before_ns`: times
        must be seen to move, and the kernel's clock of new files is some milliseconds late."""
        number, fd = self._staging.create()
        if self._disk.fstat(fd).st_mtime_ns <= before_ns < now_ns:
            self._disk.set_times(fd, now_ns, now_ns)
        return number, fd

    def commit_or_close(self, draft: Draft, fd: int, number: int) -> None:
        """Commit the draft that brings a new staging file in, or leave no trace of the file."""
        try:
            draft.commit()
        except BaseException:
            self._disk.close(fd)
            self._staging.drop(number)
            raise

    async def leave_pinned_staging(self, ino: int, content: Content) -> None:
        """Go on in a copy, because a pre-image owns the staging file. Rare: a settled save that
        is changed in place in the moment before its publish. Several callers may copy at once;
        the pinned bytes do not change, so the first copy that is ready is taken."""
        number = await self.copied(content)
        live = self._namespace.find(ino)
        if live is None or live.content.staging != content.staging:
            self._staging.drop(number)
            return
        draft = self._drafts.begin()
        replaced = Content(number, content.base, content.base_limit, content.synced, content.fallback)
        draft.update(ino, content=replaced)
        draft.commit()
        open_file = self.open_files.get(ino)
        if open_file is not None:
            self.close_fd(open_file)
            self.load(open_file, replaced)

    async def copied(self, content: Content) -> int:
        """Copy a staging file; returns the number of the copy. What was synced is so in the copy, and
        durable when: this returned."""
        copy, fd = self._staging.create()
        source = self._staging.open_read(content.staging)
        try:
            await trio.to_thread.run_sync(copy_sparse, self._disk, source, fd)
            if content.synced:
                await trio.to_thread.run_sync(self._disk.sync, fd)
                await trio.to_thread.run_sync(self._staging.sync_names)
        except BaseException:
            self._staging.drop(copy)
            raise
        finally:
            self._disk.close(source)
            self._disk.close(fd)
        return copy

    def record_limit(self, open_file: OpenFile, size: int) -> None:
        """An overlay was cut: nothing of its base shows behind `size` any more."""
        old = open_file.content
        open_file.content = Content(old.staging, old.base, size, old.synced, old.fallback)
        draft = self._drafts.begin()
        draft.update(open_file.ino, content=open_file.content)
        draft.commit()

    async def mark_synced(self, ino: int, content: Content) -> None:
        """The bytes are synced: sync the name, and say so in the record."""
        live = self._namespace.inode(ino)
        if content.synced or live.content.staging != content.staging or live.content.synced:
            return
        await trio.to_thread.run_sync(self._staging.sync_names)
        live = self._namespace.inode(ino)
        if live.content.staging != content.staging:
            return
        marked = Content(content.staging, live.content.base, live.content.base_limit, True, content.fallback)
        draft = self._drafts.begin()
        draft.update(ino, content=marked)
        draft.commit()
        open_file = self.open_files.get(ino)
        if open_file is not None and open_file.content.staging == content.staging:
            open_file.content = marked
