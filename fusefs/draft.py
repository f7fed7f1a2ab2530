"""One operation on the live tree, gathered before it is made.

One rule: an operation is checked in full before its draft is committed, and a draft is
committed whole: journal first, then index. So a refused operation has changed nothing.
"""

from __future__ import annotations

import stat
from collections.abc import Callable

import msgspec

from ckptfs.fusefs.namespace import Counter, Namespace, key_of
from ckptfs.fusefs.requests import Requests
from ckptfs.store.index import Change, Table
from ckptfs.store.inode import Content, Inode, encode_inode
from ckptfs.store.staging import Staging


class Drafts:
    """Makes drafts: holds the counters and the set of directories that changed since publish.

    `changed_dirs` mirrors the DIRTY table. Belongs to the index thread.
    """

    def __init__(
        self, namespace: Namespace, staging: Staging, requests: Requests, clock: Callable[[], int]
    ) -> None:
        self.namespace = namespace
        self.requests = requests
        self.staging = staging
        self.clock = clock
        self.inos = Counter(namespace.index, b"next_ino", 2)
        self.positions = Counter(namespace.index, b"next_seq", 1)
        self.changed_dirs = {int.from_bytes(k, "big") for k, _ in namespace.index.scan(Table.DIRTY)}
        self.pinned_staging: set[int] = set()

    def begin(self) -> Draft:
        """An empty draft."""
        return Draft(self)


class Draft:
    """The inodes, entries and attributes that one operation changes."""

    def __init__(self, drafts: Drafts) -> None:
        self._drafts = drafts
        self._namespace = drafts.namespace
        self._inodes: dict[int, Inode | None] = {}
        self._dirty: set[int] = set()
        self._applied: list[Callable[[], None]] = []
        self.change = Change()
        self.pinned_staging: set[int] = set()
        self.now_ns = drafts.clock()

    def inode(self, ino: int) -> Inode:
        """The record as this draft leaves it."""
        drafted = self._inodes.get(ino)
        return drafted if drafted is not None else self._namespace.inode(ino)

    def drafted(self, ino: int) -> Inode | None:
        """The record, if this draft changes it."""
        return self._inodes.get(ino)

    def new_inode(self, inode: Inode) -> int:
        """Give a new inode its number."""
        ino = self._drafts.inos.take()
        self._inodes[ino] = inode
        return ino

    def update(self, ino: int, **fields: object) -> Inode:
        """Change fields of a record."""
        changed = msgspec.structs.replace(self.inode(ino), **fields)
        self._inodes[ino] = changed
        return changed

    def add_entry(self, parent: int, name: bytes, ino: int) -> None:
        """Put an inode under a name: entry, back link, the parent's times and count."""
        self._put_entry(parent, name, ino)
        inode = self.inode(ino)
        links = ((parent, name),) if inode.is_dir else (*inode.links, (parent, name))
        self._inodes[ino] = msgspec.structs.replace(inode, links=links, ctime_ns=self.now_ns)
        self._touch(parent, 1 if inode.is_dir else 0)

    def remove_entry(self, parent: int, name: bytes, ino: int) -> None:
        """Take a name away; the inode keeps its other links."""
        self._delete_entry(parent, name)
        inode = self.inode(ino)
        links = tuple(link for link in inode.links if link != (parent, name))
        self._inodes[ino] = msgspec.structs.replace(inode, links=links, ctime_ns=self.now_ns)
        self._touch(parent, -1 if inode.is_dir else 0)

    def mark_changed(self, ino: int) -> None:
        """An inode changed, so the directories that list it differ from what is published."""
        inode = self.inode(ino)
        self._dirty.update(parent for parent, _ in inode.links)
        if inode.is_dir:
            self._dirty.add(ino)

    def mark_differing(self, directory: int) -> None:
        """A directory differs from what is published."""
        self._dirty.add(directory)

    def settle(self, directory: int) -> None:
        """A directory is what is published, or is gone: it does not differ from that any more."""
        self.change.delete(Table.DIRTY, key_of(directory))
        self._dirty.discard(directory)
        self.when_applied(lambda: self._drafts.changed_dirs.discard(directory))

    def set_xattr(self, ino: int, name: bytes, value: bytes | None) -> None:
        """Set an extended attribute, or remove it (None)."""
        if value is None:
            self.change.delete(Table.XATTR, key_of(ino) + name)
        else:
            self.change.put(Table.XATTR, key_of(ino) + name, value)

    def remove_inode(self, ino: int) -> None:
        """Remove a record that nothing links to or has open, with its attributes and bytes."""
        self.drop_content(self.inode(ino).content)
        for key, _ in self._namespace.index.scan(Table.XATTR, key_of(ino)):
            self.change.delete(Table.XATTR, key)
        if self.inode(ino).is_dir:
            self.change.delete(Table.PUBLISHED, key_of(ino))
            self.settle(ino)
        self._inodes[ino] = None

    def drop_content(self, content: Content) -> None:
        """The bytes of `content` are not this inode's any more: its staging file goes, once the
        change is synced, unless a pre-image pins it."""
        number = content.staging
        if number and number not in self._drafts.pinned_staging | self.pinned_staging:
            self.change.after_commit(lambda: self._drafts.staging.drop(number))

    def answer(self, ino: int) -> None:
        """This draft does all that the present request asks for; `ino` is what it makes or takes away."""
        self._drafts.requests.record(self.change, ino)

    def when_applied(self, action: Callable[[], None]) -> None:
        """Run `action` once the change is made: memory must not know of what was refused."""
        self._applied.append(action)

    def commit(self, *, sync: bool = False) -> None:
        """Make the operation. Durable when: as Index.apply. NoSpace leaves everything as it was."""
        fresh = self.commit_records()
        self._namespace.index.apply(self.change, sync=sync)
        self._drafts.changed_dirs |= fresh
        for action in self._applied:
            action()

    def commit_records(self) -> set[int]:
        """Put the drafted records into `change`, which somebody else applies.

        Returns the directories that the change newly marks as changed.
        """
        for ino, inode in self._inodes.items():
            if inode is None:
                self.change.delete(Table.INODE, key_of(ino))
            else:
                self.change.put(Table.INODE, key_of(ino), encode_inode(inode))
        fresh = self._dirty - self._drafts.changed_dirs
        for directory in fresh:
            self.change.put(Table.DIRTY, key_of(directory), b"")
        return fresh

    def _put_entry(self, parent: int, name: bytes, ino: int) -> None:
        position = key_of(self._drafts.positions.take())
        self.change.put(Table.ENTRY, key_of(parent) + name, key_of(ino) + position)
        self.change.put(Table.ENTRY_SEQ, key_of(parent) + position, key_of(ino) + name)

    def _delete_entry(self, parent: int, name: bytes) -> None:
        position = key_of(self._namespace.entry_position(parent, name))
        self.change.delete(Table.ENTRY, key_of(parent) + name)
        self.change.delete(Table.ENTRY_SEQ, key_of(parent) + position)

    def _touch(self, directory: int, subdirs: int) -> None:
        inode = self.inode(directory)
        self._inodes[directory] = msgspec.structs.replace(
            inode, mtime_ns=self.now_ns, ctime_ns=self.now_ns, subdirs=inode.subdirs + subdirs
        )
        self._dirty.add(directory)


def inherited(parent: Inode, mode: int, gid: int) -> tuple[int, int]:
    """(mode, gid) of something new in `parent`: a set-gid directory passes its group on, and to
    new directories the bit as well."""
    if not parent.mode & stat.S_ISGID:
        return mode, gid
    return (mode | stat.S_ISGID if stat.S_ISDIR(mode) else mode), parent.gid
