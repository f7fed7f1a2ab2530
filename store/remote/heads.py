"""Finding the newest head of a unit on a remote, and placing the next one.

One rule: a number is taken once. What a list says is a hint; whether the next number is there is asked by
name. Numbers that are multiples of SIGNPOST stay, so the newest can be found without any list.

Source: FORMAT.md, "Remotes", "Reading the newest head".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptfs.store.errors import Conflict, Corrupt, NotFound, Unavailable
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.head import RemoteHead, decode_head
from ckptfs.store.remote.log import dense_end
from ckptfs.store.remote.names import HEADS, head_key, heads_of, parse_head_key, piece_key, pieces_of
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.several import done_for_each

KEPT = 8
SIGNPOST = 16
_PARALLEL = 8
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest head that can be read (None: none), the highest number that is taken (0: none), when the
    storage got that head (ns), and what is wrong with newer ones."""

    head: RemoteHead | None
    sequence: int
    modified_ns: int
    problems: tuple[str, ...] = ()


async def newest_head(remote: Remote, unit: UnitId, at_least: int = 0) -> Newest:
    """A unit's newest head, whatever lists say. `at_least`: a number that was taken, as somebody remembers.

    Unavailable if heads come and go faster than they can be read; other errors as the remote raises.
    """
    for _ in range(_TRIES):
        listed = await _listed(remote, heads_of(unit))
        found = await _newest_of(remote, unit, listed.get(unit, []), at_least, thorough=True)
        if found is not None:
            return found
    raise Unavailable(f"the heads of {unit.hex()} at {remote.url} are removed while they are read; try again")


async def newest_heads(remote: Remote) -> list[Newest]:
    """The newest head of every unit that a list shows, by unit id; of one that was made just now maybe not
    the newest."""
    listed = await _listed(remote, HEADS)
    found = []
    for unit in sorted(listed):
        newest = await _newest_of(remote, unit, listed[unit], 0, thorough=False)
        found.append(newest if newest is not None else await newest_head(remote, unit))
    return found


async def place_head(remote: Remote, head: RemoteHead) -> None:
    """Make a head. Conflict if its number is taken by another. Durable when: this returned."""
    encoded = head.encode()
    assert decode_head(encoded) == head, "a head does not decode to itself"
    await remote.create_unnamed(head_key(head.unit, head.sequence), encoded)


async def fill_signposts(remote: Remote, head: RemoteHead, newest: int) -> None:
    """Have the signposts between number `newest` and `head`, if numbers are passed over there."""
    for sequence in range(newest // SIGNPOST * SIGNPOST + SIGNPOST, head.sequence, SIGNPOST):
        try:
            await place_head(remote, replace(head, sequence=sequence))
        except (Conflict, Corrupt):
            continue  # it is there


async def remove_old_pieces(remote: Remote, newest: RemoteHead) -> None:
    """Remove the pieces of a unit's history that none of the last KEPT heads names. For the unit's own node
    only: nobody else knows what it is about to name."""
    named = {piece.name for piece in newest.pieces}
    for sequence in range(max(1, newest.sequence - KEPT + 1), newest.sequence):
        try:
            head = decode_head(await remote.get_unnamed(head_key(newest.unit, sequence)))
        except (Corrupt, NotFound):
            continue
        named |= {piece.name for piece in head.pieces}
    kept = {piece_key(newest.unit, name) for name in named}
    for meta in await remote.list_objects(pieces_of(newest.unit)):
        if meta.key not in kept:
            await remote.remove(meta.key)


async def remove_old_heads(remote: Remote, unit: UnitId, newest: int) -> None:
    """Remove the heads that are KEPT and more behind the newest."""
    for sequence in (await _listed(remote, heads_of(unit))).get(unit, []):
        if sequence <= newest - KEPT and sequence % SIGNPOST:
            await remote.remove(head_key(unit, sequence))


async def _listed(remote: Remote, folder: str) -> dict[UnitId, list[int]]:
    found: dict[UnitId, list[int]] = {}
    for meta in await remote.list_objects(folder):
        parsed = parse_head_key(meta.key)
        if parsed is not None:
            found.setdefault(parsed[0], []).append(parsed[1])
    return {unit: sorted(sequences) for unit, sequences in found.items()}


async def _newest_of(
    remote: Remote, unit: UnitId, listed: list[int], at_least: int, *, thorough: bool
) -> Newest | None:
    """None: the highest is not there any more, so there are higher ones by now."""
    sequence = max(listed, default=0)
    if at_least and await _is_there(remote, unit, at_least):
        sequence = max(sequence, at_least)
    elif thorough:
        sequence = max(sequence, await _found_by_name(remote, unit))
    while await _is_there(remote, unit, sequence + 1):
        sequence += 1
    problems: list[str] = []
    # Those below are for when it is damaged. A list may leave out the one that comes next.
    kept = range(max(1, sequence - KEPT), sequence + 1)
    for candidate in sorted({*listed, *kept}, reverse=True):
        key = head_key(unit, candidate)
        try:
            head = decode_head(await remote.get_unnamed(key))
            if head.unit != unit or head.sequence != candidate:
                raise Corrupt("it is that of another unit or number")
            return Newest(head, sequence, (await remote.stat(key)).modified_ns, tuple(problems))
        except Corrupt as e:
            problems.append(f"{remote.url}/{key}: {e}")
        except NotFound:
            if candidate == sequence:
                return None
    return Newest(None, sequence, 0, tuple(problems))


async def _found_by_name(remote: Remote, unit: UnitId) -> int:
    """The highest number that is there, asked without a list."""
    posts = await dense_end(lambda number: _is_there(remote, unit, number * SIGNPOST))
    behind = range(posts * SIGNPOST + 1, (posts + 1) * SIGNPOST)
    there = await done_for_each(lambda sequence: _is_there(remote, unit, sequence), behind, _PARALLEL)
    return max(
        (number for number, is_there in zip(behind, there, strict=True) if is_there), default=posts * SIGNPOST
    )


async def _is_there(remote: Remote, unit: UnitId, sequence: int) -> bool:
    return await remote.stat_or_none(head_key(unit, sequence)) is not None
