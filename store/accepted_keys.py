"""Whose seals are accepted at a place of a history: the keys that are known, and those that they name. Pure.

One rule: a key is accepted because it is known, because an accepted one has named it as its successor, or
because a known one goes on, in a seal of its own, with what that key has left.

Source: FORMAT.md, "Seals", "Rotation".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.frames import Frame
from ckptfs.store.history import RecordKind
from ckptfs.store.ids import UnitId
from ckptfs.store.keyring import Rotation, decode_rotation
from ckptfs.store.seal import SealRecord, chained_all, decode_seal
from ckptfs.store.signing import PublicKey


class Accepted:
    """The keys for one walk through one history, in order; `rotate` at each ROTATE record.

    Of one known key the rotations are followed; several are all that is accepted. If none is known, the
    first that is met is taken for the one. `named` are the keys that were met, in order.
    """

    def __init__(self, unit: UnitId, keys: Sequence[PublicKey], frames: Sequence[Frame]) -> None:
        self._now = {key.raw: key for key in keys}
        self._follows = len(self._now) <= 1
        self._is_known = bool(self._now)
        self._met: dict[bytes, PublicKey | None] = {}
        self._retired: set[bytes] = set()
        self._prints = {key.fingerprint: None for key in keys}
        for old in _predecessors(unit, set(self._now), frames):
            self._accept(old)

    def __contains__(self, raw: bytes) -> bool:
        return raw in self._now

    @property
    def named(self) -> list[PublicKey]:
        """The keys in the seals so far."""
        return [key for key in self._met.values() if key is not None]

    @property
    def fingerprints(self) -> list[str]:
        """All that were accepted at some place."""
        return list(self._prints)

    def key_of(self, raw: bytes) -> PublicKey | None:
        """The key of a seal that was met; None if these bytes are none."""
        if raw not in self._met:
            try:
                self._met[raw] = self._now.get(raw) or PublicKey(raw)
            except InvalidRequest:
                self._met[raw] = None
            if not self._is_known and self._met[raw] is not None:
                self._is_known = True
                self._accept(raw)
        return self._met[raw]

    def is_retired(self, raw: bytes) -> bool:
        """Whether a record in front has retired this key."""
        return raw in self._retired

    def rotate(self, payload: bytes) -> str | None:
        """Go on behind a ROTATE record; what is wrong with it, None: nothing."""
        try:
            rotation = decode_rotation(payload)
        except Corrupt:
            return None  # Told as a record that is none.
        if not rotation.is_signed():
            return "the old key has not signed it"
        if rotation.old not in self._now:
            return "the old key is not one that is known"
        if rotation.new not in self._now and not self._follows:
            return "the new key is not among those that are known"
        self._accept(rotation.new)
        del self._now[rotation.old]
        self._retired.add(rotation.old)
        return None

    def _accept(self, raw: bytes) -> None:
        try:
            key = self._now.get(raw) or PublicKey(raw)
        except InvalidRequest:
            return
        self._now[raw] = key
        self._prints[key.fingerprint] = None


def _predecessors(unit: UnitId, known: set[bytes], frames: Sequence[Frame]) -> list[bytes]:
    """The keys from which rotations lead to a known one that are sealed by their new key: with that seal it
    speaks for the chain in front."""
    found: list[bytes] = []
    for seal, rotations in reversed(list(_rotations(unit, frames))):
        for rotation in reversed(rotations):
            if rotation.new in known and rotation.is_signed() and seal.key == rotations[-1].new:
                known.add(rotation.old)
                found.append(rotation.old)
    return found


def _rotations(unit: UnitId, frames: Sequence[Frame]) -> Iterator[tuple[SealRecord, list[Rotation]]]:
    """The batches that have ROTATE records, as far as their seal is right."""
    if not any(frame.kind == RecordKind.ROTATE for frame in frames):
        return
    records: list[Frame] = []
    for frame in frames:
        if frame.kind != RecordKind.SEAL:
            records.append(frame)
            continue
        covered, rotations = records, []
        records = []
        try:
            seal = decode_seal(frame.payload)
            covered = covered[-seal.records :]
            rotations = [decode_rotation(f.payload) for f in covered if f.kind == RecordKind.ROTATE]
            is_signed = bool(rotations) and seal.is_signed_by(PublicKey(seal.key), unit)
        except (Corrupt, InvalidRequest):
            continue
        if is_signed and chained_all(seal.before, covered) == seal.head:
            yield seal, rotations
