"""`ckptfs import`: an existing directory becomes a unit, each of its checkpoints a version.

One rule: what was there is removed (and only with `move`) after a durable version holds it, and only if it
still is what that version holds.

An import that was killed is begun again: what the newest version has is not taken anew, so nothing is
doubled. What dies between storing a file and listing the version leaves chunks, which the next try finds, or
the collector takes. With `move` the names of a listed version go before the next is begun; a row of META says
whose they were, so that the next try does not take their absence for news.

Source: FORMAT.md, "Importing".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import trio

from ckptfs.daemon.import_files import FileTaker, Taken
from ckptfs.daemon.import_plan import (
    Found,
    Path,
    ReadTree,
    Step,
    changed_since,
    deeper_saves,
    files_to_take,
    is_empty,
    is_same,
    plan_import,
    with_left,
)
from ckptfs.daemon.import_trees import TreeMaker
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.outside import Outside
from ckptfs.daemon.removing import Remover
from ckptfs.fusefs.facts import Facts, VersionFacts
from ckptfs.fusefs.mutations import VERSIONS_NAME
from ckptfs.store.errors import Conflict, InvalidRequest, Unavailable
from ckptfs.store.far_trees import read_tree_there
from ckptfs.store.histories import Unit
from ckptfs.store.history import IMPORTED, VersionRecord
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.index import Change, Table
from ckptfs.store.tree import Entry
from ckptfs.store.version_names import version_name

MOVING = b"moving:"
"""META, with a unit id: device, inode and path of the directory that is being moved into that unit."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`source` becomes the unit `name`. `left` are paths below it that somebody is at work on; () is the
    directory itself, see import_plan.Found. `follows`: somebody goes on importing it, so its
    checkpoints may lie deeper, and that something has gone is news; what changed after `looked_ns` (0: no
    matter) is left. `device` and `inode` are those of the directory that is meant (inode 0: any)."""

    source: str
    name: bytes
    move: bool = False
    left: frozenset[Path] = frozenset()
    follows: bool = False
    looked_ns: int = 0
    device: int = 0
    inode: int = 0


@dataclass(slots=True)
class Imported:
    """What came of it: the versions that were made, the newest one (of this or an earlier import), how many
    files came by which way, and what could not be removed."""

    made: list[VersionRecord] = field(default_factory=list)
    newest: VersionRecord | None = None
    ways: Counter[str] = field(default_factory=Counter)
    bytes_by_way: Counter[str] = field(default_factory=Counter)
    removed_files: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, taker: FileTaker) -> None:
        """Count what was taken."""
        self.ways.update(taker.counts)
        self.bytes_by_way.update(taker.bytes_by_way)


@dataclass(frozen=True, slots=True)
class Planned:
    """A version that would be made, and the files and bytes that would be read for it."""

    step: Step
    files: int
    bytes: int


class Importer:
    """Belongs to the index thread; one import at a time."""

    def __init__(self, parts: OpenStore) -> None:
        self._parts = parts
        self._facts = VersionFacts(parts.segments)
        self._one_at_a_time = trio.Lock()

    async def plan(self, wanted: Wanted) -> list[Planned]:
        """What `run` would do."""
        outside = await trio.to_thread.run_sync(self._opened, wanted)
        try:
            news = await self._news(outside, wanted, outside.scan)
        finally:
            outside.close()
        return await trio.to_thread.run_sync(self._planned, news)

    def _opened(self, wanted: Wanted) -> Outside:
        """The directory, from which on its name does not matter any more. Blocks."""
        outside = Outside(wanted.source, self._parts.disk.root)
        try:
            outside.require_identity(wanted.device, wanted.inode)
        except InvalidRequest:
            outside.close()
            raise
        return outside

    def _planned(self, news: _News) -> list[Planned]:
        return [
            Planned(step, len(files), sum(found.size for found in files))
            for step in news.steps
            for files in [news.files_of(step, self._read_tree_there)]
        ]

    async def run(self, wanted: Wanted, tell: Callable[[int, int], None]) -> Imported:
        """Make the versions. `tell(done, total)` hears of bytes.

        Conflict: a live directory has the name. InvalidRequest, NotFound: the directory is none that can be
        imported. Unavailable: somebody is at work in it. NoSpace, OSError as they come. Versions that were
        made before stay, and nothing of others is listed. Durable when: this returned.
        """
        async with self._one_at_a_time:
            outside = await trio.to_thread.run_sync(self._opened, wanted)
            try:
                return await _Run(self, self._parts, self._facts, outside, wanted, tell).run()
            finally:
                outside.close()

    async def _news(self, outside: Outside, wanted: Wanted, scan: Callable[[], Found]) -> _News:
        check_unit_name(wanted.name)
        newest = self._newest(wanted.name)
        keeps = self._is_moving(outside, wanted.name)

        def looked() -> _News:
            read_tree = self._read_tree_there
            base = {} if newest is None else {entry.name: entry for entry in read_tree(newest.top)}
            top = scan()
            if not wanted.follows and (below := deeper_saves(top)) is not None:
                one = os.path.join(wanted.source, os.fsdecode(below))
                raise InvalidRequest(
                    f"the checkpoints are not in {wanted.source} itself, but in {one}; import that"
                )
            later = frozenset(changed_since(top, wanted.looked_ns, base))
            if any(found.is_dir and (found.name,) in later - wanted.left for found in top.children):
                raise Unavailable(f"something appeared in {wanted.source} after it was looked at")
            top = with_left(top, wanted.left | later, keeps=keeps)
            steps = plan_import(top, base, read_tree, wanted.follows)
            return _News(top, newest, base, steps)

        return await trio.to_thread.run_sync(looked)

    def _newest(self, name: bytes) -> VersionRecord | None:
        unit = self._parts.histories.unit_named(name)
        return None if unit is None else self._parts.histories.newest(unit.unit)

    def _read_tree_there(self, entry: Entry) -> Sequence[Entry]:
        """A saved directory, for a worker thread."""
        return () if entry.tree is None else read_tree_there(self._parts.segments, entry.tree)

    def _is_moving(self, outside: Outside, name: bytes) -> bool:
        """Whether this very directory is being moved into the unit, by an import that was killed."""
        unit = self._parts.histories.unit_named(name)
        row = None if unit is None else self._parts.index.get(Table.META, MOVING + unit.unit)
        if row is None:
            return False
        # The number of a device may be another one after a reboot; a directory may have been renamed.
        device, inode, *path = msgspec.msgpack.decode(row)
        status = outside.status
        return (device, inode) == (status.st_dev, status.st_ino) or path == [os.fsencode(outside.real_path)]


@dataclass(frozen=True, slots=True)
class _News:
    """A directory as it is, the newest version with its entries, and the versions that are to be made."""

    top: Found
    newest: VersionRecord | None
    base: Mapping[bytes, Entry]
    steps: tuple[Step, ...]

    def new(self, step: Step) -> list[Found]:
        names = frozenset(step.names)
        return [child for child in self.top.children if child.name in names]

    def files_of(self, step: Step, read_tree: ReadTree) -> list[Found]:
        return [found for _, found in _files_of(self.new(step), self.base, read_tree)]


def _files_of(
    new: Sequence[Found], base: Mapping[bytes, Entry], read_tree: ReadTree
) -> list[tuple[Path, Found]]:
    return [pair for one in new for pair in files_to_take(one, base.get(one.name), read_tree)]


class _Run:
    """One import."""

    def __init__(
        self,
        importer: Importer,
        parts: OpenStore,
        facts: VersionFacts,
        outside: Outside,
        wanted: Wanted,
        tell: Callable[[int, int], None],
    ) -> None:
        self._importer = importer
        self._parts = parts
        self._facts = facts
        self._outside = outside
        self._wanted = wanted
        self._done_bytes = self._total_bytes = 0
        self._tell_all = tell
        self._remover = Remover(outside)
        self._imported = Imported()

    async def run(self) -> Imported:
        news = await self._importer._news(self._outside, self._wanted, self._remover.scan)
        self._imported.newest = news.newest
        planned = await trio.to_thread.run_sync(self._importer._planned, news)
        self._total_bytes = sum(one.bytes for one in planned)
        if news.steps:
            self._check_free()
        if self._wanted.move:
            new = {name for step in news.steps for name in step.names}
            await self._remove([child for child in news.top.children if child.name not in new], news.base)
        # What has gone since stays away from the first version on.
        there = {child.name for child in news.top.children}
        entries = {name: one for name, one in news.base.items() if name in there or news.top.keeps}
        for step in news.steps:
            entries = await self._make(news.top, news.new(step), step, entries)
        if self._wanted.move:
            await self._moved()
        return self._imported

    async def _make(
        self, top: Found, new: Sequence[Found], step: Step, base: Mapping[bytes, Entry]
    ) -> dict[bytes, Entry]:
        """Make one version; the entries of its top directory."""
        parts, read_tree = self._parts, self._importer._read_tree_there
        files = await trio.to_thread.run_sync(_files_of, new, base, read_tree)
        with parts.segments.pins.hold() as held:
            taker = FileTaker(parts, self._outside, held, self._tell)
            try:
                taken = await taker.take(files)
            finally:
                self._imported.add(taker)
            maker = TreeMaker(read_tree, taken)
            saved_top, entries = await trio.to_thread.run_sync(maker.make, top, new, base)
            await parts.ingest.store_objects(maker.objects, held)
            with parts.index.removals.hold():  # of the version before, too: its trees are read
                await self._list(saved_top, step)
        if self._wanted.move:
            await self._remove(new, entries, taken)
        return entries

    # ---- the record -------------------------------------------------------------------------

    async def _list(self, top: Entry, step: Step) -> None:
        """Append the version, unless the newest shows the same."""
        assert top.tree is not None
        newest = self._importer._newest(self._wanted.name)
        if newest is not None and _shows_the_same(newest.top, top):
            return
        before = None if newest is None else newest.top.tree
        facts = await self._facts.of(top.tree, before)
        self._check_free()
        unit = self._unit(step.time_ns)
        now = self._parts.histories.newest(unit.unit)
        if (now.number if now else 0) != (newest.number if newest else 0):
            raise Conflict(f"{unit.text} got another version meanwhile; import again")
        record = _record(unit, top, facts, step)
        change = Change()
        self._parts.histories.append_version(record, change)
        if self._wanted.move:
            change.put(Table.META, MOVING + unit.unit, _identity(self._outside))
        self._parts.index.apply(change, sync=True)
        self._imported.made.append(record)
        self._imported.newest = record

    def _check_free(self) -> None:
        unit = self._parts.histories.unit_named(self._wanted.name)
        if unit is not None and unit.ino:
            raise Conflict(
                f"{unit.text} is live here, and not all of it is in there; give another name with --as"
            )

    def _unit(self, time_ns: int) -> Unit:
        unit = self._parts.histories.unit_named(self._wanted.name)
        if unit is not None:
            return unit
        unit_id = UnitId(os.urandom(UNIT_ID_BYTES))
        return self._parts.histories.new_unit(unit_id, self._wanted.name, 0, time_ns)

    def _tell(self, count: int) -> None:
        self._done_bytes += count
        self._tell_all(self._done_bytes, self._total_bytes)

    # ---- what is moved ----------------------------------------------------------------------

    async def _remove(
        self, some: Sequence[Found], saved: Mapping[bytes, Entry], taken: Mapping[Path, Taken] | None = None
    ) -> None:
        """Remove what a durable version has, as far as it still is that; `taken` was taken just now."""
        for one in some:
            found = await trio.to_thread.run_sync(self._removable, one, saved.get(one.name), (), taken or {})
            for path, what in found:
                why = await trio.to_thread.run_sync(self._remover.remove, path, what)
                if why is not None:
                    self._imported.problems.append(f"{self._outside.text(path)} {why}")
                elif what.is_file:
                    self._imported.removed_files += 1

    def _removable(
        self, found: Found, saved: Entry | None, above: Path, taken: Mapping[Path, Taken]
    ) -> list[tuple[Path, Found]]:
        """Files first, as they were when they were saved, then the directories that they were in."""
        path = (*above, found.name)
        if found.is_dir:
            entries = () if saved is None else self._importer._read_tree_there(saved)
            before = {entry.name: entry for entry in entries}
            below = [
                one
                for child in found.children
                for one in self._removable(child, before.get(child.name), path, taken)
            ]
            return [*below, (path, found)]
        if found.is_left or saved is None or not (path in taken or is_same(found, saved)):
            return []
        return [(path, taken[path].seen if path in taken else found)]

    async def _moved(self) -> None:
        """All is in: the next import of this directory is one of its own. What is left is part of this."""
        if not await trio.to_thread.run_sync(lambda: is_empty(self._outside.scan())):
            return
        unit = self._parts.histories.unit_named(self._wanted.name)
        if unit is not None and self._parts.index.get(Table.META, MOVING + unit.unit) is not None:
            change = Change()
            change.delete(Table.META, MOVING + unit.unit)
            self._parts.index.apply(change, sync=True)


def check_unit_name(name: bytes) -> None:
    """InvalidRequest unless a unit may be called so: what has a place has no `@`, which names a version."""
    parts = {*name.split(b"/")}
    if not name or b"\0" in name or b"@" in name or {b"", b".", b"..", VERSIONS_NAME} & parts:
        raise InvalidRequest(f"{os.fsdecode(name)!r} is no name for a unit; give another with --as")


def _identity(outside: Outside) -> bytes:
    return msgspec.msgpack.encode(
        (outside.status.st_dev, outside.status.st_ino, os.fsencode(outside.real_path))
    )


def _shows_the_same(before: Entry, top: Entry) -> bool:
    return (before.tree, before.mode, before.uid, before.gid) == (top.tree, top.mode, top.uid, top.gid)


def _record(unit: Unit, top: Entry, facts: Facts, step: Step) -> VersionRecord:
    return VersionRecord(
        unit=unit.unit,
        number=unit.next_number,
        name=version_name(unit.next_number, step.time_ns),
        time_ns=step.time_ns,
        origin=IMPORTED,
        top=top,
        root=facts.root,
        files=facts.files,
        logical_bytes=facts.logical_bytes,
        state=facts.state,
        step=facts.step if facts.step is not None else step.step,
        steps=facts.steps,
        missing=facts.missing,
        before=unit.head,
    )
