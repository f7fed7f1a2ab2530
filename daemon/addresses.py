"""What a PATH means: which unit, where in it, and which of its versions.

One rule: a name that exists now is taken for itself, whatever it looks like; only then is its last
'@' read as the beginning of a VERSION, and only then are units asked for that exist no longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptfs.fusefs.browse_tops import name_at_root
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.errors import NotFound
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.units import Unit
from ckptfs.store.version_names import LATEST, resolve, split_version

ROOT_UNIT = b"@root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A place in a unit.

    `top` is the inode of the unit's directory (0: removed), `inner` the names below it, `ino` the
    inode that is there now (None: none), `version` the text behind '@'. `unit` is None as long as the
    unit has no history. `text` is the path as it was asked for.
    """

    text: str
    name: bytes
    unit: Unit | None
    top: int
    inner: tuple[bytes, ...]
    ino: int | None
    version: str | None

    @property
    def is_whole(self) -> bool:
        """Whether it is the unit's directory itself."""
        return not self.inner


class Addresses:
    """Finds addresses. Belongs to the index thread; `top_of` tells the unit's directory of a directory."""

    def __init__(self, namespace: Namespace, histories: Histories, top_of: Callable[[int], int]) -> None:
        self._namespace = namespace
        self._histories = histories
        self._top_of = top_of

    def find(self, text: str) -> Address:
        """The address of PATH or PATH@VERSION; NotFound if no such place is or was."""
        path, version = split_version(text)
        asked = [(text, None)] if version is None else [(text, None), (path, version)]
        # What only versions hold is told from a VERSION by nothing, so there the VERSION goes first.
        tries = [(look, *one) for look in (self._live, self._removed_unit) for one in asked]
        tries += [(look, *one) for look in (self._of_removed, self._in_past) for one in reversed(asked)]
        for look, path, version in tries:
            address = look(path, version)
            if address is not None:
                return address
        raise nothing_at(text)

    def versions(self, address: Address) -> list[VersionRecord]:
        """The versions of an address's unit, oldest first."""
        return [] if address.unit is None else self._histories.versions(address.unit.unit)

    def record(self, address: Address, default: str = LATEST) -> VersionRecord:
        """The version that an address names; NotFound or InvalidRequest say what there is instead."""
        tags = {} if address.unit is None else self._histories.tags(address.unit.unit)
        return resolve(default if address.version is None else address.version, self.versions(address), tags)

    def parts_of(self, text: str) -> tuple[bytes, ...]:
        """The names along a path; `@root` stands for the root, unless something has that name."""
        parts = _parts(os.fsencode(text))
        if parts[:1] == (ROOT_UNIT,) and self._namespace.child(ROOT_INO, ROOT_UNIT) is None:
            return parts[1:]
        return parts

    def inodes_on(self, parts: tuple[bytes, ...]) -> list[int]:
        """The inodes from the root along these names, as far as they exist."""
        inos = [ROOT_INO]
        for part in parts:
            child = self._namespace.child(inos[-1], part)
            if child is None:
                break
            inos.append(child)
        return inos

    def way_to(self, address: Address) -> list[int]:
        """The inodes from the root to the unit's directory and on along `inner`, as far as they exist."""
        top = self._namespace.path_of(address.top)
        return self.inodes_on((*_parts(top), *address.inner))

    def path_of_version(self, address: Address, record: VersionRecord) -> bytes:
        """Where the mount shows the top directory of a version, as seen from its root."""
        assert address.unit is not None, "a version has a unit"
        if address.top not in (0, ROOT_INO):
            folder = self._namespace.path_of(address.top) + b"/.versions"
        else:
            shown = self._histories.shown_names().items()
            name = next((name for name, unit in shown if unit.unit == record.unit), address.name)
            folder = b"/.versions/" + name_at_root(name, address.unit)
        return folder + b"/" + os.fsencode(record.name)

    def _live(self, text: str, version: str | None) -> Address | None:
        """The address of something that exists now, or None."""
        parts = self.parts_of(text)
        inos = self.inodes_on(parts)
        if len(inos) <= len(parts):
            return None
        directories = inos if self._namespace.inode(inos[-1]).is_dir else inos[:-1]
        return self._in_live_unit(text, parts, self._top_of(directories[-1]), inos, version)

    def _removed_unit(self, text: str, version: str | None) -> Address | None:
        """The address of a removed unit itself, or None."""
        address = self._of_removed(text, version)
        return address if address is not None and address.is_whole else None

    def _of_removed(self, text: str, version: str | None) -> Address | None:
        """The address of something in a unit that was removed, or None."""
        parts = self.parts_of(text)
        for depth in range(len(parts), len(self.inodes_on(parts)) - 1, -1):
            unit = self._unit_shown_as(b"/".join(parts[:depth]))
            if unit is not None:
                inner = parts[depth:]
                return Address(
                    text=text, name=unit.name, unit=unit, top=0, inner=inner, ino=None, version=version
                )
        return None

    def _in_past(self, text: str, version: str | None) -> Address | None:
        """The address of something that a live unit may have held once; each version will tell."""
        parts = self.parts_of(text)
        inos = self.inodes_on(parts)
        directory = next(ino for ino in reversed(inos) if self._namespace.inode(ino).is_dir)
        address = self._in_live_unit(text, parts, self._top_of(directory), inos, version)
        held = address.unit is not None and (address.top != ROOT_INO or len(address.inner) == 1)
        return address if held else None

    def _unit_shown_as(self, name: bytes) -> Unit | None:
        """The unit of this name; of several removed ones the older are NAME~ID, as in `.versions`."""
        unit = self._histories.unit_named(name)
        if unit is not None or b"~" not in name:
            return unit
        return self._histories.shown_names().get(name)

    def _in_live_unit(
        self, text: str, parts: tuple[bytes, ...], top: int, inos: list[int], version: str | None
    ) -> Address:
        unit = self._histories.unit_of_ino(top)
        path = self._namespace.path_of(top)[1:]
        return Address(
            text=text,
            name=unit.name if unit is not None else path or ROOT_UNIT,
            unit=unit,
            top=top,
            inner=parts[inos.index(top) :],
            ino=inos[-1] if len(inos) > len(parts) else None,
            version=version,
        )


def _parts(path: bytes) -> tuple[bytes, ...]:
    return tuple(_components(path))


def _components(path: bytes) -> Iterator[bytes]:
    return (part for part in path.split(b"/") if part)


def nothing_at(text: str) -> NotFound:
    """The error for a path that is nothing and was nothing."""
    return NotFound(f"there is nothing at {text}, and no unit of that name; see `ckptfs status`")
