"""Recording versions: from a tree that is stored to a record in the unit's history.

One rule: the append of a record is the commit point of a publish, and the index rows that belong
to it are one change, made right behind it. What a death in between leaves, `mend` makes good.

Source: FORMAT.md, "Publishing" and "History".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from ckptfs.fusefs.facts import Facts, VersionFacts
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.provenance import Noted, writers_record
from ckptfs.fusefs.units import Units
from ckptfs.store.errors import CkptfsError
from ckptfs.store.histories import Histories, Unit
from ckptfs.store.history import State, VersionRecord, decode_version
from ckptfs.store.ids import TreeId, UnitId
from ckptfs.store.index import Change, Table
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry
from ckptfs.store.version_names import version_name
from ckptfs.store.writer_log import WriterLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """Why a version is made: `origin` goes into the record; `step` overrides what was found."""

    origin: str
    step: int | None = None


class _RollbackNote(msgspec.Struct, frozen=True, array_like=True):
    """Row of META: a rollback that may not be listed yet. `next_number` is the unit's at that time,
    `target` the encoded record of the version whose tree is live since."""

    next_number: int
    target: bytes


_note_encoder = msgspec.msgpack.Encoder()
_note_decoder = msgspec.msgpack.Decoder(_RollbackNote)


class Recorder:
    """Binds directories to units and appends their versions. Belongs to the index thread."""

    def __init__(
        self,
        namespace: Namespace,
        units: Units,
        segments: Segments,
        histories: Histories,
        facts: VersionFacts,
        writer_log: WriterLog,
        clock: Callable[[], int],
        new_id: Callable[[], bytes],
    ) -> None:
        self._namespace = namespace
        self._units = units
        self._segments = segments
        self._histories = histories
        self._facts = facts
        self._writer_log = writer_log
        self._clock = clock
        self._new_id = new_id
        self.versions_made = 0

    @property
    def last_save_bytes(self) -> int:
        """How much the last version brought; 0 if none was made in this mount."""
        return self._facts.last_save_bytes

    def newest(self, top: int) -> VersionRecord | None:
        """The newest version of the unit whose directory this is."""
        unit = self._histories.unit_of_ino(top)
        return None if unit is None else self._histories.newest(unit.unit)

    def has_unit(self, top: int) -> bool:
        """Whether a directory has a history already."""
        return self._histories.unit_of_ino(top) is not None

    def unit_of(self, top: int) -> Unit:
        """The unit of a live directory; a name that had a history goes on with it."""
        unit = self._histories.unit_of_ino(top)
        return unit if unit is not None else self.unit_named(self._units.name_of(top), top)

    def unit_named(self, name: bytes, ino: int) -> Unit:
        """The unit of this name, bound to a directory (0: a removed one); made if there is none."""
        known = self._histories.unit_named(name)
        if known is None or known.ino != 0:
            return self._histories.new_unit(UnitId(self._new_id()), name, ino, self._clock())
        if ino:
            change = Change()
            self._histories.rebind(known.unit, ino, name, change)
            self._namespace.index.apply(change)
        bound = self._histories.unit(known.unit)
        assert bound is not None, "a unit that was just bound is found"
        return bound

    def known_unit(self, top: int) -> UnitId | None:
        """The unit that `unit_of` would give, if there is one; nothing is bound or made."""
        unit = self._histories.unit_of_ino(top)
        if unit is None:
            named = self._histories.unit_named(self._units.name_of(top))
            unit = named if named is not None and named.ino == 0 else None
        return None if unit is None else unit.unit

    async def judge(self, unit: UnitId | None, tree: TreeId) -> Facts:
        """The facts of a tree that is to be the unit's next version (None: its first). Awaits: what
        was true of the live tree before need not be so after it. Corrupt if a tree cannot be read."""
        before = None if unit is None else self._histories.newest(unit)
        return await self._facts.of(tree, before.top.tree if before is not None else None)

    def append(
        self, unit: Unit, top: Entry, facts: Facts, request: Request, change: Change, noted: Noted
    ) -> VersionRecord | None:
        """List a version with this top directory; None if the newest one shows the same.

        `change` has the rows that belong to it, `noted` are its writers. Durable when: this returned.
        """
        before = self._histories.newest(unit.unit)
        if before is not None and _same(before.top, top):
            self._namespace.index.apply(change)
            return None
        self._record_writers(unit, top, noted)
        return self.append_always(unit, top, facts, request, change)

    def append_always(
        self, unit: Unit, top: Entry, found: Facts, request: Request, change: Change
    ) -> VersionRecord:
        """List a version, whatever the newest one shows. Durable when: this returned."""
        now_ns = self._clock()
        record = VersionRecord(
            unit=unit.unit,
            number=unit.next_number,
            name=version_name(unit.next_number, now_ns),
            time_ns=now_ns,
            origin=request.origin,
            top=top,
            root=found.root,
            files=found.files,
            logical_bytes=found.logical_bytes,
            state=found.state,
            step=request.step if request.step is not None else found.step,
            steps=_steps(found, request.step),
            missing=found.missing,
            before=unit.head,
        )
        self._list(unit, record, change)
        return record

    def _record_writers(self, unit: Unit, top: Entry, noted: Noted) -> None:
        if not noted or top.tree is None:
            return
        try:
            self._writer_log.record(unit.unit, writers_record(unit.next_number, top.tree, noted))
        except (CkptfsError, OSError) as e:
            log.warning("who wrote version %d of %s is not recorded: %s", unit.next_number, unit.text, e)

    def note_rollback(self, unit: Unit, top: int, target: VersionRecord, change: Change) -> None:
        """Into the change that gives a unit's directory the tree of `target`: what the record to come
        will say. Whatever dies before `record_rollback` has listed it, the next start lists it."""
        note = _RollbackNote(unit.next_number, target.encode())
        change.put(Table.META, _rollback_key(top), _note_encoder.encode(note))

    def record_rollback(self, top: int, change: Change) -> VersionRecord | None:
        """List the tree that a rollback gave to a unit; the newest version if that shows the same.
        None if nothing is noted. `change` has more rows that belong to it. Durable when: this returned."""
        encoded = self._namespace.index.get(Table.META, _rollback_key(top))
        unit = self._histories.unit_of_ino(top)
        if encoded is None or unit is None:
            return None
        note = _note_decoder.decode(encoded)
        change.delete(Table.META, _rollback_key(top))
        newest, target = self._histories.newest(unit.unit), decode_version(note.target)
        if unit.next_number != note.next_number or (newest is not None and _same(newest.top, target.top)):
            self._namespace.index.apply(change)
            return newest
        now_ns = self._clock()
        record = replace(
            target,
            number=unit.next_number,
            name=version_name(unit.next_number, now_ns),
            time_ns=now_ns,
            origin="rollback",
            before=unit.head,
        )
        self._list(unit, record, change)
        return record

    def _list(self, unit: Unit, record: VersionRecord, change: Change) -> None:
        self._histories.append_version(record, change)
        self._namespace.index.apply(change, sync=True)
        self.versions_made += 1
        name = unit.name.decode(errors="replace")
        log.info("published %s of %s: %s, %d files", record.name, name, record.state, record.files)

    async def append_again(self, record: VersionRecord, request: Request) -> VersionRecord:
        """List once more what the newest version shows, for what `request` knows of it."""
        assert record.top.tree is not None
        with self._namespace.index.removals.hold():
            facts = await self.judge(record.unit, record.top.tree)
            unit = self._histories.unit(record.unit)
            assert unit is not None, "a unit with a version does not go"
            return self.append_always(unit, record.top, facts, request, Change())

    def unit_moved(self, ino: int) -> None:
        """A directory was renamed: its unit's history goes along."""
        unit = self._histories.unit_of_ino(ino)
        if unit is None:
            return
        change = Change()
        stays = self._units.is_top(ino)
        name = self._units.name_of(ino) if stays else unit.name
        self._histories.rebind(unit.unit, ino if stays else 0, name, change)
        self._namespace.index.apply(change)

    def unit_gone(self, ino: int, change: Change) -> None:
        """A directory is about to be removed: its unit's history stays, under its name."""
        unit = self._histories.unit_of_ino(ino)
        if unit is not None:
            self._histories.rebind(unit.unit, 0, unit.name, change)

    def mend(self) -> None:
        """At start: what a death between a record and its index rows left.

        A rename may lack its unit's new name, a version its PUBLISHED rows, a rollback its version.
        """
        for unit in self._histories.units():
            if not unit.ino:
                continue
            inode = self._namespace.find(unit.ino)
            if inode is None or not inode.links:
                change = Change()
                self._histories.rebind(unit.unit, 0, unit.name, change)
                self._namespace.index.apply(change)
                continue
            if not self._units.is_top(unit.ino) or self._units.name_of(unit.ino) != unit.name:
                self.unit_moved(unit.ino)
            if self._mend_rollback(unit):
                self._mend_rows(unit)

    def _mend_rollback(self, unit: Unit) -> bool:
        """Whether the newest version is what PUBLISHED should say."""
        try:
            self.record_rollback(unit.ino, Change())
        except (CkptfsError, OSError) as e:
            log.error("the rollback of %s is not listed yet: %s", unit.text, e)
            return False
        return True

    def _mend_rows(self, unit: Unit) -> None:
        newest = self._histories.newest(unit.unit)
        if newest is None or newest.top.tree is None:
            return
        change = Change()
        try:
            self._mend_published(unit.ino, newest.top.tree, change)
        except CkptfsError as e:
            log.error("the newest version of %s cannot be read: %s", unit.name.decode(errors="replace"), e)
        self._namespace.index.apply(change)

    def _mend_published(self, directory: int, tree: TreeId, change: Change) -> None:
        if self._namespace.index.get(Table.PUBLISHED, key_of(directory)) == tree:
            return
        change.put(Table.PUBLISHED, key_of(directory), tree)
        for entry in self._segments.read_tree(tree):
            child = self._namespace.child(directory, entry.name) if entry.tree is not None else None
            if child is not None and entry.tree is not None and self._namespace.inode(child).is_dir:
                self._mend_published(child, entry.tree, change)


def _rollback_key(top: int) -> bytes:
    return b"rolled:" + key_of(top)


def _steps(found: Facts, step: int | None) -> tuple[int, ...]:
    """The steps that a version holds intact; a caller may know what the names do not tell."""
    if step is None or found.state is not State.COMPLETE:
        return found.steps
    return tuple(sorted({*found.steps, step}))


def _same(before: Entry, top: Entry) -> bool:
    """Whether two versions show the same; the times of the top directory alone make no version."""
    return (before.tree, before.mode, before.uid, before.gid, before.xattrs) == (
        top.tree,
        top.mode,
        top.uid,
        top.gid,
        top.xattrs,
    )
