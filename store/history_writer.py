"""What is appended to a history: records, before them the rotation of the key and the name if the file has
others, and the seal behind.

One rule: a batch is one write and one sync, whole or not there.

Source: FORMAT.md, "History" (Writing) and "Seals".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ckptfs.store.errors import Corrupt
from ckptfs.store.history import RecordKind, UnitRecord
from ckptfs.store.history_batch import batch_of
from ckptfs.store.history_log import HistoryLog
from ckptfs.store.history_scan import scan_history
from ckptfs.store.ids import UnitId
from ckptfs.store.keyring import Keyring, Rotation
from ckptfs.store.seal import SEAL_FRAME_BYTES, chain_behind, decode_seal, last_key
from ckptfs.store.signing import PublicKey
from ckptfs.store.units import Unit

Record = tuple[RecordKind, bytes]


class HistoryWriter:
    """Belongs to the index thread. Seals with the keyring's key, if it has one.

    Remembers with which key each history was sealed last, as far as somebody asked.
    """

    def __init__(
        self,
        log: HistoryLog,
        clock_ns: Callable[[], int],
        keyring: Keyring,
        before_rotation: Callable[[], None],
    ) -> None:
        """`before_rotation` is called before the first ROTATE record is written."""
        self._log = log
        self._clock_ns = clock_ns
        self._keyring = keyring
        self._before_rotation = before_rotation
        self._signers: dict[UnitId, bytes | None] = {}

    def create(self, unit: Unit, first: bytes) -> Unit:
        """Make the file of a new unit, with its UNIT record `first`. Durable when: this returned."""
        key = self._keyring.signing
        frames, unit = batch_of(unit, self.chain(unit), key, ((RecordKind.UNIT, first),))
        self._log.create(unit.unit, frames)
        self._signers[unit.unit] = None if key is None else key.public.raw
        return replace(unit, file_bytes=len(frames))

    def append(self, unit: Unit, *records: Record) -> Unit:
        """Append records, and before them what the file does not know: another key, the unit's name; the
        unit behind them. Errors as HistoryLog.append. Durable when: this returned."""
        rotations = self.rotations_due(unit)
        if rotations:
            # An append of their own: proofs take the batch of a version along, and a name is enough there.
            self._before_rotation()
            unit = self._append(unit, [(RecordKind.ROTATE, one.encode()) for one in rotations])
        if unit.name != unit.recorded:
            rename = UnitRecord(unit.unit, unit.name, self._clock_ns()).encode()
            records = ((RecordKind.RENAME, rename), *records)
        if not records:
            return unit
        return replace(self._append(unit, records), recorded=unit.name)

    def _append(self, unit: Unit, records: Sequence[Record]) -> Unit:
        key = self._keyring.signing
        frames, unit = batch_of(unit, self.chain(unit), key, tuple(records))
        end = self._log.append(unit.unit, unit.file_bytes, frames)
        if key is not None:
            self._signers[unit.unit] = key.public.raw
        return replace(unit, file_bytes=end)

    def rotations_due(self, unit: Unit) -> tuple[Rotation, ...]:
        """The rotations that have to be recorded before anything is sealed with the key in use."""
        if self._keyring.signing is None or not self._keyring.rotations:
            return ()
        if unit.unit not in self._signers:
            self._signers[unit.unit] = self._signer_in_file(unit)
        signer = self._signers[unit.unit]
        return () if signer is None else self._keyring.way_from(signer)

    def chain(self, unit: Unit) -> bytes:
        """The chain value behind a unit's last record."""
        if unit.chain:
            return unit.chain
        # The row of a store that was made before there were seals: the file tells.
        return chain_behind(scan_history(self._log.read_all(unit.unit)[: unit.file_bytes], 0).frames)

    def last_key(self, unit: Unit) -> PublicKey | None:
        """The key in the seal that ends a history; None if none does."""
        tail = self._log.read_all(unit.unit, max(0, unit.file_bytes - SEAL_FRAME_BYTES))
        return last_key(tail) if unit.sealed else None

    def _signer_in_file(self, unit: Unit) -> bytes | None:
        """Who sealed last, be it with records without a seal behind it."""
        key = self.last_key(unit)
        if key is not None:
            return key.raw
        seals = [
            f for f in scan_history(self._log.read_all(unit.unit), 0).frames if f.kind == RecordKind.SEAL
        ]
        try:
            return decode_seal(seals[-1].payload).key if seals else None
        except Corrupt:
            return None
