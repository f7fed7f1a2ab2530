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
from ckptfs.store.remote.filling import Buffers, fill_pack
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.names import pack_key, shard_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import pack_rows
from ckptfs.store.remote.reading import locate
from ckptfs.store.remote.several import done_for_each
from ckptfs.store.remote.shard import Keys, PackFacts, Rows, decode_shard, encode_shard
from ckptfs.store.segments import Segments

PACK_BYTES = 16 << 20
PACKS_A_SHARD = 32
# Packs that are sent at a time, and packs that are made meanwhile.
_PARALLEL = 4
_MAKING = 1
OnProgress = Callable[[int, int], None]
_Packed = tuple[PackFacts, list[tuple[ChunkId, int, int]]]


@dataclass(slots=True)
class Sent:
    """What went over the wire: chunks, and bytes in all."""

    chunks: int = 0
    bytes: int = 0


class Sender:
    """Sends chunks of this store to a remote. Belongs to the index thread.

    At most _PARALLEL + _MAKING packs are in memory, and of each that is on its way what encloses it.
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
        self._sending = trio.CapacityLimiter(_PARALLEL)
        self._making = trio.CapacityLimiter(_MAKING)
        self._may_be_there = True

    async def send(self, wanted: Keys, sent: Sent) -> None:
        """Have chunks on the remote, in packs that shards list; `known` knows them then. Adds to `sent`.

        Corrupt: one is damaged or missing here, or comes back changed; other errors as the remote raises.
        Durable when: this returned.
        """
        places = locate(self._segments, wanted)
        parts, total, done = _parts(places), _bytes_of(places), 0
        packs: dict[int, _Packed] = {}
        buffers, self._may_be_there = Buffers(), True

        async def send_part(number: int) -> None:
            nonlocal done
            packs[number] = await self._send_pack(parts[number], buffers, sent)
            first = number - number % PACKS_A_SHARD
            group = range(first, min(first + PACKS_A_SHARD, len(parts)))
            if all(one in packs for one in group):
                await self._send_shard([packs.pop(one) for one in group], sent)
                done += sum(_bytes_of(parts[one]) for one in group)
                self._on_progress(done, total)

        await done_for_each(send_part, range(len(parts)), _PARALLEL + _MAKING)

    async def _send_shard(self, packs: Sequence[_Packed], sent: Sent) -> None:
        content = encode_shard(packs)
        name = self._remote.name(content)
        if await self._remote.put(shard_key(name), name, content):
            sent.bytes += len(content)
        self._known.add(name, decode_shard(content))

    async def _send_pack(self, part: Places, buffers: Buffers, sent: Sent) -> _Packed:
        async with self._making:
            pack = await fill_pack(buffers, self._disk, self._segments, part, self._generation)
            name = await trio.to_thread.run_sync(self._remote.name, pack)
        async with self._sending:
            # A push that died has made the same packs of the same chunks, and begun with the same.
            if await self._remote.put(pack_key(name), name, pack, check_first=self._may_be_there):
                sent.bytes += len(pack)
                sent.chunks += len(part)
                self._may_be_there = False
        packed = PackFacts(name, len(pack), self._generation), pack_rows(pack)
        buffers.give_back(pack)
        return packed


def _bytes_of(places: Places) -> int:
    return int(places.rows["length"].sum(dtype=int))


def _parts(places: Places) -> list[Places]:
    """The places in parts of about PACK_BYTES."""
    parts: list[Places] = []
    ends = places.rows["length"].cumsum(dtype="int64")
    start, base = 0, 0
    while start < len(places):
        stop = max(start + 1, int(ends.searchsorted(base + PACK_BYTES, side="right")))
        parts.append(places.taken(np.arange(start, stop)))
        start, base = stop, int(ends[stop - 1])
    return parts


def parts_of(rows: Rows) -> list[Rows]:
    """Rows in groups of what one pack holds."""
    ends, parts, start, base = rows["stored"].cumsum(dtype="int64"), list[Rows](), 0, 0
    while start < len(rows):
        stop = max(start + 1, int(ends.searchsorted(base + PACK_BYTES, side="right")))
        parts.append(rows[start:stop])
        start, base = stop, int(ends[stop - 1])
    return parts
