"""Histories: what was appended is there after every kind of end, and nothing else is.

The one rule: each claim is checked on the instance that made it, on one that was opened after a clean
close, after a process that died before the index heard of it, and with the index deleted (rebuild).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Conflict, InvalidRequest, NoSpace, NotFound, ReadOnly
from ckptfs.store.frames import decode_frames, encode_frame
from ckptfs.store.histories import Histories, Unit
from ckptfs.store.history import GENESIS, RecordKind, State, VersionRecord, decode_version
from ckptfs.store.history_log import history_path
from ckptfs.store.ids import TreeId, UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.seal import decode_seal
from ckptfs.store.signing import SigningKey
from ckptfs.store.tree import Entry
from ckptfs.store.units import encode_unit
from ckptfs.store.version_names import version_name

A, B, C = (UnitId(bytes([n]) * 16) for n in (0xA1, 0xB2, 0xC3))
START_NS = 1_796_000_000_000_000_000
TOP = Entry(
    name=b"top",
    mode=stat.S_IFDIR | 0o755,
    uid=1000,
    gid=1000,
    mtime_ns=START_NS,
    ctime_ns=START_NS,
    tree=TreeId(bytes(32)),  # type: ignore[arg-type]
)


class FaultyDisk(Disk):
    """Fails the next calls of the kinds that a test names, with the error that it names."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.fail: dict[str, int] = {}

    def _maybe(self, call: str) -> None:
        if code := self.fail.pop(call, 0):
            raise OSError(code, os.strerror(code))

    def pwrite(self, fd: int, payload: bytes | bytearray | memoryview, offset: int) -> int:
        if "pwrite" in self.fail:
            super().pwrite(fd, payload[: len(payload) // 2], offset)
        self._maybe("pwrite")
        return super().pwrite(fd, payload, offset)

    def sync(self, fd: int) -> None:
        self._maybe("sync")
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._maybe("truncate")
        super().truncate(fd, size)


class Store:
    """A store that can be closed, killed, and lose its index. The clock ticks a second a call."""

    def __init__(self, root: Path, key: SigningKey | None = None) -> None:
        self.root = root
        self.key = key
        self.now_ns = START_NS
        root.mkdir()
        self.open()

    def clock(self) -> int:
        self.now_ns += 1_000_000_000
        return self.now_ns

    def open(self) -> None:
        self.disk = FaultyDisk(str(self.root))
        self.index = Index(self.disk)
        self.histories = Histories(self.disk, self.index, clock_ns=self.clock, key=self.key)

    def reopen(self) -> Histories:
        self.index.close()
        self.open()
        return self.histories

    def kill(self) -> Histories:
        """What is left when the process dies: the files and the journal, as they are."""
        left = self.root.with_name(f"{self.root.name}-left")
        shutil.copytree(self.root, left)
        self.index.close()
        shutil.rmtree(self.root)
        left.rename(self.root)
        self.open()
        return self.histories

    def rebuild(self) -> Histories:
        self.index.close()
        shutil.rmtree(self.root / "index")
        shutil.rmtree(self.root / "journal")
        self.open()
        return self.histories

    def file(self, unit: UnitId) -> Path:
        return self.root / history_path(unit)

    def next_record(self, unit_id: UnitId, state: State = State.COMPLETE) -> VersionRecord:
        unit = self.unit(unit_id)
        now = self.clock()
        return VersionRecord(
            unit=unit_id,
            number=unit.next_number,
            name=version_name(unit.next_number, now),
            time_ns=now,
            origin="settled",
            top=TOP,
            root=bytes(32),
            files=3,
            logical_bytes=1 << 33,
            state=state,
            step=unit.next_number * 100,
            steps=(unit.next_number * 100,) if state is State.COMPLETE else (),
            missing=() if state is State.COMPLETE else ("model-00002-of-00002.safetensors is missing",),
            before=unit.head,
        )

    def unit(self, unit_id: UnitId) -> Unit:
        unit = self.histories.unit(unit_id)
        assert unit is not None
        return unit

    def publish(self, unit_id: UnitId, state: State = State.COMPLETE) -> VersionRecord:
        record = self.next_record(unit_id, state)
        change = Change()
        self.histories.append_version(record, change)
        self.index.apply(change, sync=True)
        return record

    def rebind(self, unit_id: UnitId, ino: int, name: bytes) -> None:
        change = Change()
        self.histories.rebind(unit_id, ino, name, change)
        self.index.apply(change)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store")
    yield store
    store.index.close()


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Store]:
    """A store whose histories are sealed."""
    store = Store(tmp_path / "sealed", SigningKey(bytes(32)))
    yield store
    store.index.close()


def everything(store: Store) -> dict[str, object]:
    """All that the histories tell, but for live inodes (which a rebuild cannot know)."""
    histories = store.histories
    return {
        unit.unit.hex(): (
            unit.name,
            unit.next_number,
            unit.head,
            unit.frames,
            unit.file_bytes,
            unit.chain,
            unit.sealed,
            histories.versions(unit.unit),
            histories.tags(unit.unit),
            histories.pins(unit.unit),
            histories.newest_complete(unit.unit),
        )
        for unit in histories.units()
    }


@pytest.mark.parametrize("kind", ["store", "sealed"])
def test_everything_survives_reopening_death_and_the_loss_of_the_index(
    request: pytest.FixtureRequest, kind: str
) -> None:
    store: Store = request.getfixturevalue(kind)
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.histories.new_unit(B, b"a/b", 11, START_NS)
    for state in (State.COMPLETE, State.PARTIAL, State.OPAQUE, State.COMPLETE, State.PARTIAL):
        store.publish(A, state)
    store.publish(B)
    store.histories.tag(A, 1, "best")
    store.histories.tag(A, 2, "bad")
    store.histories.untag(A, "bad")
    store.histories.pin(A, 2)
    store.histories.pin(A, 3)
    store.histories.unpin(A, 3)
    store.histories.forget(A, 3)
    store.rebind(A, 10, b"run2")
    before = everything(store)
    assert store.histories.numbers(A) == [1, 2, 4, 5]
    newest_complete = store.histories.newest_complete(A)
    assert newest_complete is not None and newest_complete.number == 4
    for again in (store.reopen, store.kill, store.rebuild, store.reopen):
        again()
        assert everything(store) == before, again.__name__
        assert store.histories.problems == []
    store.publish(A)
    assert store.histories.numbers(A) == [1, 2, 4, 5, 6]


def test_versions_form_a_chain(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    records = [store.publish(A) for _ in range(5)]
    assert [r.before for r in records] == [GENESIS, *(r.link() for r in records[:-1])]
    frames = list(decode_frames(store.file(A).read_bytes()))
    assert [f.sequence for f in frames] == [1, 2, 3, 4, 5, 6]
    assert [decode_version(f.payload) for f in frames if f.kind == RecordKind.VERSION] == records


def test_a_version_is_there_once_its_frame_is_synced(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.publish(A)
    record = store.next_record(A)
    store.histories.append_version(record, Change())  # The process dies before it applies the change.
    store.kill()
    assert store.histories.newest(A) == record
    assert store.unit(A).ino == 10
    assert store.histories.problems == []


def test_a_refused_change_is_made_up_for(store: Store) -> None:
    """The disk is full for the journal after the frame was written: the version exists all the same."""
    store.histories.new_unit(A, b"run1", 10, START_NS)
    record = store.next_record(A)
    store.histories.append_version(record, Change())
    assert store.publish(A).number == 2
    assert store.histories.numbers(A) == [1, 2]


def test_steps_of_one_change_build_on_each_other(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    record = store.next_record(A)
    change = Change()
    store.histories.append_version(record, change)
    store.histories.rebind(A, 0, b"run1", change)
    store.index.apply(change, sync=True)
    unit = store.unit(A)
    assert (unit.ino, unit.next_number, unit.head) == (0, 2, record.link())


def test_an_overtaken_version_is_a_conflict(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    late = store.next_record(A)
    store.publish(A)
    with pytest.raises(Conflict):
        store.histories.append_version(late, Change())
    assert store.histories.numbers(A) == [1]


@pytest.mark.parametrize("torn_bytes", [1, 27, 30, 200])
def test_a_torn_tail_is_cut_off(store: Store, torn_bytes: int) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.publish(A)
    whole = store.file(A).read_bytes()
    frame = encode_frame(RecordKind.VERSION, 3, store.next_record(A).encode())
    store.file(A).write_bytes(whole + frame[:torn_bytes])
    store.kill()
    assert store.file(A).read_bytes() == whole
    assert store.histories.problems == []
    store.publish(A)
    assert store.histories.numbers(A) == [1, 2]


def test_a_batch_is_there_whole_or_not_at_all(sealed: Store) -> None:
    """At whatever byte the write of a version and its seal ends."""
    sealed.histories.new_unit(A, b"run1", 10, START_NS)
    first = sealed.publish(A)
    whole = sealed.file(A).read_bytes()
    sealed.histories.append_version(sealed.next_record(A), Change())
    batch = sealed.file(A).read_bytes()[len(whole) :]
    assert [f.kind for f in decode_frames(batch)] == [RecordKind.VERSION, RecordKind.SEAL]
    for written in [*range(0, len(batch), 13), len(batch) - 1]:
        sealed.file(A).write_bytes(whole + batch[:written])
        sealed.kill()
        assert sealed.file(A).read_bytes() == whole and sealed.histories.problems == []
    assert sealed.histories.versions(A) == [first]
    for lost in range(0, len(batch) - 100, 13):
        # The sectors of one write reach the disk in any order: the seal may be there without the record.
        sealed.file(A).write_bytes(whole + batch[:lost] + bytes(40) + batch[lost + 40 :])
        sealed.reopen()
        assert sealed.histories.problems == [] and sealed.file(A).read_bytes() == whole
    sealed.file(A).write_bytes(whole + batch)
    sealed.kill()
    assert sealed.histories.numbers(A) == [1, 2]


def test_without_the_index_a_record_that_lost_its_seal_stays(sealed: Store) -> None:
    sealed.histories.new_unit(A, b"run1", 10, START_NS)
    sealed.publish(A)
    sealed.publish(A)
    content = sealed.file(A).read_bytes()
    sealed.file(A).write_bytes(content[:-1])
    sealed.rebuild()
    assert sealed.histories.numbers(A) == [1, 2]
    assert sealed.histories.head(sealed.unit(A))[1] is None
    sealed.publish(A)
    key = sealed.histories.head(sealed.unit(A))[1]
    assert key is not None and sealed.key is not None and key == sealed.key.public


def test_a_row_from_before_there_were_seals_is_brought_up(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.publish(A)
    expected = store.unit(A).chain
    old = msgspec.msgpack.decode(encode_unit(store.unit(A)))[:11]
    change = Change()
    change.put(Table.UNIT, A, msgspec.msgpack.encode(old))
    store.index.apply(change)
    store.key = SigningKey(bytes(32))
    store.reopen()
    assert store.unit(A).chain == b"" and store.histories.head(store.unit(A)) == (expected, None)
    store.publish(A)
    seals = [decode_seal(f.payload) for f in decode_frames(store.file(A).read_bytes()) if f.kind == 9]
    assert [seal.before for seal in seals] == [expected] and store.unit(A).chain == seals[0].head


@pytest.mark.parametrize("left_bytes", [0, 20])
def test_a_unit_that_was_being_made_leaves_nothing(store: Store, left_bytes: int) -> None:
    store.file(A).write_bytes(encode_frame(1, 1, b"")[:left_bytes])
    store.reopen()
    assert store.histories.units() == [] and not store.file(A).exists()


def test_an_index_that_knows_more_than_the_file_is_a_problem_of_that_unit_only(store: Store) -> None:
    for unit, name in ((A, b"run1"), (B, b"run2")):
        store.histories.new_unit(unit, name, 10, START_NS)
        store.publish(unit)
        store.publish(unit)
    whole = store.file(A).read_bytes()
    store.file(A).write_bytes(whole[:-1])
    store.reopen()
    (problem,) = store.histories.problems
    assert "run1" in str(problem) and history_path(A) in str(problem)
    assert store.histories.numbers(A) == [1, 2]
    with pytest.raises(ReadOnly):
        store.publish(A)
    store.rebind(A, 10, b"renamed all the same")
    assert store.publish(B).number == 3
    os.unlink(store.file(A))
    store.reopen()
    assert len(store.histories.problems) == 1


def test_damage_in_the_middle_loses_one_version_and_not_the_later_ones(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    for _ in range(5):
        store.publish(A)
    content = bytearray(store.file(A).read_bytes())
    frames = list(decode_frames(bytes(content)))
    content[frames[2].end - 50] ^= 3  # version 2
    store.file(A).write_bytes(content)
    store.rebuild()
    assert store.histories.numbers(A) == [1, 3, 4, 5]
    assert any("damaged" in str(p) for p in store.histories.problems)
    assert store.file(A).read_bytes() == content
    assert store.publish(A).number == 6
    content[60] ^= 3  # the unit's own record
    store.file(A).write_bytes(content)
    store.rebuild()
    assert store.histories.numbers(A) == [1, 3, 4, 5]
    assert store.unit(A).name == b"unit-a1a1a1a1"


def test_a_record_that_does_not_belong_is_left_out_and_reported(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    first = store.publish(A)
    stranger = replace(store.next_record(A), unit=B)
    unchained = replace(store.next_record(A), before=bytes([7]) * 32)
    payloads = [stranger.encode(), first.encode(), b"no record", unchained.encode()]
    frames = [encode_frame(RecordKind.VERSION, n, p) for n, p in enumerate(payloads, 3)]
    with store.file(A).open("ab") as file:
        file.write(b"".join(frames) + encode_frame(99, 7, b""))
    store.kill()
    assert store.histories.numbers(A) == [1, 2]
    assert len(store.histories.problems) == 5
    assert store.unit(A).frames == 7


def test_a_full_disk_changes_nothing(store: Store) -> None:
    store.disk.fail = {"pwrite": errno.ENOSPC}
    with pytest.raises(NoSpace):
        store.histories.new_unit(A, b"run1", 10, START_NS)
    assert not store.file(A).exists()
    store.histories.new_unit(A, b"run1", 10, START_NS)
    whole = store.file(A).read_bytes()
    store.disk.fail = {"pwrite": errno.ENOSPC}
    with pytest.raises(NoSpace):
        store.publish(A)
    assert store.file(A).read_bytes() == whole
    assert store.publish(A).number == 1


@pytest.mark.parametrize("fail", [{"sync": errno.EIO}, {"pwrite": errno.EIO, "truncate": errno.EIO}])
def test_a_writer_that_failed_is_broken_for_good(store: Store, fail: dict[str, int]) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.histories.new_unit(B, b"run2", 11, START_NS)
    store.disk.fail = dict(fail)
    for _ in range(2):
        with pytest.raises(ReadOnly, match="restart"):
            store.publish(A)
    assert store.publish(B).number == 1
    store.kill()
    assert store.publish(A).number in (1, 2)


def test_a_file_that_somebody_else_changed_takes_nothing(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    with store.file(A).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ReadOnly, match="somebody else"):
        store.publish(A)


def test_a_made_again_directory_continues_its_history(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.publish(A)
    store.rebind(A, 0, b"run1")
    assert store.histories.unit_of_ino(10) is None
    removed = store.histories.unit_named(b"run1")
    assert removed is not None and (removed.unit, removed.ino) == (A, 0)
    store.rebind(A, 77, b"run1")
    assert store.publish(A).number == 2
    live = store.histories.unit_of_ino(77)
    assert live is not None and live.unit == A


def test_the_newer_owner_has_the_plain_name(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.publish(A)
    store.rebind(A, 0, b"run1")
    store.histories.new_unit(B, b"tmp", 11, START_NS)
    store.publish(B)
    store.rebind(B, 11, b"run1")
    assert {name: u.unit for name, u in store.histories.shown_names().items()} == {
        b"run1": B,
        b"run1~a1a1a1a1": A,
    }
    store.rebind(B, 0, b"run1")  # Both are removed: the one that had it last goes on.
    named = store.histories.unit_named(b"run1")
    assert named is not None and named.unit == B


def test_removed_units_without_a_version_are_not_shown(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.histories.new_unit(B, b"run1", 0, START_NS)
    store.rebind(A, 0, b"run1")
    assert store.histories.shown_names() == {}
    store.publish(A)
    store.histories.forget(A, 1)
    assert store.histories.shown_names() == {}


def test_a_refused_rename_leaves_the_old_binding(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.histories.rebind(A, 20, b"run2", Change())  # never applied
    for find in (store.histories.unit_of_ino(10), store.histories.unit_named(b"run1")):
        assert find is not None and find.unit == A
    assert store.histories.unit_of_ino(20) is None and store.histories.unit_named(b"run2") is None
    store.kill()
    assert store.unit(A).name == b"run1"
    store.rebuild()  # The file was told again that the name is run1.
    assert store.unit(A).name == b"run1"


def test_renaming_works_on_a_full_disk_and_is_recorded_later(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.disk.fail = {"pwrite": errno.ENOSPC}
    change = Change()
    store.histories.rebind(A, 10, b"run2", change)
    store.disk.fail = {}
    store.index.apply(change)
    assert store.unit(A).recorded == b"run1"
    store.reopen()
    assert store.unit(A).recorded == b"run2"
    store.rebuild()
    assert store.unit(A).name == b"run2"


def test_tags_and_pins_protect_from_forgetting(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.publish(A)
    store.publish(A)
    store.histories.tag(A, 1, "best")
    store.histories.tag(A, 1, "best")
    with pytest.raises(Conflict):
        store.histories.tag(A, 2, "best")
    with pytest.raises(Conflict):
        store.histories.forget(A, 1)
    store.histories.untag(A, "best")
    store.histories.pin(A, 1)
    with pytest.raises(Conflict):
        store.histories.forget(A, 1)
    store.histories.unpin(A, 1)
    store.histories.forget(A, 1)
    with pytest.raises(NotFound):
        store.histories.forget(A, 1)
    with pytest.raises(NotFound):
        store.histories.tag(A, 1, "best")
    with pytest.raises(NotFound):
        store.histories.pin(A, 9)
    with pytest.raises(NotFound):
        store.histories.untag(A, "best")
    with pytest.raises(InvalidRequest):
        store.histories.tag(A, 2, "latest")
    assert store.histories.version(A, 1) is None


def test_newest_complete_follows_appends_and_forgets(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)

    def number() -> int | None:
        found = store.histories.newest_complete(A)
        return found.number if found else None

    assert number() is None
    store.publish(A, State.PARTIAL)
    assert number() is None
    store.publish(A)
    store.publish(A)
    store.publish(A, State.OPAQUE)
    assert number() == 3
    store.histories.forget(A, 4)
    assert number() == 3
    store.histories.forget(A, 3)
    assert number() == 2
    store.publish(A, State.PARTIAL)
    assert number() == 2
    store.publish(A)
    assert number() == 6
    store.histories.forget(A, 2)
    store.histories.forget(A, 6)
    assert number() is None


def test_reading_only_touches_nothing(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    store.publish(A)
    store.histories.append_version(store.next_record(A), Change())
    store.index.commit()
    before = store.file(A).read_bytes()
    histories = Histories(store.disk, store.index, read_only=True)
    assert histories.numbers(A) == [1] and store.file(A).read_bytes() == before


def test_ten_thousand_versions_are_listed_in_half_a_second(store: Store) -> None:
    store.histories.new_unit(A, b"run1", 10, START_NS)
    with store.file(A).open("ab") as file:
        record = store.next_record(A)
        for number in range(1, 10_001):
            file.write(encode_frame(RecordKind.VERSION, number + 1, record.encode()))
            record = replace(record, number=number + 1, before=record.link(), state=State.PARTIAL)
    store.reopen()
    start = time.perf_counter()
    assert len(store.histories.versions(A)) == 10_000
    took_s = time.perf_counter() - start
    complete = store.histories.newest_complete(A)
    assert complete is not None and complete.number == 1
    assert took_s < 0.5
    assert store.index.count(Table.VERSION) == 10_000
