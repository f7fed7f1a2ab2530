"""What has to be synced before something is relied on, told from the calls that reach the disk.

One rule: each case is a crash behind a crash, or a crash in a moment that chance rarely meets.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from disklog import FolderSynced, Names, Synced
from faultdisk import Faults, Log, RecordingDisk
from small_store import SmallStore, random_bytes

from ckptfs.store.disk import Disk
from ckptfs.store.frames import encode_frame
from ckptfs.store.histories import Histories
from ckptfs.store.history import MarkRecord, RecordKind
from ckptfs.store.history_log import history_path
from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.journal import JOURNAL_PATH, Journal
from ckptfs.store.layout import FOLDERS, open_store
from ckptfs.store.packing import make_segment_dir
from ckptfs.store.segment_format import segment_paths

UNIT = UnitId(b"u" * 16)


def recorded(root: Path, faults: Faults | None = None) -> tuple[Disk, Log]:
    """A recorded disk on a folder that is there."""
    log = Log(faults=faults)
    return RecordingDisk(str(root), log), log


def number_of(log: Log, path: Path) -> int:
    """The number of a file or folder in the log."""
    return log.number(os.stat(path))


def test_a_new_index_is_found_by_its_name_after_a_loss_of_power(tmp_path: Path) -> None:
    disk, log = recorded(tmp_path)
    Index(disk).close()
    named = next(
        i for i, e in enumerate(log.events) if isinstance(e, Names) and e.places[-1].name == "data.mdb"
    )
    assert FolderSynced(number_of(log, tmp_path / "index")) in log.events[named:]


def test_an_opened_store_relies_on_no_name_that_a_killed_process_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(str(tmp_path / "store"), create=True)
    log = Log()
    monkeypatch.setattr("ckptfs.store.layout.Disk", lambda root: RecordingDisk(root, log))
    open_store(str(tmp_path / "store"))
    synced = {event.folder for event in log.events if isinstance(event, FolderSynced)}
    assert {number_of(log, tmp_path / "store" / folder) for folder in ("", *FOLDERS)} <= synced


def test_a_record_that_a_killed_process_wrote_is_synced_before_it_counts(tmp_path: Path) -> None:
    index = Index(Disk(str(tmp_path)))
    Histories(Disk(str(tmp_path)), index).new_unit(UNIT, b"run", 2, 1)
    index.close()
    with open(tmp_path / history_path(UNIT), "ab") as history:
        history.write(encode_frame(RecordKind.UNPIN, 2, MarkRecord(1, "", 1).encode()))
    disk, log = recorded(tmp_path)
    index = Index(disk)
    try:
        Histories(disk, index)
        assert Synced(number_of(log, tmp_path / history_path(UNIT))) in log.events
    finally:
        index.close()


def test_a_journal_of_which_a_loss_of_power_took_the_first_record_is_no_other_store_s(tmp_path: Path) -> None:
    journal = Journal(Disk(str(tmp_path)))
    operation = [(0, b"key", b"value")]
    for sequence in (1, 2):
        journal.append(sequence, operation)  # type: ignore[arg-type]
    first = (tmp_path / JOURNAL_PATH).read_bytes()[: journal.size_bytes() // 2]
    journal.restart()
    for sequence in (3, 4):
        journal.append(sequence, operation)  # type: ignore[arg-type]
    journal.close()
    with open(tmp_path / JOURNAL_PATH, "r+b") as file:
        file.write(first)
    journal = Journal(Disk(str(tmp_path)))
    assert journal.replay(2) == []
    journal.close()


def test_a_journal_begins_anew_durably(tmp_path: Path) -> None:
    disk, log = recorded(tmp_path)
    journal = Journal(disk)
    journal.begin_anew()
    assert log.events[-1] == Synced(number_of(log, tmp_path / JOURNAL_PATH))
    journal.close()


def test_a_segment_folder_that_could_not_be_synced_is_not_taken_for_synced(tmp_path: Path) -> None:
    faults = Faults()
    disk, _ = recorded(tmp_path, faults)
    disk.make_dir("segments")
    faults.first = faults.last = faults.calls + 2
    with pytest.raises(OSError):
        make_segment_dir(disk, 1)
    assert faults.failed == ["sync_dir"] and disk.list_dir("segments") == []


def test_a_removed_segment_of_which_the_idx_came_back_is_removed_again(tmp_path: Path) -> None:
    """The loss of power kept the unlink of the .seg and lost the one before it, of the .idx."""
    store = SmallStore(tmp_path)
    try:
        stored = store.store_bytes(random_bytes(200_000))
        recipe = store.segments.read_recipe(stored.recipe)
        location = store.segments.locate(next(recipe.chunks()))
        assert location is not None
        change = Change()
        store.ingest.reclaim.stage_removal(change, [stored.recipe, *recipe.chunks()])
        store.index.apply(change)
        store.reopen()
        os.unlink(tmp_path / segment_paths(location.segment)[0])
        trio.run(store.ingest.reclaim.execute)
        assert store.segment_files() == [] and store.index.count(Table.SEGMENT) == 0
    finally:
        store.close()
