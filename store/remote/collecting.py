"""The collector of a remote: versions that retention lets go, and what nothing needs then.

One rule: nothing is removed before the decision is in the log; and only what was there before it.

Source: FORMAT.md, "Remotes", "Collecting".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import trio

from ckptfs.store.bucket import Unfinished
from ckptfs.store.errors import Conflict, Corrupt, NotFound, NotPermitted
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import ChunkId, UnitId
from ckptfs.store.remote import sending
from ckptfs.store.remote.catalogue import RemoteUnit
from ckptfs.store.remote.clock import storage_now_ns
from ckptfs.store.remote.fencing import (
    LetGo,
    Standing,
    fence,
    listed_units,
    read_standings,
    without_lost,
)
from ckptfs.store.remote.kept import Kept
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.listing import Listing, list_contents
from ckptfs.store.remote.log import RemoteLog
from ckptfs.store.remote.log_entry import TOKEN_BYTES, Claim, Decision, Extension, Join
from ckptfs.store.remote.lost import lost_versions
from ckptfs.store.remote.names import (
    COPY,
    KEPT,
    kept_key,
    log_key,
    pack_key,
    shard_key,
)
from ckptfs.store.remote.objects import Random, Remote
from ckptfs.store.remote.pack import encode_pack, pack_rows
from ckptfs.store.remote.ranges import RangeReader
from ckptfs.store.remote.remote_walk import RemoteWalk
from ckptfs.store.remote.several import done_beside, done_for_each
from ckptfs.store.remote.shard import ROW, PackFacts, Rows, decode_shard, encode_shard
from ckptfs.store.remote.stock import Mask, Needed, Stock, stock_of

GRACE_S = 24 * 3600.0
_PARALLEL = 8
_SECOND_NS = 10**9


@dataclass(slots=True)
class Collected:
    """What a collection did, or would: the versions that went (unit, number), objects and bytes that are
    removed, what was copied over of packs that were mostly not needed, and what stays; `unfinished`: what of
    it dead writers had left half-made. `lost`: what of units
    that were given up is damaged, see Standing. `is_off`: another was faster, so nothing was removed;
    but those versions are listed no more."""

    went: list[tuple[UnitId, int]] = field(default_factory=list)
    lost: list[tuple[UnitId, int, str]] = field(default_factory=list)
    removed_packs: int = 0
    removed_bytes: int = 0
    removed_shards: int = 0
    unfinished: Unfinished = field(default_factory=Unfinished)
    copied_bytes: int = 0
    kept_packs: int = 0
    kept_bytes: int = 0
    is_off: bool = False


class Collector:
    """Collects a remote, once. Belongs to one thread."""

    def __init__(
        self,
        remote: Remote,
        node: str,
        random: Random,
        let_go: LetGo,
        grace_s: float = GRACE_S,
        given_up: Iterable[UnitId] = (),
    ) -> None:
        """`node` is what this node is called; shards younger than `grace_s` stay, with all their packs. What
        is damaged of the units `given_up` holds back nothing: it does not stay."""
        self._given_up = frozenset(given_up)
        self._remote = remote
        self._node = node
        self._random = random
        self._let_go = let_go
        self._grace_ns = int(grace_s * _SECOND_NS)
        self._log = RemoteLog(remote)
        self._walk = RemoteWalk(remote)
        # Packs that were read as a whole, or made, by name.
        self._is_sound: dict[bytes, bool] = {}
        self._walked: set[tuple[UnitId, int]] = set()
        self._now_ns = 0

    async def collect(self, *, dry_run: bool = False) -> Collected:
        """Take what retention lets go and nothing needs. With `dry_run` nothing changes.

        Corrupt or NotFound: something is damaged, so nothing was taken; the message says what. Conflict:
        another collector is at work. Other errors as the remote raises: what was not removed is the next
        one's. Durable when: this returned.
        """
        await self._remote.open()
        await (self._log.refresh() if dry_run else self._log.settle())
        kept = await self._log.kept()
        if self._log.is_open and not dry_run:
            raise self._busy()
        units = kept.units | self._log.joined.keys() | await listed_units(self._remote)
        self._now_ns = await self._storage_now_ns(dry_run)
        standings = await read_standings(self._remote, units, self._let_go, self._now_ns, self._given_up)
        if not self._given_up <= standings.keys():
            unknown = min(self._given_up - standings.keys()).hex()
            raise NotFound(f"{self._remote.url} has no unit {unknown}, so nothing of it is given up")
        # Behind the heads: what they list is in shards by then.
        self._known = KnownChunks(self._remote, kept, every=True)
        await self._known.refresh()
        before = self._known.shards
        listing = await list_contents(self._remote)
        stock = await self._stock(listing)
        for unit in self._given_up:
            standings[unit] = await without_lost(self._remote, stock, standings[unit])
        for standing in standings.values():
            await self._reach(stock, standing.unit, standing.staying)
        await self._check_needed(stock, standings.values())
        report = Collected(
            went=sorted((unit, number) for unit, one in standings.items() for number in one.going),
            lost=sorted((unit, *lack) for unit, one in standings.items() for lack in one.lost),
        )
        if dry_run:
            return await self._would(stock, listing, before, report)
        await self._copy_over(stock, listing, report)
        # Before the claim, which others wait for: it reads packs.
        await self._sound(await self._stock(await list_contents(self._remote)))
        claim, token = await self._claim()
        try:
            units = kept.units | standings.keys() | self._log.joined.keys()
            joined = dict(self._log.joined)

            async def look() -> tuple[list[RemoteUnit], Listing, Kept]:
                fenced = await self._fence(units, standings, joined, claim)
                staying = {(unit.head.unit, number) for unit in fenced for number in unit.head.versions}
                report.went = [one for one in report.went if one not in staying]
                await self._known.refresh()
                listing = await list_contents(self._remote)
                listing.newest_ns = (await self._remote.stat(log_key(claim))).modified_ns
                stock = await self._stock(listing)
                for unit in fenced:
                    await self._reach(stock, unit, unit.versions)
                plan = stock, await self._sound(stock), listing, before, claim, report
                return fenced, listing, await trio.to_thread.run_sync(self._plan, *plan)

            alive = Extension(claim, token)
            fenced, listing, left = await done_beside(look, lambda: self._log.keep_alive(alive))
            name = await self._decide(left, fenced)
        except BaseException:
            with trio.move_on_after(10, shield=True):
                await self._log.add(Decision(claim), lambda: not self._log.is_open)
            raise
        if name is None:
            return Collected(report.went, report.lost, is_off=True)
        await self._remove(left, listing, name)
        report.unfinished = await self._remote.sweep(self._now_ns - self._grace_ns, dry_run=False)
        return report

    async def _would(
        self, stock: Stock, listing: Listing, before: frozenset[bytes], report: Collected
    ) -> Collected:
        found = await self._needed(stock)
        await trio.to_thread.run_sync(self._plan, stock, found, listing, before, 0, report)
        report.copied_bytes = int(found.used[self._sparse(found, listing)].sum())
        report.unfinished = await self._remote.sweep(self._now_ns - self._grace_ns, dry_run=True)
        return report

    async def _storage_now_ns(self, dry_run: bool) -> int:
        """The storage's time; for who may only look the newest that it shows: then no more goes."""
        try:
            return await storage_now_ns(self._remote, self._random)
        except NotPermitted:
            if not dry_run:
                raise
            return max((meta.modified_ns for meta in await self._remote.list_objects("")), default=0)

    # ---- what is needed ---------------------------------------------------------------------

    async def _stock(self, listing: Listing) -> Stock:
        """All rows in packs that are there."""
        known, stored = self._known, self._remote.stored_size
        there = np.array(
            [listing.packs.get(pack.name) == stored(pack.size) for pack in known.packs], np.bool_
        )
        # A list may not show them yet.
        doubtful = [number for number in np.flatnonzero(~there).tolist() if known.counting[number]]
        for number in doubtful:
            there[number] = await self._is_there(known.packs[number])
        assert known.every is not None
        every = [np.zeros(0, ROW), *known.every]

        def sort() -> Stock:
            rows: Rows = np.concatenate(every)
            return stock_of(known.packs, rows[there[rows["pack"]]])

        return await trio.to_thread.run_sync(sort)

    async def _is_there(self, pack: PackFacts) -> bool:
        found = await self._remote.stat_or_none(pack_key(pack.name))
        return found is not None and found.size == self._remote.stored_size(pack.size)

    async def _reach(self, stock: Stock, unit: RemoteUnit, records: Iterable[VersionRecord]) -> None:
        for record in records:
            if (record.unit, record.number) in self._walked:
                continue
            assert record.top.tree is not None, "a version is a directory"
            try:
                await self._walk.walk(stock, [record.top.tree])
            except (Corrupt, NotFound) as e:
                raise self._damaged(str(e), record) from None
            self._walked.add((record.unit, record.number))

    async def _check_needed(self, stock: Stock, standings: Iterable[Standing]) -> None:
        """Corrupt names a version that lacks chunks."""
        try:
            await trio.to_thread.run_sync(lambda: stock.rows_of(self._walk.all()))
        except Corrupt as e:
            for standing in standings:
                for number, lack in (await lost_versions(self._remote, stock, standing.staying)).items():
                    (record,) = (one for one in standing.staying if one.number == number)
                    raise self._damaged(lack.why, record) from None
            raise self._damaged(str(e)) from None

    async def _needed(self, stock: Stock) -> Needed:
        try:
            return await trio.to_thread.run_sync(lambda: stock.needed(self._walk.all()))
        except Corrupt as e:
            raise self._damaged(str(e)) from None

    async def _sound(self, stock: Stock) -> Needed:
        """What is needed, so chosen that no good copy of a chunk goes and a rotten one stays: each pack that
        would hold the only copy left is read as a whole. Corrupt: all copies are in packs that are wrong."""
        packs, wanted = stock.packs, await trio.to_thread.run_sync(self._walk.all)
        while True:
            rotten = np.array([self._is_sound.get(pack.name, True) is False for pack in packs], np.bool_)
            left = await trio.to_thread.run_sync(stock.without, rotten) if rotten.any() else stock
            found = await self._needed(left)
            risky = await trio.to_thread.run_sync(stock.only_copies, found, wanted)
            wrong = [packs[number] for number in np.flatnonzero(risky & rotten).tolist()]
            if wrong:
                raise self._damaged(
                    f"{pack_key(wrong[0].name)} has other bytes, and no other pack all of its"
                )
            names = {packs[number].name for number in np.flatnonzero(risky).tolist()}
            unread = sorted(names - self._is_sound.keys())
            if not unread:
                return found
            await done_for_each(self._read_whole, unread, 2)

    async def _read_whole(self, name: bytes) -> None:
        try:
            await self._remote.get(pack_key(name), name)
            self._is_sound[name] = True
        except (Corrupt, NotFound):
            self._is_sound[name] = False

    def _damaged(self, what: str, record: VersionRecord | None = None) -> Corrupt:
        more = f" ({self._known.problems[0]})" if self._known.problems else ""
        advice = "heal it first (`ckptfs push --verify` from the nodes that copy to it)"
        if record is not None:
            what = f"version {record.number} of {record.unit.hex()}: {what}"
            advice += (
                "; if its node is gone for good, and no other remote has it: `ckptfs remote gc --give-up "
                f"{record.unit.hex()}` goes on without what is damaged"
            )
        return Corrupt(f"{self._remote.url} is damaged, so nothing is collected: {what}{more}; {advice}")

    def _old(self, listing: Listing) -> Mask:
        """Which packs are listed by shards that are old enough only."""
        young_ns = listing.newest_ns - self._grace_ns
        young = {
            self._known.packs[number].name
            for number in range(len(self._known.packs))
            if listing.shards.get(self._known.shard_of(number), listing.newest_ns) > young_ns
        }
        return np.array([pack.name not in young for pack in self._known.packs], np.bool_)

    def _sparse(self, found: Needed, listing: Listing) -> Mask:
        mask: Mask = found.sparse & self._old(listing)
        return mask

    def _plan(
        self,
        stock: Stock,
        found: Needed,
        listing: Listing,
        before: frozenset[bytes],
        claim: int,
        report: Collected,
    ) -> Kept:
        """What is left, and the figures of it."""
        known = self._known
        fresh = np.array(
            [known.shard_of(number) not in before for number in range(len(known.packs))], np.bool_
        )
        there = np.zeros(len(known.packs), np.bool_)
        there[np.unique(stock.rows["pack"])] = True
        wanted = there & (found.packs | fresh | ~self._old(listing))
        names = {known.packs[number].name for number in np.flatnonzero(wanted).tolist()}
        shards = {
            known.shard_of(number)
            for number, pack in enumerate(known.packs)
            if pack.name in names and known.counting[number]
        }
        dropped = {
            pack.name
            for number, pack in enumerate(known.packs)
            if known.shard_of(number) in shards and pack.name not in names
        }
        gone = {name: size for name, size in listing.packs.items() if name not in names}
        report.removed_packs, report.removed_bytes = len(gone), sum(gone.values())
        report.removed_shards = len(listing.shards.keys() - shards)
        report.kept_packs = len(names)
        report.kept_bytes = sum(listing.packs.get(name, 0) for name in names)
        return Kept(claim, frozenset(), frozenset(shards), frozenset(dropped))

    # ---- what is done -----------------------------------------------------------------------

    async def _copy_over(self, stock: Stock, listing: Listing, report: Collected) -> None:
        """Bring what is needed of packs that mostly are not into new ones."""
        found = await self._needed(stock)
        rows = found.rows_in(self._sparse(found, listing))
        parts = sending.parts_of(rows)
        for start in range(0, len(parts), sending.PACKS_A_SHARD):
            group = parts[start : start + sending.PACKS_A_SHARD]
            packs = await done_for_each(lambda part: self._copy_part(stock, part), group, 2)
            content = encode_shard(packs)
            name = self._remote.name(content)
            await self._remote.put(shard_key(name), name, content)
            self._known.add(name, decode_shard(content))
            report.copied_bytes += sum(facts.size for facts, _ in packs)

    async def _copy_part(self, stock: Stock, rows: Rows) -> tuple[PackFacts, list[tuple[ChunkId, int, int]]]:
        chunks = await RangeReader(self._remote, stock.packs, stock.others_of).read(rows)
        content = await trio.to_thread.run_sync(encode_pack, chunks, self._log.generation)
        name = self._remote.name(content)
        await self._remote.put(pack_key(name), name, content, check_first=True)
        self._is_sound[name] = True
        return PackFacts(name, len(content), self._log.generation), pack_rows(content)

    async def _claim(self) -> tuple[int, bytes]:
        last = self._log.claim
        claim = Claim(self._node, self._random(TOKEN_BYTES))
        number = await self._log.add(claim, lambda: self._log.claim != last)
        if not number:
            raise self._busy()
        return number, claim.token

    def _busy(self) -> Conflict:
        return Conflict(f"somebody else collects {self._remote.url}; try again later")

    async def _fence(
        self, units: Set[UnitId], standings: dict[UnitId, Standing], joined: dict[UnitId, Join], claim: int
    ) -> list[RemoteUnit]:
        units = units | await listed_units(self._remote)
        more = claim, self._let_go, self._now_ns, self._given_up
        return await fence(self._remote, units, standings, joined, *more)

    async def _decide(self, left: Kept, fenced: Sequence[RemoteUnit]) -> bytes | None:
        """Put the decision into the log; the name of what is left, None if another was faster."""
        units = frozenset(unit.head.unit for unit in fenced)
        content = Kept(left.claim, units, left.shards, left.dropped).encode()
        name = self._remote.name(content)
        for key in (kept_key(name), kept_key(name) + COPY):
            await self._remote.put(key, name, content)
        await self._log.add(Decision(left.claim, name), lambda: not self._log.is_open)
        return name if (self._log.decided, self._log.kept_name) == (left.claim, name) else None

    async def _remove(self, left: Kept, listing: Listing, name: bytes) -> None:
        kept = {
            pack.name
            for number, pack in enumerate(self._known.packs)
            if left.counts(self._known.shard_of(number), pack)
        }
        keys = [shard_key(shard) for shard in listing.shards.keys() - left.shards]
        keys += [pack_key(pack) for pack in listing.packs.keys() - kept]
        ours = {kept_key(name), kept_key(name) + COPY}
        keys += [meta.key for meta in await self._remote.list_objects(KEPT) if meta.key not in ours]
        await done_for_each(self._remote.remove, keys, _PARALLEL)
