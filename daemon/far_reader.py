"""A saved file as the parsers of `formats` read it, from a worker thread.

One rule: every read happens in the index thread, one request at a time; the worker only waits for it.
"""

from __future__ import annotations

import trio

from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments

# What the index thread, which answers the kernel too, reads in one go: a header has any length.
_PIECE_BYTES = 1 << 20


class FarReader:
    """Behind the Reader protocol. Only for a thread that trio.to_thread started."""

    def __init__(self, segments: Segments, recipe: Recipe) -> None:
        self._segments = segments
        self._recipe = recipe

    @property
    def size(self) -> int:
        """The file's length in bytes."""
        return self._recipe.size

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the file ends. Corrupt if they are not right."""
        pieces: list[bytes] = []
        for start in range(offset, min(offset + length, self.size), _PIECE_BYTES):
            wanted = min(_PIECE_BYTES, offset + length - start)
            pieces.append(trio.from_thread.run_sync(self._segments.read_file, self._recipe, start, wanted))
        return b"".join(pieces)
