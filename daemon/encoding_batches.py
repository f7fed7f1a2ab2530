"""Batches of chunks to encode, and which chunk it is that one of them fails of.

One rule: a chunk that the encoder does not survive, or does not get right, is tried twice by itself, and then
stays as it is as long as this daemon runs; all others are encoded.

Belongs to the index thread.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from ckptfs.daemon.encoding_worker import EncoderDied
from ckptfs.store.encoding_level import Level
from ckptfs.store.encoding_plan import PlannedChunk
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.reencode import BATCH_BYTES, BATCH_CHUNKS, Encoding

log = logging.getLogger(__name__)
_MOST_AT_ONCE = 8
Encode = Callable[[Sequence[PlannedChunk], Level], Awaitable[Encoding]]
"""As Reencoder.encode."""


def batches(planned: Sequence[PlannedChunk]) -> Iterator[list[PlannedChunk]]:
    """The chunks in their order, as many at a time as one segment takes."""
    batch: list[PlannedChunk] = []
    size = 0
    for one in planned:
        batch.append(one)
        size += one.length
        if size >= BATCH_BYTES or len(batch) >= BATCH_CHUNKS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class CarefulEncoding:
    """Encodes batches. `left_raw` are the chunks that the encoder failed of."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self.left_raw: set[ChunkId] = set()

    async def encode(self, batch: Sequence[PlannedChunk], level: Level = "fast") -> Encoding:
        """As Reencoder.encode. EncoderDied or Corrupt if more than a few chunks of a batch make it fail:
        then it is not the chunks. Durable when: this returned."""
        done, blamed = Encoding(), set[ChunkId]()
        parts = [[one for one in batch if one.chunk not in self.left_raw]]
        while parts:
            part = parts.pop()
            try:
                done.add(await self._encode(part, level))
                continue
            except (EncoderDied, Corrupt) as e:
                error = e
            if len(part) > 1:
                # What was encoded against what comes before it goes behind it.
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
            elif await self._fails_again(part, level, done):
                if len(blamed) >= _MOST_AT_ONCE:
                    self.left_raw -= blamed
                    raise error
                chunk = part[0].chunk
                blamed.add(chunk)
                self.left_raw.add(chunk)
                log.error("chunk %s stays as it is, the encoder fails of it: %s", cid_text(chunk), error)
        return done

    async def _fails_again(self, part: Sequence[PlannedChunk], level: Level, done: Encoding) -> bool:
        """Whoever has ended the process need not have meant this chunk."""
        try:
            done.add(await self._encode(part, level))
        except (EncoderDied, Corrupt):
            return True
        return False
