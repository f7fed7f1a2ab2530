"""The records of a history: one byte string for one record, a valid one or Corrupt for any bytes."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import pytest
from golden import broken, plain, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store.dagcbor import Node, decode_node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.history import (
    GENESIS,
    MarkRecord,
    State,
    UnitRecord,
    VersionRecord,
    decode_mark,
    decode_unit,
    decode_version,
)
from ckptfs.store.history_mirror import version_of
from ckptfs.store.ids import ChunkId, TreeId, UnitId
from ckptfs.store.tree import Entry

DIGESTS = st.binary(min_size=32, max_size=32)
UNITS = st.binary(min_size=16, max_size=16).map(UnitId)
TIMES = st.integers(-(1 << 63), (1 << 64) - 1)
COUNTS = st.integers(0, (1 << 63) - 1)
TOPS = st.builds(
    Entry,
    name=st.just(b"top"),
    mode=st.integers(0, 0o7777).map(lambda mode: mode | stat.S_IFDIR),
    uid=st.integers(0, 70000),
    gid=st.integers(0, 70000),
    mtime_ns=TIMES,
    ctime_ns=TIMES,
    tree=DIGESTS.map(lambda b: TreeId(ChunkId(b))),
)
VERSIONS = st.builds(
    VersionRecord,
    unit=UNITS,
    number=st.integers(1, (1 << 63) - 1),
    name=st.text(min_size=1, max_size=30).filter(lambda name: "/" not in name and "\0" not in name),
    time_ns=TIMES,
    origin=st.sampled_from(["settled", "commit-point", "command", "snapshot", "pre-image", "rollback"]),
    top=TOPS,
    root=DIGESTS,
    files=COUNTS,
    logical_bytes=COUNTS,
    state=st.sampled_from(State),
    step=st.one_of(st.none(), COUNTS),
    steps=st.lists(COUNTS, max_size=4).map(tuple),
    missing=st.lists(st.text(max_size=20), max_size=3).map(tuple),
    before=DIGESTS,
)
NAMES = st.binary(min_size=1, max_size=20).filter(lambda name: b"\0" not in name)
UNIT_RECORDS = st.builds(UnitRecord, UNITS, NAMES, TIMES)
MARKS = st.builds(MarkRecord, COUNTS, st.text(max_size=20), TIMES)
VERSION = VersionRecord(
    unit=UnitId(bytes(16)),
    number=1,
    name="v000001_20261129T160211Z",
    time_ns=1,
    origin="settled",
    top=Entry(
        name=b"top", mode=stat.S_IFDIR, uid=0, gid=0, mtime_ns=0, ctime_ns=0, tree=TreeId(ChunkId(bytes(32)))
    ),
    root=bytes(32),
    files=1,
    logical_bytes=1,
    state=State.COMPLETE,
    step=None,
    steps=(),
    missing=(),
    before=GENESIS,
)
DECODERS: dict[str, Callable[[bytes], VersionRecord | UnitRecord | MarkRecord]] = {
    "version": decode_version,
    "unit": decode_unit,
    "mark": decode_mark,
}


@pytest.mark.parametrize("vector", vectors("history"), ids=lambda v: v["name"])
def test_golden_records(vector: dict[str, Any]) -> None:
    encoded = bytes.fromhex(vector["hex"])
    record = DECODERS[vector["kind"]](encoded)
    assert plain(record) == vector["record"]
    assert record.encode() == encoded
    if isinstance(record, VersionRecord):
        assert record.link().hex() == vector["link"]


@pytest.mark.parametrize("vector", vectors("history_row"), ids=lambda v: v["name"])
def test_golden_rows_of_the_index(vector: dict[str, Any]) -> None:
    assert plain(version_of(bytes.fromhex(vector["hex"]))) == vector["record"]


@settings(deadline=None)
@given(VERSIONS, UNIT_RECORDS, MARKS)
def test_what_is_encoded_is_decoded(version: VersionRecord, unit: UnitRecord, mark: MarkRecord) -> None:
    assert decode_version(version.encode()) == version
    assert decode_unit(unit.encode()) == unit
    assert decode_mark(mark.encode()) == mark


@settings(deadline=None)
@given(VERSIONS)
def test_the_link_is_over_the_record_and_the_link_before(version: VersionRecord) -> None:
    assert version.link() == hashlib.sha3_256(version.before + version.encode()).digest()
    assert replace(version, before=bytes(31) + b"\1").link() != version.link()


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(DECODERS)),
    broken(st.one_of(VERSIONS, UNIT_RECORDS, MARKS).map(lambda r: r.encode())),
)
def test_any_bytes_are_a_record_or_corrupt(kind: str, encoded: bytes) -> None:
    try:
        record = DECODERS[kind](encoded)
    except Corrupt:
        return
    assert record.encode() == encoded


BAD: list[tuple[str, Node]] = [
    ("version", 2),
    ("unit", bytes(15)),
    ("number", 0),
    ("number", -1),
    ("number", 1 << 63),
    ("number", "1"),
    ("name", ""),
    ("name", "a/b"),
    ("name", "a\0"),
    ("time", -(1 << 63) - 1),
    ("top", 1),
    ("top", {}),
    ("root", bytes(33)),
    ("files", -1),
    ("bytes", 1 << 63),
    ("state", "whole"),
    ("step", -1),
    ("step", True),
    ("steps", [True]),
    ("steps", ["1"]),
    ("steps", [-1]),
    ("steps", [1 << 63]),
    ("missing", [b"x"]),
    ("before", b""),
    ("more", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=str)
def test_a_record_that_nobody_writes_is_corrupt(field: str, value: Node) -> None:
    node = cast("dict[str, Node]", decode_node(VERSION.encode()))
    with pytest.raises(Corrupt):
        decode_version(encode_node({**node, field: value}))
    if field in node:
        del node[field]
        with pytest.raises(Corrupt):
            decode_version(encode_node(node))


def test_the_top_of_a_version_is_a_directory() -> None:
    link = replace(VERSION.top, mode=stat.S_IFLNK, tree=None, target=b"x")
    with pytest.raises(Corrupt):
        decode_version(replace(VERSION, top=link).encode())


@pytest.mark.parametrize(
    "record",
    [
        UnitRecord(UnitId(bytes(15)), b"a", 0),
        UnitRecord(UnitId(bytes(16)), b"", 0),
        UnitRecord(UnitId(bytes(16)), b"a\0", 0),
        MarkRecord(-1, "", 0),
        MarkRecord(1, "", 1 << 64),
    ],
    ids=str,
)
def test_small_records_that_nobody_writes_are_corrupt(record: UnitRecord | MarkRecord) -> None:
    encoded = record.encode() if not isinstance(record, MarkRecord) or record.time_ns < 1 << 64 else b"\xff"
    with pytest.raises(Corrupt):
        (decode_unit if isinstance(record, UnitRecord) else decode_mark)(encoded)


def test_every_field_of_a_version_is_in_its_link() -> None:
    changed: dict[str, Any] = {
        "unit": UnitId(b"u" * 16),
        "number": 2,
        "name": "x",
        "time_ns": 2,
        "origin": "x",
        "top": replace(VERSION.top, uid=1),
        "root": b"r" * 32,
        "files": 2,
        "logical_bytes": 2,
        "state": State.OPAQUE,
        "step": 1,
        "steps": (1,),
        "missing": ("x",),
        "before": b"b" * 32,
    }
    assert changed.keys() == {field.name for field in fields(VersionRecord)}
    links = {replace(VERSION, **{name: value}).link() for name, value in changed.items()}
    assert len(links | {VERSION.link()}) == len(changed) + 1
