"""What a remote lacks of the versions that it lists, brought from other remotes.

One rule: what another remote gives is behind the same ids and names, so it does not matter which it is.

Source: FORMAT.md, "Remotes", "Healing from another remote".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio

from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.ids import ChunkId, UnitId, cid_text
from ckptfs.store.recipe import decode_recipe
from ckptfs.store.remote import sending
from ckptfs.store.remote.catalogue import read_history, unit_of_history
from ckptfs.store.remote.head import RemoteHead
from ckptfs.store.remote.heads import newest_head, newest_heads
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.log import RemoteLog
from ckptfs.store.remote.names import pack_key, piece_key, shard_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import encode_pack, pack_rows
from ckptfs.store.remote.ranges import RangeReader, Whole
from ckptfs.store.remote.shard import PackFacts, Rows, decode_shard, encode_shard, keys_of
from ckptfs.store.tree import decode_tree

_SLICE = 256


class OtherRemote:
    """Another remote, of which is read what is asked for. Belongs to one thread. `failure`: why it cannot
    be used (it is asked no more then)."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._known: KnownChunks | None = None
        self.failure = ""

    async def read(self, chunks: Iterable[ChunkId]) -> list[Whole]:
        """Those of these chunks that it has, whole."""
        wanted = list(chunks)
        if self.failure or not wanted:
            return []
        try:
            known = await self._opened()
            rows = known.rows_of(keys_of(sorted(wanted)))
            return await self._whole(RangeReader(self._remote, known.packs, known.others_of), rows)
        except (CkptfsError, OSError) as e:
            self.failure = str(e)
            return []

    async def _whole(self, reader: RangeReader, rows: Rows) -> list[Whole]:
        """What of these rows is right; what is not is found by halving."""
        try:
            return await reader.read(rows)
        except (Corrupt, NotFound):
            middle = len(rows) // 2
            if not middle:
                return []
            return await self._whole(reader, rows[:middle]) + await self._whole(reader, rows[middle:])

    async def history(self, unit: UnitId) -> bytes:
        """The history of a unit as it has it; empty if it has none."""
        try:
            await self._opened()
            newest = await newest_head(self._remote, unit)
            return await read_history(self._remote, newest.head) if newest.head is not None else b""
        except (CkptfsError, OSError) as e:
            self.failure = str(e)
            return b""

    async def _opened(self) -> KnownChunks:
        if self._known is None:
            await self._remote.open()
            log = RemoteLog(self._remote)
            await log.refresh()
            self._known = KnownChunks(self._remote, await log.kept())
            await self._known.refresh()
        return self._known


async def read_from(others: Sequence[OtherRemote], chunks: Iterable[ChunkId]) -> dict[ChunkId, bytes]:
    """Those of these chunks that some other remote has."""
    found: dict[ChunkId, bytes] = {}
    wanted = {*chunks}
    for other in others:
        found.update(await other.read(wanted - found.keys()))
    return found


