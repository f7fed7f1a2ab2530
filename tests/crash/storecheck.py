"""Is everything in a store that must be there, and nothing else? Asked of the files, beside a daemon.

    storecheck.py STORE [MOST_S]

One rule: what a daemon may still be about to do (drop a staging file after a commit, store what has
settled) is given time; what is wrong at every look until then is a finding. Prints one JSON object.

- staging: every file is named by an inode or a pin, and every name has its file;
- segments: every file has its row and every row its files; every chunk row is in its `.idx`, so that a
  rebuild finds it; what it is encoded against is there, at a smaller depth;
- chunks: every tree, recipe and chunk of every version, of the live tree and of every pin is there and
  has the bytes of its id.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable

from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.histories import Histories
from ckptfs.store.history_proof import prove
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.index import Index, Table
from ckptfs.store.inode import Content, decode_inode
from ckptfs.store.parent_table import Lineage, ParentTable
from ckptfs.store.pins import decode_pin
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import SEGMENTS_PATH, Row, decode_location, segment_paths
from ckptfs.store.segments import Segments
from ckptfs.store.staging import STAGING_PATH

_LEAST_LOOKS = 5


class Look:
    """One look at the store, as of the last commit of its index."""

    def __init__(self, root: str, known_good: set[ChunkId]) -> None:
        self.findings: set[str] = set()
        self.versions = 0
        self.checked_bytes = 0
        self._disk = Disk(root)
        self._known_good = known_good
        staging_before = set(self._disk.list_dir(STAGING_PATH))
        segments_before = self._segment_files()
        self._index = Index(self._disk, read_only=True)
        try:
            self._segments = Segments(self._disk, self._index)
            self._check_staging(staging_before)
            self._check_segments(segments_before)
            self._check_contents()
            self._segments.close()
        finally:
            self._index.close()

    def _check_staging(self, before: set[str]) -> None:
        named = {f"{content.staging:016x}" for content in self._contents() if content.staging}
        there = set(self._disk.list_dir(STAGING_PATH))
        self.findings |= {f"staging/{name} is named by nothing" for name in (before & there) - named}
        self.findings |= {f"staging/{name} is named and not there" for name in named - there}

    def _contents(self) -> Iterable[Content]:
        for _, value in self._index.scan(Table.INODE):
            yield decode_inode(value).content
        for _, value in self._index.scan(Table.PREIMAGE):
            yield decode_pin(value).inode.content

    def _segment_files(self) -> set[str]:
        folders = [name for name in self._disk.list_dir(SEGMENTS_PATH) if len(name) == 2]
        return {
            f"{SEGMENTS_PATH}/{f}/{n}" for f in folders for n in self._disk.list_dir(f"{SEGMENTS_PATH}/{f}")
        }

    def _check_segments(self, before: set[str]) -> None:
        numbers = {int.from_bytes(key, "big") for key, _ in self._index.scan(Table.SEGMENT)}
        there = self._segment_files()
        named = {path for number in numbers for path in segment_paths(number)}
        self.findings |= {f"{path} has no row" for path in (before & there) - named}
        self.findings |= {f"{path} has a row and is not there" for path in named - there}
        rows: dict[int, dict[ChunkId, Row]] = {}
        edges: set[bytes] = set()
        for key, value in self._index.scan(Table.CHUNK):
            location, chunk = decode_location(value), ChunkId(key)
            if location.segment not in rows:
                rows[location.segment] = self._idx_rows(location.segment)
            row = rows[location.segment].get(chunk)
            if row is None or row.location(location.segment) != location:
                self.findings.add(f"chunk {key.hex()} is not in the .idx of segment {location.segment:x}")
                continue
            edges |= {parent + chunk for parent in row.parents}
            self._check_parents(row)
        wrong = edges ^ {key for key, _ in self._index.scan(Table.CHILD)}
        self.findings |= {
            f"the tables and the .idx files differ in who needs {key[:32].hex()}" for key in wrong
        }

    def _check_parents(self, row: Row) -> None:
        table = ParentTable(self._index)
        lineage = Lineage(row.depth, row.parents) if row.parents else None
        if not table.agrees(row.chunk, lineage) or not table.may_put(row.chunk, lineage):
            self.findings.add(
                f"chunk {row.chunk.hex()}: what it is encoded against is not there, or too deep"
            )

    def _idx_rows(self, segment: int) -> dict[ChunkId, Row]:
        try:
            return {row.chunk: row for row in read_idx(self._disk, segment).rows}
        except (CkptfsError, OSError) as e:
            self.findings.add(f"the .idx of segment {segment:x}: {e}")
            return {}

    def _check_contents(self) -> None:
        for content in self._contents():
            for recipe in (content.base, content.fallback):
                if recipe is not None:
                    self._check_recipe(recipe, "the live tree")
        for key, value in self._index.scan(Table.PUBLISHED):
            self._check_tree(
                TreeId(ChunkId(value[:32])), f"directory {int.from_bytes(key, 'big')} as published"
            )
        histories = Histories(self._disk, self._index, read_only=True)
        for unit in histories.units():
            proof = prove(histories.evidence(unit.unit), [])
            self.findings |= {f"{unit.text}: {finding.message}" for finding in proof.findings}
            for record in histories.versions(unit.unit):
                self.versions += 1
                if record.top.tree is not None:
                    self._check_tree(record.top.tree, f"{unit.text} {record.name}")

    def _check_tree(self, tree: TreeId, where: str) -> None:
        if ChunkId(tree) in self._known_good:
            return
        try:
            entries = self._segments.read_tree(tree)
        except CkptfsError as e:
            self.findings.add(f"{where}: {e}")
            return
        bad = len(self.findings)
        for entry in entries:
            if entry.tree is not None:
                self._check_tree(entry.tree, where)
            if entry.recipe is not None:
                self._check_recipe(entry.recipe, f"{where}, {entry.name!r}", entry.size)
        if len(self.findings) == bad:
            self._known_good.add(ChunkId(tree))

    def _check_recipe(self, identity: RecipeId, where: str, size: int | None = None) -> None:
        if ChunkId(identity) in self._known_good and size is None:
            return
        try:
            recipe = self._segments.read_recipe(identity)
            if size is not None and recipe.size != size:
                self.findings.add(f"{where}: {size} bytes in the tree, {recipe.size} in the recipe")
            for chunk in recipe.chunks():
                if chunk not in self._known_good:
                    self._segments.check(chunk)
                    self._known_good.add(chunk)
            self.checked_bytes += recipe.data_bytes()
            self._known_good.add(ChunkId(identity))
        except CkptfsError as e:
            self.findings.add(f"{where}: {e}")


def check(root: str, most_s: float) -> dict[str, object]:
    """Look until nothing is wrong, at most for `most_s`; what was wrong at every look.

    A look is one of the index as of a commit, and of files that go on changing; on a busy machine it alone
    may take longer than `most_s`, and says nothing then of what was about to be done: so there are several.
    """
    deadline = time.monotonic() + most_s
    looks = 0
    known_good: set[ChunkId] = set()
    checked_bytes = 0
    wrong: set[str] | None = None
    while True:
        look = Look(root, known_good)
        checked_bytes += look.checked_bytes
        wrong = look.findings if wrong is None else wrong & look.findings
        looks += 1
        if not wrong or (time.monotonic() >= deadline and looks >= _LEAST_LOOKS):
            return {"findings": sorted(wrong), "versions": look.versions, "checked_bytes": checked_bytes}
        time.sleep(1.0)


def main(arguments: list[str]) -> int:
    """The program."""
    most_s = float(arguments[1]) if len(arguments) > 1 else 15.0
    print(json.dumps(check(arguments[0], most_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
