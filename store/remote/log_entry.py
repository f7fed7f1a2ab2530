"""Entries of a remote's log: who copies to there, and what collectors decided. Pure.

One rule: an entry says its own number, so none can stand in another's place.

Source: FORMAT.md, "Remotes", "Collecting".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ckptfs.store.bucket import Payload
from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.frames import decode_frames, encode_frame
from ckptfs.store.history import checked_map
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.remote.box import NAME_BYTES

TOKEN_BYTES = 16
MOST_ENTRIES = (1 << 32) - 1
_JOIN, _CLAIM, _DECISION, _EXTENSION = 1, 2, 3, 4
_JOIN_FIELDS: dict[str, tuple[type, ...]] = {"unit": (bytes,), "name": (bytes,), "node": (str,)}
_CLAIM_FIELDS: dict[str, tuple[type, ...]] = {"node": (str,), "token": (bytes,)}
_EXTENSION_FIELDS: dict[str, tuple[type, ...]] = {"claim": (int,), "token": (bytes,)}
_DECISION_FIELDS: dict[str, tuple[type, ...]] = {"claim": (int,), "kept": (bytes,)}


@dataclass(frozen=True, slots=True)
class Join:
    """Somebody is about to copy a unit."""

    unit: UnitId
    name: bytes
    node: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A collector begins; `token` makes it unlike every other claim."""

    node: str
    token: bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """What came of the claim with the number `claim`: what `kept` names is left; b"": it is off."""

    claim: int
    kept: bytes = b""


@dataclass(frozen=True, slots=True)
class Extension:
    """The collector with the claim of this number, whose `token` this is, is alive: it is waited for anew."""

    claim: int
    token: bytes


Entry = Join | Claim | Decision | Extension


def encode_entry(number: int, entry: Entry) -> bytes:
    """The entry as the object of this number."""
    fields: dict[str, Node]
    match entry:
        case Join():
            kind, fields = _JOIN, {"unit": entry.unit, "name": entry.name, "node": entry.node}
        case Claim():
            kind, fields = _CLAIM, {"node": entry.node, "token": entry.token}
        case Decision():
            kind, fields = _DECISION, {"claim": entry.claim, "kept": entry.kept}
        case Extension():
            kind, fields = _EXTENSION, {"claim": entry.claim, "token": entry.token}
    return encode_frame(kind, number, encode_node(fields))


def decode_entry(encoded: Payload, number: int) -> Entry:
    """The entry in `encoded`; Corrupt unless it is one of this number."""
    frame = next(iter(decode_frames(memoryview(encoded))), None)
    if frame is None or frame.end != len(encoded) or frame.sequence != number:
        raise Corrupt("not an entry of the log, or one that is damaged")
    if frame.kind == _JOIN:
        node = checked_map(frame.payload, _JOIN_FIELDS, "join")
        unit, name = cast(bytes, node["unit"]), cast(bytes, node["name"])
        if len(unit) != UNIT_ID_BYTES or not name or b"\0" in name:
            raise Corrupt("a join has no usable unit or name")
        return Join(UnitId(unit), name, cast(str, node["node"]))
    if frame.kind == _CLAIM:
        node = checked_map(frame.payload, _CLAIM_FIELDS, "claim")
        if len(cast(bytes, node["token"])) != TOKEN_BYTES:
            raise Corrupt("a claim has a token of the wrong length")
        return Claim(cast(str, node["node"]), cast(bytes, node["token"]))
    if frame.kind == _DECISION:
        node = checked_map(frame.payload, _DECISION_FIELDS, "decision")
        claim, kept = cast(int, node["claim"]), cast(bytes, node["kept"])
        if not 0 < claim < number or len(kept) not in (0, NAME_BYTES):
            raise Corrupt("a decision of no claim, or with a name of the wrong length")
        return Decision(claim, kept)
    if frame.kind == _EXTENSION:
        node = checked_map(frame.payload, _EXTENSION_FIELDS, "extension")
        claim, token = cast(int, node["claim"]), cast(bytes, node["token"])
        if not 0 < claim < number or len(token) != TOKEN_BYTES:
            raise Corrupt("an extension of no claim, or with a token of the wrong length")
        return Extension(claim, token)
    raise Corrupt(f"an entry of the log of the unknown kind {frame.kind}")
