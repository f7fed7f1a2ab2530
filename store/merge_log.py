"""What merged versions were made of: recorded in histories, looked up in the index.

One rule: as with the writers of versions (writer_log.py): the synced record of the history comes before its
row, and before its version.

Source: FORMAT.md, "Merges".
"""

from __future__ import annotations

from ckptfs.store.disk import Disk
from ckptfs.store.histories import Histories
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.history_mirror import put_merge, version_key
from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.layout import MERGES, add_ro_compat
from ckptfs.store.merge_record import MergeRecord, decode_merge, decode_merge_row


class MergeLog:
    """Every method belongs to the index thread."""

    def __init__(self, disk: Disk, index: Index, histories: Histories) -> None:
        self._disk = disk
        self._index = index
        self._histories = histories

    def of(self, version: VersionRecord) -> MergeRecord | None:
        """What a version was merged from; None: it was not. Corrupt if its row is damaged."""
        encoded = self._index.get(Table.MERGE, version_key(version.unit, version.number))
        record = None if encoded is None else decode_merge_row(encoded)
        return record if record is not None and record.tree == version.top.tree else None

    def record(self, unit: UnitId, record: MergeRecord) -> None:
        """Record what the version was made of that is about to be listed. NoSpace, ReadOnly: as
        Histories.append_record. Durable when: this returned."""
        add_ro_compat(self._disk, MERGES)
        encoded = record.encode()
        assert decode_merge(encoded) == record, "a merge record does not decode to itself"
        change = Change()
        put_merge(unit, record, change)
        self._histories.append_record(unit, RecordKind.MERGE, encoded, change)
