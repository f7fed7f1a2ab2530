"""The chunks that were decoded last, kept with those that were decoded beside them.

One rule: what counts against the limit is the memory that is really held. So it is buffers that go, the one
first whose chunks nobody has asked for for longest, and all of its chunks go with it.

Touched only by the index thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from ckptfs.store.codecs import Plain
from ckptfs.store.ids import ChunkId


class DecodedChunks:
    """Keeps buffers up to `limit` bytes; the newest stays even if it alone is larger."""

    __slots__ = ("_buffers", "_chunks", "_limit", "held_bytes")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: dict[ChunkId, Plain] = {}
        self._buffers: OrderedDict[int, tuple[memoryview, list[ChunkId]]] = OrderedDict()
        self.held_bytes = 0

    def get(self, chunk: ChunkId) -> Plain | None:
        """The bytes of a chunk, if they are kept."""
        plain = self._chunks.get(chunk)
        if plain is not None:
            self._buffers.move_to_end(id(plain.buffer))
        return plain

    def view(self, chunk: ChunkId) -> memoryview | None:
        """The same as a buffer."""
        plain = self.get(chunk)
        return None if plain is None else plain.view

    def put(self, plains: Mapping[ChunkId, Plain]) -> None:
        """Keep chunks that were decoded and are right."""
        for chunk, plain in plains.items():
            buffer = plain.buffer
            _, chunks = self._buffers.setdefault(id(buffer), (buffer, []))
            if not chunks:
                self.held_bytes += len(buffer)
            chunks.append(chunk)
            self._chunks[chunk] = plain
        while self.held_bytes > self._limit and len(self._buffers) > 1:
            _, (buffer, chunks) = self._buffers.popitem(last=False)
            self.held_bytes -= len(buffer)
            for chunk in chunks:
                if chunk in self._chunks and self._chunks[chunk].buffer is buffer:
                    del self._chunks[chunk]
