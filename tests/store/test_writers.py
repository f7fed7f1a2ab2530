"""Writers of versions: recorded behind their version, mirrored, gone with it; old stores have none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio
from golden import broken, plain, vectors
from history_edits import OURS
from hypothesis import given, settings
from hypothesis import strategies as st
from rotting import scrub
from saved_store import SavedStore

from ckptfs.store.dagcbor import Node, decode_node, encode_node
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.frames import decode_frames, encode_frame
from ckptfs.store.histories import Histories
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.history_check import Fault
from ckptfs.store.history_log import history_path
from ckptfs.store.history_proof import prove
from ckptfs.store.ids import ChunkId, TreeId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.layout import read_format
from ckptfs.store.rebuild import rebuild
from ckptfs.store.writer_log import WriterLog
from ckptfs.store.writers import (
    MOST_WRITERS,
    Writer,
    WritersRecord,
    decode_writers,
    decode_writers_row,
    encode_writers_row,
)

RUN = b"run1"
COUNTS = st.integers(0, (1 << 63) - 1)
TEXTS = st.text(max_size=20)
IDS = st.dictionaries(st.text("ABC_", max_size=8), TEXTS, max_size=4).map(
    lambda ids: tuple(sorted(ids.items(), key=lambda item: (len(item[0]), item[0])))
)
PROCESSES = st.builds(
    Writer, pid=COUNTS, uid=COUNTS, user=TEXTS, program=TEXTS,
    arguments=st.lists(TEXTS, max_size=4).map(tuple), cgroup=TEXTS, container=TEXTS, commit=TEXTS, ids=IDS,
)  # fmt: skip
RECORDS = st.builds(
    WritersRecord,
    st.integers(1, (1 << 63) - 1),
    st.binary(min_size=32, max_size=32).map(lambda b: TreeId(ChunkId(b))),
    st.lists(PROCESSES, max_size=4).map(tuple),
    COUNTS,
)
ADA = Writer(pid=7, uid=1000, user="ada", program="python3", ids=(("RANK", "0"),))
BOB = Writer(pid=8, uid=1001)
TREE = TreeId(ChunkId(bytes(32)))


@pytest.mark.parametrize("vector", vectors("writers"), ids=lambda v: v["name"])
def test_golden_records_and_rows(vector: dict[str, Any]) -> None:
    record = decode_writers(bytes.fromhex(vector["hex"]))
    assert record == decode_writers_row(bytes.fromhex(vector["row"]))
    assert plain(record) == vector["record"]
    assert record.encode().hex() == vector["hex"]


@settings(deadline=None)
@given(RECORDS)
def test_what_is_encoded_is_decoded(record: WritersRecord) -> None:
    assert decode_writers(record.encode()) == record
    assert decode_writers_row(encode_writers_row(record)) == record


@settings(deadline=None, max_examples=300)
@given(broken(RECORDS.map(lambda record: record.encode())))
def test_any_bytes_are_a_record_or_corrupt(encoded: bytes) -> None:
    try:
        record = decode_writers(encoded)
    except Corrupt:
        return
    assert record.encode() == encoded


@given(broken(RECORDS.map(encode_writers_row)))
def test_any_bytes_are_a_row_or_corrupt(encoded: bytes) -> None:
    try:
        decode_writers_row(encoded)
    except Corrupt:
        pass


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pid", -1), ("pid", True), ("uid", 1 << 63), ("user", None), ("user", "x" * 257), ("arguments", [1]),
        ("arguments", ["x"] * 64), ("arguments", "x"), ("ids", {"a": 1}), ("ids", []), ("more", 1),
    ],
)  # fmt: skip
def test_a_process_that_nobody_writes_is_corrupt(key: str, value: Node) -> None:
    node = decode_node(WritersRecord(1, TREE, (ADA,)).encode())
    assert isinstance(node, dict) and isinstance(node["writers"], list)
    process = node["writers"][0]
    assert isinstance(process, dict)
    process[key] = value
    with pytest.raises(Corrupt):
        decode_writers(encode_node(node))


def test_too_many_processes_are_corrupt() -> None:
    node = decode_node(WritersRecord(1, TREE, (ADA,) * MOST_WRITERS).encode())
    assert isinstance(node, dict) and isinstance(node["writers"], list)
    node["writers"].append(node["writers"][0])
    with pytest.raises(Corrupt, match="out of range"):
        decode_writers(encode_node(node))


def writers_of(version: VersionRecord, *writers: Writer) -> WritersRecord:
    assert version.top.tree is not None
    return WritersRecord(version.number, version.top.tree, writers)


class World:
    """A store in which versions of `run1` are published, and their writers recorded."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.open()

    def open(self) -> None:
        self.store = SavedStore(self.root, key=OURS)
        self.log = WriterLog(self.store.disk, self.store.index, self.store.histories)

    def publish(self, content: bytes, *writers: Writer) -> VersionRecord:
        def listed(record: VersionRecord) -> None:
            if writers:
                self.log.record(record.unit, writers_of(record, *writers))

        self.store.before_listing = listed
        return trio.run(lambda: self.store.publish(RUN, {b"model": content}))

    def known(self, *records: VersionRecord) -> list[WritersRecord | None]:
        return [self.log.of(record) for record in records]

    def faults(self, record: VersionRecord) -> list[Fault]:
        evidence = self.store.histories.evidence(record.unit)
        return [one.fault for one in prove(evidence, [OURS.public]).findings]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "store")
    yield world
    world.store.close()


