"""Regular files of past versions that are open, and what to say when stored bytes are wrong.

One rule: they are read-only and immutable, so an open one is its recipe and what stat(2) showed of
it, and outlives its version.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.browse import Browse
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.kept_notes import Kind, Notes
from ckptfs.fusefs.kept_open import decode_open, encode_open
from ckptfs.fusefs.stored_reads import StoredReads
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.formats import Reader, parse
from ckptfs.store.ids import RecipeId
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments

_TOLD_FOR_S = 60.0
_MOST_TOLD = 1000


class VersionedFiles:
    """Open files of versions by inode. Belongs to the trio thread."""

    def __init__(
        self,
        segments: Segments,
        stored_reads: StoredReads,
        browse: Browse,
        live_recipe: Callable[[int], Recipe | None],
        sibling_recipe: Callable[[int, bytes], RecipeId | None],
        notes: Notes,
    ) -> None:
        """`live_recipe(ino)` is the stored content of a live file, `sibling_recipe(ino, name)` that of
        another file in its directory."""
        self._segments = segments
        self._stored_reads = stored_reads
        self._browse = browse
        self._live_recipe = live_recipe
        self._sibling_recipe = sibling_recipe
        self._notes = notes
        self._open: dict[int, tuple[RecipeId, Recipe, int]] = {}
        self._shown: dict[int, Attributes] = {}
        self._told: dict[tuple[int, bytes | None], float] = {}

    def resume(self, ino: int, count: int) -> None:
        """A file that the daemon before had open. NotFound if nothing is known of it, or as the store."""
        value = self._notes.get(Kind.SAVED, ino)
        if value is None:
            raise NotFound(f"nothing is known of node {ino} of a version")
        recipe_id, shown = decode_open(value)
        recipe = self._segments.read_recipe(recipe_id)
        self._shown[ino] = shown
        self._open[ino] = (recipe_id, recipe, count)

    async def open(self, ino: int) -> None:
        """Open once more; NotFound if the version is gone, Corrupt if others have it open unverified."""
        if ino not in self._open:
            await self._stored_reads.make_saved_ready(self._browse.recipe(ino))
        if ino in self._open:
            identity, recipe, count = self._open[ino]
            if self._stored_reads.is_damaged(ino):
                raise Corrupt("others have it open, and read it from a segment that is damaged")
        else:
            identity, count = self._browse.recipe(ino), 0
            recipe = self._segments.read_recipe(identity)
            shown = self._shown[ino] = self._browse.attributes(ino)
            self._notes.put(Kind.SAVED, ino, encode_open(identity, shown))
            self._stored_reads.attach_saved(ino, identity)
        self._open[ino] = (identity, recipe, count + 1)

    def release(self, ino: int) -> None:
        """One handle fewer."""
        identity, recipe, count = self._open[ino]
        if count == 1:
            del self._open[ino], self._shown[ino]
            self._notes.delete(Kind.SAVED, ino)
            self._stored_reads.detach_saved(ino)
        else:
            self._open[ino] = (identity, recipe, count - 1)

    def opened_recipe(self, ino: int) -> Recipe:
        """What an open file consists of; EBADF as StagedFiles.stored_recipe."""
        if ino not in self._open:
            raise PosixError(errno.EBADF)
        return self._open[ino][1]

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

    def describe(self, ino: int, path: str, error: Corrupt) -> str | None:
        """The error with the tensor that the bytes belong to, if the file's format tells.

        None if that was said of this file and chunk in the last minute: the kernel asks again and again.
        """
        now = time.monotonic()
        key = (ino, error.expected)
        if self._told.get(key, now) > now:
            return None
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told[key] = now + _TOLD_FOR_S
        try:
            recipe = self._open[ino][1] if ino in self._open else self._live_recipe(ino)
        except CkptfsError:
            recipe = None
        where = "" if recipe is None else self._place_in(ino, path, recipe, error)
        return f"{where}{error}; restore the chunk from a copy, or roll back"

    def _place_in(self, ino: int, path: str, recipe: Recipe, error: Corrupt) -> str:
        """The tensor and file offset of a chunk, as the beginning of a sentence."""
        offset = next(
            (recipe.start(i) for i in range(len(recipe)) if recipe.piece(i).chunk == error.expected), None
        )
        if offset is None:
            return ""
        try:
            name = path.rpartition("/")[2]
            layout = parse(self._segments.file_reader(recipe), name, lambda other: self._sibling(ino, other))
        except CkptfsError:
            layout = None
        tensors = layout.tensors if layout is not None else ()
        tensor = next((t.name for t in tensors if t.offset <= offset < t.end), None)
        named = f"tensor {tensor!r}, " if tensor is not None else ""
        return f"{named}file offset {offset}: "

    def _sibling(self, ino: int, name: str) -> Reader | None:
        identity = self._sibling_recipe(ino, os.fsencode(name))
        return None if identity is None else self._segments.file_reader(self._segments.read_recipe(identity))
