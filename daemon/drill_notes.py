"""The last drill of each unit, for status and metrics: kept in the index across restarts.

One rule: it says what the store owner's command has said, and decides nothing.

Source: FORMAT.md, "Drills".
"""

from __future__ import annotations

import time

import msgspec

from ckptfs.daemon.messages import Json, Outcome
from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Index, Table

DRILL = b"drill:"
_MOST_SOURCE = 200


class DrillNote(msgspec.Struct, frozen=True, array_like=True):
    """One drill: of version `number`, got from `source`, ended at `time_ns`; how many seconds it took to have
    the version back."""

    number: int
    time_ns: int
    outcome: Outcome
    source: str
    recovery_s: float

    @property
    def age_s(self) -> float:
        """How long ago it was."""
        return (time.time_ns() - self.time_ns) / 1e9

    def as_json(self) -> Json:
        """As `status` shows it."""
        return {
            "number": self.number,
            "outcome": self.outcome,
            "source": self.source,
            "recovery_s": self.recovery_s,
            "age_s": self.age_s,
        }


_decoder = msgspec.msgpack.Decoder(DrillNote)


class DrillNotes:
    """Belongs to the index thread."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def note(self, unit: UnitId, number: int, outcome: Outcome, source: str, recovery_s: float) -> DrillNote:
        """Keep the result of a drill that has just ended."""
        note = DrillNote(number, time.time_ns(), outcome, source[:_MOST_SOURCE], recovery_s)
        change = Change()
        change.put(Table.META, DRILL + unit, msgspec.msgpack.encode(note))
        self._index.apply(change)
        return note

    def of(self, unit: UnitId) -> DrillNote | None:
        """The last drill of a unit; None if there was none, or a later program noted it otherwise."""
        row = self._index.get(Table.META, DRILL + unit)
        try:
            return None if row is None else _decoder.decode(row)
        except msgspec.DecodeError:
            return None
