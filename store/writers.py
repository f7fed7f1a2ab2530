"""Who wrote what a version holds: the processes that had its files open for writing. Pure.

One rule: these are facts for people who look for the origin of a save. Nothing is decided by them, and what
a process says of itself proves nothing.

Source: FORMAT.md, "Writers".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import msgspec

from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.history import checked_map
from ckptfs.store.ids import DIGEST_BYTES, ChunkId, TreeId

MOST_WRITERS = 64
MOST_CHARACTERS = 256
MOST_WORDS = 64
_COUNTS = range(1 << 63)
_RECORD_FIELDS: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "tree": (bytes,),
    "writers": (list,),
    "others": (int,),
}
_FIELDS: dict[str, tuple[type, ...]] = {
    "pid": (int,),
    "uid": (int,),
    "user": (str,),
    "program": (str,),
    "arguments": (list,),
    "cgroup": (str,),
    "container": (str,),
    "commit": (str,),
    "ids": (dict,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """One process, as it was when it opened its first file.

    What is not known is "", or empty. `program` is the name of its executable, `arguments` what may be kept
    of its command line, `container` the 64 hex digits of its container, `commit` what is checked out in its
    working directory, `ids` what its environment says of the job that it belongs to, by name.
    """

    pid: int
    uid: int
    user: str = ""
    program: str = ""
    arguments: tuple[str, ...] = ()
    cgroup: str = ""
    container: str = ""
    commit: str = ""
    ids: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class WritersRecord:
    """The payload of a WRITERS frame: the writers of version `number`, and how many there are besides.

    It stands in front of that version. `tree` is what the version is to hold: if another one got the number,
    the record speaks for none.
    """

    number: int
    tree: TreeId
    writers: tuple[Writer, ...]
    others: int = 0

    def encode(self) -> bytes:
        """Canonical bytes."""
        assert len(self.writers) <= MOST_WRITERS
        rows: list[Node] = [_node_of(one) for one in self.writers]
        return encode_node({"number": self.number, "tree": self.tree, "writers": rows, "others": self.others})


def decode_writers(encoded: bytes) -> WritersRecord:
    """The record in `encoded`; Corrupt unless it is one, canonical and of known fields."""
    node = checked_map(encoded, _RECORD_FIELDS, "writers record")
    number, tree, others = cast(int, node["number"]), cast(bytes, node["tree"]), cast(int, node["others"])
    rows = cast("list[Node]", node["writers"])
    if number not in _COUNTS or number == 0 or others not in _COUNTS or len(rows) > MOST_WRITERS:
        raise Corrupt("a writers record has a number out of range")
    if len(tree) != DIGEST_BYTES:
        raise Corrupt("a writers record has a tree id of another length")
    return WritersRecord(number, TreeId(ChunkId(tree)), tuple(map(_writer_of, rows)), others)


# Rows of the index: decoded for every version that `log` lists.
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WritersRecord)


def encode_writers_row(record: WritersRecord) -> bytes:
    """A row of the table WRITERS."""
    return _encoder.encode(record)


def decode_writers_row(encoded: bytes) -> WritersRecord:
    """The record in a row, or Corrupt."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"the index holds a bad writers record: {e}") from None


def _node_of(writer: Writer) -> Node:
    return {
        "pid": writer.pid,
        "uid": writer.uid,
        "user": writer.user,
        "program": writer.program,
        "arguments": list(writer.arguments),
        "cgroup": writer.cgroup,
        "container": writer.container,
        "commit": writer.commit,
        "ids": dict(writer.ids),
    }


def _writer_of(node: Node) -> Writer:
    if not isinstance(node, dict) or node.keys() != _FIELDS.keys():
        raise Corrupt("a writers record lists something that is not a process")
    if any(type(node[key]) not in kinds for key, kinds in _FIELDS.items()):
        raise Corrupt("a writers record has a bad field")
    pid, uid = cast(int, node["pid"]), cast(int, node["uid"])
    arguments, ids = cast("list[Node]", node["arguments"]), cast("dict[str, Node]", node["ids"])
    texts = [node[key] for key in ("user", "program", "cgroup", "container", "commit")]
    words = [*texts, *arguments, *ids.keys(), *ids.values()]
    if not {*map(type, words)} <= {str} or pid not in _COUNTS or uid not in _COUNTS:
        raise Corrupt("a writers record has a field that is no text, or a number out of range")
    if len(arguments) + len(ids) > MOST_WORDS or any(len(cast(str, one)) > MOST_CHARACTERS for one in words):
        raise Corrupt("a writers record has a text that is too long")
    return Writer(
        pid=pid,
        uid=uid,
        user=cast(str, node["user"]),
        program=cast(str, node["program"]),
        arguments=tuple(cast("list[str]", arguments)),
        cgroup=cast(str, node["cgroup"]),
        container=cast(str, node["container"]),
        commit=cast(str, node["commit"]),
        # In the order of canonical DAG-CBOR, so that what is decoded is what was encoded.
        ids=tuple(cast("dict[str, str]", ids).items()),
    )
