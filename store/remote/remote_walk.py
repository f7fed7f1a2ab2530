"""What versions on a remote lead to: their trees and recipes are read from there.

One rule: nothing is taken for reached but what was read behind its id; what cannot be read is an error.

Source: FORMAT.md, "Remotes", "Collecting".
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import trio

from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import decode_recipe
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.ranges import Got, RangeReader, Take
from ckptfs.store.remote.reading import KeySet, add_recipe
from ckptfs.store.remote.shard import Keys, keys_of
from ckptfs.store.remote.stock import Stock
from ckptfs.store.tree import decode_tree


class RemoteWalk:
    """Gathers what is reached, in several walks. Belongs to one thread.

    32 bytes of memory a chunk, 100 a tree or recipe; of what is read as ranges.py says.
    """

    def __init__(self, remote: Remote, seen: Iterable[ChunkId] = ()) -> None:
        """Trees and recipes that were `seen`, with all below them, are passed over."""
        self._remote = remote
        self._reached = KeySet()
        self._seen: set[ChunkId] = {*seen}

    @property
    def seen(self) -> Set[ChunkId]:
        """Trees and recipes that were met, or seen before."""
        return self._seen

    async def walk(self, stock: Stock, trees: Iterable[ChunkId]) -> None:
        """Reach all below these trees. Corrupt or NotFound names what is damaged or not there."""
        recipes = set[ChunkId]()
        level = {*trees} - self._seen
        while level:
            self._note(level)
            below = set[ChunkId]()

            async def add_entries(batch: list[Got], below: set[ChunkId] = below) -> None:
                for _, encoded in batch:
                    for entry in decode_tree(bytes(encoded)):
                        if entry.tree is not None:
                            below.add(entry.tree)
                        elif entry.recipe is not None:
                            recipes.add(entry.recipe)

            await self._read(stock, level, add_entries)
            level = below - self._seen
        recipes -= self._seen
        self._note(recipes)

        async def add_chunks(batch: list[Got]) -> None:
            for _, encoded in batch:
                add_recipe(self._reached, decode_recipe(bytes(encoded)))

        await self._read(stock, recipes, add_chunks)

    def all(self) -> Keys:
        """What was reached, sorted."""
        return self._reached.all()

    def _note(self, chunks: set[ChunkId]) -> None:
        self._seen |= chunks
        self._reached.add(b"".join(chunks))

    async def _read(self, stock: Stock, chunks: set[ChunkId], take: Take) -> None:
        if chunks:
            rows = await trio.to_thread.run_sync(stock.rows_of, keys_of(sorted(chunks)))
            await RangeReader(self._remote, stock.packs, stock.others_of).deliver(rows, take)
