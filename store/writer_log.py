"""The writers of versions: recorded in histories, looked up in the index.

One rule: as with digests, a synced record of the history comes before its row. It also comes before its
version, so that what is kept of the history's head right behind a version is that version's.

Source: FORMAT.md, "Writers".
"""

from __future__ import annotations

from ckptfs.store.disk import Disk
from ckptfs.store.histories import Histories
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.history_mirror import put_writers, version_key
from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.layout import WRITERS, add_ro_compat
from ckptfs.store.writers import WritersRecord, decode_writers, decode_writers_row


class WriterLog:
    """Every method belongs to the index thread."""

    def __init__(self, disk: Disk, index: Index, histories: Histories) -> None:
        self._disk = disk
        self._index = index
        self._histories = histories
        self._is_flagged = False

    def of(self, version: VersionRecord) -> WritersRecord | None:
        """What is known of the writers of a version. Corrupt if its row is damaged."""
        encoded = self._index.get(Table.WRITERS, version_key(version.unit, version.number))
        record = None if encoded is None else decode_writers_row(encoded)
        return record if record is not None and record.tree == version.top.tree else None

    def record(self, unit: UnitId, record: WritersRecord) -> None:
        """Record who wrote the version that is about to be listed. NoSpace, ReadOnly: as
        Histories.append_record; it then stays unknown. Durable when: this returned."""
        if not self._is_flagged:
            add_ro_compat(self._disk, WRITERS)
            self._is_flagged = True
        encoded = record.encode()
        assert decode_writers(encoded) == record, "a writers record does not decode to itself"
        change = Change()
        put_writers(unit, record, change)
        self._histories.append_record(unit, RecordKind.WRITERS, encoded, change)
