"""Rolling back: a unit's live tree becomes that of one of its versions, metadata only.

One rule: all that changes, of all units that are asked for at once, is one change of the index; its
journal record, synced, is the commit point. A death leaves the old trees or the new ones.

The steps: versions of what is there; the change; the records of the new versions; the kernel is told.
Source: ARCHITECTURE §4 "Roll back"; FORMAT.md, "Roll back".
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ckptfs.fusefs.draft import Draft, Drafts
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.publish import Publisher
from ckptfs.fusefs.quiet import Quiet
from ckptfs.fusefs.recording import Recorder, Request
from ckptfs.fusefs.tree_replacement import Replaced, TreeReplacement
from ckptfs.fusefs.units import Units
from ckptfs.store.errors import Conflict, InvalidRequest, NoSpace, NotFound, ReadOnly
from ckptfs.store.histories import Histories, Unit
from ckptfs.store.history import VersionRecord
from ckptfs.store.index import Change, Table
from ckptfs.store.inode import ROOT_INO, Inode
from ckptfs.store.segments import Segments

TellKernel = Callable[[Sequence[tuple[int, bytes]], Sequence[int]], Awaitable[None]]
"""Makes the kernel ask again for (directory, name) pairs and for attributes of inodes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A unit's live directory (0: it was removed, and is to be made again), and the version that it
    is to show."""

    top: int
    record: VersionRecord


@dataclass(frozen=True, slots=True)
class Rolled:
    """What became of one unit: the newest version `before`, and the one that is live now."""

    before: VersionRecord
    now: VersionRecord


@dataclass(slots=True)
class _Done:
    """The outcome of a step; `failure` is why a new version could not be listed."""

    replaced: Replaced
    rolled: list[Rolled] = field(default_factory=list)
    failure: NoSpace | ReadOnly | None = None


class Rollback:
    """Carries rollbacks out. Belongs to the trio thread; no publish runs meanwhile."""

    def __init__(
        self,
        namespace: Namespace,
        drafts: Drafts,
        units: Units,
        segments: Segments,
        files: Files,
        preimages: Preimages,
        quiet: Quiet,
        is_known: Callable[[int], bool],
        histories: Histories,
        recorder: Recorder,
        publisher: Publisher,
        tell_kernel: TellKernel,
    ) -> None:
        self._namespace = namespace
        self._drafts = drafts
        self._units = units
        self._segments = segments
        self._files = files
        self._preimages = preimages
        self._quiet = quiet
        self._is_known = is_known
        self._histories = histories
        self._recorder = recorder
        self._publisher = publisher
        self._tell = tell_kernel

    async def roll_back(self, wanted: Sequence[Wanted], uid: int | None) -> list[Rolled]:
        """Give each unit the tree of a version, all in one step; `uid` None: nobody's rights bind.

        Raises as a publish, and as TreeReplacement.replace; then no live tree has changed. An error
        that comes behind the step says so; the next publish then lists what is there.
        Durable when: this returned.
        """
        live = [one.top for one in wanted if one.top]
        if any(self._units.versions_off(top) for top in live):
            raise InvalidRequest("versioning is off there, so what is there now could not be kept")
        done = await self._publisher.publish_before(live, Request("command"), lambda: self._step(wanted, uid))
        await self._tell_kernel(done.replaced)
        if done.failure is not None:
            raise done.failure
        return done.rolled

    def _step(self, wanted: Sequence[Wanted], uid: int | None) -> _Done:
        """The step itself: nothing else runs meanwhile."""
        draft = self._drafts.begin()
        replacement = self._replacement(draft, uid)
        tops: list[tuple[int, VersionRecord]] = []
        for one in wanted:
            unit, newest = self._histories.unit(one.record.unit), self._histories.newest(one.record.unit)
            is_listed = self._histories.has_version(one.record.unit, one.record.number)
            if unit is None or newest is None or not is_listed:
                raise NotFound(f"version {one.record.number} is there no longer; `ckptfs log` lists what is")
            if unit.ino not in (0, one.top) or (one.top and not self._is_linked(one.top)):
                raise Conflict(f"{unit.text} was removed or renamed meanwhile; try again")
            top = one.top or self._revived(unit, one.record, draft, replacement.replaced)
            if not unit.ino:
                self._histories.rebind(unit.unit, top, unit.name, draft.change)
            tops.append((top, newest))
            replacement.replace(top, one.record.top)
            self._recorder.note_rollback(unit, top, one.record, draft.change)
        draft.commit(sync=True)
        done = _Done(replacement.replaced)
        self._forget(done.replaced, [top for top, _ in tops])
        for top, newest in tops:
            self._list(top, newest, done)
        return done

    def _revived(self, unit: Unit, record: VersionRecord, draft: Draft, replaced: Replaced) -> int:
        """The directory of a unit that was removed, made again in its place."""
        way, _, name = unit.name.rpartition(b"/")
        parent = self._namespace.at_path(way)
        if parent is None or not self._namespace.inode(parent).is_dir:
            raise InvalidRequest(f"the directory that {unit.text} was in is gone; make it again first")
        if self._namespace.child(parent, name) is not None:
            raise InvalidRequest(f"the name {unit.text} is taken; move what has it out of the way first")
        saved = record.top
        inode = Inode(saved.mode, saved.uid, saved.gid, (), saved.mtime_ns, saved.mtime_ns, saved.ctime_ns)
        top = draft.new_inode(inode)
        draft.add_entry(parent, name, top)
        replaced.names.append((parent, name))
        if way:
            self._units.name_unit(top, draft.change)
        return top

    def _replacement(self, draft: Draft, uid: int | None) -> TreeReplacement:
        return TreeReplacement(
            self._namespace,
            self._units,
            self._segments,
            self._files,
            self._preimages,
            self._is_known,
            self._recorder.unit_gone,
            draft,
            uid,
        )

    def _forget(self, replaced: Replaced, tops: Sequence[int]) -> None:
        """What is remembered of inodes that are gone, and of changes that are undone."""
        now = time.monotonic()
        for ino in replaced.removed:
            self._preimages.closed_at.pop(ino, None)
            self._files.forget_pages(ino)
        for directory in (*replaced.settled, *replaced.removed):
            self._quiet.forget(directory)
        for directory in replaced.differing:
            self._quiet.major(directory, directory, now)
        for ino in replaced.inodes:
            self._files.writers.note_privileges(ino)
        for top in tops:
            self._preimages.forget_preserved(top)

    def _list(self, top: int, before: VersionRecord, done: _Done) -> None:
        """The record of a unit's new version."""
        change = Change()
        settled = top in done.replaced.settled
        if settled:
            change.delete(Table.DIRTY, key_of(top))
        try:
            now = self._recorder.record_rollback(top, change)
        except (NoSpace, ReadOnly) as e:
            done.failure = type(e)(f"the files are rolled back, but no version lists that yet: {e}")
            return
        assert now is not None, "a unit that was rolled back has a version"
        if settled:
            self._drafts.changed_dirs.discard(top)
        done.rolled.append(Rolled(before, now))

    async def _tell_kernel(self, replaced: Replaced) -> None:
        names = [(parent, name) for parent, name in replaced.names if self._is_held(parent)]
        changed = {*replaced.inodes, *replaced.orphans, *(parent for parent, _ in names)}
        await self._tell(names, [ino for ino in changed if self._is_held(ino)])

    def _is_linked(self, ino: int) -> bool:
        inode = self._namespace.find(ino)
        return inode is not None and bool(inode.links)

    def _is_held(self, ino: int) -> bool:
        return ino == ROOT_INO or self._is_known(ino)
