"""What versions on a remote lead to: their trees and recipes are read from there.

One rule: nothing is taken for reached but what was read behind its id; what cannot be read is an error.

Source: FORMAT.md, "Remotes", "Collecting".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import decode_recipe
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.ranges import Got, RangeReader
from ckptfs.store.remote.reading import KeySet, add_recipe
from ckptfs.store.remote.shard import Keys, keys_of
from ckptfs.store.remote.stock import Stock
from ckptfs.store.tree import decode_tree


class RemoteWalk:
    """Gathers what is reached, in several walks. Belongs to one thread.

    32 bytes of memory a chunk, 100 a tree or recipe; a batch of ranges.py of what is read.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._reached = KeySet()
        self._seen: set[ChunkId] = set()

    async def walk(self, stock: Stock, trees: Iterable[ChunkId]) -> None:
        """Reach all below these trees. Corrupt or NotFound names what is damaged or not there."""
        recipes = set[ChunkId]()
        level = {*trees} - self._seen
        while level:
            self._note(level)
            below = set[ChunkId]()
            async for batch in self._read(stock, level):
                for _, encoded in batch:
                    for entry in decode_tree(encoded):
                        if entry.tree is not None:
                            below.add(entry.tree)
                        elif entry.recipe is not None:
                            recipes.add(entry.recipe)
            level = below - self._seen
        recipes -= self._seen
        self._note(recipes)
        async for batch in self._read(stock, recipes):
            for _, encoded in batch:
                add_recipe(self._reached, decode_recipe(encoded))

    def all(self) -> Keys:
        """What was reached, sorted."""
        return self._reached.all()

    def _note(self, chunks: set[ChunkId]) -> None:
        self._seen |= chunks
        self._reached.add(b"".join(chunks))

    def _read(self, stock: Stock, chunks: set[ChunkId]) -> AsyncIterator[list[Got]]:
        rows = stock.rows_of(keys_of(sorted(chunks))) if chunks else stock.rows[:0]
        return RangeReader(self._remote, stock.packs).batches(rows)
