"""Stored files that the kernel reads by itself, and readers who keep what they opened.

One rule: whoever opens a stored file to read it gets one node's bytes, whole and unchanging, to the last
close; whoever is about to change the file is sent to the inode's second node first.

Files that consist of tensors only: they are replaced, not edited. Of anything else (a database, a log that
somebody follows) a reader must see what a writer appends, so it is read the ordinary way. Saved files
under `.versions` never change, so there it may be any file. Source: SEMANTICS.md, "Write paths".
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.kept_notes import Kind, Notes
from ckptfs.fusefs.kept_open import decode_open, encode_open
from ckptfs.fusefs.nodes import Nodes
from ckptfs.fusefs.openfile import OpenFile
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.store.disk import Disk
from ckptfs.store.errors import NotFound
from ckptfs.store.ids import RecipeId
from ckptfs.store.inode import Content
from ckptfs.store.whole_segment import LEAST_BYTES, WholeSegments

_MOST_REFUSED = 1024


@dataclass(slots=True)
class _Left:
    """What the readers of a first node go on reading, and what stat(2) shows of it."""

    recipe: RecipeId
    shown: Attributes
    readers: int


class StoredReads:
    """Which nodes are read from a segment, and the readers of first nodes. Belongs to the trio thread.

    `drop_attributes` makes the kernel ask again for those of a node. `_segments` are the segments by the
    nodes that are read from them, `_refused` says which thread was told ESTALE last at a first node,
    `_again` which threads were told ESTALE and have not looked their name up since.
    """

    def __init__(
        self,
        disk: Disk,
        whole: WholeSegments,
        passthrough: Passthrough,
        nodes: Nodes,
        drop_attributes: Callable[[int], Awaitable[None]],
        notes: Notes,
    ) -> None:
        self._disk = disk
        self._whole = whole
        self._passthrough = passthrough
        self._nodes = nodes
        self._drop_attributes = drop_attributes
        self._notes = notes
        self._left: dict[int, _Left] = {}
        self._segments = passthrough.segments()
        self._refused: dict[int, int] = {}
        self._again: dict[int, None] = {}

    def resume(self, ino: int, readers: int) -> None:
        """Readers of a first node that the daemon before had. NotFound if nothing is known of them."""
        value = self._notes.get(Kind.LEFT, ino)
        if value is None or not self._nodes.is_left(ino):
            raise NotFound(f"nothing is known of those who read node {ino}")
        self._left[ino] = _Left(*decode_open(value), readers)

    def want(self, recipe: RecipeId, size: int) -> None:
        """A file was stored that somebody may read soon."""
        if self._passthrough.enabled and size >= LEAST_BYTES:
            self._whole.want(recipe)

    async def make_ready(self, ino: int, content: Content) -> None:
        """A live file is about to be opened for reading: let `attach` succeed if that takes a moment only."""
        stored = None if content.staging else content.base
        if self._passthrough.enabled and stored is not None and not self._nodes.is_second(ino):
            await self._whole.make_ready(stored, only_tensors=True)

    async def make_saved_ready(self, recipe: RecipeId) -> None:
        """The same of a file of a version."""
        if self._passthrough.enabled:
            await self._whole.make_ready(recipe, only_tensors=False)

    def attach(self, ino: int, recipe: RecipeId, size: int) -> None:
        """At the first open of a stored live file, for reading: let the kernel read its segment, if it can.

        Not on a second node: a writer who was just sent there must not meet new readers.
        """
        if size >= LEAST_BYTES and not self._nodes.is_second(ino):
            self._attach(ino, recipe, only_tensors=True)

    def attach_saved(self, node: int, recipe: RecipeId) -> None:
        """The same of a file of a version."""
        self._attach(node, recipe, only_tensors=False)

    def detach(self, ino: int) -> None:
        """Nobody has the present node of a live file open any more."""
        self._detach(self._nodes.node_of(ino))

    def detach_saved(self, node: int) -> None:
        """The last reader of a file of a version is gone."""
        self._detach(node)

    def require_present(self, node: int) -> None:
        """ESTALE if the inode was given another node, perhaps while an open of this one had to wait: the
        kernel would take what is opened now for an open of the node that it asked for."""
        if node != self._nodes.node_of(Nodes.ino_of(node)):
            raise PosixError(errno.ESTALE)

    def is_serving(self, ino: int) -> bool:
        """Whether a live file's present node is read from a segment."""
        return self._passthrough.reads_stored(self._nodes.node_of(ino))

    def is_damaged(self, node: int) -> bool:
        """Whether the segment that the kernel reads for a node was found damaged since."""
        return node in self._segments and self._whole.is_damaged(self._segments[node])

    def reads(self, segment: int) -> bool:
        """Whether the kernel reads a segment for any node."""
        return segment in self._segments.values()

    async def leave(self, open_file: OpenFile, shown: Attributes) -> None:
        """Leave the inode's first node to those who have it open; from now on there is a second."""
        recipe, ino = open_file.content.base, open_file.ino
        assert recipe is not None, "what the kernel reads from a segment is stored"
        self._leave(ino, recipe, shown, open_file.readers)
        self._nodes.split(ino)
        await self._drop_attributes(ino)

    def expect_again(self, thread: int) -> None:
        """A thread is told ESTALE. The kernel tries once more, and only once; so what its name leads to then
        must not be another file that is read from a segment (somebody may rename one into place)."""
        if len(self._again) >= _MOST_REFUSED:
            self._again.clear()
        self._again[thread] = None

    def comes_again(self, thread: int) -> bool:
        """Whether a thread that was told ESTALE looks a file up; asked once."""
        if thread not in self._again:
            return False
        del self._again[thread]
        return True

    def require_insisting(self, ino: int, thread: int) -> None:
        """ESTALE, except if the thread comes to this first node again after that: the kernel tries once more
        by name, so then there is no name (a file that is mounted alone)."""
        if self._refused.pop(ino, None) == thread:
            return
        if len(self._refused) >= _MOST_REFUSED:
            self._refused.clear()
        self._refused[ino] = thread
        raise PosixError(errno.ESTALE)

    def reopen_left(self, ino: int, content: Content, shown: Attributes, *, is_open: bool) -> bool:
        """A reader of a first node more, one who holds the node and came by no name: whether the kernel
        reads a segment for him, too. `is_open` says whether the inode is open in another way.

        ESTALE if others read older bytes there: a node has one content at a time.
        """
        stored = None if content.staging else content.base
        left = self._left.get(ino)
        if left is None:
            if is_open or stored is None:
                return False
            self._attach(ino, stored, only_tensors=True)
            if not self._passthrough.reads_stored(ino):
                return False
            left = self._leave(ino, stored, shown, 0)
        elif left.recipe != stored or self.is_damaged(ino):
            raise PosixError(errno.ESTALE)
        left.readers += 1
        return True

    def release_left(self, ino: int) -> None:
        """A reader of the first node has closed it."""
        left = self._left[ino]
        left.readers -= 1
        if not left.readers:
            del self._left[ino]
            self._notes.delete(Kind.LEFT, ino)
            self._detach(ino)

    def left_attributes(self, ino: int, live: Attributes) -> Attributes:
        """What stat(2) shows on a first node: rights as they are, content as it was while somebody has it
        open, and as it is if nobody has."""
        left = self._left.get(ino)
        if left is None:
            return live
        was = left.shown
        return replace(live, size=was.size, blocks=was.blocks, mtime_ns=was.mtime_ns)

    def recipes(self) -> list[RecipeId]:
        """What readers of first nodes have open, for the collector to leave alone."""
        return [left.recipe for left in self._left.values()]

    def _leave(self, ino: int, recipe: RecipeId, shown: Attributes, readers: int) -> _Left:
        self._notes.put(Kind.LEFT, ino, encode_open(recipe, shown))
        left = self._left[ino] = _Left(recipe, shown, readers)
        return left

    def _attach(self, node: int, recipe: RecipeId, *, only_tensors: bool) -> None:
        if not self._passthrough.enabled:
            return
        opened = self._whole.open(recipe, only_tensors=only_tensors)
        if opened is not None:
            if self._passthrough.attach_stored(node, opened.fd, opened.segment):
                self._segments[node] = opened.segment
            self._disk.close(opened.fd)

    def _detach(self, node: int) -> None:
        self._passthrough.detach_stored(node)
        segment = self._segments.pop(node, None)
        if segment is not None:
            self._whole.given_back(segment)
