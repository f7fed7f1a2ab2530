"""What people call the records of a history. Pure.

One rule: a record of which there is no name is none, and says so by Corrupt or ValueError.
"""

from __future__ import annotations

from ckptfs.store.digests import decode_digests_record
from ckptfs.store.frames import Frame
from ckptfs.store.health_records import decode_health_record
from ckptfs.store.history import (
    MarkRecord,
    RecordKind,
    UnitRecord,
    VersionRecord,
    decode_mark,
    decode_unit,
    decode_version,
)
from ckptfs.store.keyring import decode_rotation
from ckptfs.store.merge_record import decode_merge
from ckptfs.store.writers import decode_writers


def described(frame: Frame) -> tuple[str, VersionRecord | None]:
    """What people call a record; Corrupt or ValueError if it is none."""
    kind = RecordKind(frame.kind)
    match kind:
        case RecordKind.VERSION:
            version = decode_version(frame.payload)
            return f"version {version.number}", version
        case RecordKind.UNIT | RecordKind.RENAME:
            return _name_label(decode_unit(frame.payload)), None
        case RecordKind.ROTATE:
            decode_rotation(frame.payload)
            return "the rotation of the key", None
        case RecordKind.DIGESTS | RecordKind.HEALTH:
            return _contents_label(frame), None
        case RecordKind.WRITERS | RecordKind.MERGE:
            return _origin_label(frame), None
        case _:
            return _mark_label(kind, decode_mark(frame.payload)), None


def _contents_label(frame: Frame) -> str:
    if frame.kind == RecordKind.DIGESTS:
        return f"the digests of {len(decode_digests_record(frame.payload).contents)} contents"
    return f"the health of {len(decode_health_record(frame.payload).contents)} contents"


def _origin_label(frame: Frame) -> str:
    if frame.kind == RecordKind.WRITERS:
        return f"the writers of version {decode_writers(frame.payload).number}"
    return f"the sources of version {decode_merge(frame.payload).number}"


def _name_label(record: UnitRecord) -> str:
    return f"the name {record.name.decode('utf-8', 'backslashreplace')!r}"


def _mark_label(kind: RecordKind, mark: MarkRecord) -> str:
    words = {
        RecordKind.TAG: f"the tag {mark.name!r} of",
        RecordKind.UNTAG: f"the end of the tag {mark.name!r} of",
        RecordKind.PIN: "the pin of",
        RecordKind.UNPIN: "the end of the pin of",
        RecordKind.FORGET: "the forgetting of",
    }
    return f"{words[kind]} version {mark.number}"


def span(noun: str, first: int, last: int) -> str:
    """ "version 3", or "versions 3 to 5"."""
    return f"{noun} {first}" if first >= last else f"{noun}s {first} to {last}"
