"""What is reachable in a store, and is all of it there: asked of its files, while no daemon has it.

    liveset.py STORE

One rule: nothing of the collector is used. Everything is read and hashed: the live tree, the directories as
published, pre-images, versions; their trees, recipes and chunks. Prints one JSON object: `live_bytes` (the
stored length of every distinct chunk that is reached), `payload_bytes` (of every chunk that is stored),
`disk_bytes` (what the segments really occupy), `missing` and `versions`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.histories import Histories
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.index import Index, Table
from ckptfs.store.inode import Content, decode_inode
from ckptfs.store.pins import decode_pin
from ckptfs.store.segment_format import decode_location
from ckptfs.store.segments import Segments


class LiveSet:
    """One walk over a store that nobody has open."""

    def __init__(self, root: str) -> None:
        disk = Disk(root)
        self._index = Index(disk, read_only=True)
        self._segments = Segments(disk, self._index)
        self._reached: dict[ChunkId, int] = {}
        self.missing: list[str] = []
        self.versions = 0
        try:
            self._walk(Histories(disk, self._index, read_only=True))
            rows = self._index.scan(Table.CHUNK)
            self.payload_bytes = sum(decode_location(value).stored for _, value in rows)
        finally:
            self._segments.close()
            self._index.close()

    @property
    def live_bytes(self) -> int:
        """The stored length of all that is reached."""
        return sum(self._reached.values())

    def _walk(self, histories: Histories) -> None:
        for _, value in self._index.scan(Table.INODE):
            self._content(decode_inode(value).content, "the live tree")
        for _, value in self._index.scan(Table.PREIMAGE):
            self._content(decode_pin(value).inode.content, "a pre-image")
        for _, value in self._index.scan(Table.PUBLISHED):
            self._tree(TreeId(ChunkId(value[:32])), "a published directory")
        for unit in histories.units():
            for record in histories.versions(unit.unit):
                self.versions += 1
                assert record.top.tree is not None
                self._tree(record.top.tree, f"{unit.text} {record.name}")

    def _content(self, content: Content, where: str) -> None:
        for recipe in (content.base, content.fallback):
            if recipe is not None:
                self._recipe(recipe, where)

    def _tree(self, tree: TreeId, where: str) -> None:
        if self._take(tree, where):
            for entry in self._segments.read_tree(tree):
                if entry.tree is not None:
                    self._tree(entry.tree, where)
                if entry.recipe is not None:
                    self._recipe(entry.recipe, where)

    def _recipe(self, recipe: RecipeId, where: str) -> None:
        if self._take(recipe, where):
            for chunk in self._segments.read_recipe(recipe).chunks():
                self._take(chunk, where)

    def _take(self, chunk: ChunkId, where: str) -> bool:
        """Read and hash a chunk; False if it was looked at before, or is not right."""
        if chunk in self._reached:
            return False
        try:
            self._segments.check(chunk)
        except CkptfsError as e:
            self.missing.append(f"{where}: {e}")
            return False
        location = self._segments.locate(chunk)
        assert location is not None
        self._reached[chunk] = location.stored
        return True


def main(root: str) -> int:
    """The program."""
    found = LiveSet(root)
    facts = {
        "live_bytes": found.live_bytes,
        "payload_bytes": found.payload_bytes,
        "disk_bytes": sum(os.stat(p).st_blocks * 512 for p in Path(root, "segments").rglob("*.seg")),
        "versions": found.versions,
        "missing": found.missing[:20],
    }
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
