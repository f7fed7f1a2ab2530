"""Of which versions of which nodes a merged version was made. Pure.

One rule: these are facts for people. What the version holds says its record, and nothing is decided here.

Source: FORMAT.md, "Merges".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import msgspec

from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.history import checked_map
from ckptfs.store.ids import DIGEST_BYTES, UNIT_ID_BYTES, ChunkId, TreeId, UnitId

MOST_SOURCES = 4096
MOST_NOTES = 100
MOST_CHARACTERS = 4096
_NUMBERS = range(1, 1 << 63)
_FIELDS: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "tree": (bytes,),
    "sources": (list,),
    "notes": (list,),
}
_SOURCE_FIELDS: dict[str, tuple[type, ...]] = {
    "node": (str,),
    "unit": (bytes,),
    "number": (int,),
    "link": (bytes,),
    "key": (str,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSource:
    """A version that went in: version `number` of a unit of `node`, its link, and the fingerprint of the key
    that has sealed it ("": nobody)."""

    node: str
    unit: UnitId
    number: int
    link: bytes
    key: str = ""


@dataclass(frozen=True, slots=True)
class MergeRecord:
    """The payload of a MERGE frame: what version `number`, which is to come, was made of. `notes` say which
    of several contents of a name was taken. `tree` is what the version is to hold: if another one got the
    number, the record speaks for none."""

    number: int
    tree: TreeId
    sources: tuple[MergeSource, ...]
    notes: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Canonical bytes."""
        rows: list[Node] = [
            {"node": one.node, "unit": one.unit, "number": one.number, "link": one.link, "key": one.key}
            for one in self.sources
        ]
        return encode_node(
            {"number": self.number, "tree": self.tree, "sources": rows, "notes": list(self.notes)}
        )


def bounded_notes(notes: list[str]) -> tuple[str, ...]:
    """As many of these as a record holds, and how many more there are."""
    texts = [one.encode("utf-8", "backslashreplace").decode()[:MOST_CHARACTERS] for one in notes]
    if len(texts) > MOST_NOTES:
        texts[MOST_NOTES - 1 :] = [f"and {len(texts) - MOST_NOTES + 1} more"]
    return tuple(texts)


def decode_merge(encoded: bytes) -> MergeRecord:
    """The record in `encoded`; Corrupt unless it is one, canonical and of known fields."""
    node = checked_map(encoded, _FIELDS, "merge record")
    number, tree = cast(int, node["number"]), cast(bytes, node["tree"])
    rows, notes = cast("list[Node]", node["sources"]), cast("list[Node]", node["notes"])
    if number not in _NUMBERS or len(tree) != DIGEST_BYTES:
        raise Corrupt("a merge record has a number out of range, or a tree id of another length")
    if len(rows) > MOST_SOURCES or len(notes) > MOST_NOTES:
        raise Corrupt("a merge record lists more than a merge has")
    if any(type(one) is not str or len(one) > MOST_CHARACTERS for one in notes):
        raise Corrupt("a merge record has a note that is none")
    return MergeRecord(
        number, TreeId(ChunkId(tree)), tuple(map(_source_of, rows)), tuple(cast("list[str]", notes))
    )


def _source_of(node: Node) -> MergeSource:
    if not isinstance(node, dict) or node.keys() != _SOURCE_FIELDS.keys():
        raise Corrupt("a merge record lists something that is no source")
    if any(type(node[key]) not in kinds for key, kinds in _SOURCE_FIELDS.items()):
        raise Corrupt("a source in a merge record has a bad field")
    unit, link = cast(bytes, node["unit"]), cast(bytes, node["link"])
    if len(unit) != UNIT_ID_BYTES or len(link) != DIGEST_BYTES or node["number"] not in _NUMBERS:
        raise Corrupt("a source in a merge record has an id of another length, or a number out of range")
    if max(len(cast(str, node[key])) for key in ("node", "key")) > MOST_CHARACTERS:
        raise Corrupt("a source in a merge record has a text that is too long")
    return MergeSource(
        node=cast(str, node["node"]),
        unit=UnitId(unit),
        number=cast(int, node["number"]),
        link=link,
        key=cast(str, node["key"]),
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MergeRecord)


def encode_merge_row(record: MergeRecord) -> bytes:
    """A row of the table MERGE."""
    return _encoder.encode(record)


def decode_merge_row(encoded: bytes) -> MergeRecord:
    """The record in a row, or Corrupt."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"the index holds a bad merge record: {e}") from None
