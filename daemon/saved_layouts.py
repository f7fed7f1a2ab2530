"""Where the tensors lie in a file of a version.

One rule: the index thread reads, a worker thread parses; a header of any length holds nobody up.
"""

from __future__ import annotations

import os

import trio

from ckptfs.daemon.saved_files import Saved, way_into
from ckptfs.store.far_reader import FarReader
from ckptfs.store.formats import Layout, Reader, parse, parse_content
from ckptfs.store.ids import RecipeId
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry


async def saved_layout(
    segments: Segments, limiter: trio.CapacityLimiter, top: Entry, saved: Saved
) -> Layout | None:
    """The layout of the regular file `saved` of the version whose top directory is `top`; None if its format
    is not known. Corrupt if what says so cannot be read. Called in the index thread."""
    assert saved.entry.recipe is not None, "a regular file has a recipe"
    folder, _, name = saved.path.rpartition(b"/")
    file = FarReader(segments.file_reader(segments.read_recipe(saved.entry.recipe)))

    def recipe_beside(other: str) -> RecipeId | None:
        inner = (*folder.split(b"/"), os.fsencode(other)) if folder else (os.fsencode(other),)
        way = way_into(segments, top, inner)
        return way[-1].recipe if len(way) > len(inner) else None

    def sibling(other: str) -> Reader | None:
        recipe = trio.from_thread.run_sync(recipe_beside, other)
        if recipe is None:
            return None
        return FarReader(segments.file_reader(trio.from_thread.run_sync(segments.read_recipe, recipe)))

    return await trio.to_thread.run_sync(parse, file, os.fsdecode(name), sibling, limiter=limiter)


async def content_layout(
    segments: Segments, limiter: trio.CapacityLimiter, recipe: RecipeId
) -> Layout | None:
    """The layout that the bytes of a content have, whatever its files are called and lie beside: for what is
    kept with the content. None, Corrupt: as for `saved_layout`. Called in the index thread."""
    file = FarReader(segments.file_reader(segments.read_recipe(recipe)))
    return await trio.to_thread.run_sync(parse_content, file, limiter=limiter)
