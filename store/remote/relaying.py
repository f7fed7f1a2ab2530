"""What a remote lacks of the versions that it lists, brought from other remotes.

One rule: what another remote gives is behind the same ids and names, so it does not matter which it is.

Source: FORMAT.md, "Remotes", "Healing from another remote".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from ckptfs.store.remote.reading import KeySet, add_recipe
from ckptfs.store.remote.shard import PackFacts, chunk_of_key, decode_shard, encode_shard, keys_of
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
            return await RangeReader(self._remote, known.packs, known.others_of).read_right(rows)
        except (CkptfsError, OSError) as e:
            self.failure = str(e)
            return []

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
            what = f"{self._remote.url}: version {record.number} of {head.unit.hex()}"
            try:
                brought, lost = await self._bring_below(record.top.tree, report)
            except Corrupt as e:
                report.damaged.append(f"{what}: {e}")
                continue
            if brought:
                one = cid_text(min(brought))
                report.healed.append(
                    f"{what} lacked {len(brought)} chunks, {one} for one; brought from another remote"
                )
            if lost:
                report.damaged.append(
                    f"{what} lacks {len(lost)} chunks that no other remote has, {cid_text(min(lost))} for one"
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

    async def _bring_below(self, top: ChunkId, report: RelayReport) -> tuple[set[ChunkId], set[ChunkId]]:
        """Have all below a tree there; what was brought, and what nobody has."""
        level, seen, recipes = {top}, set[ChunkId](), set[ChunkId]()
        brought, lost, chunks = set[ChunkId](), set[ChunkId](), KeySet()
        while level:
            seen |= level
            below = set[ChunkId]()

            def add_entries(encoded: bytes, below: set[ChunkId] = below) -> None:
                for entry in decode_tree(encoded):
                    if entry.tree is not None:
                        below.add(entry.tree)
                    elif entry.recipe is not None:
                        recipes.add(entry.recipe)

            await self._have(level, add_entries, brought, lost, report)
            level = below - seen

        def add_chunks(encoded: bytes) -> None:
            add_recipe(chunks, decode_recipe(encoded))

        await self._have(recipes, add_chunks, brought, lost, report)
        missing = list(map(chunk_of_key, self._known.missing(chunks.all()).tolist()))
        for start in range(0, len(missing), _SLICE):
            await self._bring(missing[start : start + _SLICE], brought, lost, report)
        return brought, lost

    async def _have(
        self,
        wanted: set[ChunkId],
        take: Callable[[bytes], None],
        brought: set[ChunkId],
        lost: set[ChunkId],
        report: RelayReport,
    ) -> None:
        """Hand over trees or recipes, which are read here, or brought if they are not right here."""
        ordered = sorted(wanted)
        for start in range(0, len(ordered), _SLICE):
            part = ordered[start : start + _SLICE]
            found = dict(await self._reader.read_right(self._known.rows_of(keys_of(part))))
            found |= await self._bring([one for one in part if one not in found], brought, lost, report)
            for encoded in found.values():
                take(encoded)

    async def _bring(
        self, wanted: Sequence[ChunkId], brought: set[ChunkId], lost: set[ChunkId], report: RelayReport
    ) -> dict[ChunkId, bytes]:
        """Have these there, which are not; those that were brought."""
        if not wanted:
            return {}
        found = await read_from(self._others, wanted)
        lost |= {chunk for chunk in wanted if chunk not in found}
        brought.update(found)
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
