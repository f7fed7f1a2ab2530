"""Whether everything that a version names is in the index: its trees, recipes and chunks.

One rule: a shared tree or recipe is looked at once, whatever number of versions share it; nothing
but trees and recipes is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.store.errors import CkptfsError
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry


@dataclass(frozen=True, slots=True)
class Lack:
    """What is missing: `chunks` in all (an unreadable tree or recipe counts as one), and whether
    a tree is among them, so that not even the names are known."""

    chunks: int = 0
    trees: bool = False

    def __add__(self, other: Lack) -> Lack:
        return Lack(self.chunks + other.chunks, self.trees or other.trees)


_NOTHING = Lack()


class VersionCheck:
    """Answers for many versions of one store. Index thread. About 150 bytes a distinct object."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._trees: dict[TreeId, Lack] = {}
        self._recipes: dict[RecipeId, Lack] = {}

    def lack(self, top: Entry) -> Lack:
        """What is missing of the version whose top directory this is."""
        return self._of_entry(top)

    def _of_entry(self, entry: Entry) -> Lack:
        if entry.tree is not None:
            return self._of_tree(entry.tree)
        if entry.recipe is not None:
            return self._of_recipe(entry.recipe)
        return _NOTHING

    def _of_tree(self, tree: TreeId) -> Lack:
        known = self._trees.get(tree)
        if known is None:
            try:
                entries = self._segments.read_tree(tree)
                known = sum((self._of_entry(entry) for entry in entries), _NOTHING)
            except CkptfsError:
                known = Lack(1, trees=True)
            self._trees[tree] = known
        return known

    def _of_recipe(self, recipe: RecipeId) -> Lack:
        known = self._recipes.get(recipe)
        if known is None:
            try:
                chunks = set(self._segments.read_recipe(recipe).chunks())
                known = Lack(sum(self._segments.locate(chunk) is None for chunk in chunks))
            except CkptfsError:
                known = Lack(1)
            self._recipes[recipe] = known
        return known
