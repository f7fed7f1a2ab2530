"""`.versions` and `/.versions/UNIT`: which versions they list, and who may go through them today.

One rule: the way into the past has the rights of the present. Both take mode and owner of the live
directory; a removed unit has its saved owner and no rights for others. A unit that lies deeper than
the root's own directories is reached at the root by a way that spares it the directories between, so
group and others keep there only the rights that none of these takes from any of them (mode_behind).

In names of units at the root, '/' is %2F and '%' is %25.
"""

from __future__ import annotations

import stat
from dataclasses import replace
from typing import Protocol

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.browse_listing import VersionSource
from ckptfs.fusefs.browse_nodes import Base, UnitNode, VersionsNode
from ckptfs.fusefs.browse_rights import mode_behind
from ckptfs.store.errors import NotFound
from ckptfs.store.histories import Unit
from ckptfs.store.ids import UnitId
from ckptfs.store.inode import ROOT_INO, Inode

_UNIT_COOKIES = 1 << 61
_NAME_MAX = 255


class LiveTree(Protocol):
    """What is asked of Namespace; both it and LiveUnits raise ENOENT for what was removed."""

    def find(self, ino: int) -> Inode | None: ...
    def inode(self, ino: int) -> Inode: ...
    def attributes(self, ino: int) -> Attributes: ...
    def ancestors(self, directory: int) -> list[int]: ...
    def path_of(self, ino: int) -> bytes: ...
    def at_path(self, path: bytes) -> int | None: ...


class LiveUnits(Protocol):
    """What is asked of Units."""

    def top_of(self, directory: int) -> int: ...
    def path_in_unit(self, top: int, directory: int) -> list[tuple[int, bytes]]: ...
    def takes_subdirectories(self, top: int) -> bool: ...


class Tops:
    """Answers from the live tree and the histories; keeps nothing. Belongs to the index thread."""

    def __init__(self, histories: VersionSource, live: LiveTree, units: LiveUnits) -> None:
        self._histories = histories
        self._live = live
        self._units = units

    def base(self, node: VersionsNode | UnitNode) -> Base | None:
        """What versions a node lists; None if none: the root's `.versions`, a unit not yet published."""
        if isinstance(node, UnitNode):
            return Base(node.ino, node.unit, b"")
        top = self._units.top_of(node.live)
        if top == ROOT_INO and not self._units.takes_subdirectories(ROOT_INO):
            return None
        unit = self._histories.unit_of_ino(top)
        if unit is None:
            return None
        return Base(
            node.ino, unit.unit, b"/".join(name for _, name in self._units.path_in_unit(top, node.live))
        )

    def lists_units(self, node: VersionsNode | UnitNode) -> bool:
        """Whether a node lists units: the root's `.versions`. Where the root is itself one unit,
        it lists that unit's versions as well."""
        return isinstance(node, VersionsNode) and node.live == ROOT_INO

    def published_below(self, node: VersionsNode | UnitNode) -> int | None:
        """The live directory whose versions a node lists, None if there is none."""
        if isinstance(node, UnitNode):
            unit = self._histories.unit(node.unit)
            return unit.ino if unit is not None and self._is_live(unit) else None
        if node.live == ROOT_INO and not self._units.takes_subdirectories(ROOT_INO):
            return None
        return node.live

    def attributes(self, node: VersionsNode | UnitNode) -> Attributes:
        """What stat(2) shows; NotFound if a removed unit has no version any more."""
        if isinstance(node, VersionsNode):
            base = self.base(node)
            unit = None if base is None else self._histories.unit(base.unit)
            return _like(self._live.attributes(node.live), node.ino, unit)
        unit = self._histories.unit(node.unit)
        if unit is not None and self._is_live(unit):
            between = [self._live.inode(ino) for ino in self._live.ancestors(unit.ino)[1:-1]]
            like = _like(self._live.attributes(unit.ino), node.ino, unit)
            return replace(like, mode=mode_behind(like.mode, like.gid, between))
        return self._removed(node)

    def unit_named(self, name: bytes) -> UnitId | None:
        """The unit that the root's `.versions` shows under a name."""
        plain = name.replace(b"%2F", b"/").replace(b"%25", b"%")
        unit = self._histories.unit_named(plain)
        if unit is not None and name == name_at_root(plain, unit) and self._has_something(unit):
            return unit.unit
        return next(
            (u.unit for n, u in self._histories.shown_names().items() if name_at_root(n, u) == name), None
        )

    def units_behind(self, cookie: int, limit: int) -> list[tuple[int, bytes, UnitId]]:
        """Up to `limit` (cookie, shown name, unit) behind a cookie. Cookies come from the ids of the
        units, so they stay, whatever is made, renamed or removed."""
        rows = [
            (_cookie(u.unit), name_at_root(name, u), u.unit)
            for name, u in self._histories.shown_names().items()
        ]
        return sorted(row for row in rows if row[0] > cookie)[:limit]

    def _is_live(self, unit: Unit) -> bool:
        inode = self._live.find(unit.ino) if unit.ino else None
        return inode is not None and bool(inode.links)

    def _has_something(self, unit: Unit) -> bool:
        return unit.ino != 0 or self._histories.newest(unit.unit) is not None

    def _removed(self, node: UnitNode) -> Attributes:
        newest = self._histories.newest(node.unit)
        if newest is None:
            raise NotFound("nothing is left of this unit")
        top = newest.top
        return Attributes(
            ino=node.ino,
            mode=stat.S_IFDIR | top.mode & stat.S_IRWXU,
            nlink=1,
            uid=top.uid,
            gid=top.gid,
            rdev=0,
            size=0,
            blocks=0,
            atime_ns=newest.time_ns,
            mtime_ns=newest.time_ns,
            ctime_ns=newest.time_ns,
        )


def _like(live: Attributes, ino: int, unit: Unit | None) -> Attributes:
    """A directory with the rights of a live one; its time is that of the newest version."""
    newest_ns = unit.newest_ns if unit is not None else 0
    time_ns = newest_ns or live.mtime_ns
    return replace(live, ino=ino, nlink=1, size=0, blocks=0, mtime_ns=time_ns, ctime_ns=time_ns)


def _cookie(unit: UnitId) -> int:
    return _UNIT_COOKIES | int.from_bytes(unit[:8], "big") & (_UNIT_COOKIES - 1)


def name_at_root(name: bytes, unit: Unit) -> bytes:
    """What the root's `.versions` calls a unit that is shown as `name`."""
    escaped = name.replace(b"%", b"%25").replace(b"/", b"%2F")
    if len(escaped) <= _NAME_MAX:
        return escaped
    return escaped[:200] + b"~" + unit.unit.hex().encode()
