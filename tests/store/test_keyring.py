"""keyring, accepted_keys: a key follows another only on its signed word, and each alone leads to all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden import broken, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NoSpace
from ckptfs.store.frames import Frame, decode_frames, encode_frame
from ckptfs.store.histories import Histories
from ckptfs.store.history import GENESIS, MarkRecord, RecordKind
from ckptfs.store.history_check import Fault, HistoryReport, check_history
from ckptfs.store.history_log import HistoryLog, history_path
from ckptfs.store.history_scan import scan_history
from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Index
from ckptfs.store.keyring import Keyring, Rotation, decode_rotation, make_rotation
from ckptfs.store.layout import open_store, read_format
from ckptfs.store.seal import chained, chained_all, decode_seal, make_seal
from ckptfs.store.signing import PublicKey, SigningKey

OLD, NEW, NEWEST, THIEF = (SigningKey(bytes([n]) * 32) for n in range(4))
TO_NEW = make_rotation(OLD, NEW.public, 5)
TO_NEWEST = make_rotation(NEW, NEWEST.public, 6)
UNIT = UnitId(b"u" * 16)
BYTES = st.binary(min_size=32, max_size=32)
ROTATIONS = st.builds(
    Rotation, BYTES, BYTES, st.integers(0, (1 << 63) - 1), st.binary(min_size=64, max_size=64)
).filter(lambda one: one.old != one.new)


@pytest.mark.parametrize("vector", vectors("rotation"), ids=lambda v: v["name"])
def test_golden_records(vector: dict[str, Any]) -> None:
    rotation = decode_rotation(bytes.fromhex(vector["hex"]))
    assert rotation.encode().hex() == vector["hex"] and rotation.is_signed()
    old, new, time_ns = bytes.fromhex(vector["old"]), bytes.fromhex(vector["new"]), vector["time_ns"]
    assert (rotation.old, rotation.new, rotation.time_ns) == (old, new, time_ns)
    message = b"ckptfs key rotation 1\0" + old + new + time_ns.to_bytes(8, "little")
    assert PublicKey(old).has_signed(message, bytes.fromhex(vector["signature"]))


@given(ROTATIONS)
def test_what_is_encoded_is_decoded(rotation: Rotation) -> None:
    assert decode_rotation(rotation.encode()) == rotation


@settings(deadline=None, max_examples=300)
@given(broken(ROTATIONS.map(lambda one: one.encode())))
def test_any_bytes_are_a_record_or_corrupt(encoded: bytes) -> None:
    try:
        rotation = decode_rotation(encoded)
    except Corrupt:
        return
    assert rotation.encode() == encoded
    assert rotation.is_signed() in (True, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("new", bytes(31)),
        ("old", TO_NEW.new),
        ("time", -1),
        ("time", 1 << 63),
        ("signature", bytes(63)),
        ("more", 1),
    ],
    ids=str,
)
def test_a_record_that_nobody_writes_is_corrupt(field: str, value: Node) -> None:
    node: dict[str, Node] = {
        "new": TO_NEW.new, "old": TO_NEW.old, "time": 5, "signature": TO_NEW.signature,
    }  # fmt: skip
    assert decode_rotation(encode_node(node)) == TO_NEW
    with pytest.raises(Corrupt):
        decode_rotation(encode_node({**node, field: value}))


@pytest.mark.parametrize("field", ["old", "new", "time_ns", "signature"])
def test_every_field_is_signed(field: str) -> None:
    assert TO_NEW.is_signed()
    other: dict[str, Any] = {
        "old": THIEF.public.raw,
        "new": THIEF.public.raw,
        "time_ns": 6,
        "signature": bytes(64),
    }
    assert not replace(TO_NEW, **{field: other[field]}).is_signed()


def test_a_keyring_knows_the_keys_that_lead_to_the_one_in_use() -> None:
    ring = Keyring(NEWEST, [TO_NEW, TO_NEWEST])
    assert ring.way_from(OLD.public.raw) == (TO_NEW, TO_NEWEST)
    assert ring.way_from(NEW.public.raw) == (TO_NEWEST,)
    assert ring.way_from(NEWEST.public.raw) == ring.way_from(THIEF.public.raw) == ()
    assert ring.retired == [OLD.public, NEW.public]
    assert ring.trusted == [OLD.public, NEW.public, NEWEST.public]
    astray = Keyring(NEWEST, [make_rotation(NEW, OLD.public, 1), TO_NEW])
    assert astray.retired == [] and astray.trusted == [NEWEST.public]
    assert Keyring().trusted == Keyring().retired == []


# ---- histories ------------------------------------------------------------------------------


Batched = tuple[RecordKind, bytes]


class Written:
    """A history as somebody with some keys writes it."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.chain = GENESIS
        self.marks = 0

    def batch(self, key: SigningKey | None, *records: Batched) -> Written:
        """Records and their seal."""
        start = head = self.chain
        for kind, payload in records:
            head = chained(head, kind, payload)
            self.frames.append((kind, payload))
        if key is not None:
            seal = make_seal(key, UNIT, start, len(records), head)
            self.frames.append((RecordKind.SEAL, seal.encode()))
        self.chain = head
        return self

    def tag(self, key: SigningKey | None, *rotations: Rotation) -> Written:
        """A batch of a tag, and of rotations before it."""
        self.marks += 1
        mark = MarkRecord(1, f"tag{self.marks}", 1).encode()
        return self.batch(
            key, *((RecordKind.ROTATE, one.encode()) for one in rotations), (RecordKind.TAG, mark)
        )

    def check(self, *keys: SigningKey, retired: Sequence[SigningKey] = ()) -> HistoryReport:
        encoded = b"".join(encode_frame(kind, n, payload) for n, (kind, payload) in enumerate(self.frames, 1))
        publics = [key.public for key in keys]
        return check_history(UNIT, scan_history(encoded, 0), publics, None, [key.public for key in retired])

    def faults(self, *keys: SigningKey, retired: Sequence[SigningKey] = ()) -> set[Fault]:
        return {one.fault for one in self.check(*keys, retired=retired).findings}


