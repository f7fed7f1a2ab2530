"""Keeping what a destructive call is about to take away.

One rule: content that no version holds, and that was closed for `settle_s` or is part of a commit
point, is pinned by reference before the call is made; the next publish of the unit lists it as a
pre-image.

At the first such call since the last publish the whole settled state of the unit is pinned,
not only the one file, so that the pre-image is the state before the destruction and never a
mixture with what the job writes next. Source: ARCHITECTURE §1.2 and §4.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import msgspec

from ckptfs.fusefs.commits import Commits
from ckptfs.fusefs.draft import Draft, Drafts
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.units import Units
from ckptfs.store.errors import CkptfsError
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.index import Table
from ckptfs.store.inode import Content, Inode
from ckptfs.store.pins import PinnedDirectory, PinnedFile, decode_pin, encode_pin
from ckptfs.store.segments import Segments


class Preimages:
    """Makes pins and knows which exist. Belongs to the index thread.

    `closed_at`: when a file that is still in staging was last closed (monotonic); unknown after
    a restart, which counts as long ago.
    """

    def __init__(
        self,
        namespace: Namespace,
        drafts: Drafts,
        units: Units,
        segments: Segments,
        settle_s: float,
        is_written: Callable[[int], bool],
    ) -> None:
        self._namespace = namespace
        self._drafts = drafts
        self._units = units
        self._segments = segments
        self.settle_s = settle_s
        self._is_written = is_written
        self.closed_at: dict[int, float] = {}
        self.commits = Commits(namespace)
        self._pinned_units: dict[int, dict[int, Content]] = {}
        self._preserved: dict[int, set[tuple[int, RecipeId | None]]] = {}
        self.reload_pins()

    def give_up(self, may_go: Callable[[int], bool]) -> int:
        """Let pins go, because the disk is full and no other history may; returns how many.

        Of a unit for which `may_go` is false those stay whose name is still there: nobody removed them
        to make room.
        """
        draft = self._drafts.begin()
        gone = 0
        for top in list(self._pinned_units):
            pins, all_may_go = self.pins_of(top), may_go(top)
            pins = [pin for pin in pins if all_may_go or not self._has_name(top, pin[1])]
            if not pins:
                continue
            self.release(top, pins, draft)
            gone += len(pins)
        draft.commit()
        return gone

    def forget_preserved(self, top: int) -> None:
        """An ordinary version was made: what comes now is another settled state."""
        self._preserved.pop(top, None)

    def published(self, top: int, since: float) -> None:
        """An ordinary version was made, which was asked for at `since` (monotonic)."""
        self.forget_preserved(top)
        self.commits.published(since)

    def reload_pins(self) -> None:
        """Take what is pinned from the index."""
        self._pinned_units.clear()
        self._drafts.pinned_staging.clear()
        for key, value in self._namespace.index.scan(Table.PREIMAGE):
            self._note(int.from_bytes(key[:8], "big"), decode_pin(value))

    def is_loss(self, ino: int) -> bool:
        """Whether destroying this file's content now would lose what must be kept."""
        return self._is_loss(ino, self._namespace.inode(ino))

    def before_destroying(self, ino: int, draft: Draft, copy: Content | None = None) -> bool:
        """Pin the content of a file that is about to lose it; True if that was needed.

        The caller then must not touch the staging file: it belongs to the pin. With `copy` the
        pin holds that copy instead.
        """
        inode = self._namespace.inode(ino)
        if not self._is_loss(ino, inode):
            return False
        if copy is not None:
            inode = msgspec.structs.replace(inode, content=copy)
        parent = inode.links[0][0]
        if self._units.versions_off(parent):
            return False
        top = self._units.top_of(parent)
        if not inode.content.staging and (ino, inode.content.base) in self._preserved.get(top, ()):
            return False
        pinned = self._pinned_units.get(top)
        if pinned is None:
            self._pin_settled(top, draft, ino)
        if pinned is None or pinned.get(ino) != inode.content:
            self._pin(top, ino, inode, inode.links[0], draft)
        return True

    def before_replacing(self, top: int, ino: int, inode: Inode, draft: Draft) -> None:
        """Pin a file that a rollback of its unit takes away, if somebody closed it and no version
        lists it, settled or not: a rollback can be undone."""
        known = self._pinned_units.get(top, {}).get(ino)
        if known != inode.content and self._is_loss(ino, inode, unsettled=True):
            link = next(one for one in inode.links if self._units.top_of(one[0]) == top)
            self._pin(top, ino, inode, link, draft)

    def pins_of(self, top: int) -> list[tuple[bytes, PinnedFile]]:
        """(key, pin) of every pinned file of a unit."""
        return [(k, decode_pin(v)) for k, v in self._namespace.index.scan(Table.PREIMAGE, key_of(top))]

    def move_pins(self, number: int, copy: int, draft: Draft) -> bool:
        """Let the pins of staging file `number` go on in a copy of it; False if there are none any more."""
        moved = False
        for key, value in self._namespace.index.scan(Table.PREIMAGE):
            pin = decode_pin(value)
            if pin.inode.content.staging != number:
                continue
            content = msgspec.structs.replace(pin.inode.content, staging=copy)
            pin = msgspec.structs.replace(pin, inode=msgspec.structs.replace(pin.inode, content=content))
            draft.change.put(Table.PREIMAGE, key, encode_pin(pin))
            draft.when_applied(partial(self._note, int.from_bytes(key[:8], "big"), pin))
            moved = True
        if moved:
            draft.when_applied(lambda: self._drafts.pinned_staging.discard(number))
        return moved

    def units_with_pins(self) -> list[int]:
        """The top directories of units that have pins."""
        return list(self._pinned_units)

    def release(self, top: int, pins: list[tuple[bytes, PinnedFile]], draft: Draft) -> None:
        """Drop pins, because a version lists what they held.

        Until the next ordinary version, what that pre-image lists needs no second one: a removal
        of many files takes longer than the publish of its first pins.
        """
        self._preserved[top] = {(pin.ino, pin.inode.content.base) for _, pin in pins}
        for key, _ in pins:
            value = self._namespace.index.get(Table.PREIMAGE, key)
            if value is None:
                continue
            draft.change.delete(Table.PREIMAGE, key)
            number = decode_pin(value).inode.content.staging
            if number:
                self._drafts.pinned_staging.discard(number)
                if not self._still_used(decode_pin(value)):
                    draft.change.after_commit(partial(self._drafts.staging.drop, number))
        # Others may have come while these were published.
        released = {key for key, _ in pins}
        left = {pin.ino: pin.inode.content for key, pin in self.pins_of(top) if key not in released}
        self._pinned_units[top] = left
        if not left:
            del self._pinned_units[top]

    def _is_loss(self, ino: int, inode: Inode, *, unsettled: bool = False) -> bool:
        content = inode.content
        if not inode.is_file or not inode.links or (not content.staging and content.base is None):
            return False
        if content.staging:
            closed = self.closed_at.get(ino, float("-inf"))
            settled = unsettled or time.monotonic() - closed >= self.settle_s
            if self._is_written(ino):
                return False
            if not settled and not self.commits.covers(inode.links[0][0], closed):
                return False
            return self._namespace.attributes_of(ino, inode).size > 0
        return not self._is_published(inode, content.base)

    def _is_published(self, inode: Inode, recipe: RecipeId | None) -> bool:
        parent, name = inode.links[0]
        if parent not in self._drafts.changed_dirs:
            return True
        published = self._namespace.index.get(Table.PUBLISHED, key_of(parent))
        if published is None:
            return False
        try:
            entries = self._segments.read_tree(TreeId(published[:32]))  # type: ignore[arg-type]
        except CkptfsError:
            return False
        at = bisect_left(entries, name, key=lambda entry: entry.name)
        return at < len(entries) and entries[at].name == name and entries[at].recipe == recipe

    def _pin_settled(self, top: int, draft: Draft, besides: int) -> None:
        for directory in list(self._drafts.changed_dirs):
            try:
                if self._units.top_of(directory) != top:
                    continue
            except PosixError:  # a removed directory belongs to no unit
                continue
            for _, name, ino in self._namespace.entries(directory):
                inode = self._namespace.inode(ino)
                if ino != besides and self._is_loss(ino, inode):
                    self._pin(top, ino, inode, (directory, name), draft)

    def _pin(self, top: int, ino: int, inode: Inode, link: tuple[int, bytes], draft: Draft) -> None:
        """Pin a file under one of its names, which is in the unit: others may be in other units."""
        attributes = self._namespace.attributes_of(ino, inode)
        frozen = msgspec.structs.replace(
            inode, size=attributes.size, mtime_ns=attributes.mtime_ns, ctime_ns=attributes.ctime_ns
        )
        parent, name = link
        pin = PinnedFile(
            ino,
            tuple(self._directory(i, n) for i, n in self._units.path_in_unit(top, parent)),
            name,
            frozen,
            tuple(sorted(self._namespace.xattrs(ino).items())),
        )
        key = key_of(top) + key_of(self._drafts.positions.take())
        draft.change.put(Table.PREIMAGE, key, encode_pin(pin))
        draft.pinned_staging.add(inode.content.staging)
        draft.when_applied(lambda: self._note(top, pin))

    def _directory(self, ino: int, name: bytes) -> PinnedDirectory:
        inode = self._namespace.inode(ino)
        return PinnedDirectory(name, inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.ctime_ns)

    def _note(self, top: int, pin: PinnedFile) -> None:
        self._pinned_units.setdefault(top, {})[pin.ino] = pin.inode.content
        if pin.inode.content.staging:
            self._drafts.pinned_staging.add(pin.inode.content.staging)

    def _has_name(self, top: int, pin: PinnedFile) -> bool:
        """Whether there is something under the name of what was pinned."""
        at: int | None = top
        for name in (*(directory.name for directory in pin.directories), pin.name):
            at = None if at is None else self._namespace.child(at, name)
        return at is not None

    def _still_used(self, pin: PinnedFile) -> bool:
        """Whether the live inode still has the pinned staging file as its content."""
        live = self._namespace.find(pin.ino)
        return live is not None and live.content.staging == pin.inode.content.staging
