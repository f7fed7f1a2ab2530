"""Answering the kernel's reads: live files, and files of past versions.

One rule: what is returned is handed to the kernel in the same step of the event loop, because a view
of a stored file is good only until the next one is asked for.
"""

from __future__ import annotations

from ckptfs.fusefs.files import Files
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO
from ckptfs.fusefs.nodes import Nodes
from ckptfs.fusefs.versioned_files import VersionedFiles
from ckptfs.store.hashing import Buffer
from ckptfs.store.reading_ahead import ReadingAhead
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments


class KernelReads:
    """Belongs to the trio thread."""

    def __init__(
        self, segments: Segments, files: Files, versioned: VersionedFiles, ahead: ReadingAhead
    ) -> None:
        self._segments = segments
        self._files = files
        self._versioned = versioned
        self._ahead = ahead

    async def read(self, node: int, offset: int, length: int) -> Buffer:
        """Up to `length` bytes of an open file; Corrupt if they are not the ones that were saved."""
        recipe = self._stored_recipe(node)
        if recipe is not None:
            self._ahead.note_use()
            plan = self._segments.plan_read(recipe, offset, length)
            if not plan.unverified or not await self._ahead.prepare(recipe, offset, plan):
                return self._segments.show(plan)
            recipe = self._stored_recipe(node)  # somebody may have written to it meanwhile
        if recipe is None:
            return self._files.read(Nodes.ino_of(node), offset, length)
        return self._segments.show(self._segments.plan_read(recipe, offset, length))

    def _stored_recipe(self, node: int) -> Recipe | None:
        if node >= FIRST_VIRTUAL_INO:
            return self._versioned.opened_recipe(node)
        return self._files.stored_recipe(Nodes.ino_of(node))
