"""What is known of a version before it is recorded: its Merkle root, its size, is it whole?

One rule: facts are computed from the stored trees, not from the live files, so they are facts of
exactly what the version lists.

Trees are decoded and headers parsed in a worker thread: one that is large or hostile takes seconds, and the
mount answers meanwhile. The bytes come from the index thread, to which the worker turns for each read.

Source: ARCHITECTURE §4 "Publish" and §6; the rules of completeness: store/formats/completeness.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import trio

from ckptfs.store.far_reader import FarReader
from ckptfs.store.far_trees import read_tree_there
from ckptfs.store.formats import Reader
from ckptfs.store.formats.completeness import assess
from ckptfs.store.history import State
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.lru import Lru
from ckptfs.store.merkle import version_root
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

_REMEMBERED_FILES = 200_000
_LAST_SAVES = 8
_MOST_BYTES = (1 << 63) - 1  # a few sparse files are enough to add up to more
Files = tuple[tuple[bytes, Entry], ...]
OpenFile = Callable[[RecipeId], Reader]


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one version: `root` over its files, their number and total length, and their state."""

    root: bytes
    files: int
    logical_bytes: int
    state: State
    step: int | None
    steps: tuple[int, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of a version as the completeness rules look at it, in the worker thread. `open_file`: who opens
    it there, if its chunks are not all stored."""

    size: int
    recipe: RecipeId
    segments: Segments
    open_file: OpenFile | None = None

    @property
    def identity(self) -> Hashable:
        """Equal for equal content."""
        return self.recipe

    def open(self) -> Reader:
        """Random access to its bytes, verified as they are read."""
        if self.open_file is not None:
            return self.open_file(self.recipe)
        return FarReader(trio.from_thread.run_sync(self._reader))

    def _reader(self) -> Reader:
        return self.segments.file_reader(self.segments.read_recipe(self.recipe))


class VersionFacts:
    """Computes facts, and remembers verdicts on files that did not change. Index thread; one
    question after the other, whose worker alone touches what is remembered until it is answered.

    `last_save_bytes`: how much a save brings, holes left out: the most of what the last versions have
    that the one before them has not (one save may come in several). 0 before the first.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._one_at_a_time = trio.Lock()
        self._saved_bytes: deque[int] = deque(maxlen=_LAST_SAVES)
        self._verdicts: MutableMapping[tuple[str, Hashable], object] = {}
        self._flat: Lru[TreeId, Files] = Lru(_REMEMBERED_FILES)

    @property
    def last_save_bytes(self) -> int:
        """See above."""
        return max(self._saved_bytes, default=0)

    async def of(
        self,
        tree: TreeId,
        tree_before: TreeId | None,
        since_step: int | None = None,
        open_file: OpenFile | None = None,
    ) -> Facts:
        """The facts of a unit's tree, given that of the version before it; Corrupt if a tree cannot
        be read. `since_step`: see assess. `open_file` opens files of which not all chunks are stored, in the
        worker thread; errors as it raises."""
        async with self._one_at_a_time:
            facts, added_bytes = await trio.to_thread.run_sync(
                self._judged, tree, tree_before, since_step, open_file
            )
            if len(self._verdicts) > _REMEMBERED_FILES:
                self._verdicts.clear()
        if added_bytes:
            self._saved_bytes.append(added_bytes)
        return facts

    def _judged(
        self, tree: TreeId, tree_before: TreeId | None, since_step: int | None, open_file: OpenFile | None
    ) -> tuple[Facts, int]:
        """The facts, and how many bytes the version before has not. In a worker thread."""
        files = self._files(tree)
        files_before = None if tree_before is None else self._files(tree_before)
        before = {path: entry.recipe for path, entry in files_before or ()}
        changed = (
            None
            if files_before is None
            else frozenset(_text(path) for path, entry in files if before.get(path) != entry.recipe)
        )
        found = assess(self._views(files, open_file), changed, self._verdicts, since_step=since_step)
        steps = sorted({c.step for c in found.checkpoints if c.step is not None and c.state == "complete"})
        facts = Facts(
            root=version_root((path, entry.root) for path, entry in files if entry.root is not None),
            files=len(files),
            logical_bytes=min(sum(entry.size for _, entry in files), _MOST_BYTES),
            state=State(found.state),
            step=found.step,
            steps=tuple(steps),
            missing=tuple(_printable(sentence) for sentence in found.missing),
        )
        known = set(before.values())
        added = {entry.recipe: entry.size - entry.holes for _, entry in files if entry.recipe not in known}
        return facts, sum(added.values())

    def _views(self, files: Files, open_file: OpenFile | None) -> Mapping[str, SavedFile]:
        return {
            _text(path): SavedFile(entry.size, entry.recipe, self._segments, open_file)
            for path, entry in files
            if entry.recipe is not None
        }

    def _files(self, tree: TreeId) -> Files:
        """(path, entry) of every regular file below a tree."""
        known = self._flat.get(tree)
        if known is None:
            known = tuple(self._walk(tree))
            self._flat.put(tree, known, len(known) + 1)
        return known

    def _walk(self, tree: TreeId) -> Iterator[tuple[bytes, Entry]]:
        for entry in read_tree_there(self._segments, tree):
            if entry.is_file:
                yield entry.name, entry
            elif entry.tree is not None:
                for path, below in self._files(entry.tree):
                    yield entry.name + b"/" + path, below


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def _printable(sentence: str) -> str:
    """A record holds UTF-8; a file name need not."""
    return sentence.encode("utf-8", "backslashreplace").decode("utf-8")
