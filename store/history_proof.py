"""The proof of a unit: its history is what was signed, and the index shows what the history says.

One rule: the history decides. What people see comes from the rows of the index, so a row that says
something else is a finding too.

Source: FORMAT.md, "Seals" and "Rows of the index".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfs.store.errors import Corrupt
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_check import Fault, Finding, HistoryReport, check_history, digests_in
from ckptfs.store.history_mirror import Mirror, version_of
from ckptfs.store.history_scan import HistoryScan, scan_history, whole_batches
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.index import Change, Table
from ckptfs.store.seal import Head
from ckptfs.store.signing import PublicKey
from ckptfs.store.units import Unit

_Rows = Mapping[tuple[Table, bytes], bytes]
_LABELS = {
    Table.VERSION: "version",
    Table.PIN: "pin of version",
    Table.WRITERS: "writers of version",
    Table.MERGE: "sources of version",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """The history file of a unit, byte for byte, and the rows of the index that mirror it."""

    unit_id: UnitId
    unit: Unit | None
    encoded: bytes
    rows: _Rows


def prove(
    evidence: Evidence,
    keys: Sequence[PublicKey],
    expected: Head | None = None,
    retired: Collection[PublicKey] = (),
) -> HistoryReport:
    """Check a history and its mirror; see check_history. Touches no disk, so any thread may do it."""
    scan, unit = scan_history(evidence.encoded, 0), evidence.unit
    if unit is not None and unit.sealed and scan.frames and scan.frames[-1].sequence > unit.frames:
        # As the next start will take it: what lost its seal behind the mirrored part is not there.
        scan = whole_batches(scan)
    report = check_history(evidence.unit_id, scan, keys, expected, retired)
    report.findings += differences(evidence, scan)
    report.digests = digests_in(scan.frames)
    return report


def doubt_of(found: HistoryReport, record: VersionRecord) -> str | None:
    """Why a report does not say that a version is signed with a key that was accepted; None: it does."""
    wrong = next((one.message for one in found.findings if one.number == record.number), None)
    signer = next((one.key for one in found.versions if one.number == record.number), None)
    if wrong is None and signer not in found.accepted:
        wrong = f"version {record.number} is not signed with a key that is known here"
    return wrong


def differences(evidence: Evidence, scan: HistoryScan) -> Iterator[Finding]:
    """Where the index says something else than the part of the history that it mirrors."""
    unit = evidence.unit
    if unit is None:
        yield Finding(Fault.INDEX, None, "the index does not know this unit")
        return
    if len(evidence.encoded) < unit.file_bytes:
        lost = unit.file_bytes - len(evidence.encoded)
        yield Finding(
            Fault.REMOVED, None, f"the history has lost its last {lost} bytes, which the index knows"
        )
    frames = [frame for frame in scan.frames if frame.sequence <= unit.frames]
    change = Change()
    mirror = Mirror(evidence.unit_id, None, HistoryScan(frames, scan.end, []), change)
    said = mirror.unit
    if (said.recorded, said.next_number, said.head) != (unit.recorded, unit.next_number, unit.head):
        message = "the index has another name, newest version or link for this unit than its history"
        yield Finding(Fault.INDEX, None, message)
    if unit.chain and unit.chain != said.chain:
        yield Finding(Fault.INDEX, None, "the index has another chain value than the history")
    yield from _row_differences(_rows_of(change), evidence.rows)


def _rows_of(change: Change) -> _Rows:
    rows: dict[tuple[Table, bytes], bytes] = {}
    for table, key, value in change.operations:
        if table in (Table.DIGEST, Table.HEALTH, Table.META):
            continue  # These belong to no unit, or to no history.
        if value is None:
            rows.pop((Table(table), key), None)
        else:
            rows[Table(table), key] = value
    return rows


def _row_differences(said: _Rows, rows: _Rows) -> Iterator[Finding]:
    for place in sorted(said.keys() | rows.keys()):
        expected, found = said.get(place), rows.get(place)
        if found is None:
            how = "the index lacks"
        elif expected is None:
            how = "only the index has"
        elif _is_same(place[0], expected, found):
            continue
        else:
            how = "the index has another"
        number, label = _label(*place)
        yield Finding(Fault.INDEX, number, f"{how} {label}")


def _is_same(table: Table, expected: bytes, found: bytes) -> bool:
    """Rows that an older ckptfs wrote may be other bytes for the same record."""
    if expected == found or table is not Table.VERSION:
        return expected == found
    try:
        return version_of(expected) == version_of(found)
    except Corrupt:
        return False


def _label(table: Table, key: bytes) -> tuple[int | None, str]:
    rest = key[UNIT_ID_BYTES:]
    if table is Table.TAG:
        return None, f"tag {rest.decode('utf-8', 'backslashreplace')!r}"
    number = int.from_bytes(rest, "big")
    return number, f"{_LABELS[table]} {number}"
