"""Publishing: making a version of a unit, all of it or nothing.

One rule: a version is listed only once it is durable, and what it lists is one moment of the
live tree (quiet directories as they are, busy ones as they were last published).

The steps, each safe to die in: store the files that wait; build the trees; store the trees;
append the version record to the history, synced (the commit point); tell the index.
Source: ARCHITECTURE §4 "Publish"; FORMAT.md, "Publishing".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import trio

from ckptfs.fusefs.draft import Drafts
from ckptfs.fusefs.facts import Facts, VersionFacts
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.quiet import Due, Quiet
from ckptfs.fusefs.storing import Storing, Waiting
from ckptfs.fusefs.treebuilder import TOP_NAME, Stored, TreeBuilder, overlay_pins
from ckptfs.fusefs.units import Units
from ckptfs.store.errors import InvalidRequest, NotFound
from ckptfs.store.histories import Histories, Unit
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import ChunkId, TreeId, UnitId
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Ingest
from ckptfs.store.inode import Inode
from ckptfs.store.pins import PinnedFile
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry
from ckptfs.store.version_names import version_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """Why a version is made: `origin` goes into the record; `step` overrides what was found."""

    origin: str
    step: int | None = None


class Publisher:
    """Makes versions of one mount's units. Belongs to the trio thread; one publish at a time."""

    def __init__(
        self,
        namespace: Namespace,
        drafts: Drafts,
        units: Units,
        files: Files,
        preimages: Preimages,
        quiet: Quiet,
        segments: Segments,
        ingest: Ingest,
        storing: Storing,
        histories: Histories,
        facts: VersionFacts,
        clock: Callable[[], int],
        new_id: Callable[[], bytes],
    ) -> None:
        self._namespace = namespace
        self._drafts = drafts
        self._units = units
        self._files = files
        self._preimages = preimages
        self._quiet = quiet
        self._segments = segments
        self._ingest = ingest
        self._storing = storing
        self._histories = histories
        self._facts = facts
        self._clock = clock
        self._new_id = new_id
        self._one_at_a_time = trio.Lock()

    def changed_dirs_by_unit(self) -> dict[int, list[int]]:
        """The directories that differ from what is published, by unit; unversioned ones left out."""
        grouped: dict[int, list[int]] = {}
        for directory in list(self._drafts.changed_dirs):
            inode = self._namespace.find(directory)
            if inode is None or not inode.links:
                continue
            try:
                if not self._units.versions_off(directory):
                    grouped.setdefault(self._units.top_of(directory), []).append(directory)
            except Exception:  # below a directory that was removed while somebody is still in it
                log.debug("directory %d has no way to the root", directory)
        return grouped

    def due(self, directories: list[int]) -> Due:
        """What the quiet policy says of a unit's changed directories now."""
        return self._quiet.due(directories, time.monotonic(), self._files.writers_in)

    def due_now(self, directories: list[int]) -> Due:
        """What is taken when somebody asks for a version at once: all that nobody is writing."""
        whole = {d for d in directories if not self._files.writers_in(d)}
        return Due(True, frozenset(whole), frozenset(directories) - whole)

    async def publish(self, top: int, due: Due, request: Request) -> VersionRecord | None:
        """Make a version of a unit; None if there is nothing new since the last one.

        Durable when: this returned. NoSpace: nothing was listed, and the next try starts afresh.
        """
        async with self._one_at_a_time:
            await self._publish_preimage(top)
            with self._segments.pins.hold() as held:
                return await self._publish_live(top, due, request, held)

    async def publish_preimage(self, top: int) -> None:
        """Make a version of what destructive calls pinned, if there is any, and nothing else."""
        async with self._one_at_a_time:
            await self._publish_preimage(top)

    async def _publish_live(
        self, top: int, due: Due, request: Request, held: set[ChunkId]
    ) -> VersionRecord | None:
        planned_s = time.monotonic()
        grown = await self._store_files(due, planned_s, held)
        if not self._is_linked(top):
            return None
        due = self._still_due(due, planned_s)
        with self._namespace.index.removals.hold():
            record = await self._publish_trees(top, due, request, grown, held)
        self._finish(due, planned_s)
        self._preimages.forget_preserved(top)
        return record

    async def _publish_trees(
        self, top: int, due: Due, request: Request, grown: dict[int, Stored], held: set[ChunkId]
    ) -> VersionRecord | None:
        """From the trees to the record; nothing that they name can be collected meanwhile."""
        builder = TreeBuilder(
            self._namespace, self._units, self._segments, top, due.quiet, due.settled_only, grown
        )
        tree = builder.build()
        top_entry = builder.top_entry(tree)
        await self._ingest.store_objects(builder.built.objects, held)
        if not self._is_linked(top):
            return None
        change = Change()
        for directory, built in builder.built.trees.items():
            change.put(Table.PUBLISHED, key_of(directory), built)
        if self._histories.unit_of_ino(top) is None and not self._segments.read_tree(tree):
            # Nothing was ever saved here: no history for an empty directory.
            self._namespace.index.apply(change)
            return None
        return self._append(self._unit_of(top), top_entry, request, change)

    async def publish_now(self, top: int, request: Request) -> VersionRecord:
        """Make a version of what is there at once; the newest one if nothing is new."""
        directories = self.changed_dirs_by_unit().get(top, [])
        record = await self.publish(top, self.due_now(directories), request)
        if record is None:
            unit = self._histories.unit_of_ino(top)
            record = self._histories.newest(unit.unit) if unit is not None else None
            if unit is not None and record is not None and request.step not in (None, record.step):
                # Nothing is new but what the caller knows of it.
                record = self._record(unit, record.top, request, Change())
        if record is None:
            raise NotFound(
                "there is nothing to publish here yet: versioning is off, or all files are being written"
            )
        return record

    def mend(self) -> None:
        """At start: what a death between a record and its index rows left.

        A rename may lack its unit's new name, a version its PUBLISHED rows.
        """
        for unit in self._histories.units():
            if not unit.ino:
                continue
            if not self._is_linked(unit.ino):
                change = Change()
                self._histories.rebind(unit.unit, 0, unit.name, change)
                self._namespace.index.apply(change)
                continue
            if not self._units.is_top(unit.ino) or self._units.name_of(unit.ino) != unit.name:
                self.unit_moved(unit.ino)
            newest = self._histories.newest(unit.unit)
            if newest is not None and newest.top.tree is not None:
                change = Change()
                self._mend_published(unit.ino, newest.top.tree, change)
                self._namespace.index.apply(change)

    def _mend_published(self, directory: int, tree: TreeId, change: Change) -> None:
        if self._namespace.index.get(Table.PUBLISHED, key_of(directory)) == tree:
            return
        change.put(Table.PUBLISHED, key_of(directory), tree)
        for entry in self._segments.read_tree(tree):
            child = self._namespace.child(directory, entry.name) if entry.tree is not None else None
            if child is not None and entry.tree is not None and self._namespace.inode(child).is_dir:
                self._mend_published(child, entry.tree, change)

    def unit_moved(self, ino: int) -> None:
        """A directory was renamed: its unit's history goes along."""
        unit = self._histories.unit_of_ino(ino)
        change = Change()
        if unit is not None:
            stays = self._units.is_top(ino) and self._units.top_of(ino) == ino
            name = self._units.name_of(ino) if stays else unit.name
            self._histories.rebind(unit.unit, ino if stays else 0, name, change)
            self._namespace.index.apply(change)

    def directory_gone(self, ino: int) -> None:
        """A directory is about to be removed: its unit's history stays, under its name."""
        unit = self._histories.unit_of_ino(ino)
        if unit is None and ino in self._preimages.units_with_pins():
            unit = self._unit_of(ino)
        if unit is None:
            return
        change = Change()
        if ino in self._preimages.units_with_pins():
            inode = self._namespace.inode(ino)
            change.put(Table.META, _gone_key(ino), unit.unit + _pack_top(inode))
        self._histories.rebind(unit.unit, 0, unit.name, change)
        self._namespace.index.apply(change)

    # -- the steps -------------------------------------------------------------------------

    async def _store_files(self, due: Due, now: float, held: set[ChunkId]) -> dict[int, Stored]:
        """Store what waits in the directories that are taken; logs that are open are copied."""
        waiting: list[Waiting] = []
        growing: list[tuple[int, bytes]] = []
        for directory in due.quiet | due.settled_only:
            settled_only = directory in due.settled_only
            for _, name, ino in self._namespace.entries(directory):
                inode = self._namespace.inode(ino)
                if not inode.is_file or not inode.content.staging:
                    continue
                if self._files.is_busy(ino):
                    growing.append((ino, name))
                elif inode.content.staging in self._drafts.pinned_staging:
                    continue
                elif not settled_only or self._quiet.is_settled(directory, ino, now):
                    size = self._namespace.attributes_of(ino, inode).size
                    waiting.append(Waiting(ino, name, inode, size))
        await self._storing.store(waiting)
        grown = {}
        for ino, name in growing:
            stored = await self._grow(ino, name, held)
            if stored is not None:
                grown[ino] = stored
        return grown

    async def _grow(self, ino: int, name: bytes, held: set[ChunkId]) -> Stored | None:
        open_file = self._files.open_files.get(ino)
        if open_file is None or (open_file.writers and not open_file.growth.is_log(name)):
            return None
        return await self._storing.store_growing(ino, name, held)

    def _still_due(self, due: Due, planned_s: float) -> Due:
        """Directories in which something happened while their files were stored are busy now."""
        moved = {d for d in due.quiet if self._quiet.happened_since(d, planned_s)}
        alive = {d for d in due.quiet | due.settled_only if self._is_linked(d)}
        return Due(True, (due.quiet - moved) & alive, due.settled_only & alive)

    def _is_linked(self, directory: int) -> bool:
        inode = self._namespace.find(directory)
        return inode is not None and bool(inode.links)

    def _append(self, unit: Unit, top: Entry, request: Request, change: Change) -> VersionRecord | None:
        """The commit point, unless the tree is what the last version has."""
        before = self._histories.newest(unit.unit)
        if before is not None and _same(before.top, top):
            self._namespace.index.apply(change)
            return None
        return self._record(unit, top, request, change)

    def _record(self, unit: Unit, top: Entry, request: Request, change: Change) -> VersionRecord:
        assert top.tree is not None
        found = self._facts.of(unit.unit, top.tree)
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
        self._histories.append_version(record, change)
        self._namespace.index.apply(change, sync=True)
        log.info("published %s of %s: %s, %d files", record.name, unit.name.decode(errors="replace"),
                 record.state, record.files)  # fmt: skip
        return record

    def _finish(self, due: Due, planned_s: float) -> None:
        change = Change()
        for directory in due.quiet:
            if self._quiet.happened_since(directory, planned_s):
                continue
            if self._has_unstored(directory):
                self._quiet.published_open(directory, planned_s)
                continue
            change.delete(Table.DIRTY, key_of(directory))
            self._drafts.changed_dirs.discard(directory)
            self._quiet.forget(directory)
        for directory in due.settled_only:
            self._quiet.published_settled(directory, planned_s)
        self._namespace.index.apply(change)

    def _has_unstored(self, directory: int) -> bool:
        """Whether a file of a directory is still in staging (it was busy, or is being written)."""
        return any(
            inode is not None and inode.content.staging != 0
            for inode in (self._namespace.find(ino) for _, _, ino in self._namespace.entries(directory))
        )

    def _unit_of(self, top: int) -> Unit:
        unit = self._histories.unit_of_ino(top)
        if unit is not None:
            return unit
        name = self._units.name_of(top)
        removed = self._histories.unit_named(name)
        if removed is not None and removed.ino == 0:
            change = Change()
            self._histories.rebind(removed.unit, top, name, change)
            self._namespace.index.apply(change)
        else:
            self._histories.new_unit(UnitId(self._new_id()), name, top, self._clock())
        bound = self._histories.unit_of_ino(top)
        assert bound is not None, "a unit that was just bound is found"
        return bound

    # -- pre-images ------------------------------------------------------------------------

    async def _publish_preimage(self, top: int) -> None:
        pins = self._preimages.pins_of(top)
        if not pins:
            return
        failed = await self._storing.store(
            [
                Waiting(p.ino, p.name, p.inode, p.inode.size, key, p)
                for key, p in pins
                if p.inode.content.staging
            ]
        )
        pins = self._preimages.pins_of(top)
        kept = [(key, pin) for key, pin in pins if key not in failed]
        if any(pin.inode.content.staging for _, pin in kept):
            return  # somebody has a pinned file mapped: the next round tries again
        if kept:
            with self._namespace.index.removals.hold(), self._segments.pins.hold() as held:
                await self._append_preimage(top, [pin for _, pin in kept], held)
        draft = self._drafts.begin()
        self._preimages.release(top, pins, draft)
        draft.change.delete(Table.META, _gone_key(top))
        draft.commit()

    async def _append_preimage(self, top: int, pins: list[PinnedFile], held: set[ChunkId]) -> None:
        unit, entry = self._pinned_top(top)
        newest = self._histories.newest(unit.unit)
        base = newest.top.tree if newest is not None else None
        stored = {i: self._stored_pin(pin) for i, pin in enumerate(pins)}
        tree, objects = overlay_pins(self._segments, base, pins, stored)
        await self._ingest.store_objects(objects, held)
        self._append(unit, replace(entry, tree=tree), Request("pre-image"), Change())

    def _stored_pin(self, pin: PinnedFile) -> Stored:
        recipe = pin.inode.content.base
        if recipe is None:
            raise InvalidRequest("a pinned file has no content")
        root = pin.inode.root or self._storing.root_of(self._segments.read_recipe(recipe))
        return Stored(recipe, root, pin.inode.size)

    def _pinned_top(self, top: int) -> tuple[Unit, Entry]:
        gone = self._namespace.index.get(Table.META, _gone_key(top))
        if gone is None:
            inode = self._namespace.inode(top)
            return self._unit_of(top), _top_entry(_pack_top(inode))
        unit = self._histories.unit(UnitId(gone[:16]))
        if unit is None:
            raise NotFound("the unit of a removed directory is not in the history")
        return unit, _top_entry(gone[16:])


def _steps(found: Facts, step: int | None) -> tuple[int, ...]:
    """The steps that a version holds intact; a caller may know what the names do not tell."""
    if step is None or found.state is not State.COMPLETE:
        return found.steps
    return tuple(sorted({*found.steps, step}))


def _gone_key(top: int) -> bytes:
    return b"gone:" + key_of(top)


def _pack_top(inode: Inode) -> bytes:
    return msgspec.msgpack.encode((inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.ctime_ns))


def _top_entry(packed: bytes) -> Entry:
    mode, uid, gid, mtime_ns, ctime_ns = msgspec.msgpack.decode(packed)
    placeholder = TreeId(bytes(32))  # type: ignore[arg-type]
    return Entry(
        name=TOP_NAME, mode=mode, uid=uid, gid=gid, mtime_ns=mtime_ns, ctime_ns=ctime_ns, tree=placeholder
    )


def _same(before: Entry, top: Entry) -> bool:
    """Whether two versions show the same; the times of the top directory alone make no version."""
    return (before.tree, before.mode, before.uid, before.gid, before.xattrs) == (
        top.tree,
        top.mode,
        top.uid,
        top.gid,
        top.xattrs,
    )
