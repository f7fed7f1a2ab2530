"""Whether a caller of the control socket may do something to an address.

One rule: a socket never gives more than the mount does. The way to a place is judged by the modes of
today, from the root of the file system down; what lies only in a version by its saved modes too; a
removed unit belongs to the owner it was saved with, and to root.

Source: ARCHITECTURE.md, sections 4 (Browse) and 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptfs.daemon.addresses import Address, Addresses, nothing_at
from ckptfs.daemon.rights import Access, Caller, Modes, may
from ckptfs.daemon.saved_files import way_into
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.errors import NotPermitted
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry
from ckptfs.store.units import Unit


class Rights:
    """Answers for one mount. Belongs to the index thread.

    `ancestors()` are the modes of the directories above the mount point; `owner_uid` is the owner of
    the store; `only_owner` says that nobody else may enter the mount at all.
    """

    def __init__(
        self,
        namespace: Namespace,
        segments: Segments,
        histories: Histories,
        addresses: Addresses,
        ancestors: Callable[[], Sequence[Modes]],
        *,
        owner_uid: int,
        only_owner: bool,
    ) -> None:
        self._namespace = namespace
        self._segments = segments
        self._histories = histories
        self._addresses = addresses
        self._ancestors = ancestors
        self._owner_uid = owner_uid
        self._only_owner = only_owner

    def find(self, caller: Caller, text: str) -> Address:
        """The address of `text`. What the caller may not see is refused before it is said to exist."""
        self._require_entry(caller)
        deepest = self._addresses.inodes_on(self._addresses.parts_of(text))
        directories = [ino for ino in deepest if self._namespace.inode(ino).is_dir]
        if not caller.is_root and not may(caller, self._live_way(directories), Access.SEARCH):
            raise NotPermitted(f"you may not look at {text} (permission denied on the way to it)")
        address = self._addresses.find(text)
        if not address.top and not self.may_unit(caller, address.unit, Access.READ):
            raise nothing_at(text)
        return address

    def require_unit(self, caller: Caller, address: Address, wanted: Access) -> None:
        """NotPermitted unless the caller may have `wanted` of the unit's directory."""
        allowed = (
            self._may_live(caller, self._namespace.path_of(address.top), wanted)
            if address.top
            else self.may_unit(caller, address.unit, wanted)
        )
        if not allowed:
            raise _refused(address.text, wanted)

    def require_place_for(self, caller: Caller, address: Address) -> None:
        """NotPermitted unless the caller may make a removed unit's directory again where it was."""
        way, _, _ = address.name.rpartition(b"/")
        if not self._may_live(caller, way, Access.WRITE | Access.SEARCH):
            raise _refused(address.text, Access.WRITE)

    def require_place(self, caller: Caller, address: Address, record: VersionRecord | None) -> None:
        """NotPermitted unless the caller may read the place, in `record` if that is given."""
        if caller.is_root:
            return
        inos = self._addresses.way_to(address) if address.top else []
        if address.top and record is None:
            allowed = may(caller, self._live_way(inos), Access.READ)
        elif address.top:
            directories = [ino for ino in inos if self._namespace.inode(ino).is_dir]
            allowed = may(caller, self._live_way(directories), Access.SEARCH)
        else:
            allowed = self.may_unit(caller, address.unit, Access.READ)
        if allowed and record is not None:
            saved = way_into(self._segments, record.top, address.inner)
            allowed = may(caller, [_modes(entry) for entry in saved], Access.READ)
        if not allowed:
            raise _refused(address.text, Access.READ)

    def reader(self, caller: Caller) -> Callable[[Entry], bool]:
        """Whether the caller may read an entry of a saved directory that he may enter."""

        def may_read(entry: Entry) -> bool:
            wanted = Access.READ | Access.SEARCH if entry.is_dir else Access.READ
            return caller.is_root or may(caller, [_modes(entry)], wanted)

        return may_read

    def require_owner(self, caller: Caller) -> None:
        """NotPermitted unless the caller is the store's owner or root."""
        if not self.is_owner(caller):
            raise NotPermitted("only the owner of the store and root may do this")

    def is_owner(self, caller: Caller) -> bool:
        """Whether the caller is the store's owner or root."""
        return caller.is_root or caller.uid == self._owner_uid

    def may_unit(self, caller: Caller, unit: Unit | None, wanted: Access) -> bool:
        """Whether the caller may have `wanted` of a whole unit, be it live or removed."""
        if caller.is_root:
            return True
        if unit is not None and unit.ino:
            return self._may_live(caller, self._namespace.path_of(unit.ino), wanted)
        newest = None if unit is None else self._histories.newest(unit.unit)
        return newest is not None and newest.top.uid == caller.uid

    def _require_entry(self, caller: Caller) -> None:
        if self._only_owner and not self.is_owner(caller):
            raise NotPermitted("this mount is its user's alone (it was not mounted with allow_other)")

    def _may_live(self, caller: Caller, path: bytes, wanted: Access) -> bool:
        parts = tuple(part for part in path.split(b"/") if part)
        return caller.is_root or may(caller, self._live_way(self._addresses.inodes_on(parts)), wanted)

    def _live_way(self, inos: Sequence[int]) -> list[Modes]:
        inodes = [self._namespace.inode(ino) for ino in inos]
        return [*self._ancestors(), *(Modes(inode.mode, inode.uid, inode.gid) for inode in inodes)]


def _modes(entry: Entry) -> Modes:
    return Modes(entry.mode, entry.uid, entry.gid)


def _refused(text: str, wanted: Access) -> NotPermitted:
    verb = "change" if wanted & Access.WRITE else "read"
    return NotPermitted(f"you may not {verb} {text} (its modes do not let you)")