def test_they_are_a_sealed_batch_before_their_version(world: World) -> None:
    record = world.publish(b"a", ADA, BOB)
    kinds = [f.kind for f in decode_frames((world.root / history_path(record.unit)).read_bytes())]
    assert kinds[-4:] == [RecordKind.WRITERS, RecordKind.SEAL, RecordKind.VERSION, RecordKind.SEAL]
    assert world.known(record) == [writers_of(record, ADA, BOB)]
    assert world.faults(record) == [] and "writers" in read_format(world.store.disk).ro_compat


def test_a_store_without_them_has_no_flag(world: World) -> None:
    record = world.publish(b"a")
    assert world.known(record) == [None] and "writers" not in read_format(world.store.disk).ro_compat


def test_they_survive_reopening_and_the_loss_of_the_index(world: World) -> None:
    versions = [world.publish(b"a", ADA), world.publish(b"b"), world.publish(b"c", BOB)]
    expected = [writers_of(versions[0], ADA), None, writers_of(versions[2], BOB)]
    assert world.known(*versions) == expected
    world.store.histories.forget(versions[0].unit, versions[0].number)
    expected[0] = None
    assert world.known(*versions) == expected, "they go with their version"
    world.store.close()
    world.open()
    assert world.known(*versions) == expected
    world.store.close()
    shutil.rmtree(world.root / "index")
    rebuild(Disk(str(world.root)), boot_id="boot", now_ns=1)
    world.open()
    assert world.known(*versions) == expected and world.faults(versions[2]) == []


def test_another_version_of_their_number_has_none_of_them(world: World) -> None:
    """A publish died between the two records; what is made next has other content."""
    first = world.publish(b"a")
    meant = WritersRecord(first.number + 1, TREE, (ADA,))
    world.log.record(first.unit, meant)
    second = world.publish(b"b")
    assert second.number == meant.number and world.known(second) == [None]
    assert world.faults(second) == []
    third = world.publish(b"c", BOB)
    assert world.known(third) == [writers_of(third, BOB)]


def test_the_last_record_in_front_of_a_version_counts(world: World) -> None:
    """A publish found no room for its version and came again."""

    def twice(record: VersionRecord) -> None:
        for writer in (ADA, BOB):
            world.log.record(record.unit, writers_of(record, writer))

    world.store.before_listing = twice
    record = trio.run(lambda: world.store.publish(RUN, {b"model": b"a"}))
    assert world.known(record) == [writers_of(record, BOB)] and world.faults(record) == []


def test_an_altered_record_is_found(world: World) -> None:
    record = world.publish(b"a", ADA)
    evidence = world.store.histories.evidence(record.unit)
    forged = writers_of(record, replace(ADA, user="eve")).encode()
    # The frames' checksums are made good as well, so that only the seal can tell.
    frames = b"".join(
        encode_frame(f.kind, f.sequence, forged if f.kind == RecordKind.WRITERS else f.payload)
        for f in decode_frames(evidence.encoded)
    )
    assert len(frames) == len(evidence.encoded) and frames != evidence.encoded
    report = prove(replace(evidence, encoded=frames), [OURS.public])
    assert {one.fault for one in report.findings} == {Fault.ALTERED, Fault.INDEX}


def test_a_row_that_says_something_else_is_found_and_healed(world: World) -> None:
    record, other = world.publish(b"a", ADA), world.publish(b"b", BOB)
    change = Change()
    forged = encode_writers_row(writers_of(record, replace(ADA, user="eve")))
    change.put(Table.WRITERS, record.unit + (1).to_bytes(8, "big"), forged)
    change.delete(Table.WRITERS, record.unit + (2).to_bytes(8, "big"))
    world.store.index.apply(change)
    assert world.faults(record) == [Fault.INDEX, Fault.INDEX]
    assert all(one.healed for one in scrub(world.store).findings)
    assert world.known(record, other) == [writers_of(record, ADA), writers_of(other, BOB)]
    assert world.faults(other) == []


def test_a_record_behind_its_version_is_left_out(world: World) -> None:
    record = world.publish(b"a", ADA)
    payload = writers_of(record, BOB).encode()
    world.store.histories.append_record(record.unit, RecordKind.WRITERS, payload, Change())
    world.store.close()
    shutil.rmtree(world.root / "index")
    rebuild(Disk(str(world.root)), boot_id="boot", now_ns=1)
    world.open()
    assert world.known(record) == [writers_of(record, ADA)]


def test_an_index_from_before_there_were_writers(tmp_path: Path) -> None:
    """Its table is made when it is opened for writing; read only it is as good as empty."""
    world = World(tmp_path / "store")
    record = world.publish(b"a")
    world.store.close()
    (world.root / "index" / "pages").unlink()
    env = lmdb.open(str(world.root / "index"), max_dbs=20)
    with env.begin(write=True) as transaction:
        transaction.drop(env.open_db(b"writers", txn=transaction))
    env.close()
    disk = Disk(str(world.root))
    index = Index(disk, read_only=True)
    assert WriterLog(disk, index, Histories(disk, index, read_only=True)).of(record) is None
    index.close()
    world.open()
    other = world.publish(b"b", ADA)
    assert world.known(record, other) == [None, writers_of(other, ADA)]
    world.store.close()


def test_every_field_of_a_process_is_in_its_record() -> None:
    node = decode_node(WritersRecord(1, TREE, (ADA,)).encode())
    assert isinstance(node, dict) and isinstance(node["writers"], list)
    process = node["writers"][0]
    assert isinstance(process, dict) and process.keys() == asdict(ADA).keys()
