"""Tampering: whoever may rewrite every file of a store changes, drops or reorders nothing unnoticed.

The one rule: each attack rewrites files as the attacker would (checksums and sequence numbers made good
again), and is judged with nothing but the public key, or a head that was kept elsewhere.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import trio
from history_edits import (
    EDITS,
    IDS,
    OURS,
    THEIRS,
    Edit,
    Frames,
    add_a_mark,
    add_digests,
    exchange_two_seals,
    remove_only_the_seal,
    replay,
    retag,
    strip_the_last_seals,
    strip_the_seals,
)
from saved_store import SavedStore, Tree

from ckptfs.store.digest_log import DigestLog
from ckptfs.store.digests import FileDigests
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.frames import Frame, decode_frames, encode_frame
from ckptfs.store.hashing import crc64
from ckptfs.store.histories import Histories
from ckptfs.store.history import (
    MarkRecord,
    RecordKind,
    State,
    VersionRecord,
    decode_version,
)
from ckptfs.store.history_check import Fault, Finding, HistoryReport
from ckptfs.store.history_log import history_path
from ckptfs.store.history_proof import prove
from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.seal import Head, chained_all, decode_seal, head_of, make_seal
from ckptfs.store.segment_format import encode_location, segment_paths
from ckptfs.store.signing import SigningKey
from ckptfs.store.units import encode_unit

RUN, OTHER = b"run1", b"run2"


@dataclass(frozen=True, slots=True)
class Store:
    """A store that nobody has open, with five versions of `run1` and two of `run2`, all sealed."""

    root: Path
    unit: UnitId
    other: UnitId
    head: Head

    def file(self, unit: UnitId) -> Path:
        return self.root / history_path(unit)

    def frames(self, unit: UnitId) -> Frames:
        return [(f.kind, f.payload) for f in decode_frames(self.file(unit).read_bytes())]

    def put(self, unit: UnitId, frames: Frames) -> None:
        """Write a history anew, with right checksums and sequence numbers."""
        whole = (encode_frame(kind, number, payload) for number, (kind, payload) in enumerate(frames, 1))
        self.file(unit).write_bytes(b"".join(whole))

    def lose_index(self) -> None:
        for name in ("index", "journal"):
            shutil.rmtree(self.root / name)

    def proof(
        self, unit: UnitId | None = None, expected: Head | None = None, key: bool = True
    ) -> HistoryReport:
        """What `log --verify` finds, once a daemon has opened the store."""
        store = SavedStore(self.root, key=OURS)
        try:
            evidence = store.histories.evidence(self.unit if unit is None else unit)
            return prove(evidence, [OURS.public] if key else [], expected)
        finally:
            store.close()

    def go_on(self, step: int = 99) -> None:
        """A daemon makes one more version."""
        store = SavedStore(self.root, key=OURS)
        trio.run(_publish, store, RUN, step)
        store.close()


def record_digests(store: SavedStore, record: VersionRecord) -> None:
    """What the daemon makes in the background: here of a content that is in no other version."""
    assert record.top.tree is not None
    recipe = next(entry.recipe for entry in store.segments.read_tree(record.top.tree) if entry.recipe)
    digests = FileDigests(300_000, b"s" * 32, b"b" * 32, 7)
    DigestLog(store.disk, store.index, store.histories).record(record.unit, {recipe: digests})


async def _publish(store: SavedStore, name: bytes, step: int) -> VersionRecord:
    tree: Tree = {b"model.bin": random.Random(step).randbytes(300_000), b"below": {b"small": b"%d" % step}}
    return await store.publish(name, tree, state=State.COMPLETE, step=step)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make(tmp_path_factory.mktemp("made") / "store")


def make(root: Path, key: SigningKey | None = OURS) -> Store:
    store = SavedStore(root, key=key)
    records = [trio.run(_publish, store, RUN, step) for step in (1, 2)]
    unit = records[0].unit
    store.histories.tag(unit, 1, "best")
    store.histories.pin(unit, 1)
    rename(store.histories, store.index, unit, b"renamed")
    rename(store.histories, store.index, unit, RUN)
    record_digests(store, records[1])
    for step in (3, 4):
        trio.run(_publish, store, RUN, step)
    store.histories.tag(unit, 2, "bad")
    store.histories.untag(unit, "bad")
    store.histories.forget(unit, 2)
    trio.run(_publish, store, RUN, 5)
    others = [trio.run(_publish, store, OTHER, step) for step in (7, 8)]
    head = prove(store.histories.evidence(unit), [] if key is None else [key.public]).head
    store.close()
    return Store(root, unit, others[0].unit, head)


def rename(histories: Histories, index: Index, unit: UnitId, name: bytes) -> None:
    change = Change()
    histories.rebind(unit, 77, name, change)
    index.apply(change)


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(made.root, tmp_path / "store")
    yield replace(made, root=tmp_path / "store")


def faults(report: HistoryReport) -> set[tuple[Fault, int | None]]:
    return {(finding.fault, finding.number) for finding in report.findings}


# ---- what was not touched -----------------------------------------------------------------------------


def test_an_untouched_store_has_no_finding(store: Store) -> None:
    for again in (lambda: None, store.lose_index, store.go_on):
        again()
        report = store.proof(expected=store.head)
        assert report.findings == []
        assert {version.key for version in report.versions} == {OURS.public.fingerprint}
        assert report.keys == [OURS.public.fingerprint]
    assert [version.number for version in report.versions] == [1, 2, 3, 4, 5, 6]
    assert store.head.number == 5 and report.head.number == 6 and head_of(str(store.head)) == store.head
    assert store.proof(store.other).findings == []
    assert store.proof(expected=replace(store.head, number=None)).findings == []


# ---- the history --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "fault", "number"), EDITS, ids=IDS)
def test_an_edited_history_is_found_with_the_public_key(
    store: Store, change: Callable[[Edit], None], fault: Fault, number: int | None
) -> None:
    edit = Edit(store.frames(store.unit))
    change(edit)
    store.put(store.unit, edit.frames)
    store.lose_index()
    report = store.proof()
    assert (fault, number) in faults(report), report.findings


@pytest.mark.parametrize(("change", "fault", "number"), EDITS, ids=IDS)
def test_it_is_still_found_when_a_daemon_has_gone_on(
    store: Store, change: Callable[[Edit], None], fault: Fault, number: int | None
) -> None:
    """The daemon's own new seal does not make good what it found in the store."""
    edit = Edit(store.frames(store.unit))
    change(edit)
    store.put(store.unit, edit.frames)
    store.lose_index()
    store.go_on()
    report = store.proof()
    if change is strip_the_seals:  # Looks like a store from before there were seals: the head tells.
        assert [version.key for version in report.versions][:5] == [None] * 5
    else:
        assert (fault, number) in faults(report), report.findings


