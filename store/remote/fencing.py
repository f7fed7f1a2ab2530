"""The heads of all units, for a collector: read, and fenced.

One rule: a unit is fenced by its next head, made of the newest one; so whoever goes on from an older one
cannot place his, and has to look at the log.

Source: FORMAT.md, "Remotes", "Collecting" (1 and 3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ckptfs.store.errors import Conflict, Corrupt, NotFound, Unavailable
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.catalogue import RemoteUnit, read_unit
from ckptfs.store.remote.head import RemoteHead, decode_head
from ckptfs.store.remote.heads import Newest, newest_head, place_head
from ckptfs.store.remote.log_entry import Join
from ckptfs.store.remote.names import HEADS, head_key, parse_head_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.several import done_for_each

_PARALLEL = 8
_TRIES = 8
LetGo = Callable[[RemoteUnit, int], Collection[int]]
"""The numbers of a unit's versions that are not to stay, at a moment of the storage's clock (ns)."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A unit as it is to stay: `going` are the versions that go."""

    unit: RemoteUnit
    going: frozenset[int]

    @property
    def staying(self) -> tuple[VersionRecord, ...]:
        """The versions that stay."""
        return tuple(record for record in self.unit.versions if record.number not in self.going)


async def listed_units(remote: Remote) -> set[UnitId]:
    """The units of which a list shows a head."""
    parsed = (parse_head_key(meta.key) for meta in await remote.list_objects(HEADS))
    return {one[0] for one in parsed if one is not None}


async def read_standings(
    remote: Remote, units: Iterable[UnitId], let_go: LetGo, now_ns: int
) -> dict[UnitId, Standing]:
    """Those of these units that have a head. Corrupt or NotFound: of one it cannot be told what it has."""

    async def read(unit_id: UnitId) -> Standing | None:
        newest = await _undamaged(remote, unit_id)
        if newest.head is None:
            return None
        unit = await _whole(remote, newest.head)
        return Standing(unit, frozenset(let_go(unit, now_ns)))

    wanted = sorted(units)
    found = await done_for_each(read, wanted, _PARALLEL)
    return {unit_id: one for unit_id, one in zip(wanted, found, strict=True) if one is not None}


async def fence(
    remote: Remote,
    units: Iterable[UnitId],
    standings: Mapping[UnitId, Standing],
    joined: Mapping[UnitId, Join],
    generation: int,
    let_go: LetGo,
    now_ns: int,
) -> list[RemoteUnit]:
    """Give every unit a head of this generation; what those list. Raises as read_standings.

    What a newer head's history holds (a tag, a pin that came since) stays: `let_go` is asked once more, and
    nothing goes that did not go in `standings`.
    """

    async def still_going(head: RemoteHead) -> Collection[int]:
        standing = standings.get(head.unit)
        if standing is None or not standing.going:
            return ()
        unit = standing.unit if standing.unit.head == head else await _whole(remote, head)
        return standing.going.intersection(let_go(unit, now_ns))

    async def one(unit_id: UnitId) -> RemoteUnit:
        known = standings[unit_id].unit.head.sequence if unit_id in standings else 0
        for _ in range(_TRIES):
            newest = await _undamaged(remote, unit_id, known)
            if newest.head is None and unit_id not in joined:
                raise NotFound(f"{remote.url} has no head of unit {unit_id.hex()} any more: {_ADVICE}")
            base = newest.head or _first(joined[unit_id])
            going = await still_going(base)
            stays = tuple(number for number in base.versions if number not in going)
            head = replace(base, sequence=newest.sequence + 1, generation=generation, versions=stays)
            if await _placed(remote, head):
                return await _whole(remote, head)
        raise Unavailable(f"the heads of {unit_id.hex()} at {remote.url} come too fast; try again")

    return await done_for_each(one, sorted(units), _PARALLEL)


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


_ADVICE = "a push from the node that copies it puts that right; until then nothing is collected"


def _first(join: Join) -> RemoteHead:
    return RemoteHead(unit=join.unit, sequence=1, name=join.name, node=join.node)


async def _undamaged(remote: Remote, unit_id: UnitId, at_least: int = 0) -> Newest:
    newest = await newest_head(remote, unit_id, at_least)
    if newest.problems:
        # What it listed cannot be told, so neither what may go.
        raise Corrupt(f"{newest.problems[0]}: {_ADVICE}")
    return newest


async def _whole(remote: Remote, head: RemoteHead) -> RemoteUnit:
    unit = await read_unit(remote, head)
    if len(unit.versions) != len(head.versions):
        raise Corrupt(f"the history of {head.unit.hex()} at {remote.url} lacks versions: {_ADVICE}")
    return unit