def rotated_twice() -> Written:
    return Written().tag(OLD).tag(OLD).tag(NEW, TO_NEW).tag(NEW).tag(NEWEST, TO_NEWEST).tag(NEWEST)


ALL = (OLD, NEW, NEWEST)


@pytest.mark.parametrize("known", [(OLD,), (NEW,), (NEWEST,), ALL, ALL[::-1], ()], ids=range(6))
def test_any_one_of_the_keys_leads_to_all(known: tuple[SigningKey, ...]) -> None:
    for history in (rotated_twice(), Written().tag(OLD).tag(NEWEST, TO_NEW, TO_NEWEST).tag(NEWEST)):
        report = history.check(*known)
        assert report.findings == []
        assert {OLD.public.fingerprint, NEWEST.public.fingerprint} <= set(report.accepted)


def test_of_several_keys_no_rotation_leads_to_another() -> None:
    assert rotated_twice().faults(OLD, NEW) == {Fault.KEY}
    assert rotated_twice().faults(THIEF) == {Fault.KEY}


def test_a_key_without_a_rotation_is_found() -> None:
    for known in ((OLD,), (NEW,)):
        assert Fault.KEY in Written().tag(OLD).tag(NEW).faults(*known)


def test_a_rotation_that_the_old_key_has_not_signed_is_found() -> None:
    forged = replace(make_rotation(THIEF, THIEF.public, 1), old=OLD.public.raw)
    history = Written().tag(OLD).tag(THIEF, replace(forged, new=THIEF.public.raw))
    assert Fault.KEY in history.faults(OLD)
    by_a_stranger = make_rotation(NEWEST, THIEF.public, 1)
    assert Fault.KEY in Written().tag(OLD).tag(THIEF, by_a_stranger).faults(OLD)


