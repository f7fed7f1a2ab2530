"""The health of contents and versions: recorded in histories, looked up in the index.

One rule: as with digests, a synced record of a history comes before its row. What a version's contents add
up to is a row only: whoever loses it walks the version again, and reads no content.

Source: FORMAT.md, "Health".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.health_records import (
    NO_TENSORS,
    ContentHealth,
    HealthRecord,
    HealthSum,
    VersionHealth,
    decode_content_row,
    decode_content_sum,
    decode_version_row,
    encode_version_row,
)
from ckptfs.store.histories import Histories
from ckptfs.store.history import RecordKind
from ckptfs.store.history_mirror import HEALTH_OF, put_health, version_key
from ckptfs.store.ids import RecipeId, UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.layout import HEALTH, add_ro_compat


class HealthLog:
    """Every method belongs to the index thread."""

    def __init__(self, disk: Disk, index: Index, histories: Histories) -> None:
        self._disk = disk
        self._index = index
        self._histories = histories
        self._is_flagged = False

    def has(self, recipe: RecipeId) -> bool:
        """Whether a content was looked at, and its row tells what it adds up to."""
        try:
            return self.sum_of(recipe) is not None
        except Corrupt:
            return False

    def has_no_tensors(self, recipe: RecipeId) -> bool:
        """Whether a content was looked at and has no float tensor. No damaged row says that."""
        return self._index.get(Table.HEALTH, recipe) == NO_TENSORS

    def of(self, recipe: RecipeId) -> ContentHealth | None:
        """What was found in a content; None if it has no float tensor (see `has_no_tensors`), or was not
        looked at. Corrupt if the row is damaged."""
        encoded = self._index.get(Table.HEALTH, recipe)
        return None if encoded is None else decode_content_row(encoded)

    def sum_of(self, recipe: RecipeId) -> HealthSum | None:
        """The sum over the float tensors of a content; None if it was not looked at. Corrupt as for `of`."""
        encoded = self._index.get(Table.HEALTH, recipe)
        return None if encoded is None else decode_content_sum(encoded)

    async def record(
        self, unit: UnitId, made: Sequence[tuple[HealthRecord, bytes]], without: Iterable[RecipeId] = ()
    ) -> None:
        """Record what was found in contents that a version of `unit` has, as `encoded_records` makes it;
        contents `without` a float tensor get a row and no record. Those that are gone get no row.

        NoSpace: the rest is not recorded. ReadOnly: the history takes nothing more until the next start.
        Durable when: this returned; the rows of contents without a tensor at the next commit.
        """
        for record, encoded in made:
            # Each is a sync: whoever waits for the index thread gets a turn before it.
            await trio.lowlevel.checkpoint()
            contents = {one: found for one, found in record.contents.items() if self._is_stored(one)}
            if contents:
                self._flag()
                change = Change()
                put_health(HealthRecord(contents), change)
                self._histories.append_record(unit, RecordKind.HEALTH, encoded, change)
        change = Change()
        for recipe in without:
            if self._is_stored(recipe):
                change.put(Table.HEALTH, recipe, NO_TENSORS)
        if change.operations:
            self._flag()
            self._index.apply(change)

    def of_version(self, unit: UnitId, number: int) -> VersionHealth | None:
        """What the contents of a version add up to; None: not known, as where the row is damaged."""
        encoded = self._index.get(Table.META, HEALTH_OF + version_key(unit, number))
        if encoded is None:
            return None
        try:
            return decode_version_row(encoded)
        except Corrupt:
            return None

    def newest(self, unit: UnitId) -> tuple[int, VersionHealth] | None:
        """The newest version of a unit of which that is known."""
        key = self._index.last_key(Table.META, HEALTH_OF + unit)
        if key is None:
            return None
        number = int.from_bytes(key[-8:], "big")
        found = self.of_version(unit, number)
        return None if found is None else (number, found)

    def put_version(self, unit: UnitId, number: int, health: VersionHealth) -> None:
        """Note what the contents of a version add up to, if it is listed still. Durable when: the next commit
        was made."""
        if self._histories.version(unit, number) is None:
            return
        change = Change()
        change.put(Table.META, HEALTH_OF + version_key(unit, number), encode_version_row(health))
        self._index.apply(change)

    def _is_stored(self, recipe: RecipeId) -> bool:
        return self._index.get(Table.CHUNK, recipe) is not None

    def _flag(self) -> None:
        if not self._is_flagged:
            add_ro_compat(self._disk, HEALTH)
            self._is_flagged = True
