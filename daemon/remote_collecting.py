"""`ckptfs remote gc`: retention at a remote, and the room of what nothing needs there.

One rule: what may go is decided by store/retention.py alone, on what the remote lists and by the storage's
clock; of units of other nodes only where that was asked for.

Source: ARCHITECTURE.md, section 8; FORMAT.md, "Remotes", "Collecting".
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from ckptfs.daemon.copying import Copying
from ckptfs.daemon.messages import Json
from ckptfs.daemon.retaining import Policies
from ckptfs.store.errors import InvalidRequest
from ckptfs.store.histories import Histories
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.remote.catalogue import RemoteUnit
from ckptfs.store.remote.collecting import Collected, Collector
from ckptfs.store.retention import Candidate, plan_expiry


class RemoteCollecting:
    """Belongs to the index thread."""

    def __init__(self, copying: Copying, histories: Histories, policies: Policies, node: str) -> None:
        self._copying = copying
        self._histories = histories
        self._policies = policies
        self._node = node

    async def collect(
        self, remote: str | None, *, dry_run: bool, every_node: bool, give_up: Iterable[str] = ()
    ) -> Json:
        """Collect one remote; the answer to be shown. Raises as Collector.collect. InvalidRequest: `give_up`
        has something that is no id of a unit."""
        given_up = [_unit_id(text) for text in give_up]
        target, names = self._copying.target(remote), dict[UnitId, str]()

        def let_go(unit: RemoteUnit, now_ns: int) -> Collection[int]:
            names[unit.head.unit] = os.fsdecode(unit.name)
            is_ours = self._histories.unit(unit.head.unit) is not None
            return self._expired(unit, now_ns) if is_ours or every_node else ()

        collector = Collector(target.open(), self._node, os.urandom, let_go, given_up=given_up)
        found = await collector.collect(dry_run=dry_run)
        if not dry_run:
            lost = [(unit, number) for unit, number, _ in found.lost]
            self._copying.let_go(target, found.went, lost)
        return _row(target.name, found, names, dry_run=dry_run)

    def _expired(self, unit: RemoteUnit, now_ns: int) -> Collection[int]:
        """What the policies do not want; what is pinned or tagged here counts as pinned there."""
        held = {*unit.pins, *self._histories.pins(unit.head.unit)}
        held |= {*unit.tags.values(), *self._histories.tags(unit.head.unit).values()}
        candidates = [
            Candidate(
                unit=record.unit,
                number=record.number,
                time_ns=record.time_ns,
                state=record.state,
                step=record.step,
                logical_bytes=record.logical_bytes,
                pinned=record.number in held,
                mirrors_live=record.origin != "pre-image",
                is_preimage=record.origin == "pre-image",
                steps=record.steps,
            )
            for record in unit.versions
        ]
        plan = plan_expiry(candidates, lambda _: self._policies.of(unit.name), now_ns)
        return {number for _, number in plan.order}


def _unit_id(text: str) -> UnitId:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != UNIT_ID_BYTES:
        raise InvalidRequest(f"{text!r} is not the id of a unit ({2 * UNIT_ID_BYTES} hex digits)")
    return UnitId(found)


def _row(name: str, found: Collected, names: dict[UnitId, str], *, dry_run: bool) -> dict[str, Json]:
    forgotten: list[Json] = [
        {"unit": names.get(unit, unit.hex()), "id": unit.hex(), "number": number}
        for unit, number in found.went
    ]
    lost: list[Json] = [
        {"unit": names.get(unit, unit.hex()), "id": unit.hex(), "number": number or None, "why": why}
        for unit, number, why in found.lost
    ]
    return {
        "remote": name,
        "dry_run": dry_run,
        "called_off": found.is_off,
        "forgotten": forgotten,
        "lost": lost,
        "freed_bytes": found.removed_bytes,
        "freed_objects": found.removed_packs + found.removed_shards,
        "unfinished_objects": found.unfinished.count,
        "unfinished_bytes": found.unfinished.size_bytes,
        "copied_bytes": found.copied_bytes,
        "kept_bytes": found.kept_bytes,
    }
