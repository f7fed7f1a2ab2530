"""A file of a remote as the parsers of `formats` read it, from a worker thread.

One rule: only the chunks are fetched that hold what is asked for; those of a batch, which is as good as one
round trip, together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Recipe
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.shard import keys_of
from ckptfs.store.segments import Segments

_PLACES_AT_ONCE = 64


class FarFile:
    """Behind the BatchReader protocol. Only for a thread that trio.to_thread started.

    Errors as the fetcher raises them."""

    def __init__(self, segments: Segments, fetcher: Fetcher, recipe: Recipe) -> None:
        self._segments, self._fetcher, self._recipe = segments, fetcher, recipe
        self.size = recipe.size

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the file ends."""
        return self.pread_many([(offset, length)])[0]

    def pread_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The same of many (offset, length), each of them short."""
        found: list[bytes] = []
        for first in range(0, len(places), _PLACES_AT_ONCE):
            found += trio.from_thread.run(self._read, places[first : first + _PLACES_AT_ONCE])
        return found

    async def _read(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        wanted = {chunk for offset, length in places for chunk in self._chunks(offset, length)}
        if wanted:
            await self._fetcher.fetch(keys_of(sorted(wanted)))
        file = self._segments.file_reader(self._recipe)
        return [file.pread(offset, length) for offset, length in places]

    def _chunks(self, offset: int, length: int) -> Iterable[ChunkId]:
        end, recipe = min(offset + length, self.size), self._recipe
        if not 0 <= offset < end:
            return ()
        pieces = range(recipe.index_at(offset), recipe.index_at(end - 1) + 1)
        return (chunk for index in pieces if (chunk := recipe.piece(index).chunk) is not None)
