"""The histories of all units: their versions, tags and pins, and the units' names.

One rule: a record is a synced frame of the unit's history file before it is a row of the index.
The append and sync of a VERSION frame is the commit point of a publish; the rows only mirror the
file, and what they lack is taken from it when the store is opened (with an empty index that is
everything: rebuild).

Source: FORMAT.md, "History".
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable

import msgspec

from ckptfs.store.disk import Disk
from ckptfs.store.errors import (
    CkptfsError,
    Conflict,
    Corrupt,
    InvalidRequest,
    NoSpace,
    NotFound,
    Place,
    ReadOnly,
)
from ckptfs.store.frames import Frame, encode_frame
from ckptfs.store.history import (
    GENESIS,
    MarkRecord,
    RecordKind,
    State,
    UnitRecord,
    VersionRecord,
    decode_mark,
    decode_unit,
    decode_version,
)
from ckptfs.store.history_scan import scan_history
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.version_names import check_tag

HISTORY_PATH = "history"
_FILE_NAME = re.compile(r"([0-9a-f]{32})\.log")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """A unit as the index knows it.

    `name` is its path below the mount ("run1", "a/b/c", "@root"); `ino` its live directory, 0 once
    that is removed; `head` the link of the newest version, 32 zero bytes before the first.
    `frames` and `file_bytes` say up to where the history file is mirrored, `recorded` which name
    the file gives; `bound_ns` is when name or directory last changed, `newest_ns` the time of the
    newest version.
    """

    unit: UnitId
    name: bytes
    ino: int
    next_number: int
    head: bytes
    frames: int
    created_ns: int
    file_bytes: int
    recorded: bytes
    bound_ns: int
    newest_ns: int

    @property
    def claim(self) -> tuple[bool, bool, int, bytes]:
        """Orders units of one name: the greatest has the right to it."""
        return (self.ino != 0, self.next_number > 1, self.bound_ns, self.unit)


class _Hints:
    """Which units may have a key; the row decides. So a change that never was applied does no harm."""

    __slots__ = ("_units",)

    def __init__(self) -> None:
        self._units: dict[int | bytes, list[UnitId]] = {}

    def add(self, key: int | bytes, unit: UnitId) -> None:
        units = self._units.setdefault(key, [])
        if unit not in units:
            units.append(unit)

    def drop(self, key: int | bytes, unit: UnitId) -> None:
        units = self._units.get(key, [])
        if unit in units:
            units.remove(unit)
        if not units:
            self._units.pop(key, None)

    def units(self, key: int | bytes) -> list[UnitId]:
        return self._units.get(key, [])


_encoder = msgspec.msgpack.Encoder()
_unit_decoder = msgspec.msgpack.Decoder(Unit)
_version_decoder = msgspec.msgpack.Decoder(VersionRecord)


def history_path(unit: UnitId) -> str:
    """Where a unit's history lies, below the store root."""
    return f"{HISTORY_PATH}/{unit.hex()}.log"


def _key(unit: UnitId, number: int) -> bytes:
    return unit + number.to_bytes(8, "big")


