"""Packs of a remote that are gone or damaged, made anew of what this store has.

One rule: a pack is healed by the very same pack. Its name is that of its content, so nothing else can pass
for it, and whoever's shards list it find it again.

Source: FORMAT.md, "Remotes" ("Nothing is ever overwritten").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import trio

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.ids import ChunkId
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.names import PACKS, pack_key, shard_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import encode_pack
from ckptfs.store.remote.reading import read_chunks, read_right_chunks
from ckptfs.store.remote.relaying import OtherRemote, read_from
from ckptfs.store.remote.shard import decode_shard
from ckptfs.store.segments import Segments


@dataclass(slots=True)
class HealReport:
    """What was looked at, and sentences on what was wrong: `healed` is put right, `damaged` is not."""

    packs: int = 0
    read_bytes: int = 0
    healed: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class Healer:
    """Looks at all packs that shards list. Belongs to the index thread; one pack is in memory."""

    def __init__(
        self,
        remote: Remote,
        known: KnownChunks,
        disk: Disk,
        segments: Segments,
        others: Sequence[OtherRemote] = (),
    ) -> None:
        """What this store lacks is asked of `others`."""
        self._others = others
        self._remote = remote
        self._known = known
        self._disk = disk
        self._segments = segments

    async def heal(self, *, read: bool) -> HealReport:
        """See to it that each pack is there, in its length; with `read`, with its content too.

        Raises as the remote does. Durable when: this returned.
        """
        report = HealReport()
        listed = {meta.key: meta.size for meta in await self._remote.list_objects(PACKS)}
        for number, pack in enumerate(self._known.packs):
            if not self._known.counting[number]:
                continue
            key = pack_key(pack.name)
            report.packs += 1
            wrong = ""
            if listed.get(key) != self._remote.stored_size(pack.size):
                wrong = "it is not there" if key not in listed else "it has another length"
            elif read:
                report.read_bytes += pack.size
                wrong = await self._wrong(key, pack.name)
            if wrong:
                await self._make_anew(number, f"{self._remote.url}/{key}: {wrong}", report)
        return report

    async def _wrong(self, key: str, name: bytes) -> str:
        try:
            await self._remote.get(key, name)
        except (Corrupt, NotFound) as e:
            return str(e)
        return ""

    async def _make_anew(self, number: int, what: str, report: HealReport) -> None:
        pack = self._known.packs[number]
        try:
            chunks = await self._chunks_of(number)
            payloads = await self._payloads(chunks)
            lost = len(chunks) - len(payloads)
            if lost:
                raise NotFound(f"{self._nobody()} all that was in it ({lost} of {len(chunks)} are missing)")
            content = await trio.to_thread.run_sync(
                encode_pack, [(chunk, payloads[chunk]) for chunk in chunks], pack.generation
            )
            if self._remote.name(content) != pack.name:
                raise Corrupt("what it held cannot be told any more")
        except (Corrupt, NotFound) as e:
            report.damaged.append(f"{what}; {e}")
            return
        await self._remote.put(pack_key(pack.name), pack.name, content)
        report.healed.append(f"{what}; made anew")

    def _nobody(self) -> str:
        return "neither this store nor another remote has" if self._others else "this store has not"

    async def _payloads(self, chunks: list[ChunkId]) -> dict[ChunkId, bytes]:
        """Those of these chunks that this store has, or another remote. Corrupt: the store has one with other
        bytes, and there are no others to ask."""
        places = self._segments.locate_many(chunks)
        if not self._others:
            return dict(await read_chunks(self._disk, self._segments, places)) if len(places) else {}
        found = await read_right_chunks(self._disk, self._segments, places) if len(places) else {}
        return found | await read_from(self._others, set(chunks) - found.keys())

    async def _chunks_of(self, number: int) -> list[ChunkId]:
        """The chunks of a pack in their order, from the shard that lists it: the rows in memory lack those
        that another shard lists too."""
        name, pack = self._known.shard_of(number), self._known.packs[number]
        shard = decode_shard(await self._remote.get(shard_key(name), name))
        rows = shard.rows[shard.rows["pack"] == shard.packs.index(pack)]
        return [ChunkId(row["chunk"].tobytes()) for row in rows[np.argsort(rows["offset"])]]