def test_the_old_key_signs_nothing_behind_its_rotation() -> None:
    for history in (rotated_twice().tag(OLD), rotated_twice().tag(NEW), Written().tag(OLD).tag(OLD, TO_NEW)):
        for known in ((OLD,), (NEW,), (NEWEST,), ALL):
            assert Fault.KEY in history.faults(*known), known


def test_a_thief_of_the_old_key_is_found_by_whoever_knows_the_new_one() -> None:
    """FORMAT.md names what he can do to those who know only the old one."""
    stolen = make_rotation(OLD, THIEF.public, 5)
    forked = Written().tag(OLD).tag(THIEF, stolen)
    assert forked.faults(OLD) == set(), "this is what is named there"
    assert Fault.KEY in forked.faults(NEW) and Fault.KEY in forked.faults(OLD, NEW)
    went_on = Written().tag(OLD).tag(OLD)
    assert went_on.faults(OLD, NEW) == set(), "and this, to whoever does not know that it was retired"
    assert Fault.KEY in went_on.faults(OLD, NEW, retired=[OLD])
    assert rotated_twice().faults(*ALL, retired=[OLD, NEW]) == set()


def test_a_thief_of_the_old_key_changes_nothing_in_front_of_the_rotation() -> None:
    """He makes its seals anew and keeps the true batch that rotates; that continues what was there."""
    true = rotated_twice()
    forged = Written().tag(OLD)
    forged.tag(OLD)
    kind, _ = forged.frames[2]
    assert kind == RecordKind.TAG
    forged.frames[2:] = []
    forged.chain = chained_all(
        GENESIS, [Frame(kind, 0, p) for kind, p in forged.frames if kind != RecordKind.SEAL]
    )
    forged.batch(OLD, (RecordKind.TAG, MarkRecord(1, "forged", 1).encode()))
    forged.frames += true.frames[4:]
    for known in ((OLD,), (NEW,), (NEWEST,), ALL):
        assert Fault.REMOVED in forged.faults(*known), known
        assert Fault.REMOVED not in true.faults(*known)


def test_a_true_rotation_that_the_new_key_has_not_sealed_lets_nobody_in() -> None:
    """The record is no secret: at the end of a forged history it makes no old key one that is trusted."""
    for key in (OLD, THIEF, None):
        assert Written().tag(OLD).tag(key, TO_NEW).faults(NEW), key
    kind, payload = rotated_twice().frames[6]
    elsewhere = decode_seal(payload)
    assert kind == RecordKind.SEAL and elsewhere.key == NEW.public.raw
    forged = Written().tag(OLD).tag(None, TO_NEW)
    forged.frames.append((kind, payload))
    assert forged.faults(NEW) and forged.faults(OLD)


# ---- written by Histories -------------------------------------------------------------------


class Store:
    def __init__(self, root: Path, ring: Keyring) -> None:
        self.root, self.ring = root, ring
        self.open()

    def open(self) -> None:
        self.disk: Disk = open_store(str(self.root), create=True)
        self.index = Index(self.disk)
        self.histories = Histories(self.disk, self.index, key=self.ring)

    def reopen(self, ring: Keyring) -> None:
        self.index.close()
        self.ring = ring
        self.open()

    def kinds(self, unit: UnitId = UNIT) -> list[int]:
        return [f.kind for f in decode_frames((self.root / history_path(unit)).read_bytes())]

    def faults(self, *keys: SigningKey) -> set[Fault]:
        scan = scan_history((self.root / history_path(UNIT)).read_bytes(), 0)
        return {one.fault for one in check_history(UNIT, scan, [key.public for key in keys]).findings}

    def rename(self, name: bytes) -> None:
        change = Change()
        self.histories.rebind(UNIT, 0, name, change)
        self.index.apply(change)


