"""Push: versions of this store become versions of a remote.

One rule: a head names a version only after every chunk that it leads to is on the remote, and the version
counts as copied only after the head and its history were read back.

Source: FORMAT.md, "Remotes", "Copying, and what a crash leaves".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Conflict, Corrupt
from ckptfs.store.histories import Histories
from ckptfs.store.history import PULLED, State, VersionRecord
from ckptfs.store.history_scan import scan_history
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.catalogue import read_history, unit_of_history
from ckptfs.store.remote.copied import Copied, CopiedUnits
from ckptfs.store.remote.head import Piece, RemoteHead, decode_head, merged_pieces
from ckptfs.store.remote.heads import (
    SIGNPOST,
    fill_signposts,
    newest_head,
    place_head,
    remove_old_heads,
    remove_old_pieces,
)
from ckptfs.store.remote.healing import Healer, HealReport
from ckptfs.store.remote.kept import EVERYTHING, Kept
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.log import RemoteLog
from ckptfs.store.remote.log_entry import Join
from ckptfs.store.remote.lost import lost_versions, stock_of_shards
from ckptfs.store.remote.names import head_key, piece_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.reading import chunks_of
from ckptfs.store.remote.relaying import OtherRemote, Relay
from ckptfs.store.remote.sending import OnProgress, Sender, Sent
from ckptfs.store.seal import chain_behind
from ckptfs.store.segments import Segments
from ckptfs.store.units import Unit

_TRIES = 4
Wanted = Callable[[VersionRecord], bool]


def complete_versions(record: VersionRecord) -> bool:
    """What is copied if nobody asks for more. What was pulled is on a remote."""
    return record.state is State.COMPLETE and record.origin != PULLED


def own_versions(record: VersionRecord) -> bool:
    """The same with those that are not complete."""
    return record.origin != PULLED


def still_let_go(histories: Histories, unit: UnitId, let_go: Collection[int]) -> frozenset[int]:
    """Those of the versions that a collector let go on a remote that are not wanted there again: nobody has
    pinned or tagged them here."""
    if not let_go:
        return frozenset()
    return frozenset(let_go) - histories.pins(unit) - {*histories.tags(unit).values()}


@dataclass(slots=True)
class PushReport:
    """What a push of one unit did: the versions `copied` by it, and all that are `safe` now; what it `sent`;
    `problems` are sentences on what was not as it should be."""

    copied: list[int] = field(default_factory=list)
    safe: tuple[int, ...] = ()
    sent: Sent = field(default_factory=Sent)
    problems: list[str] = field(default_factory=list)


class Overtaken(Conflict):
    """The head that was to be made is there: what was planned has to be planned anew."""


class Pusher:
    """Copies units to one remote. Belongs to the index thread; one push at a time.

    What it takes of memory is said in sending.py.
    """

    def __init__(
        self,
        remote: Remote,
        disk: Disk,
        segments: Segments,
        histories: Histories,
        copied: CopiedUnits,
        node: str,
        on_progress: OnProgress = lambda done, total: None,
    ) -> None:
        """`node` is what this node is called, for people; `on_progress(done, total)` is told bytes."""
        self._remote = remote
        self._disk = disk
        self._segments = segments
        self._histories = histories
        self._copied = copied
        self._node = node
        self._on_progress = on_progress
        self._log = RemoteLog(remote)
        self._plan(EVERYTHING)

    async def heal(self, *, read: bool, others: Sequence[OtherRemote] = ()) -> HealReport:
        """See to the packs of all who copy to this remote, see Healer; what of them this store lacks, and
        with `others` whatever else the listed versions lack, is asked of other remotes."""
        await self._remote.open(create=True)
        await self._look_at_log()
        if read:
            await self._log.check()
        await self._known.refresh()
        found = await Healer(self._remote, self._known, self._disk, self._segments, others).heal(read=read)
        if others:
            relayed = await Relay(self._remote, self._known, others, self._generation).mend()
            found.healed += relayed.healed
            found.damaged += relayed.damaged
            found.damaged += [f"not asked: {one.failure}" for one in others if one.failure]
        found.healed += self._told()
        return found

    def _told(self) -> list[str]:
        """What was damaged besides, each told once."""
        told = [*self._remote.problems, *self._known.problems, *self._log.problems]
        for problems in (self._remote.problems, self._known.problems, self._log.problems):
            problems.clear()
        return told

    async def _look_at_log(self) -> None:
        """Know what counts: what was relied on before a collector decided is forgotten."""
        await self._log.settle()
        kept = await self._log.kept()
        while self._log.is_open:  # somebody has claimed meanwhile
            await self._log.settle()
            kept = await self._log.kept()
        if (kept, self._log.generation) != (self._kept, self._generation):
            self._plan(kept, self._log.generation)

    def _plan(self, kept: Kept, generation: int = 0) -> None:
        self._kept, self._generation = kept, generation
        self._known = KnownChunks(self._remote, kept)
        self._sender = Sender(
            self._remote, self._disk, self._segments, self._known, self._on_progress, generation
        )

    async def push(
        self,
        unit_id: UnitId,
        wanted: Wanted = complete_versions,
        *,
        again: bool = False,
        even_let_go: bool = False,
    ) -> PushReport:
        """Copy the versions of a unit that are `wanted` and not copied yet, the newest first; `again`: see
        to it that those that are copied still have all their chunks there, as far as shards tell. What a
        collector let go there is sent again only if it is pinned or tagged since, or with `even_let_go`.

        A version that is damaged here is left out and named in `problems`. Conflict: the remote has another
        history under this unit's id. Other errors as the remote raises: the versions in `safe` of the next
        report stay copied. Durable when: this returned.
        """
        report = PushReport()
        if self._copied.of(unit_id) is None and not any(map(wanted, self._histories.versions(unit_id))):
            return report  # nothing of it ever went there, nor shall
        await self._remote.open(create=True)
        for last in range(_TRIES - 1, -1, -1):
            try:
                await self._push(unit_id, wanted, again, even_let_go, report)
                break
            except Overtaken:
                if not last:
                    raise
                self._plan(self._kept, self._generation)
        report.problems += self._told()
        return report

    async def _push(
        self, unit_id: UnitId, wanted: Wanted, again: bool, even_let_go: bool, report: PushReport
    ) -> None:
        base, lost = await self._begin(unit_id, report)
        await self._known.refresh()
        again = again or bool(self._known.problems or report.problems)
        passed_over = frozenset() if even_let_go else still_let_go(self._histories, unit_id, base.let_go)
        for record in reversed(self._histories.versions(unit_id)):
            is_copied = record.number in base.versions
            if (is_copied and not again) or not (is_copied or wanted(record) or record.number in lost):
                continue
            if not is_copied and record.number in passed_over:
                continue
            try:
                missing = self._known.missing(await chunks_of(self._segments, record))
                await self._sender.send(missing, report.sent)
            except Corrupt as e:
                if self._histories.version(unit_id, record.number) is not None:
                    report.problems.append(f"version {record.number} is not copied whole: {e}")
                continue  # else it was let go meanwhile
            if not is_copied:
                base = await self._place(unit_id, base, record.number, report)
                report.copied.append(record.number)
        if again:
            await self._send_pieces_again(base)
        if base.chain != self._history(unit_id)[1]:
            base = await self._place(unit_id, base, None, report)
        noted = self._copied.of(unit_id)
        listed = (base.sequence, base.versions, base.let_go)
        if noted is None or (noted.sequence, noted.versions, noted.let_go) != listed:
            await self._confirm(base)  # a push died behind its head, or a collector made it
        report.safe = base.versions

    # ---- heads and histories ----------------------------------------------------------------

    async def _begin(self, unit_id: UnitId, report: PushReport) -> tuple[RemoteHead, Collection[int]]:
        """The head to go on from: the collector of the remote sees it before anything is relied on. And what
        is copied, but not whole there."""
        noted = self._copied.of(unit_id)
        newest = await newest_head(self._remote, unit_id, noted.sequence if noted is not None else 0)
        # Behind the heads: whose fence was met, or is damaged, has its claim in the log.
        await self._look_at_log()
        report.problems += newest.problems
        if noted is not None and newest.sequence < noted.sequence:
            report.problems.append(
                f"{self._remote.url} was put back to an older state: head {newest.sequence} of "
                f"{unit_id.hex()} is the newest there, {noted.sequence} was"
            )
        sequence = max(newest.sequence, noted.sequence if noted is not None else 0)
        if newest.head is not None:
            self._check_continues(newest.head, self._history(unit_id)[0])
            if sequence == newest.head.sequence:
                return newest.head, ()
        unit = self._unit(unit_id)
        if newest.head is None:
            # Whoever collects from now on knows of this unit; who did before is known to us.
            await self._log.add(Join(unit_id, unit.name, self._node))
            await self._look_at_log()
        base = newest.head or RemoteHead(unit=unit_id, sequence=1, name=unit.name, node=self._node)
        # An older head than the newest may list what a collector has taken since.
        lost = await self._lost_there(base, report)
        versions = tuple(number for number in base.versions if number not in lost)
        base = replace(base, sequence=sequence + 1, generation=self._generation, versions=versions)
        await fill_signposts(self._remote, base, newest.sequence)
        await self._make_head(base)
        return base, lost

    async def _lost_there(self, head: RemoteHead, report: PushReport) -> frozenset[int]:
        """Those of the versions that a head lists that cannot stay listed: they lack something on the remote,
        which is told. But what is not here any more and only damaged may yet be healed, and stays."""
        if not head.versions:
            return frozenset()
        known = KnownChunks(self._remote, self._kept, every=True)
        await known.refresh()
        unit = unit_of_history(head, self._history(head.unit)[0])
        lacks = await lost_versions(self._remote, await stock_of_shards(known), unit.versions)
        report.problems += [
            f"version {number} of {head.unit.hex()} is not whole on {self._remote.url}: {lack.why}"
            for number, lack in lacks.items()
        ]
        here = {*self._histories.numbers(head.unit)}
        return frozenset(
            number
            for number, lack in lacks.items()
            if number in here or (lack.is_missing and not known.problems)
        )

    def _check_continues(self, head: RemoteHead, history: bytes) -> None:
        """Conflict unless what is copied of the history is the beginning of what is here."""
        is_here = head.history_bytes <= len(history)
        if not is_here or _chain_of(history[: head.history_bytes]) != head.chain:
            raise Conflict(
                f"{self._remote.url} has another history of {head.unit.hex()} (by {head.node!r}) than this "
                "store: an older copy of the store was put back, or two are in use"
            )

    async def _place(
        self, unit_id: UnitId, base: RemoteHead, number: int | None, report: PushReport
    ) -> RemoteHead:
        """The next head, with version `number` too; read back, and noted."""
        history, chain = self._history(unit_id)
        here = {*self._histories.numbers(unit_id)} - {number}
        pieces = await self._send_history(unit_id, base, history, report)
        head = replace(
            base,
            sequence=base.sequence + 1,
            generation=self._generation,
            name=self._unit(unit_id).name,
            node=self._node,
            pieces=pieces,
            chain=chain,
            versions=tuple(sorted({*base.versions, *([] if number is None else [number])})),
            let_go=tuple(one for one in base.let_go if one in here),
        )
        await self._make_head(head)
        await self._confirm(head)
        return head

    async def _confirm(self, head: RemoteHead) -> None:
        """Read a head and its history back; only then what it lists is noted as copied."""
        read = decode_head(await self._remote.get_unnamed(head_key(head.unit, head.sequence)))
        history = self._history(head.unit)[0][: head.history_bytes]
        if read != head or await read_history(self._remote, read) != history:
            raise Corrupt(
                f"head {head.sequence} of {head.unit.hex()} comes back from {self._remote.url} changed"
            )
        await self._note(head)
        await remove_old_heads(self._remote, head.unit, head.sequence)
        if head.sequence % SIGNPOST == 0:
            await remove_old_pieces(self._remote, head)

    async def _make_head(self, head: RemoteHead) -> None:
        try:
            await place_head(self._remote, head)
        except Conflict as e:
            raise Overtaken(f"somebody else copies {head.unit.hex()} too, or collects: {e}") from None

    async def _send_history(
        self, unit_id: UnitId, base: RemoteHead, history: bytes, report: PushReport
    ) -> tuple[Piece, ...]:
        added = len(history) - base.history_bytes
        if not added:
            return base.pieces
        kept = base.pieces[: merged_pieces(base.pieces, added)]
        content = history[sum(piece.size for piece in kept) :]
        piece = Piece(self._remote.name(content), len(content))
        if await self._remote.put(piece_key(unit_id, piece.name), piece.name, content):
            report.sent.bytes += len(content)
        return (*kept, piece)

    async def _send_pieces_again(self, head: RemoteHead) -> None:
        """Have the pieces of the history there, whole: what is wrong is replaced."""
        history, at = self._history(head.unit)[0], 0
        for piece in head.pieces:
            content = history[at : at + piece.size]
            if self._remote.name(content) == piece.name:
                await self._remote.put(piece_key(head.unit, piece.name), piece.name, content)
            at += piece.size

    async def _note(self, head: RemoteHead) -> None:
        placed = await self._remote.stat(head_key(head.unit, head.sequence))
        records = (self._histories.version(head.unit, number) for number in reversed(head.versions))
        newest_ns = max((record.time_ns for record in records if record is not None), default=0)
        copied = Copied(head.sequence, head.chain, head.versions, placed.modified_ns, newest_ns, head.let_go)
        self._copied.note(head.unit, copied)

    def _unit(self, unit_id: UnitId) -> Unit:
        unit = self._histories.unit(unit_id)
        assert unit is not None, "a unit does not go"
        return unit

    def _history(self, unit_id: UnitId) -> tuple[bytes, bytes]:
        """The unit's history, and the chain value behind its last record."""
        history = self._histories.history_bytes(self._unit(unit_id))
        return history, _chain_of(history)


def _chain_of(history: bytes) -> bytes:
    return chain_behind(scan_history(history, 0).frames)
