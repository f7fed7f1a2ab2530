"""How a live file is opened for a client: what the kernel is told, and what it costs the file.

One rule: a request that comes again (the daemon before this one died over it) opens nothing twice.
"""

from __future__ import annotations

import errno
import os

from pyfuse3 import EntryAttributes, FileInfo, RequestContext

from ckptfs.fusefs.attributes_change import AttributeChanges
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace
from ckptfs.fusefs.provenance import Process, Provenance
from ckptfs.fusefs.replies import Replies
from ckptfs.fusefs.requests import Requests
from ckptfs.fusefs.seams import Room


class Opens:
    """Belongs to the trio thread. `strips_privileges`: the kernel leaves it to us to clear suid and sgid."""

    def __init__(
        self,
        namespace: Namespace,
        files: Files,
        attribute_changes: AttributeChanges,
        replies: Replies,
        provenance: Provenance,
        requests: Requests,
        room: Room,
    ) -> None:
        self._namespace = namespace
        self._files = files
        self._attributes = attribute_changes
        self._replies = replies
        self._provenance = provenance
        self._requests = requests
        self.room_for_writing = room.before_writing
        self.strips_privileges = False

    def created(
        self, ino: int, flags: int, uid: int, process: Process | None
    ) -> tuple[FileInfo, EntryAttributes]:
        """A file was made, and is open for writing."""
        if uid and self.strips_privileges:
            self._files.writers.note_unprivileged_writer(ino)
        self._provenance.opened(ino, process)
        entry = self._replies.created(self._namespace.attributes(ino))
        return self._replies.opened(ino, flags, write=True), entry

    async def created_before(self, ino: int, flags: int, uid: int) -> tuple[FileInfo, EntryAttributes]:
        """A create that comes again: the file is there, and may be open already."""
        if self._requests.handle is None:
            await self._files.open(ino, write=True, truncate=False)
            if uid and self.strips_privileges:
                self._files.writers.note_unprivileged_writer(ino)
        entry = self._replies.created(self._namespace.attributes(ino))
        return self._replies.opened(ino, flags, write=True), entry

    async def live(self, ino: int, flags: int, by: RequestContext, node: int | None = None) -> FileInfo:
        write, truncate = flags & os.O_ACCMODE != os.O_RDONLY, bool(flags & os.O_TRUNC)
        if self._requests.handle is not None:
            return self._replies.opened(ino, flags, write=write)
        process = await self._provenance.met(by) if write else None
        if write:
            await self.room_for_writing()
        await self._files.open(ino, write=write, truncate=truncate, node=node)
        try:
            if self.strips_privileges:
                if truncate:
                    self._attributes.strip_privileges(ino, set_ids=by.uid != 0)
                if write and by.uid:
                    self._files.writers.note_unprivileged_writer(ino)
        except BaseException:
            self._files.release(ino, write=write)  # the kernel will not: to it nothing is open
            raise
        self._provenance.opened(ino, process)
        return self._replies.opened(ino, flags, write=write)

    async def left(self, ino: int, flags: int, thread: int) -> FileInfo:
        """Who came by a name looks it up again after ESTALE. But a file that is mounted alone has none."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise PosixError(errno.ESTALE)
        if self._requests.handle is not None:
            from_segment = self._requests.handle >> 1 == ino
        else:
            from_segment = await self._files.open_left(ino, thread)
        return self._replies.opened_left(ino, flags, from_segment=from_segment)