def test_each_history_says_it_before_the_new_key_seals_anything(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", Keyring(OLD))
    store.histories.new_unit(UNIT, b"run", 0, 1)
    store.rename(b"run2")
    assert read_format(store.disk).ro_compat == ()
    store.reopen(Keyring(NEW, [TO_NEW]))
    store.rename(b"run3")
    store.rename(b"run4")
    assert store.kinds() == [1, 9, 8, 9, 11, 9, 8, 9, 8, 9]
    assert read_format(store.disk).ro_compat == ("rotations",)
    store.reopen(Keyring(NEWEST, [TO_NEW, TO_NEWEST]))
    store.histories.record_rotation(UNIT)
    store.histories.record_rotation(UNIT)
    assert store.kinds()[10:] == [11, 9]
    for known in ALL:
        assert store.faults(known) == set()
    store.index.close()


def test_rotations_that_came_together_are_said_together_and_of_new_units_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", Keyring(OLD))
    store.histories.new_unit(UNIT, b"run", 0, 1)
    store.ring.rotations, store.ring.signing = (TO_NEW, TO_NEWEST), NEWEST
    other = UnitId(b"o" * 16)
    store.histories.new_unit(other, b"other", 0, 1)
    store.histories.record_rotation(other)
    store.histories.record_rotation(UNIT)
    assert store.kinds() == [1, 9, 11, 11, 9] and store.kinds(other) == [1, 9]
    assert store.faults(OLD) == store.faults(NEWEST) == set()
    store.index.close()


def test_behind_records_without_a_seal_the_last_seal_tells_who_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", Keyring(OLD))
    store.histories.new_unit(UNIT, b"run", 0, 1)
    store.reopen(Keyring())
    store.rename(b"run2")
    store.reopen(Keyring(NEW, [TO_NEW]))
    store.rename(b"run3")
    assert store.kinds() == [1, 9, 8, 11, 9, 8, 9]
    assert store.faults(OLD) == {Fault.UNSIGNED}
    store.index.close()


def test_a_key_that_was_exchanged_without_a_rotation_says_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", Keyring(OLD))
    store.histories.new_unit(UNIT, b"run", 0, 1)
    store.reopen(Keyring(THIEF, [TO_NEW]))
    store.rename(b"run2")
    assert store.kinds() == [1, 9, 8, 9] and store.faults(OLD) == {Fault.KEY}
    store.index.close()


def test_it_survives_the_loss_of_the_index(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", Keyring(OLD))
    store.histories.new_unit(UNIT, b"run", 0, 1)
    store.reopen(Keyring(NEW, [TO_NEW]))
    store.histories.record_rotation(UNIT)
    (before,) = store.histories.units()
    store.index.close()
    for name in ("index", "journal"):
        shutil.rmtree(tmp_path / "store" / name)
    store.open()
    (after,) = store.histories.units()
    assert (after.chain, after.frames, after.sealed) == (before.chain, before.frames, True)
    assert store.histories.problems == []
    store.histories.record_rotation(UNIT)
    assert store.kinds() == [1, 9, 11, 9]
    store.index.close()


def test_a_disk_that_is_full_behind_the_rotation_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", Keyring(OLD))
    store.histories.new_unit(UNIT, b"run", 0, 1)
    store.ring.rotations, store.ring.signing = (TO_NEW,), NEW
    real, calls = HistoryLog.append, []

    def second_fails(self: HistoryLog, unit: UnitId, end: int, frames: bytes) -> int:
        calls.append(end)
        if len(calls) == 2:
            raise NoSpace("full")
        return real(self, unit, end, frames)

    monkeypatch.setattr(HistoryLog, "append", second_fails)
    store.rename(b"run2")  # It is recorded when there is room.
    assert store.kinds() == [1, 9, 11, 9]
    store.rename(b"run3")
    assert store.kinds() == [1, 9, 11, 9, 8, 9] and len(calls) == 3
    assert store.faults(OLD) == store.faults(NEW) == set() and store.histories.problems == []
    store.index.close()
