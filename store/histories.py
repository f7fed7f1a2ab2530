"""The histories of all units: their versions, tags and pins, and the units' names.

One rule: a record is a synced frame of the unit's history file before it is a row of the index.
The append and sync of a VERSION frame is the commit point of a publish; the rows only mirror the
file, and what they lack is taken from it when the store is opened (with an empty index that is
everything: rebuild). With a key, a seal follows the records of each append, in the same write.

Source: FORMAT.md, "History".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from ckptfs.store.digests import FileDigests, encode_digests
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Conflict, Corrupt, NoSpace, NotFound
from ckptfs.store.history import (
    GENESIS,
    MarkRecord,
    RecordKind,
    State,
    UnitRecord,
    VersionRecord,
    decode_version,
)
from ckptfs.store.history_log import HistoryLog
from ckptfs.store.history_mirror import Mirror, put_mark, put_version, version_key, version_of
from ckptfs.store.history_proof import Evidence
from ckptfs.store.history_scan import scan_history, whole_batches
from ckptfs.store.history_writer import HistoryWriter
from ckptfs.store.ids import UNIT_ID_BYTES, RecipeId, UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.keyring import Keyring
from ckptfs.store.layout import ROTATIONS, add_ro_compat
from ckptfs.store.signing import PublicKey, SigningKey
from ckptfs.store.units import Unit, UnitHints, encode_unit, shown_names, unit_of
from ckptfs.store.version_names import check_tag

__all__ = ["Histories", "Unit"]


class Histories:
    """Every method belongs to the index thread.

    `problems` is what was found damaged at opening; the units concerned can still be read.
    In memory only: hints from inodes and names to units, and per unit how far back from which
    version the newest complete one was searched for, and the records whose rows may be missing.
    """

    def __init__(
        self,
        disk: Disk,
        index: Index,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        read_only: bool = False,
        key: Keyring | SigningKey | None = None,
    ) -> None:
        """`read_only`: show what the index has, touch no file. `key` seals what is appended."""
        keyring = key if isinstance(key, Keyring) else Keyring(key)
        self._index = index
        self._clock_ns = clock_ns
        self._read_only = read_only
        self._log = HistoryLog(disk)
        self._writer = HistoryWriter(self._log, clock_ns, keyring, lambda: add_ro_compat(disk, ROTATIONS))
        self._hints = UnitHints()
        self._complete: dict[UnitId, tuple[int, int]] = {}
        self._appended: dict[bytes, VersionRecord] = {}
        self.problems: list[Corrupt] = []
        if not read_only:
            self._log.prepare()
            self._recover()
        for unit in self.units():
            self._hints.add(unit)

    # ---- units ------------------------------------------------------------------------------

    def new_unit(
        self, unit_id: UnitId, name: bytes, ino: int, time_ns: int, change: Change | None = None
    ) -> Unit:
        """A new unit. Its row is applied, or put into `change` if that is given.

        Durable when: this returned (the file), and the change is synced (the row). NoSpace if
        there is no room; nothing is left behind.
        """
        assert len(unit_id) == UNIT_ID_BYTES and name and not self._read_only
        unit = Unit(unit_id, name, ino, 1, GENESIS, 0, time_ns, 0, name, time_ns, 0, GENESIS)
        unit = self._writer.create(unit, UnitRecord(unit_id, name, time_ns).encode())
        if change is not None:
            change.put(Table.UNIT, unit_id, encode_unit(unit))
        else:
            own = Change()
            own.put(Table.UNIT, unit_id, encode_unit(unit))
            try:
                self._index.apply(own)
            except CkptfsError:
                self._log.remove(unit_id)
                raise
        self._hints.add(unit)
        return unit

    def unit(self, unit_id: UnitId) -> Unit | None:
        """The unit of this id."""
        unit = self._row(unit_id)
        if unit is not None and self._log.end(unit_id) > unit.file_bytes:
            # A frame is in the file whose change was refused afterwards (disk full): the file is right.
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
        return [unit_of(value) for _, value in self._index.scan(Table.UNIT)]

    def shown_names(self) -> dict[bytes, Unit]:
        """Units by the names they are shown under; removed ones without a version are left out."""
        return shown_names(u for u in self.units() if u.ino or self._newest_number(u.unit) is not None)

    def rebind(self, unit_id: UnitId, ino: int, name: bytes, change: Change) -> None:
        """The unit was moved or renamed, removed (`ino` 0), or made again. The row goes into `change`.

        A new name is also recorded in the history: at once if that works, else with the unit's
        next frame or at the next start. A full disk never keeps anybody from renaming.
        """
        unit = self._current(unit_id, change)
        self._hints.reset(self._row(unit_id) or unit)
        unit = replace(unit, ino=ino, name=name, bound_ns=self._clock_ns())
        try:
            unit = self._append(unit)
        except (CkptfsError, OSError):
            pass
        self._hints.add(unit)
        change.put(Table.UNIT, unit_id, encode_unit(unit))

    # ---- versions ---------------------------------------------------------------------------

    def append_version(self, record: VersionRecord, change: Change) -> None:
        """Add a version, whose rows go into `change`; the caller applies that with sync=True.

        `record` carries the unit's `next_number` and `head`; Conflict if another version was made
        in between. Durable when: this returned. NoSpace: nothing has changed. ReadOnly: the
        history could not be synced, now or before, and takes nothing more until the next start.
        """
        unit = self._current(record.unit, change)
        if (record.number, record.before) != (unit.next_number, unit.head):
            raise Conflict(f"version {record.number} of {unit.text} was overtaken by another; try again")
        encoded = record.encode()
        assert decode_version(encoded) == record, "a version record does not decode to itself"
        key = version_key(record.unit, record.number)
        # If a broken writer refuses this one, an earlier one of the same number may be in the file.
        self._appended.setdefault(key, record)
        try:
            unit = self._append(unit, (RecordKind.VERSION, encoded))
        except NoSpace:
            del self._appended[key]
            raise
        change.put(Table.UNIT, record.unit, encode_unit(put_version(unit, record, change)))

    def append_record(self, unit_id: UnitId, kind: RecordKind, payload: bytes, change: Change) -> None:
        """Append a record that is no version; `change` has its rows, and is applied. Durable when: this
        returned. NoSpace, ReadOnly: as append_version."""
        unit = self._append(self._current(unit_id, change), (kind, payload))
        change.put(Table.UNIT, unit_id, encode_unit(unit))
        self._index.apply(change, sync=True)

    def unlisted(self) -> list[VersionRecord]:
        """Versions that are, or may be, in their file, and not in the index: their rows were refused, or
        the sync failed. The next start at the latest lists them, so what they name must stay."""
        rows = {key: self._index.get(Table.VERSION, key) for key in self._appended}
        self._appended = {key: self._appended[key] for key, row in rows.items() if row is None}
        return list(self._appended.values())

    def has_version(self, unit_id: UnitId, number: int) -> bool:
        """Whether there is a version `number`."""
        return self._index.get(Table.VERSION, version_key(unit_id, number)) is not None

    def version(self, unit_id: UnitId, number: int) -> VersionRecord | None:
        """Version `number`, None if there is none or it was forgotten."""
        value = self._index.get(Table.VERSION, version_key(unit_id, number))
        return None if value is None else version_of(value)

    def versions(self, unit_id: UnitId) -> list[VersionRecord]:
        """All versions, oldest first. About 5 µs each."""
        return [version_of(value) for _, value in self._index.scan(Table.VERSION, unit_id)]

    def numbers(self, unit_id: UnitId) -> list[int]:
        """The numbers of all versions, in order."""
        return [
            int.from_bytes(key[UNIT_ID_BYTES:], "big") for key, _ in self._index.scan(Table.VERSION, unit_id)
        ]

    def newest(self, unit_id: UnitId) -> VersionRecord | None:
        """The newest version, whatever its state."""
        number = self._newest_number(unit_id)
        return None if number is None else self.version(unit_id, number)

    def newest_complete(self, unit_id: UnitId) -> VersionRecord | None:
        """The newest version in which nothing is missing."""
        newest = self._newest_number(unit_id) or 0
        found, searched = self._complete.get(unit_id, (0, 0))
        if found and not self.has_version(unit_id, found):
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
        self._appended.pop(version_key(unit_id, number), None)

    def evidence(self, unit_id: UnitId) -> Evidence:
        """What there is of a unit on the disk, for `prove`."""
        tables = (Table.VERSION, Table.TAG, Table.PIN, Table.WRITERS, Table.MERGE)
        rows = {(table, key): value for table in tables for key, value in self._index.scan(table, unit_id)}
        return Evidence(unit_id, self.unit(unit_id), self._log.read_all(unit_id), rows)

    def differing_digests(self, said: Iterable[tuple[RecipeId, FileDigests]]) -> list[RecipeId]:
        """The contents of which the index has other digests than a history says."""
        rows = ((recipe, self._index.get(Table.DIGEST, recipe), one) for recipe, one in said)
        return [recipe for recipe, row, one in rows if row is not None and row != encode_digests(one)]

    def history_bytes(self, unit: Unit) -> bytes:
        """A unit's history file as far as it is mirrored: whole batches."""
        return self._log.read_all(unit.unit)[: unit.file_bytes]

    def head(self, unit: Unit) -> tuple[bytes, PublicKey | None]:
        """The chain value behind a unit's last record, and the key in the seal of that, if it has one."""
        return self._writer.chain(unit), self._writer.last_key(unit)

    def record_rotation(self, unit_id: UnitId) -> None:
        """Have a history say that it goes on with the key in use, if it does not say so yet; one that cannot
        be written now says it before its next record. Durable when: this returned."""
        unit = self.unit(unit_id)
        if unit is not None and self._writer.rotations_due(unit):
            self._record_change(unit)

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

    # ---- the file and its mirror ------------------------------------------------------------

    def _row(self, unit_id: UnitId) -> Unit | None:
        encoded = self._index.get(Table.UNIT, unit_id)
        return None if encoded is None else unit_of(encoded)

    def _current(self, unit_id: UnitId, change: Change) -> Unit:
        """The unit as `change` will leave it, so that one change may hold several steps."""
        for table, key, value in reversed(change.operations):
            if table == Table.UNIT and key == unit_id and value is not None:
                return unit_of(value)
        unit = self.unit(unit_id)
        if unit is None:
            raise NotFound(f"there is no unit {unit_id.hex()}")
        return unit

    def _newest_number(self, unit_id: UnitId) -> int | None:
        key = self._index.last_key(Table.VERSION, unit_id)
        return None if key is None else int.from_bytes(key[UNIT_ID_BYTES:], "big")

    def _require(self, unit_id: UnitId, number: int) -> None:
        if not self.has_version(unit_id, number):
            raise NotFound(f"there is no version {number}; `ckptfs log` lists what there is")

    def _mark(self, kind: RecordKind, unit_id: UnitId, number: int, name: str = "") -> None:
        change, mark = Change(), MarkRecord(number, name, self._clock_ns())
        put_mark(kind, unit_id, mark, change)
        self.append_record(unit_id, kind, mark.encode(), change)

    def _append(self, unit: Unit, *records: tuple[RecordKind, bytes]) -> Unit:
        assert not self._read_only, "the histories are open for reading only"
        return self._writer.append(unit, *records)

    def _recover(self) -> None:
        """Mirror what the files have and the index lacks; cost is one stat per unit that is in order."""
        rows = {unit.unit: unit for unit in self.units()}
        sizes = self._log.sizes()
        for unit_id in sorted(rows.keys() | sizes.keys()):
            unit, size = rows.get(unit_id), sizes.get(unit_id, 0)
            if unit is not None and size < unit.file_bytes:
                lost = f"the history of {unit.text} has lost its last {unit.file_bytes - size} bytes"
                self.problems.append(self._log.corrupt(unit_id, size, lost, final=True))
                continue
            if unit is None or size > unit.file_bytes:
                unit = self._mirror(unit_id, unit, whole=unit is not None and unit.sealed)
            if unit is not None and unit.name != unit.recorded:
                self._record_change(unit)

    def _record_change(self, unit: Unit) -> None:
        change = Change()
        try:
            change.put(Table.UNIT, unit.unit, encode_unit(self._append(unit)))
            self._index.apply(change)
        except (CkptfsError, OSError):
            pass  # As in rebind: it is recorded when there is room again.

    def _mirror(self, unit_id: UnitId, unit: Unit | None, *, whole: bool = False) -> Unit | None:
        """Bring the rows of a unit up to its file; cut a torn tail off. None: the file held nothing.

        `whole`: records without their seal are a torn tail too.
        """
        start = unit.file_bytes if unit is not None else 0
        tail = self._log.read_behind(unit_id, start)
        scan = scan_history(tail, unit.frames if unit is not None else 0)
        if whole:
            scan = whole_batches(scan)
        if unit is None and not scan.frames:
            problem = self._log.drop_empty(unit_id, tail)
            self.problems += [] if problem is None else [problem]
            return None
        for offset, right in scan.mended:
            self._log.mend(unit_id, start + offset, right)
            what = "a flipped bit of a history was put right"
            self.problems.append(self._log.corrupt(unit_id, start + offset, what))
        # A process that was killed may have written them and not synced them: nothing is listed before.
        self._log.cut(unit_id, start + scan.end)
        change = Change()
        mirror = Mirror(unit_id, unit, scan, change)
        self.problems += [self._log.corrupt(unit_id, offset, what) for offset, what in mirror.problems]
        change.put(Table.UNIT, unit_id, encode_unit(mirror.unit))
        self._index.apply(change)
        self._hints.add(mirror.unit)
        return mirror.unit
