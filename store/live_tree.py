"""The live tree made anew from the last version of each unit, for a rebuild.

One rule: what is made is exactly what the version's tree says, and every directory counts as
published with that tree; so the next publish has no news and lists nothing twice.

Source: FORMAT.md, "Rebuild" and "Live tree".
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from msgspec.structs import replace

from ckptfs.store.histories import Histories, Unit
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import TreeId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.inode import ROOT_INO, Inode, decode_inode, encode_inode
from ckptfs.store.saved_inode import saved_inode
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry, FileKey
from ckptfs.store.version_check import VersionCheck

ROOT_UNIT_NAME = b"@root"
ROOT_IS_RUN = b"root_is_run"
NAMED_UNIT = b"unit:"
_OPERATIONS_A_CHANGE = 4096
_CHANGES_A_COMMIT = 64


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")


class LiveTree:
    """Builds the inodes and entries of an index that has none. Index thread; used once.

    `files` counts what was made, `problems` says in sentences what could not be.
    """

    def __init__(
        self, index: Index, segments: Segments, histories: Histories, check: VersionCheck, now_ns: int
    ) -> None:
        self._index, self._segments = index, segments
        self._histories, self._check = histories, check
        self._now_ns = now_ns
        self._change = Change()
        self._changes = 0
        self._next_ino = ROOT_INO + 1
        self._next_position = 1
        self._linked: dict[FileKey, int] = {}
        self._hard_links: dict[int, Inode] = {}
        self._unit_paths: set[bytes] = set()
        self.files = 0
        self.problems: list[str] = []

    def build(self, owner: tuple[int, int]) -> None:
        """Make the tree. `owner` is the (uid, gid) of a root directory that no version describes."""
        found = list(self._live_units())
        self._unit_paths = {unit.name for unit, _ in found if unit.name != ROOT_UNIT_NAME}
        self._make_root(owner)
        for unit, record in sorted(found, key=lambda pair: _depth_first(pair[0])):
            self._place(unit, record)
        self._change.put(Table.META, b"next_ino", _key(self._next_ino))
        self._change.put(Table.META, b"next_seq", _key(self._next_position))
        self._apply()

    def _live_units(self) -> Iterator[tuple[Unit, VersionRecord]]:
        """The unit that owns each name, with the newest of its versions that can be listed."""
        taken: set[bytes] = set()
        for unit in sorted(self._histories.units(), key=lambda unit: unit.claim, reverse=True):
            parts = unit.name.split(b"/")
            if unit.name in taken or any(part in (b"", b".", b"..") or b"\0" in part for part in parts):
                continue
            taken.add(unit.name)
            for record in reversed(self._histories.versions(unit.unit)):
                if not self._check.lack(record.top).trees:
                    yield unit, record
                    break
                self.problems.append(f"{unit.text}@{record.number} cannot be listed: a directory is missing")

    def _place(self, unit: Unit, record: VersionRecord) -> None:
        if unit.name == ROOT_UNIT_NAME:
            ino = ROOT_INO
            inode = replace(saved_inode(record.top), links=((ROOT_INO, b""),))
        else:
            *way, name = unit.name.split(b"/")
            parent = self._directory_at(way)
            if parent is None or self._child(parent, name) is not None:
                self.problems.append(f"{unit.text} is not in the live tree: its place is taken")
                return
            ino = self._take_ino()
            inode = replace(saved_inode(record.top), links=((parent, name),))
            self._add_entry(parent, name, ino)
            self._add_subdir(parent)
        assert record.top.tree is not None, "the top of a version is a directory"
        subdirs = self._fill(ino, record.top, unit.name if ino != ROOT_INO else b"")
        self._put_inode(ino, replace(inode, subdirs=subdirs))
        self._put_hard_links()
        if ino == ROOT_INO and subdirs:
            self._change.put(Table.META, ROOT_IS_RUN, b"1")
        if b"/" in unit.name:
            self._change.put(Table.META, NAMED_UNIT + _key(ino), b"")
        self._histories.rebind(unit.unit, ino, unit.name, self._change)
        self._apply()

    def _fill(self, directory: int, entry: Entry, path: bytes) -> int:
        """Make what is in a directory; returns how many directories that is."""
        assert entry.tree is not None
        subdirs = 0
        for child in self._segments.read_tree(TreeId(entry.tree)):
            below = path + b"/" + child.name if path else child.name
            if child.is_dir and below in self._unit_paths:
                continue
            if child.is_dir:
                ino = self._take_ino()
                count = self._fill(ino, child, below)
                self._put_inode(
                    ino, replace(saved_inode(child), links=((directory, child.name),), subdirs=count)
                )
                subdirs += 1
            else:
                ino = self._make_leaf(directory, child)
            self._add_entry(directory, child.name, ino)
        self._put_xattrs(directory, entry)
        self._change.put(Table.PUBLISHED, _key(directory), entry.tree)
        return subdirs

    def _make_leaf(self, directory: int, entry: Entry) -> int:
        """A file, link or node; another name of one if the entry says so. Returns its inode."""
        link = (directory, entry.name)
        ino = self._linked.get(entry.file_key) if entry.file_key is not None else None
        if ino is not None:
            known = self._hard_links[ino]
            self._hard_links[ino] = replace(known, links=(*known.links, link))
            return ino
        ino = self._take_ino()
        inode = replace(saved_inode(entry), links=(link,))
        self._put_xattrs(ino, entry)
        self.files += 1
        if entry.file_key is not None:
            self._linked[entry.file_key] = ino
            self._hard_links[ino] = inode
        else:
            self._put_inode(ino, inode)
        return ino

    def _make_root(self, owner: tuple[int, int]) -> None:
        now = self._now_ns
        root = Inode(stat.S_IFDIR | 0o755, *owner, ((ROOT_INO, b""),), now, now, now)
        self._put_inode(ROOT_INO, root)
        self._apply()

    def _directory_at(self, way: list[bytes]) -> int | None:
        """The directory at a path, made as far as it is not there; None if a file is in the way."""
        at = ROOT_INO
        for name in way:
            child = self._child(at, name)
            if child is None:
                child = self._take_ino()
                owner = self._inode(at)
                made = replace(owner, links=((at, name),), subdirs=0, versions_off=False)
                self._put_inode(child, made)
                self._add_entry(at, name, child)
                self._add_subdir(at)
                self._change.put(Table.DIRTY, _key(child), b"")
                self._apply()
            elif not self._inode(child).is_dir:
                return None
            at = child
        return at

    def _child(self, parent: int, name: bytes) -> int | None:
        value = self._index.get(Table.ENTRY, _key(parent) + name)
        return None if value is None else int.from_bytes(value[:8], "big")

    def _inode(self, ino: int) -> Inode:
        encoded = self._index.get(Table.INODE, _key(ino))
        assert encoded is not None, "an inode that an entry names is there"
        return decode_inode(encoded)

    def _add_subdir(self, directory: int) -> None:
        inode = self._inode(directory)
        self._put_inode(directory, replace(inode, subdirs=inode.subdirs + 1))
        self._apply()

    def _take_ino(self) -> int:
        self._next_ino += 1
        return self._next_ino - 1

    def _add_entry(self, parent: int, name: bytes, ino: int) -> None:
        position = _key(self._next_position)
        self._next_position += 1
        self._change.put(Table.ENTRY, _key(parent) + name, _key(ino) + position)
        self._change.put(Table.ENTRY_SEQ, _key(parent) + position, _key(ino) + name)
        if len(self._change.operations) >= _OPERATIONS_A_CHANGE:
            self._apply()

    def _put_inode(self, ino: int, inode: Inode) -> None:
        self._change.put(Table.INODE, _key(ino), encode_inode(inode))

    def _put_xattrs(self, ino: int, entry: Entry) -> None:
        for name, value in entry.xattrs:
            self._change.put(Table.XATTR, _key(ino) + name, value)

    def _put_hard_links(self) -> None:
        for ino, inode in self._hard_links.items():
            self._put_inode(ino, inode)
        self._hard_links.clear()
        self._linked.clear()

    def _apply(self) -> None:
        self._index.apply(self._change)
        self._change = Change()
        self._changes += 1
        if self._changes % _CHANGES_A_COMMIT == 0:
            self._index.commit()


def _depth_first(unit: Unit) -> tuple[bool, int, bytes]:
    """The root's own files first, then the units that others lie in, in a stable order."""
    return unit.name != ROOT_UNIT_NAME, unit.name.count(b"/"), unit.name
