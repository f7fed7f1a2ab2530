"""Units as the index knows them, and which of them has a name.

One rule: a name belongs to the live unit of that name, else to the one that had it last; so a
directory that is made again continues the history of the one that was removed.

Source: FORMAT.md, "History".
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """The row of a unit.

    `name` is its path below the mount ("run1", "a/b/c", "@root"); `ino` its live directory, 0 once
    that is removed; `head` the link of the newest version, 32 zero bytes before the first.
    `frames` and `file_bytes` say up to where the history file is mirrored, `recorded` which name
    the file gives; `bound_ns` is when name or directory last changed, `newest_ns` the time of the
    newest version. `chain` is the chain value behind the last record (empty: not known, the file
    tells), `sealed` says that a seal follows that record.
    """

    unit: UnitId
    name: bytes
    ino: int
    next_number: int
    head: bytes
    frames: int
    created_ns: int
    file_bytes: int
    recorded: bytes
    bound_ns: int
    newest_ns: int
    chain: bytes = b""
    sealed: bool = False

    @property
    def claim(self) -> tuple[bool, bool, int, bytes]:
        """Orders units of one name: the greatest has the right to it."""
        return (self.ino != 0, self.next_number > 1, self.bound_ns, self.unit)

    @property
    def text(self) -> str:
        """The name for people."""
        return self.name.decode("utf-8", "backslashreplace")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Unit)


def encode_unit(unit: Unit) -> bytes:
    """Packed bytes of a row."""
    return _encoder.encode(unit)


def unit_of(encoded: bytes) -> Unit:
    """The row in `encoded`, or Corrupt."""
    try:
        return _decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"not the row of a unit: {e}") from None


def shown_names(units: Iterable[Unit]) -> dict[bytes, Unit]:
    """Units by the names they are shown under.

    Of several of one name the first in the order of claims has it; the others are NAME~ and the
    first 8 hex digits of their id, more where that is taken too.
    """
    shown: dict[bytes, Unit] = {}
    for unit in sorted(units, key=lambda unit: unit.claim, reverse=True):
        name, digits = unit.name, 8
        while name in shown and digits <= 2 * UNIT_ID_BYTES:
            name, digits = unit.name + b"~" + unit.unit.hex()[:digits].encode(), digits + 1
        shown[name] = unit
    return shown


class UnitHints:
    """Which units may have an inode number or a name. The row decides.

    So a hint does no harm when the change that it was made for was never applied.
    """

    __slots__ = ("_keys", "_units")

    def __init__(self) -> None:
        self._units: dict[int | bytes, set[UnitId]] = {}
        self._keys: dict[UnitId, set[int | bytes]] = {}

    def add(self, unit: Unit) -> None:
        """Hint at a unit by its name and, if it is live, its inode."""
        for key in (unit.name, unit.ino):
            if key != 0:
                self._units.setdefault(key, set()).add(unit.unit)
                self._keys.setdefault(unit.unit, set()).add(key)

    def reset(self, unit: Unit) -> None:
        """Forget all hints at a unit but those that its row gives."""
        for key in self._keys.pop(unit.unit, set()):
            units = self._units[key]
            units.discard(unit.unit)
            if not units:
                del self._units[key]
        self.add(unit)

    def units(self, key: int | bytes) -> tuple[UnitId, ...]:
        """The units that may have this inode or name."""
        return tuple(self._units.get(key, ()))
