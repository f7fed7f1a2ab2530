"""What is appended to a history: records, the name before them if the file has another, the seal behind.

One rule: one append is one write and one sync, and what it leaves in the file is a whole batch.

Source: FORMAT.md, "History" (Writing) and "Seals".
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ckptfs.store.history import RecordKind, UnitRecord
from ckptfs.store.history_batch import batch_of
from ckptfs.store.history_log import HistoryLog
from ckptfs.store.history_scan import scan_history
from ckptfs.store.seal import chain_behind
from ckptfs.store.signing import SigningKey
from ckptfs.store.units import Unit

Record = tuple[RecordKind, bytes]


class HistoryWriter:
    """Belongs to the index thread. `key` seals what is appended; None: nothing is sealed."""

    def __init__(self, log: HistoryLog, clock_ns: Callable[[], int], key: SigningKey | None) -> None:
        self._log = log
        self._clock_ns = clock_ns
        self._key = key

    def create(self, unit: Unit, first: bytes) -> Unit:
        """Make the file of a new unit, with its UNIT record `first`. Durable when: this returned."""
        frames, unit = self._batch(unit, ((RecordKind.UNIT, first),))
        self._log.create(unit.unit, frames)
        return replace(unit, file_bytes=len(frames))

    def append(self, unit: Unit, *records: Record) -> Unit:
        """Append records, and before them the unit's name if the file does not know it; the unit behind
        them. Errors as HistoryLog.append. Durable when: this returned."""
        if unit.name != unit.recorded:
            rename = UnitRecord(unit.unit, unit.name, self._clock_ns()).encode()
            records = ((RecordKind.RENAME, rename), *records)
        if not records:
            return unit
        frames, unit = self._batch(unit, records)
        end = self._log.append(unit.unit, unit.file_bytes, frames)
        return replace(unit, file_bytes=end, recorded=unit.name)

    def chain(self, unit: Unit) -> bytes:
        """The chain value behind a unit's last record."""
        if unit.chain:
            return unit.chain
        # The row of a store that was made before there were seals: the file tells.
        return chain_behind(scan_history(self._log.read_all(unit.unit)[: unit.file_bytes], 0).frames)

    def _batch(self, unit: Unit, records: tuple[Record, ...]) -> tuple[bytes, Unit]:
        return batch_of(unit, self.chain(unit), self._key, records)
