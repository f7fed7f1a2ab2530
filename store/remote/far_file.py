"""A file of a remote as the parsers of `formats` read it, from a worker thread.

One rule: only the chunks are fetched that hold what is asked for.
"""

from __future__ import annotations

import trio

from ckptfs.store.recipe import Recipe
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.shard import keys_of
from ckptfs.store.segments import Segments


class FarFile:
    """Behind the Reader protocol. Only for a thread that trio.to_thread started. Errors as the fetcher's."""

    def __init__(self, segments: Segments, fetcher: Fetcher, recipe: Recipe) -> None:
        self._segments, self._fetcher, self._recipe = segments, fetcher, recipe
        self.size = recipe.size

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the file ends."""
        return trio.from_thread.run(self._read, offset, min(offset + length, self.size))

    async def _read(self, offset: int, end: int) -> bytes:
        if not 0 <= offset < end:
            return b""
        recipe = self._recipe
        pieces = range(recipe.index_at(offset), recipe.index_at(end - 1) + 1)
        chunks = {chunk for index in pieces if (chunk := recipe.piece(index).chunk) is not None}
        await self._fetcher.fetch(keys_of(sorted(chunks)))
        return self._segments.read_file(recipe, offset, end - offset)
