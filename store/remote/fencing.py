"""The heads of all units, for a collector: read, and fenced.

One rule: a unit is fenced by its next head, made of the newest one; so whoever goes on from an older one
cannot place his, and has to look at the log.

Source: FORMAT.md, "Remotes", "Collecting" (1 and 3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from ckptfs.store.errors import Conflict, Corrupt, NotFound, Unavailable
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_scan import scan_history
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.catalogue import RemoteUnit, read_unit, unit_of_history
from ckptfs.store.remote.head import Piece, RemoteHead, decode_head
from ckptfs.store.remote.heads import Newest, newest_head, place_head
from ckptfs.store.remote.log_entry import Join
from ckptfs.store.remote.lost import lost_versions
from ckptfs.store.remote.names import HEADS, head_key, parse_head_key, piece_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.several import done_for_each
from ckptfs.store.remote.stock import Stock
from ckptfs.store.seal import chain_behind

_PARALLEL = 8
_TRIES = 8
LetGo = Callable[[RemoteUnit, int], Collection[int]]
"""The numbers of a unit's versions that are not to stay, at a moment of the storage's clock (ns)."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A unit as it is to stay: `going` are the versions that go. `taken` is the highest number of its heads.

    Of a unit that is given up `lost` says what of it is damaged: (number, what it lacks), 0 for what cannot
    be told any more.
    """

    unit: RemoteUnit
    going: frozenset[int]
    taken: int
    lost: tuple[tuple[int, str], ...] = ()

    @property
    def staying(self) -> tuple[VersionRecord, ...]:
        """The versions that stay."""
        gone = self.going | {number for number, _ in self.lost}
        return tuple(record for record in self.unit.versions if record.number not in gone)


async def listed_units(remote: Remote) -> set[UnitId]:
    """The units of which a list shows a head."""
    parsed = (parse_head_key(meta.key) for meta in await remote.list_objects(HEADS))
    return {one[0] for one in parsed if one is not None}


async def read_standings(
    remote: Remote,
    units: Iterable[UnitId],
    let_go: LetGo,
    now_ns: int,
    given_up: Set[UnitId] = frozenset(),
) -> dict[UnitId, Standing]:
    """Those of these units that have a head. Corrupt or NotFound: of one that is not given up it cannot be
    told what it has."""

    async def read(unit_id: UnitId) -> Standing | None:
        if unit_id in given_up:
            return await _what_is_left(remote, unit_id, let_go, now_ns)
        newest = await _undamaged(remote, unit_id)
        if newest.head is None:
            return None
        unit = await _whole(remote, newest.head)
        return Standing(unit, frozenset(let_go(unit, now_ns)), newest.sequence)

    wanted = sorted(units)
    found = await done_for_each(read, wanted, _PARALLEL)
    return {unit_id: one for unit_id, one in zip(wanted, found, strict=True) if one is not None}


async def _what_is_left(remote: Remote, unit_id: UnitId, let_go: LetGo, now_ns: int) -> Standing | None:
    """What can be read of a unit: by its newest head that is not damaged, and its history up to the first
    piece that is."""
    newest = await newest_head(remote, unit_id)
    if not newest.sequence:
        return None
    lost = [(0, f"what it listed cannot be told: {problem}") for problem in newest.problems]
    head = newest.head or _first(Join(unit_id, unit_id.hex().encode(), ""))
    pieces, history = list[Piece](), b""
    for piece in head.pieces:
        try:
            content = await remote.get(piece_key(unit_id, piece.name), piece.name)
        except (Corrupt, NotFound) as e:
            lost.append((0, f"its history cannot be read from there on: {e}"))
            head = replace(head, pieces=tuple(pieces), chain=chain_behind(scan_history(history, 0).frames))
            break
        pieces.append(piece)
        history += content
    unit = unit_of_history(head, history)
    readable = tuple(record.number for record in unit.versions)
    lost += [
        (number, "its record cannot be read any more") for number in head.versions if number not in readable
    ]
    unit = replace(unit, head=replace(head, versions=readable))
    return Standing(unit, frozenset(let_go(unit, now_ns)), newest.sequence, tuple(lost))


async def without_lost(remote: Remote, stock: Stock, standing: Standing) -> Standing:
    """The same of a unit that is given up, without the versions that lack something."""
    lacks = await lost_versions(remote, stock, standing.staying)
    return replace(standing, lost=(*standing.lost, *((number, lack.why) for number, lack in lacks.items())))


async def fence(
    remote: Remote,
    units: Iterable[UnitId],
    standings: Mapping[UnitId, Standing],
    joined: Mapping[UnitId, Join],
    generation: int,
    let_go: LetGo,
    now_ns: int,
    given_up: Set[UnitId] = frozenset(),
) -> list[RemoteUnit]:
    """Give every unit a head of this generation; what those list. Raises as read_standings. Conflict: one
    that is given up was copied to since.

    What a newer head's history holds (a tag, a pin that came since) stays: `let_go` is asked once more, and
    nothing goes that did not go in `standings`.
    """

    async def still_going(head: RemoteHead) -> Collection[int]:
        standing = standings.get(head.unit)
        if standing is None or not standing.going:
            return ()
        unit = standing.unit if standing.unit.head == head else await _whole(remote, head)
        return standing.going.intersection(let_go(unit, now_ns))

    async def what_is_left(standing: Standing) -> RemoteUnit:
        base = standing.unit.head
        if (await newest_head(remote, base.unit, standing.taken)).sequence == standing.taken:
            stays = tuple(record.number for record in standing.staying)
            head = _next(base, standing.taken + 1, generation, stays, standing.going)
            if await _placed(remote, head):
                return await _whole(remote, head)
        raise Conflict(f"{remote.url}: {base.unit.hex()} is copied to, so it is not given up; try without")

    async def one(unit_id: UnitId) -> RemoteUnit:
        if unit_id in given_up and unit_id in standings:
            return await what_is_left(standings[unit_id])
        known = standings[unit_id].unit.head.sequence if unit_id in standings else 0
        for _ in range(_TRIES):
            newest = await _undamaged(remote, unit_id, known)
            if newest.head is None and unit_id not in joined:
                raise NotFound(
                    f"{remote.url} has no head of unit {unit_id.hex()} any more: {_advice(unit_id)}"
                )
            base = newest.head or _first(joined[unit_id])
            going = await still_going(base)
            stays = tuple(number for number in base.versions if number not in going)
            head = _next(base, newest.sequence + 1, generation, stays, going)
            if await _placed(remote, head):
                return await _whole(remote, head)
        raise Unavailable(f"the heads of {unit_id.hex()} at {remote.url} come too fast; try again")

    return await done_for_each(one, sorted(units), _PARALLEL)


def _next(
    base: RemoteHead, sequence: int, generation: int, stays: tuple[int, ...], going: Iterable[int]
) -> RemoteHead:
    """The head that a collector makes: its node does not send again what went."""
    let_go = tuple(sorted({*base.let_go, *going} - {*stays}))
    return replace(base, sequence=sequence, generation=generation, versions=stays, let_go=let_go)


async def _placed(remote: Remote, head: RemoteHead) -> bool:
    """Make a head, and read it back; False: its node was faster. Of one that arrived torn its node would take
    the one before for the newest, which lists what is about to go."""
    try:
        await place_head(remote, head)
        return decode_head(await remote.get_unnamed(head_key(head.unit, head.sequence))) == head
    except Conflict:
        return False
    except Corrupt:
        return await _placed(remote, replace(head, sequence=head.sequence + 1))


def _advice(unit_id: UnitId) -> str:
    return (
        "a push from the node that copies it puts that right, and until then nothing is collected; if that "
        f"node is gone for good: `ckptfs remote gc --give-up {unit_id.hex()}` goes on without what is damaged"
    )


def _first(join: Join) -> RemoteHead:
    return RemoteHead(unit=join.unit, sequence=1, name=join.name, node=join.node)


async def _undamaged(remote: Remote, unit_id: UnitId, at_least: int = 0) -> Newest:
    newest = await newest_head(remote, unit_id, at_least)
    if newest.problems:
        # What it listed cannot be told, so neither what may go.
        raise Corrupt(f"{newest.problems[0]}: {_advice(unit_id)}")
    return newest


async def _whole(remote: Remote, head: RemoteHead) -> RemoteUnit:
    try:
        unit = await read_unit(remote, head)
    except (Corrupt, NotFound) as e:
        raise Corrupt(f"{e}: {_advice(head.unit)}") from None
    if len(unit.versions) != len(head.versions):
        what = f"the history of {head.unit.hex()} at {remote.url} lacks versions"
        raise Corrupt(f"{what}: {_advice(head.unit)}")
    return unit
