"""Stored files that the kernel reads by itself, and readers who keep what they opened.

One rule: whoever opens a stored file to read it gets one node's bytes, whole and unchanging, to the last
close; whoever is about to change the file is sent to the inode's second node first.

Files that consist of tensors only: they are replaced, not edited. Of anything else (a database, a log that
somebody follows) a reader must see what a writer appends, so it is read the ordinary way. Saved files
under `.versions` never change, so there it may be any file. Source: SEMANTICS.md, "Write paths".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.nodes import Nodes
from ckptfs.fusefs.openfile import OpenFile
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.store.disk import Disk
from ckptfs.store.ids import RecipeId
from ckptfs.store.whole_segment import WholeSegments


@dataclass(slots=True)
class _Left:
    """What the readers of a first node go on reading, and what stat(2) shows of it."""

    recipe: RecipeId
    shown: Attributes
    readers: int


class StoredReads:
    """Which nodes are read from a segment, and the readers of first nodes. Belongs to the trio thread."""

    def __init__(self, disk: Disk, whole: WholeSegments, passthrough: Passthrough, nodes: Nodes) -> None:
        self._disk = disk
        self._whole = whole
        self._passthrough = passthrough
        self._nodes = nodes
        self._left: dict[int, _Left] = {}

    def want(self, recipe: RecipeId) -> None:
        """A file was stored that somebody may read soon."""
        if self._passthrough.enabled:
            self._whole.want(recipe)

    def attach(self, ino: int, recipe: RecipeId) -> None:
        """At the first open of a stored live file, for reading: let the kernel read its segment, if it can.

        Not on a second node: a writer who was just sent there must not meet new readers.
        """
        if not self._nodes.is_second(ino):
            self._attach(ino, recipe, only_tensors=True)

    def attach_saved(self, node: int, recipe: RecipeId) -> None:
        """The same of a file of a version."""
        self._attach(node, recipe, only_tensors=False)

    def detach(self, node: int) -> None:
        """The last reader of the node is gone."""
        self._passthrough.detach_stored(node)

    def is_serving(self, ino: int) -> bool:
        """Whether a live file's present node is read from a segment."""
        return self._passthrough.reads_stored(self._nodes.node_of(ino))

    def leave(self, open_file: OpenFile, shown: Attributes) -> None:
        """Leave the inode's first node to those who have it open; from now on there is a second."""
        recipe = open_file.content.base
        assert recipe is not None, "what the kernel reads from a segment is stored"
        self._left[open_file.ino] = _Left(recipe, shown, open_file.readers)
        self._nodes.split(open_file.ino)

    def release_left(self, ino: int) -> None:
        """A reader of the first node has closed it."""
        left = self._left[ino]
        left.readers -= 1
        if not left.readers:
            del self._left[ino]
            self._passthrough.detach_stored(ino)

    def left_attributes(self, ino: int, live: Attributes) -> Attributes | None:
        """What stat(2) shows on a first node: rights as they are, content as it was; None if nobody has
        it open any more, and whoever asks has to look the name up again."""
        left = self._left.get(ino)
        if left is None:
            return None
        was = left.shown
        return replace(live, size=was.size, blocks=was.blocks, mtime_ns=was.mtime_ns)

    def recipes(self) -> list[RecipeId]:
        """What readers of first nodes have open, for the collector to leave alone."""
        return [left.recipe for left in self._left.values()]

    def _attach(self, node: int, recipe: RecipeId, *, only_tensors: bool) -> None:
        if not self._passthrough.enabled:
            return
        fd = self._whole.open(recipe, only_tensors=only_tensors)
        if fd is not None:
            self._passthrough.attach_stored(node, fd)
            self._disk.close(fd)