ONLY_SEALS = (strip_the_seals, strip_the_last_seals, remove_only_the_seal, exchange_two_seals)
ONLY_MORE = (replay, add_a_mark, add_digests)
SILENT = [edit for edit, _, _ in EDITS if edit not in (*ONLY_SEALS, *ONLY_MORE)]


@pytest.mark.parametrize("change", SILENT, ids=lambda edit: edit.__name__)
def test_a_forger_with_a_key_of_his_own_is_found_by_the_head_alone(
    store: Store, change: Callable[[Edit], None]
) -> None:
    """He makes all seals anew; nobody knows the right key, but somebody kept a head.

    (Left out: edits that change no record, and those that stand behind the head.)
    """
    edit = Edit(store.frames(store.unit))
    change(edit)
    edit.reseal(store.unit, THEIRS)
    store.put(store.unit, edit.frames)
    store.lose_index()
    assert Fault.HEAD in {fault for fault, _ in faults(store.proof(expected=store.head, key=False))}
    assert Fault.KEY in {fault for fault, _ in faults(store.proof())}


def test_an_exchanged_key_is_found_though_nothing_else_was_changed(store: Store) -> None:
    edit = Edit(store.frames(store.unit))
    edit.reseal(store.unit, THEIRS)
    store.put(store.unit, edit.frames)
    store.lose_index()
    report = store.proof(expected=store.head)
    assert {(Fault.KEY, number) for number in range(1, 6)} <= faults(report)
    assert THEIRS.public.fingerprint in report.findings[0].message


