"""A file as the parsers of `formats` read it, from a worker thread.

One rule: every read happens in the index thread, little of it in one go; the worker only waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import trio

from ckptfs.store.formats.layout import Reader

# What the index thread, which answers the kernel too, reads in one go: a header has any length.
_PIECE_BYTES = 1 << 20
# The way to the index thread and back takes longer than reading a header (150 us and 20).
_PLACES_AT_ONCE = 64


class FarReader:
    """A reader of the index thread, behind the BatchReader protocol. Only for a thread that trio.to_thread
    started. Errors as `reader` raises them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def size(self) -> int:
        """The file's length in bytes."""
        return self._reader.size

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the file ends."""
        pieces: list[bytes] = []
        for start in range(offset, min(offset + length, self.size), _PIECE_BYTES):
            wanted = min(_PIECE_BYTES, offset + length - start)
            pieces.append(trio.from_thread.run_sync(self._reader.pread, start, wanted))
        return b"".join(pieces)

    def pread_many(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The same of many (offset, length), each of them short."""
        found: list[bytes] = []
        waiting = iter(places)
        while part := list(islice(waiting, _PLACES_AT_ONCE)):
            found += trio.from_thread.run_sync(self._read_each, part)
        return found

    def _read_each(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._reader.pread(offset, length) for offset, length in places]
