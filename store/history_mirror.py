"""The rows of the index that mirror a history file.

One rule: the file decides which versions, tags and pins there are, the row of a live unit what
it is called and where it is: a rename may have reached the file and not the tree.

Source: FORMAT.md, "History" and "Index".
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ckptfs.store.digests import DigestsRecord, decode_digests_record, encode_digests
from ckptfs.store.errors import Corrupt
from ckptfs.store.frames import Frame
from ckptfs.store.health_records import HealthRecord, decode_health_record, encode_content_row
from ckptfs.store.history import (
    GENESIS,
    MarkRecord,
    RecordKind,
    UnitRecord,
    VersionRecord,
    decode_mark,
    decode_unit,
    decode_version,
)
from ckptfs.store.history_scan import HistoryScan
from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Table
from ckptfs.store.keyring import decode_rotation
from ckptfs.store.merge_record import MergeRecord, decode_merge, encode_merge_row
from ckptfs.store.seal import chain_behind, decode_seal
from ckptfs.store.units import Unit
from ckptfs.store.writers import WritersRecord, decode_writers, encode_writers_row

# META `health:` ‖ unit id ‖ number u64be: what the contents of a version add up to. No history says that.
HEALTH_OF = b"health:"

# The index holds records as msgpack: 4 µs to decode where canonical DAG-CBOR takes 70.
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(VersionRecord)


def version_key(unit: UnitId, number: int) -> bytes:
    """The key of a version in VERSION and PIN."""
    return unit + number.to_bytes(8, "big")


def version_of(encoded: bytes) -> VersionRecord:
    """The record in a row of VERSION, or Corrupt."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"the index holds a bad version record: {e}") from None


def put_version(unit: Unit, record: VersionRecord, change: Change) -> Unit:
    """The row of a version; returns its unit after it."""
    change.put(Table.VERSION, version_key(record.unit, record.number), _encoder.encode(record))
    return replace(unit, next_number=record.number + 1, head=record.link(), newest_ns=record.time_ns)


def put_mark(kind: RecordKind, unit_id: UnitId, mark: MarkRecord, change: Change) -> None:
    """The rows of a TAG, UNTAG, PIN, UNPIN or FORGET record."""
    key, tag = version_key(unit_id, mark.number), unit_id + mark.name.encode()
    match kind:
        case RecordKind.TAG:
            change.put(Table.TAG, tag, mark.number.to_bytes(8, "big"))
        case RecordKind.UNTAG:
            change.delete(Table.TAG, tag)
        case RecordKind.PIN:
            change.put(Table.PIN, key, b"")
        case RecordKind.UNPIN:
            change.delete(Table.PIN, key)
        case RecordKind.FORGET:
            change.delete(Table.VERSION, key)
            change.delete(Table.WRITERS, key)
            change.delete(Table.MERGE, key)
            change.delete(Table.META, HEALTH_OF + key)
        case _:
            raise Corrupt(f"a mark record in a frame of kind {kind.name}")


def put_writers(unit_id: UnitId, record: WritersRecord, change: Change) -> None:
    """The row of a WRITERS record."""
    change.put(Table.WRITERS, version_key(unit_id, record.number), encode_writers_row(record))


def put_merge(unit_id: UnitId, record: MergeRecord, change: Change) -> None:
    """The row of a MERGE record."""
    change.put(Table.MERGE, version_key(unit_id, record.number), encode_merge_row(record))


def put_digests(record: DigestsRecord, change: Change) -> None:
    """The rows of a DIGESTS record. They are of contents, not of the unit whose history has them."""
    for recipe, digests in record.contents.items():
        change.put(Table.DIGEST, recipe, encode_digests(digests))


def put_health(record: HealthRecord, change: Change) -> None:
    """The rows of a HEALTH record, which are of contents as well."""
    for recipe, content in record.contents.items():
        change.put(Table.HEALTH, recipe, encode_content_row(content))


class Mirror:
    """Turns the frames that the index lacks into rows of `change`; used once.

    `unit` is the unit as it is after them, `problems` are (offset in the file, what is wrong).
    """

    def __init__(self, unit_id: UnitId, unit: Unit | None, scan: HistoryScan, change: Change) -> None:
        self._change = change
        self._known = unit is not None
        self.unit = unit or _nameless(unit_id)
        self._start = self.unit.file_bytes
        self.problems = [
            (self._start + at, f"{end - at} bytes of a history are damaged, records are lost")
            for at, end in scan.damaged
        ]
        for frame in scan.frames:
            self._add(frame)
        last = scan.frames[-1].sequence if scan.frames else self.unit.frames
        sealed = scan.frames[-1].kind == RecordKind.SEAL if scan.frames else self.unit.sealed
        chain = chain_behind(scan.frames, self.unit.chain) if self.unit.chain else b""
        self.unit = replace(
            self.unit, frames=last, file_bytes=self._start + scan.end, chain=chain, sealed=sealed
        )

    def _add(self, frame: Frame) -> None:
        try:
            match RecordKind(frame.kind):
                case RecordKind.UNIT | RecordKind.RENAME:
                    self._add_name(decode_unit(frame.payload))
                case RecordKind.VERSION:
                    self._add_version(decode_version(frame.payload))
                case RecordKind.SEAL:
                    decode_seal(frame.payload)
                case RecordKind.ROTATE:
                    decode_rotation(frame.payload)
                case RecordKind.DIGESTS:
                    put_digests(decode_digests_record(frame.payload), self._change)
                case RecordKind.HEALTH:
                    put_health(decode_health_record(frame.payload), self._change)
                case RecordKind.WRITERS:
                    record = decode_writers(frame.payload)
                    self._check_ahead(record.number)
                    put_writers(self.unit.unit, record, self._change)
                case RecordKind.MERGE:
                    merge = decode_merge(frame.payload)
                    self._check_ahead(merge.number)
                    put_merge(self.unit.unit, merge, self._change)
                case kind:
                    put_mark(kind, self.unit.unit, decode_mark(frame.payload), self._change)
        except (Corrupt, ValueError) as e:
            self._report(f"record {frame.sequence} of a history was left out: {e}")

    def _add_name(self, record: UnitRecord) -> None:
        if record.unit != self.unit.unit:
            raise Corrupt("it is that of another unit")
        unit = replace(self.unit, recorded=record.name)
        if not self._known:
            created_ns = unit.created_ns or record.time_ns
            unit = replace(unit, name=record.name, bound_ns=record.time_ns, created_ns=created_ns)
        self.unit = unit

    def _add_version(self, record: VersionRecord) -> None:
        if record.unit != self.unit.unit or record.number < self.unit.next_number:
            raise Corrupt(f"version {record.number} does not belong here")
        if record.before != self.unit.head:
            self._report(f"version {record.number} does not follow the version before it")
        self.unit = put_version(self.unit, record, self._change)

    def _check_ahead(self, number: int) -> None:
        if number < self.unit.next_number:
            raise Corrupt(f"version {number} stands in front of it")

    def _report(self, what: str) -> None:
        self.problems.append((self._start, what))


def _nameless(unit_id: UnitId) -> Unit:
    """A unit of which nothing is known yet; its name stays if the first record is lost."""
    name = b"unit-" + unit_id.hex()[:8].encode()
    return Unit(unit_id, name, 0, 1, GENESIS, 0, 0, 0, name, 0, 0, GENESIS)
