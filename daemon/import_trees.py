"""The trees of a version of an imported directory: what was taken now, and what the version before had.

One rule: all of it is done in one worker thread, since ten thousand names take a fifth of a second, and the
mount answers meanwhile; only the trees of the version before come from the index thread.

What is left alone, or was there already, stands as the version before has it, so what did not change is the
same entry, and a tree of such entries the same tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptfs.daemon.import_files import Taken
from ckptfs.daemon.import_plan import Found, Path, ReadTree, is_same
from ckptfs.fusefs.treebuilder import TOP_NAME
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.tree import Entry, encode_tree


class TreeMaker:
    """Used once, by one thread. `objects` are the trees that were made; `read_tree` is called there."""

    def __init__(self, read_tree: ReadTree, taken: Mapping[Path, Taken]) -> None:
        self._read_tree = read_tree
        self._taken = taken
        self.objects: list[tuple[ChunkId, bytes]] = []

    def make(
        self, top: Found, new: Iterable[Found], base: Mapping[bytes, Entry]
    ) -> tuple[Entry, dict[bytes, Entry]]:
        """(the entry of the directory itself, those in it): of `new` as it is now, else that of `base`."""
        entries = dict(base)
        for one in new:
            entry = self._entry_of(one, base.get(one.name))
            if entry is not None:
                entries[one.name] = entry
        return replace(_entry(top), name=TOP_NAME, tree=self._tree(entries.values())), entries

    def _entry_of(self, found: Found, base: Entry | None, above: Path = ()) -> Entry | None:
        """The entry of a name, given that of the version before; None: nothing of it is to be listed yet."""
        path = (*above, found.name)
        if found.is_dir:
            return self._directory(found, base if base is not None and base.is_dir else None, path)
        if (one := self._taken.get(path)) is not None:
            return _settled(_entry(one.seen, one), base)
        if found.is_left or is_same(found, base):
            return base
        assert not found.is_file, "a file that is news was taken"
        return _settled(_entry(found), base)

    def _directory(self, found: Found, base: Entry | None, path: Path) -> Entry | None:
        before = {entry.name: entry for entry in self._read_tree(base)} if base is not None else {}
        entries = dict(before) if found.keeps else {}
        for child in found.children:
            entry = self._entry_of(child, before.get(child.name), path)
            if entry is not None:
                entries[child.name] = entry
        if base is None and found.is_left and not entries:
            return None
        tree = self._tree(entries.values())
        if base is not None and found.keeps:
            return replace(base, tree=tree)
        return _settled(replace(_entry(found), tree=tree), base)

    def _tree(self, entries: Iterable[Entry]) -> TreeId:
        encoded = encode_tree(entries)
        identity = TreeId(chunk_id(encoded))
        self.objects.append((ChunkId(identity), encoded))
        return identity


def _entry(found: Found, taken: Taken | None = None) -> Entry:
    recipe: RecipeId | None = None if taken is None else taken.recipe
    return Entry(
        name=found.name,
        mode=found.mode,
        uid=found.uid,
        gid=found.gid,
        mtime_ns=found.mtime_ns,
        ctime_ns=found.ctime_ns,
        size=found.size if taken is not None else 0,
        holes=0 if taken is None else max(0, found.size - taken.blocks * 512),
        recipe=recipe,
        root=None if taken is None else taken.root,
        target=found.target,
        rdev=found.rdev,
        link=found.inode if found.names > 1 else 0,
        xattrs=found.xattrs,
    )


def _settled(entry: Entry, base: Entry | None) -> Entry:
    """The entry of the version before, if nothing but the time of the inode's last change differs: a name
    that was added and removed is no news."""
    return base if base is not None and replace(entry, ctime_ns=base.ctime_ns) == base else entry
