"""Building the trees of a version from the live tree and from what was last published.

One rule: this reads and computes, and never waits, so what it returns is one moment of the live
tree; storing the trees and listing the version come after.

A directory is built *as it is* (quiet), from its *settled* files only, or is taken as it was
last published (busy), with the subdirectories in it that have news. Source: ARCHITECTURE §4.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.units import Units
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.index import Table
from ckptfs.store.inode import Inode
from ckptfs.store.merkle import file_root
from ckptfs.store.pins import PinnedFile
from ckptfs.store.recipe import EMPTY
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry, encode_tree

TOP_NAME = b"top"


@dataclass(frozen=True, slots=True)
class Stored:
    """Content of a file that is open and grows: what was stored of it at `size` bytes."""

    recipe: RecipeId
    root: bytes
    size: int


@dataclass(slots=True)
class Built:
    """Trees that were built: `objects` to store, `trees` by directory."""

    objects: list[tuple[ChunkId, bytes]] = field(default_factory=list)
    trees: dict[int, TreeId] = field(default_factory=dict)


class TreeBuilder:
    """Builds one unit's trees. Belongs to the index thread; used once."""

    def __init__(
        self,
        namespace: Namespace,
        units: Units,
        segments: Segments,
        top: int,
        whole: frozenset[int],
        settled: frozenset[int],
        grown: Mapping[int, Stored],
    ) -> None:
        self._namespace = namespace
        self._units = units
        self._segments = segments
        self._top = top
        self._live = whole | settled
        self._grown = grown
        self._needed = self._with_ancestors(self._live)
        self.built = Built()

    def build(self) -> TreeId:
        """The tree of the unit's top directory."""
        self._needed.add(self._top)
        tree = self._tree(self._top)
        assert tree is not None, "the top directory is always built"
        return tree

    def top_entry(self, tree: TreeId) -> Entry:
        """The entry of the top directory itself, for the version record."""
        inode = self._namespace.inode(self._top)
        return self._entry(TOP_NAME, self._top, inode, tree=tree)

    def _with_ancestors(self, directories: frozenset[int]) -> set[int]:
        needed: set[int] = set()
        for directory in directories:
            while directory not in needed and directory != self._top:
                needed.add(directory)
                directory = self._namespace.inode(directory).links[0][0]
        return needed

    def _tree(self, directory: int) -> TreeId | None:
        if directory not in self._needed:
            published = self._namespace.index.get(Table.PUBLISHED, key_of(directory))
            return None if published is None else TreeId(ChunkId(published[:32]))
        before = self._published_entries(directory)
        if directory in self._live:
            entries = self._live_entries(directory, before)
        else:
            entries = self._refreshed(directory, before)
        encoded = encode_tree(entries)
        identity = TreeId(chunk_id(encoded))
        self.built.objects.append((identity, encoded))
        self.built.trees[directory] = identity
        return identity

    def _published_entries(self, directory: int) -> dict[bytes, Entry]:
        published = self._namespace.index.get(Table.PUBLISHED, key_of(directory))
        if published is None:
            return {}
        return {e.name: e for e in self._segments.read_tree(TreeId(ChunkId(published[:32])))}

    def _live_entries(self, directory: int, before: dict[bytes, Entry]) -> list[Entry]:
        entries = []
        for _, name, ino in self._namespace.entries(directory):
            entry = self._live_entry(name, ino, before.get(name))
            if entry is not None:
                entries.append(entry)
        return entries

    def _live_entry(self, name: bytes, ino: int, before: Entry | None) -> Entry | None:
        inode = self._namespace.inode(ino)
        if inode.is_dir:
            return self._directory_entry(name, ino, inode)
        if not inode.is_file:
            return self._entry(name, ino, inode)
        if not inode.content.staging:
            return self._entry(name, ino, inode)
        if ino in self._grown:
            return self._entry(name, ino, inode, grown=self._grown[ino])
        return before if before is not None and before.is_file else None

    def _directory_entry(self, name: bytes, ino: int, inode: Inode) -> Entry | None:
        if not self._units.takes_subdirectories(self._top) or inode.versions_off:
            return None
        if self._units.is_top(ino):
            return None
        tree = self._tree(ino)
        return None if tree is None else self._entry(name, ino, inode, tree=tree)

    def _refreshed(self, directory: int, before: dict[bytes, Entry]) -> list[Entry]:
        """A busy directory: as last published, with the news of its subdirectories."""
        entries = dict(before)
        for child in self._needed:
            parent, name = self._namespace.inode(child).links[0]
            if parent != directory or child == self._top:
                continue
            entry = self._directory_entry(name, child, self._namespace.inode(child))
            if entry is not None:
                entries[name] = entry
        return list(entries.values())

    def _entry(
        self, name: bytes, ino: int, inode: Inode, *, tree: TreeId | None = None, grown: Stored | None = None
    ) -> Entry:
        shown = self._namespace.attributes_of(ino, inode)
        recipe, root, size = self._content(inode, grown)
        return Entry(
            name=name,
            mode=inode.mode,
            uid=inode.uid,
            gid=inode.gid,
            mtime_ns=shown.mtime_ns,
            ctime_ns=shown.ctime_ns,
            size=size,
            holes=max(0, size - inode.blocks * 512) if recipe is not None and grown is None else 0,
            recipe=recipe,
            root=root,
            tree=tree,
            target=inode.target,
            rdev=inode.rdev if stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode) else 0,
            link=ino if not inode.is_dir and len(inode.links) > 1 else 0,
            xattrs=tuple(sorted(self._namespace.xattrs(ino).items())),
        )

    def _content(self, inode: Inode, grown: Stored | None) -> tuple[RecipeId | None, bytes | None, int]:
        if not inode.is_file:
            return None, None, 0
        if grown is not None:
            return grown.recipe, grown.root, grown.size
        if inode.content.base is None:
            # What a power cut left of a file that nobody had synced: no ingest has seen it.
            self.built.objects.append((ChunkId(EMPTY.identity()), EMPTY.encode()))
            return EMPTY.identity(), file_root(EMPTY.root_leaves()), 0
        return inode.content.base, inode.root, inode.size


