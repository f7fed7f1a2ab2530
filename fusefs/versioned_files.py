"""Regular files of past versions that are open, and what to say when stored bytes are wrong.

One rule: they are read-only and immutable, so an open one is its recipe and what stat(2) showed of
it, and outlives its version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.browse import Browse
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.formats import parse
from ckptfs.store.ids import RecipeId
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments


class VersionedFiles:
    """Open files of versions by inode. Belongs to the trio thread."""

    def __init__(
        self, segments: Segments, browse: Browse, live_recipe: Callable[[int], Recipe | None]
    ) -> None:
        self._segments = segments
        self._browse = browse
        self._live_recipe = live_recipe
        self._open: dict[int, tuple[RecipeId, Recipe, int]] = {}
        self._shown: dict[int, Attributes] = {}

    def open(self, ino: int) -> None:
        """Open once more; NotFound if the version is gone."""
        if ino in self._open:
            identity, recipe, count = self._open[ino]
        else:
            identity, count = self._browse.recipe(ino), 0
            recipe = self._segments.read_recipe(identity)
            self._shown[ino] = self._browse.attributes(ino)
        self._open[ino] = (identity, recipe, count + 1)

    def release(self, ino: int) -> None:
        """One handle fewer."""
        identity, recipe, count = self._open[ino]
        if count == 1:
            del self._open[ino], self._shown[ino]
        else:
            self._open[ino] = (identity, recipe, count - 1)

    def read(self, ino: int, offset: int, length: int) -> bytes:
        """Up to `length` verified bytes, or Corrupt."""
        return self._segments.read_file(self._open[ino][1], offset, length)

    def attributes(self, ino: int) -> Attributes:
        """What stat(2) shows, also of an open file whose version was let go; NotFound else."""
        try:
            return self._browse.attributes(ino)
        except NotFound:
            if ino not in self._shown:
                raise
            return self._shown[ino]

    def recipes(self) -> list[RecipeId]:
        """What is open, for the collector to leave alone."""
        return [identity for identity, _, _ in self._open.values()]

    def describe(self, ino: int, error: Corrupt, args: Sequence[object]) -> str:
        """The error with the tensor that the bytes belong to, if the file's format tells."""
        recipe = self._open[ino][1] if ino in self._open else self._live_recipe(ino)
        if recipe is None or error.expected is None:
            return str(error)
        offset = next(
            (recipe.start(i) for i in range(len(recipe)) if recipe.piece(i).chunk == error.expected), None
        )
        if offset is None:
            return str(error)
        try:
            layout = parse(self._segments.file_reader(recipe), "", None)
        except CkptfsError:
            layout = None
        tensors = layout.tensors if layout is not None else ()
        tensor = next((t.name for t in tensors if t.offset <= offset < t.offset + t.length), None)
        where = f"tensor {tensor!r}, " if tensor is not None else ""
        return f"{where}file offset {offset}: {error}; restore the chunk from a copy, or roll back"
