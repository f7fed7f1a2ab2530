"""A unit's history file against the rows of the index that mirror it; each is the other's second copy.

One rule: the file decides, and a row of a version is believed only where the file's own record of it
cannot be read. Records are put right in their place; a history never changes its length here.

Source: FORMAT.md, "History". `check_history_file` is for any thread, the rest for the index thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.frames import encode_frame
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.history_log import HistoryLog, history_path
from ckptfs.store.history_mirror import Mirror, version_of
from ckptfs.store.history_scan import HistoryScan, scan_history
from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.scrub_state import Finding
from ckptfs.store.units import Unit, encode_unit, unit_of

_MIRRORED = (Table.VERSION, Table.TAG, Table.PIN, Table.WRITERS, Table.MERGE)
_TRIES = 3


@dataclass(slots=True)
class HistoryFile:
    """What a file holds: `rows` as the index should have them, `unit` as after the last record.

    `lost` are (start, end) ranges that hold no record, `mended` (start, bytes) of what was put right.
    """

    unit: Unit
    rows: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    lost: list[tuple[int, int]] = field(default_factory=list)
    mended: list[tuple[int, bytes]] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)


def check_history_file(disk: Disk, unit: Unit, records: list[VersionRecord]) -> HistoryFile:
    """Read the part of a file that `unit`'s row says is mirrored. `records`: versions by the index.

    OSError if it cannot be read.
    """
    encoded = HistoryLog(disk).read_behind(unit.unit, 0)[: unit.file_bytes].ljust(unit.file_bytes, b"\0")
    scan = scan_history(encoded, 0)
    mended, lost = list(scan.mended), []
    ranges = scan.damaged + ([(scan.end, len(encoded))] if scan.end < len(encoded) else [])
    patched = bytearray(encoded)
    for start, end in ranges:
        right = _from_rows(scan, start, end, records)
        if right is None:
            lost.append((start, end))
        else:
            mended.append((start, right))
            patched[start:end] = right
    change = Change()
    whole = scan_history(bytes(patched), 0)
    mirror = Mirror(unit.unit, None, HistoryScan(whole.frames, whole.end, []), change)
    found = HistoryFile(mirror.unit, lost=lost, mended=mended, problems=mirror.problems)
    for table, key, value in change.operations:
        if value is None:
            found.rows.pop((table, key), None)
        else:
            found.rows[table, key] = value
    return found


def _from_rows(scan: HistoryScan, start: int, end: int, records: list[VersionRecord]) -> bytes | None:
    """The VERSION frame that stood in a damaged range, if the index has its record."""
    before = [f for f, at in zip(scan.frames, scan.starts, strict=True) if at < start]
    sequence = before[-1].sequence + 1 if before else 1
    for record in records:
        frame = encode_frame(RecordKind.VERSION, sequence, record.encode())
        # The number must be new: a row of a version whose frame is whole stood somewhere else.
        if len(frame) == end - start and not _has(scan, record):
            return frame
    return None


def _has(scan: HistoryScan, record: VersionRecord) -> bool:
    encoded = record.encode()
    return any(frame.kind == RecordKind.VERSION and frame.payload == encoded for frame in scan.frames)


def settle_history(disk: Disk, index: Index, unit_id: UnitId, file: HistoryFile) -> list[Finding]:
    """Put right what can be: the file's records, then the index's rows. No other step in between."""
    path = history_path(unit_id)
    found: list[Finding] = []
    for start, right in file.mended:
        HistoryLog(disk).mend(unit_id, start, right)
        found.append(Finding(f"{path} at byte {start}", "a record was damaged", healed=True))
    found += [
        Finding(f"{path} at byte {start}", f"{end - start} bytes hold no record") for start, end in file.lost
    ]
    found += [Finding(f"{path} at byte {at}", what) for at, what in file.problems]
    if not file.lost and not file.problems:
        wrong = _settle_rows(index, unit_id, file)
        found += [Finding("index", f"{what} differed from {path}", healed=True) for what in wrong]
    return found


def _settle_rows(index: Index, unit_id: UnitId, file: HistoryFile) -> list[str]:
    """Make the rows what the file says; which were not."""
    change = Change()
    wrong = []
    for table in _MIRRORED:
        have = dict(index.scan(table, unit_id))
        want = {key: value for (number, key), value in file.rows.items() if number == table}
        for key in have.keys() | want.keys():
            if have.get(key) == want.get(key):
                continue
            wrong.append(f"the row {table.name} {key.hex()}")
            value = want.get(key)
            change.delete(table, key) if value is None else change.put(table, key, value)
    wrong += _settle_contents(index, file, change)
    encoded = index.get(Table.UNIT, unit_id)
    if encoded is not None:
        unit = unit_of(encoded)
        right = replace(
            unit, next_number=file.unit.next_number, head=file.unit.head, frames=file.unit.frames,
            created_ns=file.unit.created_ns, newest_ns=file.unit.newest_ns,
            chain=file.unit.chain if unit.chain else b"", sealed=file.unit.sealed,
        )  # fmt: skip
        if right != unit:
            wrong.append(f"the row of unit {unit.text}")
            change.put(Table.UNIT, unit_id, encode_unit(right))
    if change.operations:
        index.apply(change)
    return wrong


def _settle_contents(index: Index, file: HistoryFile, change: Change) -> list[str]:
    """The same for rows of DIGEST and HEALTH. Those of contents that are gone went with them; if such a
    content was saved anew, its row is put back, and nothing was wrong."""
    wrong = []
    for (number, recipe), value in file.rows.items():
        table = Table(number)
        if table not in (Table.DIGEST, Table.HEALTH):
            continue
        have = index.get(table, recipe)
        if have == value or index.get(Table.CHUNK, recipe) is None:
            continue
        change.put(table, recipe, value)
        if have is not None:
            wrong.append(f"the row {table.name} {recipe.hex()}")
    return wrong


def records_of(index: Index, unit_id: UnitId) -> list[VersionRecord]:
    """The versions of a unit as far as their rows can be read."""
    records = []
    for _, value in index.scan(Table.VERSION, unit_id):
        try:
            records.append(version_of(value))
        except CkptfsError:
            continue
    return records