def test_one_version_signed_by_somebody_else_is_named(store: Store) -> None:
    edit = Edit(store.frames(store.unit))
    at = edit.version(5)
    edit.alter(at, state=State.OPAQUE)
    old = decode_seal(edit.frames[at + 1][1])
    head = chained_all(old.before, [Frame(RecordKind.VERSION, 0, edit.frames[at][1])])
    edit.frames[at + 1] = (RecordKind.SEAL, make_seal(THEIRS, store.unit, old.before, 1, head).encode())
    store.put(store.unit, edit.frames)
    store.lose_index()
    assert faults(store.proof()) == {(Fault.KEY, 5)}
    assert (Fault.KEY, 5) in faults(store.proof(key=False))


@pytest.mark.parametrize("frames_left", [-2, -6, 6])
def test_a_cut_off_end_is_found_by_the_head(store: Store, frames_left: int) -> None:
    store.put(store.unit, store.frames(store.unit)[:frames_left])
    store.lose_index()
    assert store.proof().findings == []  # What a key alone cannot show; FORMAT.md says so.
    (finding,) = store.proof(expected=store.head).findings
    assert finding.fault is Fault.HEAD and "cut off" in finding.message


def test_with_the_index_in_place_a_cut_off_end_needs_no_head(store: Store) -> None:
    store.put(store.unit, store.frames(store.unit)[:-2])
    assert Fault.REMOVED in {fault for fault, _ in faults(store.proof())}


def test_an_old_store_put_back_and_gone_on_with_is_found_by_the_head(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.root, tmp_path / "old")
    store.go_on()
    newer = store.proof().head
    shutil.rmtree(store.root)
    (tmp_path / "old").rename(store.root)
    assert faults(store.proof(expected=newer)) == {(Fault.HEAD, None)}
    store.go_on(step=100)
    store.go_on(step=101)
    assert store.proof().findings == []
    assert faults(store.proof(expected=newer)) == {(Fault.HEAD, None)}
    assert store.proof(expected=store.head).findings == []


def test_two_lines_that_were_spliced_are_a_fork(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.root, tmp_path / "twin")
    twin = replace(store, root=tmp_path / "twin")
    twin.go_on(step=50)
    store.go_on()
    store.go_on()
    ours, theirs = store.frames(store.unit), twin.frames(store.unit)
    store.put(store.unit, [*ours[:-4], *theirs[-2:], *ours[-2:]])
    store.lose_index()
    assert (Fault.FORKED, 7) in faults(store.proof())


def test_exchanged_histories_are_found(store: Store) -> None:
    mine, other = store.frames(store.unit), store.frames(store.other)
    store.put(store.unit, other)
    store.put(store.other, mine)
    store.lose_index()
    for unit in (store.unit, store.other):
        (*_, finding) = [f for f in store.proof(unit).findings if f.fault is Fault.ALTERED]
        assert "another unit" in finding.message
    # The same, with the ids inside made to fit: then no signature does.
    for unit, frames in ((store.unit, other), (store.other, mine)):
        edit = Edit(list(frames))
        for at, (kind, _) in enumerate(frames):
            if kind in (RecordKind.UNIT, RecordKind.RENAME, RecordKind.VERSION):
                edit.alter(at, unit=unit)
        edit.relink()
        store.put(unit, edit.frames)
    store.lose_index()
    assert all((Fault.ALTERED, 1) in faults(store.proof(unit)) for unit in (store.unit, store.other))


def test_a_history_that_is_gone_is_found_while_the_index_is_there(store: Store) -> None:
    store.file(store.unit).unlink()
    assert (Fault.REMOVED, None) in faults(store.proof())


def test_a_record_that_was_slipped_in_does_not_survive_the_next_start(store: Store) -> None:
    """With the index in place, what stands behind the last seal was never written by a daemon."""
    frames = store.frames(store.unit)
    store.put(store.unit, [*frames, (RecordKind.FORGET, MarkRecord(1, "", 1).encode())])
    disk = Disk(str(store.root))
    index = Index(disk, read_only=True)
    bare = Histories(disk, index, read_only=True)
    assert prove(bare.evidence(store.unit), [OURS.public], store.head).findings == []
    assert bare.has_version(store.unit, 1)
    index.close()
    assert store.proof().findings == []
    assert store.frames(store.unit) == frames


