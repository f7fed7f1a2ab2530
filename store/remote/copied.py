"""What this node remembers of its copies: META rows, one for each unit and remote.

One rule: a row is written only after what it says was read back from the remote. It can be lost (a rebuild):
then the next push finds out anew.

Source: FORMAT.md, "Remotes", "Copying".
"""

from __future__ import annotations

import msgspec

from ckptfs.store.ids import UnitId
from ckptfs.store.index import Change, Index, Table

_PREFIX = b"remote:"


class Copied(msgspec.Struct, frozen=True, array_like=True):
    """What is safe of a unit: as of head `sequence`, whose history ends with `chain`, `versions` (rising);
    the storage got that head at `modified_ns` (its clock); `newest_ns` is the time of the newest of them.
    `let_go` is what that head says that a collector let go."""

    sequence: int
    chain: bytes
    versions: tuple[int, ...]
    modified_ns: int
    newest_ns: int
    let_go: tuple[int, ...] = ()


class CopiedUnits:
    """The rows of one remote, by its name in the configuration. Belongs to the index thread."""

    def __init__(self, index: Index, remote_name: str) -> None:
        self._index = index
        self._name = remote_name

    def of(self, unit: UnitId) -> Copied | None:
        """What is remembered of a unit; None: nothing."""
        encoded = self._index.get(Table.META, self._key(unit))
        try:
            return None if encoded is None else msgspec.msgpack.decode(encoded, type=Copied)
        except msgspec.DecodeError:
            return None  # it can always be asked for again

    def note(self, unit: UnitId, copied: Copied) -> None:
        """Remember. Durable when: the index is next committed."""
        change = Change()
        change.put(Table.META, self._key(unit), msgspec.msgpack.encode(copied))
        self._index.apply(change)

    def _key(self, unit: UnitId) -> bytes:
        return _PREFIX + self._name.encode() + b"\0" + unit
