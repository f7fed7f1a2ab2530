"""The digests of whole files: recorded in histories, looked up in the index.

One rule: a digest is a synced record of a history before it is a row. The row goes with its content (the
collector), the record stays, as all records do.

Source: FORMAT.md, "Digests".
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptfs.store.digests import (
    MOST_CONTENTS,
    DigestsRecord,
    FileDigests,
    decode_digests,
    decode_digests_record,
)
from ckptfs.store.disk import Disk
from ckptfs.store.histories import Histories
from ckptfs.store.history import RecordKind
from ckptfs.store.history_mirror import put_digests
from ckptfs.store.ids import RecipeId, UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.layout import DIGESTS, add_ro_compat

_ROWS_A_CHANGE = 4096


class DigestLog:
    """Every method belongs to the index thread."""

    def __init__(self, disk: Disk, index: Index, histories: Histories) -> None:
        self._disk = disk
        self._index = index
        self._histories = histories
        self._is_flagged = False

    def of(self, recipe: RecipeId) -> FileDigests | None:
        """The digests of a content, None if they were not made yet. Corrupt if the row is damaged."""
        encoded = self._index.get(Table.DIGEST, recipe)
        return None if encoded is None else decode_digests(encoded)

    def has(self, recipe: RecipeId) -> bool:
        """Whether the index has a row of a content."""
        return self._index.get(Table.DIGEST, recipe) is not None

    def record(self, unit: UnitId, contents: Mapping[RecipeId, FileDigests]) -> None:
        """Record what was made of contents that a version of `unit` has; those that are gone are left out.

        NoSpace: the rest is not recorded. ReadOnly: the history takes nothing more until the next start.
        Durable when: this returned.
        """
        stored = [recipe for recipe in sorted(contents) if self._index.get(Table.CHUNK, recipe) is not None]
        for start in range(0, len(stored), MOST_CONTENTS):
            if not self._is_flagged:
                add_ro_compat(self._disk, DIGESTS)
                self._is_flagged = True
            record = DigestsRecord({one: contents[one] for one in stored[start : start + MOST_CONTENTS]})
            encoded = record.encode()
            assert decode_digests_record(encoded) == record, "a digests record does not decode to itself"
            change = Change()
            put_digests(record, change)
            self._histories.append_record(unit, RecordKind.DIGESTS, encoded, change)


def drop_orphans(index: Index) -> None:
    """Take out the rows of contents that are not stored: after a rebuild, histories name those too."""
    for table in (Table.DIGEST, Table.HEALTH):
        start: bytes | None = None
        while rows := index.scan(table, start=start, limit=_ROWS_A_CHANGE):
            change = Change()
            for recipe, _ in rows:
                if index.get(Table.CHUNK, recipe) is None:
                    change.delete(table, recipe)
            index.apply(change)
            start = rows[-1][0] + b"\0"