def test_no_byte_of_a_history_can_be_changed(store: Store, rng: random.Random) -> None:
    whole = store.frames(store.unit)
    places = [(at, byte) for at, (_, payload) in enumerate(whole) for byte in range(len(payload))]
    store.lose_index()
    saved = SavedStore(store.root, key=OURS)
    try:
        for at, byte in rng.sample(places, 150):
            kind, payload = whole[at]
            changed = bytearray(payload)
            changed[byte] ^= 1 << rng.randrange(8)
            store.put(store.unit, [*whole[:at], (kind, bytes(changed)), *whole[at + 1 :]])
            evidence = saved.histories.evidence(store.unit)
            assert prove(replace(evidence, unit=None, rows={}), [OURS.public]).findings[:-1], (at, byte)
    finally:
        saved.close()


# ---- the index ----------------------------------------------------------------------------------------


def edit_index(store: Store, fill: Callable[[SavedStore, Change], None]) -> list[Finding]:
    saved = SavedStore(store.root, key=OURS)
    change = Change()
    fill(saved, change)
    saved.index.apply(change)
    saved.close()
    return store.proof().findings


def test_rows_that_show_other_versions_than_the_history_are_found(store: Store) -> None:
    def version_key(number: int) -> bytes:
        return store.unit + number.to_bytes(8, "big")

    def exchange_trees(saved: SavedStore, change: Change) -> None:
        row = saved.index.get(Table.VERSION, version_key(1))
        assert row is not None
        change.put(Table.VERSION, version_key(3), row)

    def hide(saved: SavedStore, change: Change) -> None:
        change.delete(Table.VERSION, version_key(4))

    def bring_back(saved: SavedStore, change: Change) -> None:
        row = saved.index.get(Table.VERSION, version_key(1))
        assert row is not None
        change.put(Table.VERSION, version_key(2), row)

    def retag_row(saved: SavedStore, change: Change) -> None:
        change.put(Table.TAG, store.unit + b"best", (3).to_bytes(8, "big"))

    def unpin_row(saved: SavedStore, change: Change) -> None:
        change.delete(Table.PIN, version_key(1))

    expected = {
        exchange_trees: "another version 3",
        hide: "lacks version 4",
        bring_back: "only the index has version 2",
        retag_row: "another tag 'best'",
        unpin_row: "lacks pin of version 1",
    }
    said: list[str] = []
    for fill, message in expected.items():
        said.append(message)
        found = edit_index(store, fill)
        assert {finding.fault for finding in found} == {Fault.INDEX}
        assert all(any(text in finding.message for finding in found) for text in said), found


def test_a_unit_that_the_index_calls_otherwise_is_found(store: Store) -> None:
    def fill(saved: SavedStore, change: Change) -> None:
        unit = saved.histories.unit(store.unit)
        assert unit is not None
        other = msgspec.structs.replace(unit, name=OTHER, recorded=OTHER)
        change.put(Table.UNIT, store.unit, encode_unit(other))

    assert Fault.INDEX in {finding.fault for finding in edit_index(store, fill)}


def test_a_daemon_that_was_misled_by_the_index_is_found_out(store: Store) -> None:
    """It signs a version that continues nothing, or a chain that the file does not have."""

    def other_link(saved: SavedStore, change: Change) -> None:
        unit = saved.histories.unit(store.unit)
        assert unit is not None
        change.put(Table.UNIT, store.unit, encode_unit(msgspec.structs.replace(unit, head=b"x" * 32)))

    def other_chain(saved: SavedStore, change: Change) -> None:
        unit = saved.histories.unit(store.unit)
        assert unit is not None
        change.put(Table.UNIT, store.unit, encode_unit(msgspec.structs.replace(unit, chain=b"x" * 32)))

    edit_index(store, other_link)
    store.go_on(step=6)
    assert (Fault.FORKED, 6) in faults(store.proof())
    edit_index(store, other_chain)
    store.go_on(step=7)
    assert {(Fault.FORKED, 6), (Fault.REMOVED, 7)} <= faults(store.proof())


