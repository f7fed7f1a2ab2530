"""The objects in the JSON text of a proof: exactly the fields that one has, each what it must be.

One rule: there is one text for each value: no field twice, no number as text, no object for a list.

Source: FORMAT.md, "Proofs".
"""

from __future__ import annotations

from typing import Final

from ckptfs.store.errors import Corrupt
from ckptfs.store.formats.bounded_json import JsonObject
from ckptfs.store.ids import DIGEST_BYTES

COUNTS: Final = range(1 << 63)


class Fields:
    """An object of the JSON text: exactly the fields `names`, each read as what it must be, or Corrupt."""

    def __init__(self, members: object, where: str, names: str) -> None:
        pairs = members if isinstance(members, JsonObject) else []
        self._where = where
        self._values = dict(pairs)
        if len(self._values) != len(pairs):
            raise Corrupt(f"the proof has a field twice{f' in {where}' if where else ''}")
        if self._values.keys() != set(names.split()):
            raise Corrupt(f"the proof does not have the fields of one{f' in {where}' if where else ''}")

    def of(self, name: str) -> object:
        """The value as it is."""
        return self._values[name]

    def bad(self, name: str) -> Corrupt:
        """The error for a value that is not what it must be."""
        return Corrupt(f"the proof has a bad field {f'{self._where}.' if self._where else ''}{name}")

    def count(self, name: str) -> int:
        """A number from 0 to 2^63-1."""
        value = self._values[name]
        if type(value) is not int or value not in COUNTS:
            raise self.bad(name)
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self._values[name]
        if not isinstance(value, str):
            raise self.bad(name)
        return value

    def name(self, name: str) -> bytes:
        """A path of names: without NUL, nothing in it empty, `.` or `..`."""
        try:
            path = self.text(name).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise self.bad(name) from None
        if b"\0" in path or any(part in (b"", b".", b"..") for part in path.split(b"/")):
            raise self.bad(name)
        return path

    def digest(self, name: str, length: int | None = DIGEST_BYTES) -> bytes:
        """Bytes of this length in lower-case hex digits (None: any length)."""
        return self.unhex(name, self._values[name], length)

    def digests(self, name: str) -> tuple[bytes, ...]:
        """A list of such."""
        return tuple(self.unhex(name, one, DIGEST_BYTES) for one in self.items(name))

    def items(self, name: str) -> list[object]:
        """A list."""
        value = self._values[name]
        if not isinstance(value, list) or isinstance(value, JsonObject):
            raise self.bad(name)
        return value

    def fields(self, name: str, names: str) -> Fields:
        """An object."""
        return Fields(self._values[name], f"{self._where}.{name}" if self._where else name, names)

    def unhex(self, name: str, value: object, length: int | None) -> bytes:
        """What `value`, found in the field `name`, says in lower-case hex digits."""
        try:
            digest = bytes.fromhex(value) if isinstance(value, str) else b""
        except ValueError:
            raise self.bad(name) from None
        if digest.hex() != value or (length is not None and len(digest) != length):
            raise self.bad(name)
        return digest
