"""Regular files that are open: opening, reading, writing, truncating, syncing, closing.

One rule: before a call that would change bytes returns control to the loop, the inode record
names the staging file that the bytes go to. So whatever kills the daemon, the next one finds them.

Source: ARCHITECTURE §4 "Write"; semantics: SEMANTICS.md.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable

import trio

from ckptfs.fusefs.draft import Drafts
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.kept_notes import Notes
from ckptfs.fusefs.namespace import Namespace
from ckptfs.fusefs.openfile import Growth, Ingesting, OpenFile, read_open, truncate_open, write_open
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.quiet import Quiet
from ckptfs.fusefs.staged import StagedFiles
from ckptfs.fusefs.stored_reads import StoredReads
from ckptfs.fusefs.writers import Writers
from ckptfs.store.disk import Disk
from ckptfs.store.errors import NoSpace
from ckptfs.store.ids import RecipeId
from ckptfs.store.inode import Content, durable_recipe
from ckptfs.store.recipe import EMPTY, Recipe
from ckptfs.store.segments import Segments
from ckptfs.store.staging import Staging

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Files:
    """All open files by inode. Every field belongs to the trio thread.

    `ingesting` is filled by the publisher. `make_room` is called when the disk is full; it returns True if
    a second try makes sense.
    """

    def __init__(
        self,
        disk: Disk,
        namespace: Namespace,
        drafts: Drafts,
        staging: Staging,
        segments: Segments,
        quiet: Quiet,
        passthrough: Passthrough,
        stored_reads: StoredReads,
        make_room: Callable[[int], Awaitable[bool]],
        notes: Notes,
    ) -> None:
        self._disk = disk
        self._namespace = namespace
        self._drafts = drafts
        self._staging = staging
        self._segments = segments
        self._quiet = quiet
        self._passthrough = passthrough
        self._stored_reads = stored_reads
        self._make_room = make_room
        self._staged = StagedFiles(disk, namespace, drafts, staging, segments, passthrough, notes)
        self.open_files, self.resume = self._staged.open_files, self._staged.resume
        self.ingesting: dict[int, Ingesting] = {}
        self.writers = Writers(namespace, self._staged, passthrough, quiet)
        self.preimages: Preimages  # set once at wiring: the two know each other
        self.on_closed: Callable[[int], None] = lambda ino: None
        self.on_gone: Callable[[int], None] = lambda ino: None

    # -- opening and closing ---------------------------------------------------------------

    async def open(self, ino: int, *, write: bool, truncate: bool, node: int | None = None) -> None:
        """Open a regular file once more. Raises as the store does; then nothing is open.

        ESTALE: it is to be changed and the kernel reads its stored bytes, or `node`, which was asked for, is
        a left one. None: the reply that follows says which node it is.
        """
        if write or truncate:
            await self.claim(ino)
        # Of what was found damaged, who comes now reads what is verified, or nothing.
        if write or truncate or self._stored_reads.is_damaged(ino):
            await self.leave_readers(ino, names_node=node is None)
        if not (write or truncate or ino in self.open_files):
            await self._stored_reads.make_ready(ino, self._namespace.inode(ino).content)
        if node is not None:
            self._stored_reads.require_present(node)
        if truncate:
            await self.truncate_to_nothing(ino)
        open_file = self._staged.enter(ino)
        if write:
            if not open_file.readers and not open_file.writers:
                self._staged.attach(open_file)
            open_file.writers += 1
        else:
            if not open_file.readers and not open_file.writers:
                self._staged.attach_if_mapped(open_file)
                self._read_stored(open_file)
            open_file.readers += 1

    def opened_new(self, ino: int, content: Content, fd: int) -> None:
        """A file was created with this staging descriptor, and is open for writing."""
        open_file = OpenFile(ino, content, writers=1, fd=fd, writable=True)
        self.open_files[ino] = open_file
        if self._passthrough.attach(ino, fd):
            self._staged.close_fd(open_file)

    def release(self, ino: int, *, write: bool) -> None:
        """One handle fewer. After the last writer the file may be ingested."""
        open_file = self.open_files[ino]
        if write:
            open_file.writers -= 1
            if open_file.writers == 0:
                self._last_writer_left(open_file)
        else:
            open_file.readers -= 1
        self._staged.leave_if_unused(ino)
        if ino not in self.open_files:
            self._stored_reads.detach(ino)

    async def open_left(self, ino: int, thread: int) -> bool:
        """Open a left node to read it; whether the kernel reads a segment there. ESTALE at a first try."""
        shown, content = self._namespace.attributes(ino), self._namespace.inode(ino).content
        if self._stored_reads.reopen_left(ino, content, shown, is_open=ino in self.open_files):
            return True
        self._stored_reads.require_insisting(ino, thread)
        await self.open(ino, write=False, truncate=False)
        return False

    async def leave_readers(self, ino: int, *, names_node: bool = False) -> None:
        """Before a change: whoever has the kernel read the file's stored bytes keeps them. ESTALE then makes
        the kernel look the name up again, for another node (nodes.py). Else this waits for nothing."""
        while await self.give_way(ino):
            if not names_node:
                raise PosixError(errno.ESTALE)
            await self.claim(ino)  # others had a turn

    async def give_way(self, ino: int) -> bool:
        """The same for somebody who looks the name up just now; whether there was anybody to be left."""
        is_serving = self._stored_reads.is_serving(ino)
        if is_serving:
            await self._stored_reads.leave(self.open_files.pop(ino), self._namespace.attributes(ino))
        return is_serving

    def is_attached(self, ino: int) -> bool:
        """Whether the kernel reads and writes its staging file itself."""
        return self._passthrough.is_attached(ino)

    def is_held_by_kernel(self, ino: int, number: int) -> bool:
        """Whether this staging file is the inode's, and the kernel has it open itself."""
        inode = self._namespace.find(ino) if number and self._passthrough.is_attached(ino) else None
        return inode is not None and inode.content.staging == number

    def forget_pages(self, ino: int) -> None:
        """The inode is gone, and with it what is remembered of it."""
        self._passthrough.take_stale(ino)
        self.on_gone(ino)

    def note_stored(self, ino: int, recipe: RecipeId, size: int) -> None:
        """Its bytes are in the store now."""
        self.writers.forget(ino)
        self._stored_reads.want(recipe, size)

    def is_open(self, ino: int) -> bool:
        """Whether anybody has it open."""
        return ino in self.open_files

    def is_written(self, ino: int) -> bool:
        """Whether anybody has it open for writing."""
        open_file = self.open_files.get(ino)
        return open_file is not None and open_file.writers > 0

    def is_busy(self, ino: int) -> bool:
        """Whether its staging file may not become a segment: somebody writes, or the kernel has it."""
        return self.is_written(ino) or self._passthrough.is_attached(ino)

    async def claim(self, ino: int) -> None:
        """Make a file safe to write to: end its ingest, take a private copy of pinned bytes."""
        while True:
            ingesting = self.ingesting.get(ino)
            content = self._namespace.inode(ino).content
            if ingesting is not None:
                ingesting.cancel = True
                await ingesting.done.wait()
            elif content.staging in self._drafts.pinned_staging:
                if self._passthrough.is_attached(ino):
                    await self.free_from_pins(ino)
                else:
                    await self._staged.leave_pinned_staging(ino, content)
            else:
                return

    async def free_from_pins(self, ino: int) -> None:
        """Let the pins of a staging file go on in a copy, because the kernel has the file open itself: for
        whoever opens it next it is the one to write to, so it must not become a segment."""
        content = self._namespace.inode(ino).content
        number = await self._staged.copied(content)
        draft = self._drafts.begin()
        if self.preimages.move_pins(content.staging, number, draft):
            draft.commit()
        else:
            self._staging.drop(number)

    def switch_to_stored(self, ino: int) -> None:
        """The publisher is about to commit the file as stored: readers go on from the store.

        Its recipe cannot be read before that commit, and the commit may yet fail; so the next
        call on the file looks at the record again.
        """
        open_file = self.open_files.get(ino)
        if open_file is not None:
            self._staged.close_fd(open_file)
            open_file.stale = True

    # -- bytes -----------------------------------------------------------------------------

    def stored_recipe(self, ino: int) -> Recipe | None:
        """As StagedFiles.stored_recipe."""
        return self._staged.stored_recipe(ino)

    def read(self, ino: int, offset: int, length: int) -> bytes:
        """Up to `length` bytes; Corrupt if the stored bytes are not the ones that were saved."""
        open_file = self._staged.current(ino)
        if open_file.content.staging and open_file.fd < 0:
            self._staged.open_fd(open_file, writable=False)
        return read_open(self._disk, self._segments, open_file, offset, length)

    async def write(self, ino: int, offset: int, payload: bytes) -> int:
        """Write all of `payload`; OSError or NoSpace if it cannot be. Durable when: fsync."""
        try:
            return write_open(self._disk, self._segments, self._staged.writable(ino), offset, payload)
        except (OSError, NoSpace) as e:
            full = isinstance(e, NoSpace) or e.errno in _FULL
            if not full or not await self._make_room(len(payload)):
                raise
        return write_open(self._disk, self._segments, self._staged.writable(ino), offset, payload)

    async def truncate(self, ino: int, size: int) -> None:
        """Set the length; what it cuts off is pinned if no version holds it. ESTALE as `open`."""
        await self.claim(ino)
        await self.leave_readers(ino)
        inode = self._namespace.inode(ino)
        current = self._namespace.attributes_of(ino, inode).size
        if size == 0 and current:
            await self.truncate_to_nothing(ino)
            return
        if size < current:
            await self._protect_before_cut(ino)
        self._staged.enter(ino)
        try:
            open_file = self._staged.writable(ino)
            truncate_open(self._disk, self._segments, open_file, size)
            if size < open_file.content.base_limit:
                self._staged.record_limit(open_file, size)
            self._closed_event(ino, open_file)
        finally:
            self._staged.leave_if_unused(ino)

    async def truncate_to_nothing(self, ino: int) -> None:
        """Give the file a new, empty staging file. The old content stays for whoever pins it.

        A staging file that the kernel has open itself cannot be exchanged: it is cut in place.
        """
        if self._passthrough.is_attached(ino):
            await self._cut_in_place(ino)
            return
        draft = self._drafts.begin()
        self.preimages.before_destroying(ino, draft)
        inode = draft.inode(ino)
        before_ns = self._namespace.attributes_of(ino, inode).mtime_ns
        number, fd = self._staged.create(before_ns, draft.now_ns)
        content = Content(staging=number, fallback=durable_recipe(inode))
        draft.drop_content(inode.content)
        draft.update(ino, content=content, blocks=0, root=None, ctime_ns=draft.now_ns)
        draft.mark_changed(ino)
        self._staged.commit_or_close(draft, fd, number)
        open_file = self.open_files.get(ino)
        if open_file is None:
            self._disk.close(fd)
            self._closed_event(ino, OpenFile(ino, content, growth=Growth(0, wrote=True)))
            return
        self._staged.close_fd(open_file)
        open_file.content, open_file.fd, open_file.writable = content, fd, True
        open_file.extents, open_file.recipe, open_file.stale = None, EMPTY, False
        open_file.growth = Growth(0, wrote=True)

    async def fsync(self, ino: int) -> None:
        """Make bytes and name durable. Durable when: this returned.

        OSError if that fails, and at every later call: the kernel would call the next one a success.
        """
        open_file = self._staged.current(ino)
        content = open_file.content
        if content.staging in self._staging.failed:
            raise OSError(errno.EIO, "an earlier sync of it has failed; write it anew")
        if content.staging:
            if open_file.fd < 0:
                self._staged.open_fd(open_file, writable=False)
            copy = os.dup(open_file.fd)
            try:
                await trio.to_thread.run_sync(self._disk.sync, copy)
            except OSError as e:
                self._staging.note_failed(content.staging, e)
                raise
            finally:
                self._disk.close(copy)
            await self._staged.mark_synced(ino, content)
        self._namespace.index.sync_journal()

    def close_descriptor(self, fd: int) -> None:
        """Close a descriptor that was opened beside ours."""
        self._disk.close(fd)

    async def sync_closed(self, ino: int) -> None:
        """fdatasync the staging file of an inode, open or not."""
        self._staged.enter(ino)
        try:
            await self.fsync(ino)
        finally:
            self._staged.leave_if_unused(ino)

    # -- inside ----------------------------------------------------------------------------

    def _read_stored(self, open_file: OpenFile) -> None:
        base, ino = open_file.content.base, open_file.ino
        has_one_name = len(self._namespace.inode(ino).links) == 1  # two could not be left at once
        if base is not None and not open_file.content.staging and has_one_name:
            self._stored_reads.attach(ino, base, open_file.recipe.size)

    def _last_writer_left(self, open_file: OpenFile) -> None:
        if self._passthrough.is_attached(open_file.ino):
            self._staged.sample(open_file)
        if open_file.writable:
            self._staged.close_fd(open_file)
        if open_file.growth.wrote or open_file.content.staging:
            self._closed_event(open_file.ino, open_file)
        end = open_file.growth.end
        open_file.growth = Growth(end)

    def _closed_event(self, ino: int, open_file: OpenFile) -> None:
        now = time.monotonic()
        self.preimages.closed_at[ino] = now
        inode = self._namespace.inode(ino)
        if not inode.links:
            return
        draft = self._drafts.begin()
        draft.mark_changed(ino)
        draft.commit()
        log = open_file.growth.is_log(inode.links[0][1])
        for parent, _ in inode.links:
            if log:
                self._quiet.minor(parent, now)
            else:
                self._quiet.major(parent, ino, now)
        self.on_closed(ino)

    async def _protect_before_cut(self, ino: int) -> None:
        if self._passthrough.is_attached(ino):
            await self._pin_copy(ino)
            return
        draft = self._drafts.begin()
        if self.preimages.before_destroying(ino, draft):
            draft.commit()
            await self.claim(ino)

    async def _cut_in_place(self, ino: int) -> None:
        open_file = self._staged.enter(ino)
        open_file.readers += 1  # nobody else may be its last user meanwhile
        try:
            await self._protect_before_cut(ino)
            truncate_open(self._disk, self._segments, self._staged.writable(ino), 0)
            self._staged.close_fd(open_file)
        finally:
            self.release(ino, write=False)

    async def _pin_copy(self, ino: int) -> None:
        """Pin a copy, because the file itself is about to be cut in place. Rare: a settled save that
        somebody still reads is truncated in the moment before its publish."""
        if not self.preimages.is_loss(ino):
            return
        content = self._namespace.inode(ino).content
        number = await self._staged.copied(content)
        draft = self._drafts.begin()
        pinned = False
        try:
            copy = Content(staging=number, synced=content.synced)
            if self.preimages.before_destroying(ino, draft, copy):
                draft.commit()
                pinned = True
        finally:
            if not pinned:
                self._staging.drop(number)
