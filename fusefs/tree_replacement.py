"""Putting a saved tree in the place of a live one: what a rollback changes, in one draft.

One rule: this reads and drafts, and never waits, so a rollback is one moment of the live tree. What
is as the version has it already is not touched and keeps its inode; what differs gets a new one, so
whoever has the old file open keeps its bytes, as after a rename over it.

What a version of the unit never holds stays where it is: units that lie in it, and directories whose
versioning is off. Source: ARCHITECTURE §4 "Roll back"; SEMANTICS.md.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ckptfs.fusefs.draft import Draft
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.units import Units
from ckptfs.store.errors import Corrupt, InvalidRequest, NotPermitted
from ckptfs.store.ids import cid_text
from ckptfs.store.index import Change, Table
from ckptfs.store.inode import ROOT_INO, Inode
from ckptfs.store.saved_inode import VERSIONS_XATTR, saved_inode
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry, FileKey

MAX_NAMES = 1 << 18
_PRIVILEGES = stat.S_ISUID | stat.S_ISGID
_PRIVILEGED_XATTRS = (b"security.", b"trusted.")


@dataclass(slots=True)
class Replaced:
    """What a replacement changes, for those who remember things of inodes: `names` mean something
    else now, `inodes` look different, `removed` are gone, `orphans` have lost their last name only,
    `settled` directories show what is published, `differing` ones do not."""

    names: list[tuple[int, bytes]] = field(default_factory=list)
    inodes: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)


class TreeReplacement:
    """Replaces the trees of units within one draft. Belongs to the index thread; used once.

    `uid` is who asks, None for somebody whom no rights bind. `is_known` tells whether the kernel may
    still ask for an inode, `directory_gone` what to add to the change for a directory that goes.
    """

    def __init__(
        self,
        namespace: Namespace,
        units: Units,
        segments: Segments,
        files: Files,
        preimages: Preimages,
        is_known: Callable[[int], bool],
        directory_gone: Callable[[int, Change], None],
        draft: Draft,
        uid: int | None,
    ) -> None:
        self._namespace = namespace
        self._units = units
        self._segments = segments
        self._files = files
        self._preimages = preimages
        self._is_known = is_known
        self._directory_gone = directory_gone
        self._draft = draft
        self._uid = uid
        self._top = ROOT_INO
        self._linked: dict[FileKey, int] = {}
        self._shared: set[int] = set()
        self.replaced = Replaced()

    def replace(self, top: int, entry: Entry) -> None:
        """Give a unit's directory the tree and the attributes of `entry`.

        Corrupt if a directory of the version cannot be read or a file's recipe is not there,
        NotPermitted if it holds what `uid` may not bring back, InvalidRequest if it is too large:
        the draft is then to be dropped.
        """
        self._top = top
        self._linked.clear()
        self._shared.clear()
        self._fill(top, self._namespace.find(top), entry)
        for ino in self._shared:
            if (links := self._draft.inode(ino).links) and self._namespace.find(ino) is not None:
                self._draft.mark_changed(ino)
                self.replaced.inodes.append(ino)
                self.replaced.differing += [parent for parent, _ in links]

    def _fill(self, directory: int, before: Inode | None, entry: Entry) -> None:
        """Give a directory what a saved one has; `before` is its record if it is there already."""
        assert entry.tree is not None, "a directory has a tree"
        wanted = {child.name: child for child in self._segments.read_tree(entry.tree)}
        exact = True
        for _, name, ino in self._namespace.entries(directory) if before is not None else ():
            inode, child = self._namespace.inode(ino), wanted.get(name)
            if self._stays(ino, inode):
                exact &= wanted.pop(name, None) is None
            elif child is not None and self._is_kept(ino, inode, child):
                del wanted[name]
                self._keep(ino, inode, child)
            elif not self._remove(directory, name, ino, inode):
                wanted.pop(name, None)
                exact = False
        for child in wanted.values():
            self._make(directory, child)
        self._show(directory, before, entry)
        self._draft.change.put(Table.PUBLISHED, key_of(directory), entry.tree)
        if exact and directory != self._top:
            self._draft.settle(directory)
        else:
            # As to the top, the newest version is another one until the rollback is listed.
            self._draft.mark_differing(directory)
        (self.replaced.settled if exact else self.replaced.differing).append(directory)

    def _stays(self, ino: int, inode: Inode) -> bool:
        if not inode.is_dir:
            return False
        return (
            inode.versions_off or not self._units.takes_subdirectories(self._top) or self._units.is_top(ino)
        )

    def _is_kept(self, ino: int, inode: Inode, entry: Entry) -> bool:
        """Whether a live inode needs no other change than of its attributes."""
        if stat.S_IFMT(inode.mode) != stat.S_IFMT(entry.mode):
            return False
        if inode.is_dir:
            return True
        if entry.link or len(inode.links) != 1 or self._files.is_written(ino):
            return False
        same_bytes = not inode.content.staging and inode.content.base == entry.recipe
        return same_bytes and inode.target == entry.target and inode.rdev == entry.rdev

    def _keep(self, ino: int, inode: Inode, entry: Entry) -> None:
        if entry.is_dir:
            self._fill(ino, inode, entry)
        else:
            self._show(ino, inode, entry)

    def _remove(self, directory: int, name: bytes, ino: int, inode: Inode) -> bool:
        """Take a name away; False if it stays, as the way to something that stays."""
        if inode.is_dir:
            if not self._empty(ino):
                self._draft.change.delete(Table.PUBLISHED, key_of(ino))
                self._draft.mark_differing(ino)
                self.replaced.differing.append(ino)
                return False
            self._directory_gone(ino, self._draft.change)
        elif len(inode.links) == 1 or len(self._draft.inode(ino).links) == 1:
            self._preimages.before_replacing(self._top, ino, inode, self._draft)
        self._draft.remove_entry(directory, name, ino)
        self._note(directory, name)
        if self._draft.inode(ino).links:
            self._shared.add(ino)
        else:
            self._let_go(ino)
        return True

    def _empty(self, directory: int) -> bool:
        """Remove what is in a directory that goes; True if nothing is left in it."""
        is_empty = True
        for _, name, ino in self._namespace.entries(directory):
            inode = self._namespace.inode(ino)
            if self._stays(ino, inode) or not self._remove(directory, name, ino, inode):
                is_empty = False
        return is_empty

    def _let_go(self, ino: int) -> None:
        if self._files.is_open(ino) or self._is_known(ino):
            self.replaced.orphans.append(ino)
        else:
            self._draft.remove_inode(ino)
            self.replaced.removed.append(ino)

    def _make(self, directory: int, entry: Entry) -> None:
        """A new inode under a name, or another name of one that was made already."""
        self._note(directory, entry.name)
        key = entry.file_key
        ino = self._linked.get(key) if key is not None else None
        if ino is None:
            ino = self._draft.new_inode(self._inode_of(entry))
            if key is not None:
                self._linked[key] = ino
        self._draft.add_entry(directory, entry.name, ino)
        if entry.is_dir:
            self._fill(ino, None, entry)
        else:
            self._show(ino, None, entry)

    def _inode_of(self, entry: Entry) -> Inode:
        if entry.recipe is not None and self._segments.locate(entry.recipe) is None:
            name = entry.name.decode(errors="replace")
            raise Corrupt(
                f"the version lacks the content of {name} ({cid_text(entry.recipe)}); "
                "`ckptfs verify` lists what is missing"
            )
        return saved_inode(entry)

    def _show(self, ino: int, before: Inode | None, entry: Entry) -> None:
        """Give an inode the attributes that were saved; `before` is its record if it was there."""
        drafted = self._draft.drafted(ino) or before
        assert drafted is not None, "an inode is in the index or in the draft"
        saved, now = dict(entry.xattrs), self._namespace.xattrs(ino) if before is not None else {}
        self._check_rights(before, entry, saved != now)
        for name in now.keys() - saved.keys():
            self._draft.set_xattr(ino, name, None)
        for name, value in saved.items():
            if now.get(name) != value:
                self._draft.set_xattr(ino, name, value)
        fields: dict[str, object] = {
            "mode": entry.mode,
            "uid": entry.uid,
            "gid": entry.gid,
            "mtime_ns": entry.mtime_ns,
            "ctime_ns": entry.ctime_ns,
            "versions_off": entry.is_dir and saved.get(VERSIONS_XATTR) == b"off",
        }
        if msgspec.structs.replace(drafted, **fields) == drafted and saved == now:
            return
        self._draft.update(ino, **fields)
        if before is not None:
            self.replaced.inodes.append(ino)

    def _check_rights(self, before: Inode | None, entry: Entry, other_xattrs: bool) -> None:
        """A rollback gives nobody what he could not have otherwise: set-id bits, capabilities and
        device nodes are for those whom no rights bind, the rights of a directory for its owner."""
        if self._uid is None:
            return
        differs = before is None or (before.mode, before.uid, before.gid) != (
            entry.mode,
            entry.uid,
            entry.gid,
        )
        if not differs and not other_xattrs:
            return
        special = any(name.startswith(_PRIVILEGED_XATTRS) for name, _ in entry.xattrs)
        device = stat.S_ISCHR(entry.mode) or stat.S_ISBLK(entry.mode)
        if (entry.mode & _PRIVILEGES and not entry.is_dir) or special or device:
            what = "set-id bits, capabilities or a device node"
        elif before is not None and before.is_dir and (before.uid, before.gid) != (entry.uid, entry.gid):
            what = "another owner"
        elif before is not None and before.is_dir and before.uid != self._uid:
            what = "other rights or attributes"
        else:
            return
        name = entry.name.decode(errors="replace")
        raise NotPermitted(
            f"{name} had {what} in that version; only root and the store's owner may roll it back"
        )

    def _note(self, directory: int, name: bytes) -> None:
        self.replaced.names.append((directory, name))
        if len(self.replaced.names) > MAX_NAMES:
            raise InvalidRequest(
                f"more than {MAX_NAMES} names would change in one step; copy what you need from `.versions`"
            )