class Histories:
    """Every method belongs to the index thread.

    `problems` is what was found damaged at opening; the units concerned can still be read.
    In memory only: hints from inodes and names to units, how long each file is that was appended
    to, which writers are broken, and how far each unit was searched for its newest complete version.
    """

    def __init__(
        self,
        disk: Disk,
        index: Index,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        read_only: bool = False,
    ) -> None:
        self._disk = disk
        self._index = index
        self._clock_ns = clock_ns
        self._read_only = read_only
        self.problems: list[Corrupt] = []
        self._hints = _Hints()
        self._ends: dict[UnitId, int] = {}
        self._broken: dict[UnitId, str] = {}
        self._complete: dict[UnitId, tuple[int, int]] = {}
        if not read_only:
            self._recover()
        for unit in self.units():
            self._hint(unit)

    # ---- units ------------------------------------------------------------------------------

    def new_unit(
        self, unit_id: UnitId, name: bytes, ino: int, time_ns: int, change: Change | None = None
    ) -> Unit:
        """A new unit. Its row is applied, or put into `change` if that is given.

        Durable when: this returned (the file), and the change is synced (the row). NoSpace if
        there is no room; nothing is left behind.
        """
        assert len(unit_id) == UNIT_ID_BYTES
        frame = encode_frame(RecordKind.UNIT, 1, UnitRecord(unit_id, name, time_ns).encode())
        unit = Unit(unit_id, name, ino, 1, GENESIS, 1, time_ns, len(frame), name, time_ns, 0)
        own = Change() if change is None else change
        self._create_file(unit_id, frame)
        own.put(Table.UNIT, unit_id, _encoder.encode(unit))
        if change is None:
            try:
                self._index.apply(own)
            except NoSpace:
                self._disk.unlink(history_path(unit_id))
                raise
        self._hint(unit)
        return unit

    def unit(self, unit_id: UnitId) -> Unit | None:
        """The unit of this id."""
        unit = self._row(unit_id)
        if unit is not None and self._ends.get(unit_id, 0) > unit.file_bytes:
            # A frame was written whose change was then refused (disk full): the file is right.
            self._mirror(unit_id, unit)
            unit = self._row(unit_id)
        return unit

    def unit_of_ino(self, ino: int) -> Unit | None:
        """The unit whose live directory this is."""
        for unit_id in self._hints.units(ino):
            unit = self.unit(unit_id)
            if unit is not None and unit.ino == ino:
                return unit
        return None

    def unit_named(self, name: bytes) -> Unit | None:
        """The unit that has a name: the live one, else the one that had it last."""
        units = [self.unit(unit_id) for unit_id in self._hints.units(name)]
        named = [unit for unit in units if unit is not None and unit.name == name]
        return max(named, key=lambda unit: unit.claim, default=None)

    def units(self) -> list[Unit]:
        """Every unit that ever was, in the order of their ids."""
        return [self._decode_unit(value) for _, value in self._index.scan(Table.UNIT)]

    def shown_names(self) -> dict[bytes, Unit]:
        """Units by the names they are shown under; removed ones without a version are left out.

        Of several units of one name the live or latest one has it, the others are NAME~ and the
        first 8 hex digits of their id.
        """
        shown: dict[bytes, Unit] = {}
        for unit in sorted(self.units(), key=lambda unit: unit.claim, reverse=True):
            if unit.ino == 0 and self._newest_number(unit.unit) is None:
                continue
            name, digits = unit.name, 8
            while name in shown and digits <= 2 * UNIT_ID_BYTES:
                name, digits = unit.name + b"~" + unit.unit.hex()[:digits].encode(), digits + 1
            shown[name] = unit
        return shown

    def rebind(self, unit_id: UnitId, ino: int, name: bytes, change: Change) -> None:
        """The unit was moved or renamed, removed (`ino` 0), or made again. The row goes into `change`.

        A new name is also recorded in the history, at once if that works, else with the unit's
        next frame or at the next start; a full disk never keeps anybody from renaming.
        """
        unit = self._current(unit_id, change)
        committed = self._row(unit_id)
        if committed is not None:
            self._hints.drop(unit.ino if unit.ino != committed.ino else 0, unit_id)
            self._hints.drop(unit.name if unit.name != committed.name else b"", unit_id)
        unit = msgspec.structs.replace(unit, ino=ino, name=name, bound_ns=self._clock_ns())
        if unit.name != unit.recorded:
            try:
                unit = self._append(unit, [])
            except (CkptfsError, OSError):
                pass
        self._hint(unit)
        change.put(Table.UNIT, unit_id, _encoder.encode(unit))

    # ---- versions ---------------------------------------------------------------------------

    def append_version(self, record: VersionRecord, change: Change) -> None:
        """Add a version, whose rows go into `change`; the caller applies that with sync=True.

        `record` carries the unit's `next_number` and `head`; Conflict if another version was made
        in between. Durable when: this returned. NoSpace: nothing has changed. ReadOnly: the
        history could not be synced, now or before, and takes nothing more until the next start.
        """
        unit = self._current(record.unit, change)
        if (record.number, record.before) != (unit.next_number, unit.head):
            raise Conflict(f"version {record.number} of {_text(unit.name)} was overtaken by another; try again")
        encoded = record.encode()
        assert decode_version(encoded) == record, "a version record does not decode to itself"
        unit = self._append(unit, [(RecordKind.VERSION, encoded)])
        self._put_version(unit, record, change)

    def version(self, unit_id: UnitId, number: int) -> VersionRecord | None:
        """Version `number`, None if there is none or it was forgotten."""
        value = self._index.get(Table.VERSION, _key(unit_id, number))
        return None if value is None else self._decode_version(value)

    def versions(self, unit_id: UnitId) -> list[VersionRecord]:
        """All versions, oldest first. About 5 µs each."""
        return [self._decode_version(value) for _, value in self._index.scan(Table.VERSION, unit_id)]

    def numbers(self, unit_id: UnitId) -> list[int]:
        """The numbers of all versions, in order."""
        return [int.from_bytes(key[UNIT_ID_BYTES:], "big") for key, _ in self._index.scan(Table.VERSION, unit_id)]

    def newest(self, unit_id: UnitId) -> VersionRecord | None:
        """The newest version, whatever its state."""
        number = self._newest_number(unit_id)
        return None if number is None else self.version(unit_id, number)

    def newest_complete(self, unit_id: UnitId) -> VersionRecord | None:
        """The newest version in which nothing is missing."""
        newest = self._newest_number(unit_id) or 0
        found, searched = self._complete.get(unit_id, (0, 0))
        if found and self._index.get(Table.VERSION, _key(unit_id, found)) is None:
            found, searched = 0, 0
        record = None
        for number in range(newest, min(searched, newest), -1):
            record = self.version(unit_id, number)
            if record is not None and record.state is State.COMPLETE:
                found = number
                break
        self._complete[unit_id] = (found, newest)
        return self.version(unit_id, found) if found else None

    def forget(self, unit_id: UnitId, number: int) -> None:
        """Let a version go; its number is never used again. Conflict while it is tagged or pinned.

        Durable when: this returned.
        """
        self._require(unit_id, number)
        tags = sorted(tag for tag, tagged in self.tags(unit_id).items() if tagged == number)
        if tags:
            raise Conflict(f"version {number} is tagged {', '.join(tags)}; untag it first")
        if number in self.pins(unit_id):
            raise Conflict(f"version {number} is pinned; unpin it first")
        self._mark(RecordKind.FORGET, unit_id, number)

    # ---- tags and pins ----------------------------------------------------------------------

    def tag(self, unit_id: UnitId, number: int, name: str) -> None:
        """Name a version. Conflict if the tag is that of another version. Durable when: this returned."""
        check_tag(name)
        self._require(unit_id, number)
        tagged = self.tags(unit_id).get(name)
        if tagged == number:
            return
        if tagged is not None:
            raise Conflict(f"the tag {name!r} is that of version {tagged}; untag it first")
        self._mark(RecordKind.TAG, unit_id, number, name)

    def untag(self, unit_id: UnitId, name: str) -> None:
        """Take a tag away; NotFound if there is none of this name. Durable when: this returned."""
        number = self.tags(unit_id).get(name)
        if number is None:
            raise NotFound(f"there is no tag {name!r}")
        self._mark(RecordKind.UNTAG, unit_id, number, name)

    def tags(self, unit_id: UnitId) -> dict[str, int]:
        """Tag → version number."""
        rows = self._index.scan(Table.TAG, unit_id)
        return {key[UNIT_ID_BYTES:].decode(): int.from_bytes(value, "big") for key, value in rows}

    def pin(self, unit_id: UnitId, number: int) -> None:
        """Keep a version whatever retention says. Durable when: this returned."""
        self._require(unit_id, number)
        if number not in self.pins(unit_id):
            self._mark(RecordKind.PIN, unit_id, number)

    def unpin(self, unit_id: UnitId, number: int) -> None:
        """Leave a version to retention again. Durable when: this returned."""
        if number in self.pins(unit_id):
            self._mark(RecordKind.UNPIN, unit_id, number)

    def pins(self, unit_id: UnitId) -> set[int]:
        """The numbers of the pinned versions."""
        return {int.from_bytes(key[UNIT_ID_BYTES:], "big") for key, _ in self._index.scan(Table.PIN, unit_id)}
