"""Which tensor of a saved file a byte belongs to, for saying what is damaged.

One rule: naming never fails. Where the file's own header is damaged, or its format is unknown, the
name is None.
"""

from __future__ import annotations

import os

from ckptfs.daemon.saved_files import way_into
from ckptfs.store.errors import CkptfsError
from ckptfs.store.formats import Layout, Reader, parse
from ckptfs.store.ids import RecipeId
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

_MOST_LAYOUTS = 64


class TensorNames:
    """Remembers the layouts of the files that were asked for last. Belongs to the index thread."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._layouts: dict[RecipeId, Layout | None] = {}

    def tensor_at(self, top: Entry | None, path: bytes, recipe: RecipeId, offset: int) -> str | None:
        """The tensor at byte `offset` of the file `path` in the version whose top directory is `top`."""
        if recipe not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[recipe] = self._layout(top, path, recipe)
        layout = self._layouts[recipe]
        tensors = () if layout is None else layout.tensors
        return next((t.name for t in tensors if t.offset <= offset < t.end), None)

    def _layout(self, top: Entry | None, path: bytes, identity: RecipeId) -> Layout | None:
        folder, _, name = path.rpartition(b"/")

        def sibling(other: str) -> Reader | None:
            inner = (*folder.split(b"/"), os.fsencode(other)) if folder else (os.fsencode(other),)
            way = way_into(self._segments, top, inner) if top is not None else []
            recipe = way[-1].recipe if len(way) > len(inner) else None
            return None if recipe is None else self._reader(recipe)

        try:
            return parse(self._reader(identity), os.fsdecode(name), sibling)
        except CkptfsError:
            return None

    def _reader(self, recipe: RecipeId) -> Reader:
        return self._segments.file_reader(self._segments.read_recipe(recipe))
