"""Which versions of which nodes a merge is of. Pure.

One rule: a node that has the run and is left out is named, and so is why.

Source: FORMAT.md, "Remotes", "Merging".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.store.errors import InvalidRequest, NotFound
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.catalogue import RemoteUnit
from ckptfs.store.version_names import check_tag

_STEP = re.compile(r"step[:-]([0-9]{1,18})")
_SHOWN_STEPS = 5


@dataclass(frozen=True, slots=True)
class Chosen:
    """A version that goes in; `label` is what its node is called, with a part of the unit's id where several
    units are of nodes of one name."""

    label: str
    unit: RemoteUnit
    record: VersionRecord


@dataclass(frozen=True, slots=True)
class Choice:
    """The versions, in the order in which one goes before another, of which the first `preferred` were
    preferred; their step (None: they are of a tag and tell none); who has none, in sentences; and what
    newer steps there are."""

    chosen: tuple[Chosen, ...]
    preferred: int
    step: int | None
    lacking: tuple[str, ...]
    newer: tuple[int, ...]


def choose(units: Sequence[RemoteUnit], version: str, nodes: Sequence[str], prefer: Sequence[str]) -> Choice:
    """Choose of the units of one name on a remote. `version`: `step:N` or a tag. `nodes`: of these only;
    `prefer`: these go first; both by name or unit id.

    NotFound: no such node, or nobody has such a version. InvalidRequest: `version` is of one node only (a
    number, a time).
    """
    units = _of_nodes(units, nodes)
    match = _STEP.fullmatch(version)
    step: int | None
    if match is None:
        chosen, step = _tagged(units, version)
    else:
        step = int(match[1])
        chosen = {unit.head.unit: found for unit in units if (found := _of_step(unit, step)) is not None}
    having = [unit for unit in units if unit.head.unit in chosen]
    what = f"step {step}" if match is not None else f"tag {version!r}"
    if not having:
        raise NotFound(f"no node has a version of {what}; {_steps_told(units)}")
    labels = _labels(units)
    order = sorted(having, key=lambda unit: (_rank(unit, prefer), unit.head.node, unit.head.unit))
    for name in prefer:
        if not any(_is_called(unit, name) for unit in having):
            raise NotFound(f"{name!r} has no version of {what}; {_steps_told(units)}")
    there = {unit.head.node for unit in having}
    lacking = {
        unit.head.node: f"{unit.head.node} has no version of {what} there ({_told(unit)})"
        for unit in units
        if unit.head.node not in there
    }
    newer = {found for unit in units for found in _steps_of(unit) if step is not None and found > step}
    return Choice(
        tuple(Chosen(labels[unit.head.unit], unit, chosen[unit.head.unit]) for unit in order),
        sum(_rank(unit, prefer) < len(prefer) for unit in having),
        step,
        tuple(lacking[node] for node in sorted(lacking)),
        tuple(sorted(newer)),
    )


def common_steps(units: Sequence[RemoteUnit], nodes: Sequence[str]) -> list[int]:
    """The steps that every node has which has any version at all (or every one of `nodes`), the newest first.
    InvalidRequest if there is none, NotFound if there is no such node."""
    units = _of_nodes(units, nodes)
    of_node: dict[str, set[int]] = {}
    for unit in units:
        if unit.versions:
            of_node.setdefault(unit.head.node, set()).update(_steps_of(unit))
    common = set.intersection(*of_node.values()) if of_node else set()
    if not common:
        raise InvalidRequest(
            f"there is no step that all nodes have; {_steps_told(units)}. Name one with PATH@step:N, or give "
            "the versions one tag and name that; `ckptfs publish --step N` says what a version is of"
        )
    return sorted(common, reverse=True)


def _of_nodes(units: Sequence[RemoteUnit], nodes: Sequence[str]) -> list[RemoteUnit]:
    there = ", ".join(sorted({f"{unit.head.node} ({unit.head.unit.hex()})" for unit in units}))
    for name in nodes:
        if not any(_is_called(unit, name) for unit in units):
            raise NotFound(f"it was not copied by {name!r}; it was by {there}")
    return [unit for unit in units if not nodes or any(_is_called(unit, name) for name in nodes)]


def _is_called(unit: RemoteUnit, name: str) -> bool:
    return name in (unit.head.node, unit.head.unit.hex())


def _rank(unit: RemoteUnit, prefer: Sequence[str]) -> int:
    return next((at for at, name in enumerate(prefer) if _is_called(unit, name)), len(prefer))


def _labels(units: Sequence[RemoteUnit]) -> dict[UnitId, str]:
    of_name = Counter(unit.head.node for unit in units)
    return {
        unit.head.unit: unit.head.node
        if of_name[unit.head.node] == 1
        else f"{unit.head.node}-{unit.head.unit.hex()[:8]}"
        for unit in units
    }


# ---- steps ---------------------------------------------------------------------------------------


def _steps_of(unit: RemoteUnit) -> set[int]:
    found = {record.step for record in unit.versions if record.step is not None}
    return found | {
        step for record in unit.versions if record.state is State.COMPLETE for step in record.steps
    }


def _of_step(unit: RemoteUnit, step: int) -> VersionRecord | None:
    """The newest complete version that stands for a step, else the newest that does, else the newest
    complete one that holds it intact."""
    newest_first = unit.versions[::-1]
    stands = [record for record in newest_first if record.step == step]
    whole = [record for record in stands if record.state is State.COMPLETE]
    holds = [record for record in newest_first if record.state is State.COMPLETE and step in record.steps]
    return next(iter((*whole, *stands, *holds)), None)


def _tagged(units: Sequence[RemoteUnit], tag: str) -> tuple[dict[UnitId, VersionRecord], int | None]:
    """The version of each unit that has a tag, and their one step."""
    try:
        check_tag(tag)
    except InvalidRequest:
        raise InvalidRequest(
            f"each node counts its own versions, so a merge is not of {tag!r}; name a step (PATH@step:N) or "
            "a tag that all of them have"
        ) from None
    chosen = {
        unit.head.unit: record
        for unit in units
        for record in unit.versions
        if unit.tags.get(tag) == record.number
    }
    steps = {record.step for record in chosen.values() if record.step is not None}
    if len(steps) > 1:
        told = ", ".join(str(step) for step in sorted(steps))
        raise InvalidRequest(f"the versions that are tagged {tag!r} are of several steps: {told}")
    return chosen, next(iter(steps), None)


def _steps_told(units: Sequence[RemoteUnit]) -> str:
    return ", ".join(f"{unit.head.node}: {_told(unit)}" for unit in units)


def _told(unit: RemoteUnit) -> str:
    """What a unit has instead."""
    if not unit.versions:
        return "none was copied; with `partial = true` in its [[remote]] those with some ranks are, too"
    steps = sorted(_steps_of(unit))
    if not steps:
        return "its versions tell no step"
    before = "…, " if len(steps) > _SHOWN_STEPS else ""
    return f"steps {before}{', '.join(str(step) for step in steps[-_SHOWN_STEPS:])}"
