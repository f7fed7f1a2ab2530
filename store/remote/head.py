"""Heads: what of a unit is copied, as one small object after the other. Pure.

One rule: a head is never changed; the next one has the next number.

Source: FORMAT.md, "Remotes", "Head".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from ckptfs.store.bucket import Payload
from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.frames import decode_frames, encode_frame
from ckptfs.store.history import GENESIS, checked_map
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.remote.box import NAME_BYTES

_VERSION = 1
_VERSION_LET_GO = 2
_KIND = 1
_NUMBERS = range(1, 1 << 63)
_GENERATIONS = range(1 << 63)
_FIELDS: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "unit": (bytes,),
    "name": (bytes,),
    "node": (str,),
    "generation": (int,),
    "pieces": (list,),
    "chain": (bytes,),
    "versions": (list,),
}
_FIELDS_LET_GO: dict[str, tuple[type, ...]] = {**_FIELDS, "let_go": (list,)}


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a unit's history: the object's name, and its length."""

    name: bytes
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHead:
    """What of a unit is copied: its history up to the chain value `chain`, and the versions `versions`
    (rising). `let_go` (rising, none of `versions`): what a collector let go of what its node may still have,
    so that the node does not send it again. `name` is what the unit is called, `node` the node that copies
    it, for people."""

    unit: UnitId
    sequence: int
    name: bytes
    node: str
    generation: int = 0
    pieces: tuple[Piece, ...] = ()
    chain: bytes = GENESIS
    versions: tuple[int, ...] = ()
    let_go: tuple[int, ...] = ()

    @property
    def history_bytes(self) -> int:
        """How much of the history file is copied."""
        return sum(piece.size for piece in self.pieces)

    def encode(self) -> bytes:
        """Canonical bytes."""
        pieces: list[Node] = [[piece.name, piece.size] for piece in self.pieces]
        node: dict[str, Node] = {
            "version": _VERSION_LET_GO if self.let_go else _VERSION,
            "unit": self.unit,
            "name": self.name,
            "node": self.node,
            "generation": self.generation,
            "pieces": pieces,
            "chain": self.chain,
            "versions": list(self.versions),
        }
        if self.let_go:
            node["let_go"] = list(self.let_go)
        return encode_frame(_KIND, self.sequence, encode_node(node))


def decode_head(encoded: Payload) -> RemoteHead:
    """The head in `encoded`; Corrupt unless it is one, canonical."""
    frame = next(iter(decode_frames(memoryview(encoded))), None)
    if frame is None or frame.end != len(encoded) or frame.kind != _KIND or frame.sequence not in _NUMBERS:
        raise Corrupt("not the head of a unit, or one that is damaged")
    node = _fields(frame.payload)
    unit, name, chain = (cast(bytes, node[key]) for key in ("unit", "name", "chain"))
    version = _VERSION_LET_GO if "let_go" in node else _VERSION
    if node["version"] != version or len(unit) != UNIT_ID_BYTES or len(chain) != len(GENESIS) or not name:
        raise Corrupt("a head has a field of the wrong length or version")
    if b"\0" in name or node["generation"] not in _GENERATIONS:
        raise Corrupt("a head has no usable name, or a generation out of range")
    versions = _versions(cast("list[Node]", node["versions"]))
    let_go = _versions(cast("list[Node]", node.get("let_go", [])))
    if ("let_go" in node and not let_go) or not {*versions}.isdisjoint(let_go):
        raise Corrupt("a head lets go what it lists, or nothing")
    return RemoteHead(
        unit=UnitId(unit),
        sequence=frame.sequence,
        name=name,
        node=cast(str, node["node"]),
        generation=cast(int, node["generation"]),
        pieces=tuple(map(_piece, cast("list[Node]", node["pieces"]))),
        chain=chain,
        versions=versions,
        let_go=let_go,
    )


def _fields(payload: bytes) -> dict[str, Node]:
    try:
        return checked_map(payload, _FIELDS, "head")
    except Corrupt:
        return checked_map(payload, _FIELDS_LET_GO, "head")


def _piece(node: Node) -> Piece:
    if not isinstance(node, list) or list(map(type, node)) != [bytes, int]:
        raise Corrupt("a head lists something that is not a piece of a history")
    name, size = cast(bytes, node[0]), cast(int, node[1])
    if len(name) != NAME_BYTES or size not in _NUMBERS:
        raise Corrupt("a head lists a piece of a history without a name or length")
    return Piece(name, size)


def _versions(node: list[Node]) -> tuple[int, ...]:
    if {*map(type, node)} - {int}:
        raise Corrupt("a head lists a version that is not a number")
    numbers = tuple(cast("list[int]", node))
    if any(number not in _NUMBERS for number in numbers) or any(a >= b for a, b in pairwise(numbers)):
        raise Corrupt("a head lists versions out of order or range")
    return numbers


def merged_pieces(pieces: tuple[Piece, ...], added_bytes: int) -> int:
    """How many of `pieces` stay as they are if so many bytes come. Those behind them go into the new piece:
    none is longer than what it is joined with."""
    kept, size = len(pieces), added_bytes
    while kept and pieces[kept - 1].size <= size:
        kept -= 1
        size += pieces[kept].size
    return kept
