"""Sending chunks to a remote: packs of them, and the shards that say where they are.

One rule: a shard is made only after its packs are there, and a chunk is known only after its shard is.

Source: FORMAT.md, "Remotes", "Copying" (3 and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import trio

from ckptfs.store.disk import Disk
from ckptfs.store.ids import ChunkId
from ckptfs.store.places import Places
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.names import pack_key, shard_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import encode_pack, pack_rows
from ckptfs.store.remote.reading import locate, read_chunks
from ckptfs.store.remote.several import done_for_each
from ckptfs.store.remote.shard import Keys, PackFacts, Rows, decode_shard, encode_shard
from ckptfs.store.segments import Segments

PACK_BYTES = 16 << 20
PACKS_A_SHARD = 32
_PARALLEL = 4
OnProgress = Callable[[int, int], None]
_Packed = tuple[PackFacts, list[tuple[ChunkId, int, int]]]


@dataclass(slots=True)
class Sent:
    """What went over the wire: chunks, and bytes in all."""

    chunks: int = 0
    bytes: int = 0


class Sender:
    """Sends chunks of this store to a remote. Belongs to the index thread.

    At most _PARALLEL packs are in memory, each up to four times (read, packed, enclosed, read back).
    """

    def __init__(
        self,
        remote: Remote,
        disk: Disk,
        segments: Segments,
        known: KnownChunks,
        on_progress: OnProgress,
        generation: int = 0,
    ) -> None:
        """`on_progress(done, total)` is told bytes of what `send` was asked for; packs get `generation`."""
        self._remote = remote
        self._disk = disk
        self._segments = segments
        self._known = known
        self._on_progress = on_progress
        self._generation = generation

    async def send(self, wanted: Keys, sent: Sent) -> None:
        """Have chunks on the remote, in packs that shards list; `known` knows them then. Adds to `sent`.

        Corrupt: one is damaged or missing here, or comes back changed; other errors as the remote raises.
        Durable when: this returned.
        """
        places = locate(self._segments, wanted)
        total, done = _bytes_of(places), 0
        for group in _groups(places):
            packs = await self._send_packs(group, sent)
            content = encode_shard(packs)
            name = self._remote.name(content)
            if await self._remote.put(shard_key(name), name, content):
                sent.bytes += len(content)
            self._known.add(name, decode_shard(content))
            done += sum(map(_bytes_of, group))
            self._on_progress(done, total)

    async def _send_packs(self, parts: Sequence[Places], sent: Sent) -> list[_Packed]:
        """One pack of each part, several at once; what shards say of them, in this order."""
        return await done_for_each(lambda part: self._send_pack(part, sent), parts, _PARALLEL)

    async def _send_pack(self, part: Places, sent: Sent) -> _Packed:
        chunks = await read_chunks(self._disk, self._segments, part)
        content = await trio.to_thread.run_sync(encode_pack, chunks, self._generation)
        name = await trio.to_thread.run_sync(self._remote.name, content)
        # A push that died has made the same packs of the same chunks.
        if await self._remote.put(pack_key(name), name, content, check_first=True):
            sent.bytes += len(content)
            sent.chunks += len(chunks)
        return PackFacts(name, len(content), self._generation), pack_rows(content)


def _bytes_of(places: Places) -> int:
    return int(places.rows["length"].sum(dtype=int))


def _groups(places: Places) -> list[list[Places]]:
    """The places in parts of about PACK_BYTES, and these in groups of what one shard lists."""
    parts: list[Places] = []
    ends = places.rows["length"].cumsum(dtype="int64")
    start, base = 0, 0
    while start < len(places):
        stop = max(start + 1, int(ends.searchsorted(base + PACK_BYTES, side="right")))
        parts.append(places.taken(np.arange(start, stop)))
        start, base = stop, int(ends[stop - 1])
    return [parts[at : at + PACKS_A_SHARD] for at in range(0, len(parts), PACKS_A_SHARD)]


def parts_of(rows: Rows) -> list[Rows]:
    """Rows in groups of what one pack holds."""
    ends, parts, start, base = rows["stored"].cumsum(dtype="int64"), list[Rows](), 0, 0
    while start < len(rows):
        stop = max(start + 1, int(ends.searchsorted(base + PACK_BYTES, side="right")))
        parts.append(rows[start:stop])
        start, base = stop, int(ends[stop - 1])
    return parts
