"""The records of a unit's history, and the chain that links its versions.

One rule: records are only ever appended. A version's link is SHA3-256(link before ‖ record),
so no version can be changed, dropped or reordered without every later link changing.

Source: FORMAT.md, "History".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import cast

from ckptfs.store.dagcbor import Node, decode_node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import sha3
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.tree import Entry, entry_node, entry_of

GENESIS = bytes(32)
PULLED = "pull"
IMPORTED = "import"
_VERSION = 1


class RecordKind(IntEnum):
    """The kinds of frame in a history file."""

    UNIT = 1
    VERSION = 2
    TAG = 3
    UNTAG = 4
    PIN = 5
    UNPIN = 6
    FORGET = 7
    RENAME = 8
    SEAL = 9
    DIGESTS = 10
    ROTATE = 11
    WRITERS = 12
    HEALTH = 13
    MERGE = 14


class State(StrEnum):
    """What is known of the saves in a version."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One version of a unit, as it is hashed into the chain.

    `top` is the unit's directory itself with its tree (its name is b"top"); `root` the Merkle
    root over its files; `before` the link of the version before (32 zero bytes for the first);
    `origin` why it was made: "settled", "commit-point", "command", "snapshot", "pre-image",
    "rollback", PULLED or IMPORTED. `missing` says what a partial version lacks, in sentences. `steps` are the
    steps that the version holds intact.
    """

    unit: UnitId
    number: int
    name: str
    time_ns: int
    origin: str
    top: Entry
    root: bytes
    files: int
    logical_bytes: int
    state: State
    step: int | None
    steps: tuple[int, ...]
    missing: tuple[str, ...]
    before: bytes

    def encode(self) -> bytes:
        """Canonical bytes; what the link is computed over."""
        return encode_node(
            {
                "version": _VERSION,
                "unit": self.unit,
                "number": self.number,
                "name": self.name,
                "time": self.time_ns,
                "origin": self.origin,
                "top": entry_node(self.top),
                "root": self.root,
                "files": self.files,
                "bytes": self.logical_bytes,
                "state": self.state.value,
                "step": self.step,
                "steps": list(self.steps),
                "missing": list(self.missing),
                "before": self.before,
            }
        )

    def link(self) -> bytes:
        """This version's place in the chain: SHA3-256(before ‖ record)."""
        return sha3(self.before + self.encode())


_COUNTS = range(1 << 63)
_TIMES = range(-(1 << 63), 1 << 64)
_STATES = {state.value: state for state in State}
_FIELDS: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "unit": (bytes,),
    "number": (int,),
    "name": (str,),
    "time": (int,),
    "origin": (str,),
    "top": (dict,),
    "root": (bytes,),
    "files": (int,),
    "bytes": (int,),
    "state": (str,),
    "step": (int, type(None)),
    "steps": (list,),
    "missing": (list,),
    "before": (bytes,),
}


def decode_version(encoded: bytes) -> VersionRecord:
    """The record in `encoded`; Corrupt unless it is one, canonical and of known fields."""
    node = checked_map(encoded, _FIELDS, "version record")
    unit, root, before = (cast(bytes, node[key]) for key in ("unit", "root", "before"))
    if node["version"] != _VERSION or len(unit) != UNIT_ID_BYTES or len(root) != 32 or len(before) != 32:
        raise Corrupt("a version record has a field of the wrong length or version")
    steps, missing = cast("list[Node]", node["steps"]), cast("list[Node]", node["missing"])
    if not {*map(type, steps)} <= {int} or not {*map(type, missing)} <= {str}:
        raise Corrupt("a version record lists something that is not a step or a sentence")
    if not all(step in _COUNTS for step in (*cast("list[int]", steps), node["step"] or 0)):
        raise Corrupt("a version record has a step out of range")
    state = _STATES.get(cast(str, node["state"]))
    if state is None:
        raise Corrupt("a version record has an unknown state")
    if any(cast(int, node[key]) not in _COUNTS for key in ("number", "files", "bytes")):
        raise Corrupt("a version record has a number or size out of range")
    if cast(int, node["time"]) not in _TIMES or node["number"] == 0:
        raise Corrupt("a version record has a number or time out of range")
    name, top = cast(str, node["name"]), entry_of(node["top"])
    if not name or "/" in name or "\0" in name or not top.is_dir:
        raise Corrupt("a version record is not that of a directory with a usable name")
    return VersionRecord(
        unit=UnitId(unit),
        number=cast(int, node["number"]),
        name=name,
        time_ns=cast(int, node["time"]),
        origin=cast(str, node["origin"]),
        top=top,
        root=root,
        files=cast(int, node["files"]),
        logical_bytes=cast(int, node["bytes"]),
        state=state,
        step=cast("int | None", node["step"]),
        steps=tuple(cast("list[int]", steps)),
        missing=tuple(cast("list[str]", missing)),
        before=before,
    )


def checked_map(encoded: bytes, fields: dict[str, tuple[type, ...]], what: str) -> dict[str, Node]:
    """The DAG-CBOR map in `encoded` with exactly these fields and types, or Corrupt."""
    node = decode_node(encoded)
    if not isinstance(node, dict) or node.keys() != fields.keys():
        raise Corrupt(f"a {what} does not have the fields of one")
    for key, kinds in fields.items():
        if type(node[key]) not in kinds:
            raise Corrupt(f"a {what} has a bad field {key!r}")
    return node


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """The first frame of a history file: which unit it is; and, as RENAME, its new name."""

    unit: UnitId
    name: bytes
    time_ns: int

    def encode(self) -> bytes:
        """Canonical bytes."""
        return encode_node({"unit": self.unit, "name": self.name, "time": self.time_ns})


def decode_unit(encoded: bytes) -> UnitRecord:
    """The record in `encoded`, or Corrupt."""
    node = checked_map(encoded, {"unit": (bytes,), "name": (bytes,), "time": (int,)}, "unit record")
    unit = cast(bytes, node["unit"])
    if len(unit) != UNIT_ID_BYTES:
        raise Corrupt("a unit id is not 16 bytes")
    record = UnitRecord(UnitId(unit), cast(bytes, node["name"]), cast(int, node["time"]))
    if record.time_ns not in _TIMES or not record.name or b"\0" in record.name:
        raise Corrupt("a unit record has no usable name, or a time out of range")
    return record


@dataclass(frozen=True, slots=True)
class MarkRecord:
    """TAG, UNTAG, PIN, UNPIN or FORGET of version `number`; `name` is the tag, else empty."""

    number: int
    name: str
    time_ns: int

    def encode(self) -> bytes:
        """Canonical bytes."""
        return encode_node({"number": self.number, "name": self.name, "time": self.time_ns})


def decode_mark(encoded: bytes) -> MarkRecord:
    """The record in `encoded`, or Corrupt."""
    node = checked_map(encoded, {"number": (int,), "name": (str,), "time": (int,)}, "mark record")
    mark = MarkRecord(cast(int, node["number"]), cast(str, node["name"]), cast(int, node["time"]))
    if mark.number not in _COUNTS or mark.time_ns not in _TIMES:
        raise Corrupt("a mark record has a number or time out of range")
    return mark