@dataclass(slots=True)
class RelayReport:
    """What was brought, and sentences on what was put right and what could not be."""

    chunks: int = 0
    bytes: int = 0
    healed: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class Relay:
    """Brings what one remote lacks. Belongs to one thread; a few packs are in memory."""

    def __init__(
        self, remote: Remote, known: KnownChunks, others: Sequence[OtherRemote], generation: int
    ) -> None:
        """`known` is what `remote` has, `generation` that of new packs there."""
        self._remote = remote
        self._known = known
        self._others = others
        self._generation = generation
        self._reader = RangeReader(remote, known.packs, known.others_of)

    async def mend(self) -> RelayReport:
        """See to it that everything that the heads list is there. Raises as the remote does.
        Durable when: this returned."""
        report = RelayReport()
        for newest in await newest_heads(self._remote):
            if newest.head is not None:
                await self._mend_unit(newest.head, report)
        return report

    async def _mend_unit(self, head: RemoteHead, report: RelayReport) -> None:
        try:
            history = await self._history(head, report)
        except (Corrupt, NotFound) as e:
            report.damaged.append(str(e))
            return
        for record in unit_of_history(head, history).versions:
            assert record.top.tree is not None, "a version is a directory"
            lost = await self._bring_below(record.top.tree, report)
            if lost:
                report.damaged.append(
                    f"{self._remote.url}: version {record.number} of {head.unit.hex()} lacks {len(lost)} "
                    f"chunks that no other remote has, {cid_text(min(lost))} for one"
                )

    async def _history(self, head: RemoteHead, report: RelayReport) -> bytes:
        """The history of a unit, whose pieces are put right."""
        try:
            return await read_history(self._remote, head)
        except (Corrupt, NotFound) as e:
            wrong = e
        for other in self._others:
            history, at, pieces = await other.history(head.unit), 0, list[tuple[bytes, bytes]]()
            for piece in head.pieces:
                pieces.append((piece.name, history[at : at + piece.size]))
                at += piece.size
            if all(self._remote.name(content) == name for name, content in pieces):
                for name, content in pieces:
                    await self._remote.put(piece_key(head.unit, name), name, content)
                report.healed.append(f"{wrong}; brought from another remote")
                return history[:at]
        raise wrong

    async def _bring_below(self, top: ChunkId, report: RelayReport) -> set[ChunkId]:
        """Have all below a tree there; what nobody has."""
        level, seen, recipes, lost = {top}, set[ChunkId](), set[ChunkId](), set[ChunkId]()
        while level:
            seen |= level
            below = set[ChunkId]()
            for encoded in (await self._have(level, lost, report)).values():
                for entry in decode_tree(encoded):
                    if entry.tree is not None:
                        below.add(entry.tree)
                    elif entry.recipe is not None:
                        recipes.add(entry.recipe)
            level = below - seen
        chunks = set[ChunkId]()
        for encoded in (await self._have(recipes, lost, report)).values():
            chunks |= {piece.chunk for piece in decode_recipe(encoded).pieces() if piece.chunk is not None}
        missing = [
            ChunkId(bytes(key).ljust(32, b"\0")) for key in self._known.missing(keys_of(sorted(chunks)))
        ]
        for start in range(0, len(missing), _SLICE):
            await self._bring(missing[start : start + _SLICE], lost, report)
        return lost

    async def _have(
        self, wanted: set[ChunkId], lost: set[ChunkId], report: RelayReport
    ) -> dict[ChunkId, bytes]:
        """Trees or recipes, read here or brought."""
        found: dict[ChunkId, bytes] = {}
        if wanted:
            rows = self._known.rows_of(keys_of(sorted(wanted)))
            try:
                found.update(await self._reader.read(rows))
            except (Corrupt, NotFound):
                found = {}  # which are damaged is not worth telling apart: all of them are small
        return found | await self._bring(wanted - found.keys(), lost, report)

    async def _bring(
        self, wanted: Iterable[ChunkId], lost: set[ChunkId], report: RelayReport
    ) -> dict[ChunkId, bytes]:
        chunks = sorted(wanted)
        if not chunks:
            return {}
        found = await read_from(self._others, chunks)
        lost |= {chunk for chunk in chunks if chunk not in found}
        for part in _parts(sorted(found.items())):
            content = await trio.to_thread.run_sync(encode_pack, part, self._generation)
            name = self._remote.name(content)
            await self._remote.put(pack_key(name), name, content, check_first=True)
            facts = PackFacts(name, len(content), self._generation)
            shard = encode_shard([(facts, pack_rows(content))])
            shard_name = self._remote.name(shard)
            await self._remote.put(shard_key(shard_name), shard_name, shard)
            self._known.add(shard_name, decode_shard(shard))
            report.chunks += len(part)
            report.bytes += len(content)
        if found:
            what = f"{self._remote.url} lacked {len(found)} chunks, {cid_text(min(found))} for one"
            report.healed.append(f"{what}; brought from another remote")
        return found


def _parts(chunks: Sequence[Whole]) -> list[list[Whole]]:
    """Chunks in groups of what a pack holds."""
    ends = np.cumsum([len(payload) for _, payload in chunks], dtype=np.int64)
    parts, start, base = list[list[Whole]](), 0, 0
    while start < len(chunks):
        stop = max(start + 1, int(ends.searchsorted(base + sending.PACK_BYTES, side="right")))
        parts.append(list(chunks[start:stop]))
        start, base = stop, int(ends[stop - 1])
    return parts
