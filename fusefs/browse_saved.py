"""What stat(2) shows of saved entries.

One rule: times, modes and owners are as they were saved. Only what a tree does not hold is worked
out: link counts and blocks.
"""

from __future__ import annotations

from collections import Counter

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.browse_listing import Trees
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.ids import TreeId
from ckptfs.store.tree import Entry, FileKey

_COUNTED_TREES = 65_536
_COUNTED_VERSIONS = 8
_MAX_WALK_ENTRIES = 10_000
_BLOCK_BYTES = 512


class SavedTrees:
    """Reads saved directories and remembers what it counted. Belongs to the index thread."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._subdirs: dict[TreeId, int] = {}
        self._links: dict[TreeId, Counter[FileKey] | None] = {}

    def read(self, tree: TreeId) -> tuple[Entry, ...]:
        """The entries of a saved directory by name; Corrupt or NotFound."""
        return self._trees.read_tree(tree)

    def attributes(self, ino: int, entry: Entry, top: TreeId, siblings: tuple[Entry, ...] = ()) -> Attributes:
        """The attributes of an entry; `top` is its version's tree, `siblings` its directory."""
        if entry.tree is not None:
            nlink = 2 + self._count_subdirs(entry.tree)
        else:
            nlink = self._count_names(entry, top, siblings) if entry.link else 1
        size = len(entry.target) if entry.target is not None else entry.size
        return Attributes(
            ino=ino,
            mode=entry.mode,
            nlink=nlink,
            uid=entry.uid,
            gid=entry.gid,
            rdev=entry.rdev,
            size=size,
            blocks=-(-(entry.size - entry.holes) // _BLOCK_BYTES),
            atime_ns=entry.mtime_ns,
            mtime_ns=entry.mtime_ns,
            ctime_ns=entry.ctime_ns,
        )

    def clear(self) -> None:
        """Give the memory back."""
        self._subdirs.clear()
        self._links.clear()

    def _count_subdirs(self, tree: TreeId) -> int:
        count = self._subdirs.get(tree)
        if count is None:
            try:
                count = sum(entry.is_dir for entry in self._trees.read_tree(tree))
            except (Corrupt, NotFound):
                # Whoever opens the directory is told; `ls` of its parent goes on.
                count = 0
            if len(self._subdirs) >= _COUNTED_TREES:
                self._subdirs.clear()
            self._subdirs[tree] = count
        return count

    def _count_names(self, entry: Entry, top: TreeId, siblings: tuple[Entry, ...]) -> int:
        if top not in self._links:
            if len(self._links) >= _COUNTED_VERSIONS:
                self._links.clear()
            self._links[top] = self._count_links(top)
        counted = self._links[top]
        if counted is None:
            return max(2, sum(other.file_key == entry.file_key for other in siblings))
        assert entry.file_key is not None
        return max(1, counted[entry.file_key])

    def _count_links(self, top: TreeId) -> Counter[FileKey] | None:
        """How many names each hard link has below `top`; None if that is too long to count."""
        counted: Counter[FileKey] = Counter()
        trees, seen = [top], 0
        while trees:
            try:
                entries = self._trees.read_tree(trees.pop())
            except (Corrupt, NotFound):
                continue
            seen += len(entries) + 1
            if seen > _MAX_WALK_ENTRIES:
                return None
            counted.update(entry.file_key for entry in entries if entry.file_key is not None)
            trees += [entry.tree for entry in entries if entry.tree is not None]
        return counted