# ---- trees, recipes, chunks ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["tree", "recipe", "chunk"])
@pytest.mark.parametrize("how", ["payload", "row"])
def test_other_bytes_for_what_a_version_names_are_never_read(store: Store, what: str, how: str) -> None:
    """Payloads exchanged under their ids, or rows that lead elsewhere: ids are hashes, so it is Corrupt."""
    saved = SavedStore(store.root, key=OURS)
    record = saved.histories.newest(store.unit)
    assert record is not None and record.top.tree is not None
    (entry,) = [one for one in saved.segments.read_tree(record.top.tree) if one.name == b"model.bin"]
    assert entry.recipe is not None
    chunk = next(saved.segments.read_recipe(entry.recipe).chunks())
    victim = {"tree": record.top.tree, "recipe": entry.recipe, "chunk": chunk}[what]
    location = saved.segments.locate(victim)  # type: ignore[arg-type]
    assert location is not None
    if how == "row":
        elsewhere = msgspec.structs.replace(location, offset=location.offset + 1)
        change = Change()
        change.put(Table.CHUNK, victim, encode_location(elsewhere))
        saved.index.apply(change)
    saved.close()
    if how == "payload":
        overwrite(store.root / segment_paths(location.segment)[location.in_idx], location.offset)
    again = SavedStore(store.root, key=OURS)
    try:
        with pytest.raises(CkptfsError):
            read_all(again, record)
    finally:
        again.close()


def overwrite(path: Path, offset: int) -> None:
    """Change a byte; of an .idx the checksum too, as a forger would."""
    content = bytearray(path.read_bytes())
    content[offset + 40] ^= 1
    if path.suffix == ".idx":
        content[-8:] = crc64(bytes(content[:-8])).to_bytes(8, "little")
    path.write_bytes(content)


def read_all(saved: SavedStore, record: VersionRecord) -> None:
    assert record.top.tree is not None
    for entry in saved.segments.read_tree(record.top.tree):
        if entry.recipe is not None:
            recipe = saved.segments.read_recipe(entry.recipe)
            saved.segments.read_file(recipe, 0, recipe.size)


# ---- histories without seals --------------------------------------------------------------------------


def test_a_store_from_before_there_were_seals(tmp_path: Path) -> None:
    """Its versions are shown as unsigned; the first seal continues their chain, and a head covers them."""
    store = make(tmp_path / "store", key=None)
    report = store.proof()
    assert [(f.fault, f.message) for f in report.findings] == [
        (Fault.UNSIGNED, "versions 1 to 5 are not signed")
    ]
    assert store.proof(expected=store.head).findings == []
    store.go_on()
    report = store.proof(expected=store.head)
    assert report.findings == []
    assert [version.key for version in report.versions] == [None] * 5 + [OURS.public.fingerprint]
    edit = Edit(store.frames(store.unit))
    retag(edit)
    store.put(store.unit, edit.frames)
    store.lose_index()
    assert store.proof().findings != []


def test_versions_made_without_the_key_in_between_are_named(store: Store) -> None:
    saved = SavedStore(store.root)
    trio.run(_publish, saved, RUN, 60)
    saved.close()
    assert faults(store.proof()) == {(Fault.UNSIGNED, 6)}
    store.go_on()
    assert faults(store.proof()) == {(Fault.UNSIGNED, 6)}
    assert store.proof(expected=store.head).findings != []
    assert store.proof(expected=store.proof().head).findings == []


def test_damage_is_named_once_and_what_stands_behind_it_is_still_proven(store: Store) -> None:
    content = bytearray(store.file(store.unit).read_bytes())
    frames = list(decode_frames(bytes(content)))
    third = next(f for f in frames if f.kind == RecordKind.VERSION and decode_version(f.payload).number == 3)
    content[third.end - 50] ^= 3
    store.file(store.unit).write_bytes(content)
    store.lose_index()
    store.go_on()
    report = store.proof()
    assert faults(report) == {(Fault.DAMAGED, None)}
    assert [version.number for version in report.versions] == [1, 2, 4, 5, 6]
