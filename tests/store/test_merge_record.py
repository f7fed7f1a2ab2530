"""What merged versions were made of: encoded, recorded in front of their version, mirrored, gone with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trio
from golden import broken, plain, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from rotting import scrub
from saved_store import SavedStore

from ckptfs.store.dagcbor import Node, decode_node, encode_node
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_check import Fault
from ckptfs.store.history_proof import prove
from ckptfs.store.ids import ChunkId, TreeId, UnitId
from ckptfs.store.index import Change, Table
from ckptfs.store.layout import MERGES, read_format
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.merge_record import (
    MOST_NOTES,
    MergeRecord,
    MergeSource,
    bounded_notes,
    decode_merge,
    decode_merge_row,
    encode_merge_row,
)
from ckptfs.store.rebuild import rebuild
from ckptfs.store.signing import SigningKey

RUN, KEY = b"run", SigningKey(b"k" * 32)
NUMBERS = st.integers(1, (1 << 63) - 1)
SOURCES = st.builds(
    MergeSource,
    node=st.text(max_size=20),
    unit=st.binary(min_size=16, max_size=16).map(UnitId),
    number=NUMBERS,
    link=st.binary(min_size=32, max_size=32),
    key=st.text(max_size=20),
)
RECORDS = st.builds(
    MergeRecord,
    NUMBERS,
    st.binary(min_size=32, max_size=32).map(lambda b: TreeId(ChunkId(b))),
    st.lists(SOURCES, max_size=4).map(tuple),
    st.lists(st.text(max_size=20), max_size=3).map(tuple),
)
SOURCE = MergeSource(node="a", unit=UnitId(b"u" * 16), number=7, link=bytes(32), key="k")


@pytest.mark.parametrize("vector", vectors("merge"), ids=lambda v: v["name"])
def test_golden_records_and_rows(vector: dict[str, Any]) -> None:
    record = decode_merge(bytes.fromhex(vector["hex"]))
    assert record == decode_merge_row(bytes.fromhex(vector["row"]))
    assert plain(record) == vector["record"]
    assert record.encode().hex() == vector["hex"]


@settings(deadline=None)
@given(RECORDS)
def test_what_is_encoded_is_decoded(record: MergeRecord) -> None:
    assert decode_merge(record.encode()) == record
    assert decode_merge_row(encode_merge_row(record)) == record


@settings(deadline=None, max_examples=300)
@given(broken(RECORDS.map(lambda record: record.encode())))
def test_any_bytes_are_a_record_or_corrupt(encoded: bytes) -> None:
    try:
        record = decode_merge(encoded)
    except Corrupt:
        return
    assert record.encode() == encoded


@pytest.mark.parametrize(
    ("key", "value"),
    [("node", 1), ("node", "x" * 5000), ("unit", b"u"), ("number", 0), ("number", True), ("link", b""),
     ("key", None), ("more", 1)],
)  # fmt: skip
def test_a_source_that_nobody_writes_is_corrupt(key: str, value: Node) -> None:
    node = decode_node(MergeRecord(1, TreeId(ChunkId(bytes(32))), (SOURCE,)).encode())
    assert isinstance(node, dict) and isinstance(node["sources"], list)
    source = node["sources"][0]
    assert isinstance(source, dict)
    source[key] = value
    with pytest.raises(Corrupt):
        decode_merge(encode_node(node))


def test_of_many_notes_is_told_how_many_more() -> None:
    few, many = ["a", "b\udcff"], [str(number) for number in range(MOST_NOTES + 50)]
    assert bounded_notes(few) == ("a", "b\\udcff")
    found = bounded_notes(many)
    assert len(found) == MOST_NOTES and found[-1] == "and 51 more" and found[-2] == "98"
    assert decode_merge(MergeRecord(1, TreeId(ChunkId(bytes(32))), (), found).encode()).notes == found


def merge_log(store: SavedStore) -> MergeLog:
    return MergeLog(store.disk, store.index, store.histories)


def publish_merged(store: SavedStore, content: bytes) -> VersionRecord:
    """A version with a record in front of it."""

    def note(record: VersionRecord) -> None:
        assert record.top.tree is not None
        merge = MergeRecord(record.number, record.top.tree, (SOURCE,), (content.decode(),))
        merge_log(store).record(record.unit, merge)

    async def main() -> VersionRecord:
        store.before_listing = note
        return await store.publish(RUN, {b"f": content})

    return trio.run(main)


def test_it_is_mirrored_sealed_and_goes_with_its_version(tmp_path: Path) -> None:
    store = SavedStore(tmp_path, key=KEY)
    records = [publish_merged(store, b"%d" % number) for number in range(3)]
    unit = records[0].unit
    assert MERGES in read_format(store.disk).ro_compat
    told = [merge_log(store).of(record) for record in records]
    assert [one.notes for one in told if one is not None] == [("0",), ("1",), ("2",)]
    assert prove(store.histories.evidence(unit), [KEY.public]).findings == []
    store.histories.forget(unit, 1)
    assert merge_log(store).of(records[0]) is None
    store.close()

    shutil.rmtree(tmp_path / "index")
    rebuild(Disk(str(tmp_path)), boot_id="boot", now_ns=1)
    again = SavedStore(tmp_path, key=KEY)
    assert [merge_log(again).of(record) for record in records] == [None, *told[1:]]
    assert prove(again.histories.evidence(unit), [KEY.public]).findings == []
    again.close()


def test_a_forged_row_is_found_and_put_right(tmp_path: Path) -> None:
    store = SavedStore(tmp_path, key=KEY)
    record = publish_merged(store, b"x")
    good = merge_log(store).of(record)
    assert good is not None
    change = Change()
    forged = MergeRecord(record.number, good.tree, (), ())
    change.put(Table.MERGE, record.unit + (1).to_bytes(8, "big"), encode_merge_row(forged))
    store.index.apply(change)
    (finding,) = prove(store.histories.evidence(record.unit), [KEY.public]).findings
    assert finding.fault is Fault.INDEX and "sources of version 1" in finding.message
    scrub(store)
    assert merge_log(store).of(record) == good
    store.close()


def test_the_last_record_in_front_of_a_version_counts(tmp_path: Path) -> None:
    """A merge that died between the two, and was done again."""
    store = SavedStore(tmp_path, key=KEY)

    def twice(record: VersionRecord) -> None:
        assert record.top.tree is not None
        for notes in (("first",), ("again",)):
            merge = MergeRecord(record.number, record.top.tree, (SOURCE,), notes)
            merge_log(store).record(record.unit, merge)

    store.before_listing = twice
    record = trio.run(lambda: store.publish(RUN, {b"f": b"x"}))
    found = merge_log(store).of(record)
    assert found is not None and found.notes == ("again",)
    assert prove(store.histories.evidence(record.unit), [KEY.public]).findings == []
    store.close()


def test_a_record_in_front_of_another_version_speaks_for_none(tmp_path: Path) -> None:
    store = SavedStore(tmp_path, key=KEY)

    async def main() -> VersionRecord:
        unit = store.unit(RUN)
        merge_log(store).record(unit.unit, MergeRecord(1, TreeId(ChunkId(bytes(32))), (SOURCE,)))
        return await store.publish(RUN, {b"f": b"another"})

    assert merge_log(store).of(trio.run(main)) is None
    store.close()
