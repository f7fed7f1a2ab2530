"""What a PATH means: which unit, where in it, and which of its versions.

One rule: a name that exists now is taken for itself, whatever it looks like; only then is its last
'@' read as the beginning of a VERSION, and only then are units asked for that exist no longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.errors import NotFound
from ckptfs.store.histories import Histories, Unit
from ckptfs.store.history import VersionRecord
from ckptfs.store.inode import ROOT_INO
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
        address = self._live(text, None)
        if address is not None:
            return address
        path, version = split_version(text)
        found = (self._live(path, version) if version is not None else None) or self._past(text, None)
        found = found or (self._past(path, version) if version is not None else None)
        if found is None:
            raise NotFound(f"there is nothing at {text}, and no unit of that name; `ckptfs status` lists units")
        return found

    def without_version(self, text: str) -> Address:
        """The address of PATH, for what concerns a whole unit."""
        return self.find(text)

    def versions(self, address: Address) -> list[VersionRecord]:
        """The versions of an address's unit, oldest first."""
        return [] if address.unit is None else self._histories.versions(address.unit.unit)

    def record(self, address: Address, default: str = LATEST) -> VersionRecord:
        """The version that an address names; NotFound or InvalidRequest say what there is instead."""
        tags = {} if address.unit is None else self._histories.tags(address.unit.unit)
        return resolve(address.version or default, self.versions(address), tags)

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

    def _live(self, text: str, version: str | None) -> Address | None:
        """The address of something that exists now, or None."""
        parts = self._named_parts(text)
        inos = self.inodes_on(parts)
        if len(inos) <= len(parts):
            return None
        directories = inos if self._namespace.inode(inos[-1]).is_dir else inos[:-1]
        return self._in_live_unit(text, parts, self._top_of(directories[-1]), inos, version)

    def _past(self, text: str, version: str | None) -> Address | None:
        """The address of something that was: in a removed unit, or removed from a live one."""
        parts = self._named_parts(text)
        inos = self.inodes_on(parts)
        for depth in range(len(parts), len(inos) - 1, -1):
            unit = self._histories.unit_named(b"/".join(parts[:depth]))
            if unit is not None:
                inner = parts[depth:]
                return Address(
                    text=text, name=unit.name, unit=unit, top=0, inner=inner, ino=None, version=version
                )
        directory = next(ino for ino in reversed(inos) if self._namespace.inode(ino).is_dir)
        address = self._in_live_unit(text, parts, self._top_of(directory), inos, version)
        return address if self._ever_held(address) else None

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

    def _ever_held(self, address: Address) -> bool:
        """Whether a place that is not there now may have been: the check of each version is the caller's."""
        return address.unit is not None and (address.top != ROOT_INO or len(address.inner) == 1)

    def _named_parts(self, text: str) -> tuple[bytes, ...]:
        parts = _parts(os.fsencode(text))
        if parts[:1] == (ROOT_UNIT,) and self._namespace.child(ROOT_INO, ROOT_UNIT) is None:
            return parts[1:]
        return parts


def _parts(path: bytes) -> tuple[bytes, ...]:
    return tuple(_components(path))


def _components(path: bytes) -> Iterator[bytes]:
    return (part for part in path.split(b"/") if part)