def overlay_pins(
    segments: Segments, tree: TreeId | None, pins: list[PinnedFile], recipes: Mapping[int, Stored]
) -> tuple[TreeId, list[tuple[ChunkId, bytes]]]:
    """The tree of a pre-image: a published tree with pinned files put over it.

    `recipes` has the stored content of each pin by its position in `pins`.
    """
    objects: list[tuple[ChunkId, bytes]] = []

    def merged(base: TreeId | None, members: list[int], depth: int) -> TreeId:
        entries = {e.name: e for e in segments.read_tree(base)} if base is not None else {}
        below: dict[bytes, list[int]] = {}
        for position in members:
            pin = pins[position]
            if len(pin.directories) == depth:
                entries[pin.name] = _pinned_entry(pin, recipes[position])
            else:
                below.setdefault(pin.directories[depth].name, []).append(position)
        for name, inside in below.items():
            before = entries.get(name)
            child = merged(before.tree if before is not None else None, inside, depth + 1)
            directory = pins[inside[0]].directories[depth]
            entries[name] = Entry(
                name=name,
                mode=directory.mode,
                uid=directory.uid,
                gid=directory.gid,
                mtime_ns=directory.mtime_ns,
                ctime_ns=directory.ctime_ns,
                tree=child,
            )
        encoded = encode_tree(entries.values())
        objects.append((chunk_id(encoded), encoded))
        return TreeId(objects[-1][0])

    return merged(tree, list(range(len(pins))), 0), objects


def _pinned_entry(pin: PinnedFile, stored: Stored) -> Entry:
    return Entry(
        name=pin.name,
        mode=pin.inode.mode,
        uid=pin.inode.uid,
        gid=pin.inode.gid,
        mtime_ns=pin.inode.mtime_ns,
        ctime_ns=pin.inode.ctime_ns,
        size=stored.size,
        holes=max(0, stored.size - pin.inode.blocks * 512),
        recipe=stored.recipe,
        root=stored.root,
        xattrs=pin.xattrs,
    )
