"""Which ranks of a run wrote what a merge is of, as far as their processes told. Pure.

One rule: nothing is decided by it. In many jobs only some ranks write, and what a process says of itself
proves nothing; but where the format does not tell which ranks there are, people can judge.

Source: FORMAT.md, "Writers" and "Merging".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptfs.daemon.merge_choice import Chosen
from ckptfs.store.errors import Corrupt
from ckptfs.store.history import RecordKind
from ckptfs.store.writers import Writer, decode_writers

_MOST_RANKS = 1 << 20
_RANK = ("RANK", "SLURM_PROCID")
_WORLD = ("WORLD_SIZE", "SLURM_NTASKS")


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks there are (the most that a process told), and those that wrote."""

    world: int
    wrote: frozenset[int]

    @property
    def silent(self) -> tuple[int, ...]:
        """Those of which nothing is in the versions."""
        return tuple(rank for rank in range(self.world) if rank not in self.wrote)


def ranks_of(chosen: Sequence[Chosen]) -> Ranks | None:
    """The ranks that wrote these versions; a save may have come in several, so those of the same step before
    them count. None if no process told that it is one of several."""
    worlds: set[int] = set()
    wrote: set[int] = set()
    for writer in (writer for one in chosen for writer in _writers(one)):
        ids = dict(writer.ids)
        rank, world = _number(ids, _RANK), _number(ids, _WORLD)
        if rank is not None and world is not None and rank < world:
            worlds.add(world)
            wrote.add(rank)
    world = max(worlds, default=0)
    return Ranks(world, frozenset(wrote)) if world > 1 else None


def spans_text(numbers: Iterable[int]) -> str:
    """ "0, 4-7": rising numbers in a few words."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _writers(one: Chosen) -> Iterable[Writer]:
    before = [
        version.number
        for version in one.unit.versions
        if version.number < one.record.number and version.step != one.record.step
    ]
    numbers = range(max(before, default=0) + 1, one.record.number + 1)
    for frame in one.unit.scan.frames:
        if frame.kind == RecordKind.WRITERS:
            try:
                record = decode_writers(frame.payload)
            except Corrupt:
                continue  # the check of the history names it
            if record.number in numbers:
                yield from record.writers


def _number(ids: Mapping[str, str], names: Iterable[str]) -> int | None:
    text = next((ids[name] for name in names if name in ids), "")
    if not (text.isascii() and text.isdigit() and len(text) <= 8):
        return None
    return min(int(text), _MOST_RANKS)
