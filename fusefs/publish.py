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
from collections.abc import Callable, Sequence
from typing import TypeVar

import trio

from ckptfs.fusefs.draft import Drafts
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.preimage_publish import PreimagePublisher
from ckptfs.fusefs.provenance import Noted, Provenance
from ckptfs.fusefs.quiet import Due, Quiet
from ckptfs.fusefs.recording import Recorder, Request
from ckptfs.fusefs.storing import Storing, Waiting
from ckptfs.fusefs.treebuilder import Stored, TreeBuilder
from ckptfs.fusefs.units import Units
from ckptfs.store.errors import NotFound, Unavailable
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Ingest
from ckptfs.store.segments import Segments

T = TypeVar("T")
log = logging.getLogger(__name__)
_PATIENCE_S = 2.0
_LEASE_POLL_S = 0.02


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
        recorder: Recorder,
        preimage_publisher: PreimagePublisher,
        provenance: Provenance,
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
        self._recorder = recorder
        self._preimage_publisher = preimage_publisher
        self._provenance = provenance
        self._one_at_a_time = trio.Lock()

    @property
    def is_publishing(self) -> bool:
        """Whether a version is being made."""
        return self._one_at_a_time.locked()

    def changed_dirs_by_unit(self) -> dict[int, list[int]]:
        """The directories that differ from what is published, by unit; unversioned ones left out."""
        return self._changed_dirs()[0]

    async def store_unversioned(self) -> None:
        """Where versioning is off, files are stored all the same, once: deduplicated and durable."""
        directories = self._changed_dirs()[1]
        due = self.due(directories)
        if not due.publish:
            return
        asked_s = time.monotonic()
        async with self._one_at_a_time:
            with self._segments.pins.hold() as held:
                await self._store_files(due, asked_s, held)
        for directory in due.quiet | due.settled_only:
            if not self._quiet.happened_since(directory, asked_s):
                self._quiet.published_open(directory, asked_s)
                self._provenance.published(directory)

    def _changed_dirs(self) -> tuple[dict[int, list[int]], list[int]]:
        grouped: dict[int, list[int]] = {}
        unversioned: list[int] = []
        for directory in list(self._drafts.changed_dirs):
            inode = self._namespace.find(directory)
            if inode is None or not inode.links:
                continue
            try:
                if self._units.versions_off(directory):
                    unversioned.append(directory)
                else:
                    grouped.setdefault(self._units.top_of(directory), []).append(directory)
            except PosixError:  # below a directory that was removed while somebody is still in it
                log.debug("directory %d has no way to the root", directory)
        return grouped, unversioned

    def due(self, directories: list[int]) -> Due:
        """What the quiet policy says of a unit's changed directories now."""
        return self._quiet.due(directories, time.monotonic(), self._files.writers.in_directory)

    def due_now(self, directories: list[int]) -> Due:
        """What is taken when somebody asks for a version at once: all that nobody is writing."""
        whole = {d for d in directories if not self._files.writers.in_directory(d)}
        return Due(True, frozenset(whole), frozenset(directories) - whole)

    async def publish(self, top: int, due: Due, request: Request) -> VersionRecord | None:
        """Make a version of a unit; None if there is nothing new since the last one.

        Durable when: this returned. NoSpace: nothing was listed, and the next try starts afresh.
        """
        asked_s = time.monotonic()
        async with self._one_at_a_time:
            await self._preimage_publisher.publish(top)
            planned, due = due, self._still_changed(due)
            if not due.is_empty or planned.is_empty:
                with self._segments.pins.hold() as held:
                    return await self._publish_live(top, due, request, asked_s, held)
            return None

    def _still_changed(self, due: Due) -> Due:
        """Without what was published, or rolled back, while another publish or a rollback was waited for."""
        changed = self._drafts.changed_dirs
        return Due(due.publish, due.quiet & changed, due.settled_only & changed)

    async def publish_before(self, tops: Sequence[int], request: Request, step: Callable[[], T]) -> T:
        """Make versions of all that is closed in these units, then take `step` while no publish runs.

        Durable when: this returned, as far as the versions go. Raises as `publish`; then `step` was
        not taken. What is closed while another of the units is published is for `step` to see to.
        """
        async with self._one_at_a_time:
            for top in tops:
                asked_s = time.monotonic()
                await self._preimage_publisher.publish(top)
                directories = frozenset(self.changed_dirs_by_unit().get(top, ()))
                if directories:
                    with self._segments.pins.hold() as held:
                        due = Due(True, directories, frozenset())
                        await self._publish_live(top, due, request, asked_s, held)
            return step()

    async def publish_preimage(self, top: int) -> None:
        """Make a version of what destructive calls pinned, if there is any, and nothing else."""
        async with self._one_at_a_time:
            await self._preimage_publisher.publish(top)

    async def _publish_live(
        self, top: int, due: Due, request: Request, asked_s: float, held: set[ChunkId]
    ) -> VersionRecord | None:
        patience_s = 0.0 if request.origin == "settled" else _PATIENCE_S
        grown = await self._store_files(due, asked_s, held, patience_s)
        if not self._is_linked(top):
            return None
        planned = due.quiet
        due = self._still_due(top, due, asked_s, grown, at_once=request.origin != "settled")
        for directory in planned - due.quiet:
            self._quiet.postpone(directory, time.monotonic())
        with self._namespace.index.removals.hold():
            builder = TreeBuilder(
                self._namespace, self._units, self._segments, top, due.quiet, due.settled_only, grown
            )
            noted = self._provenance.noted(due.quiet | due.settled_only, grown)
            record = await self._publish_trees(top, builder, request, held, noted)
        self._finish(due, set(builder.built.trees), asked_s)
        self._preimages.published(top, asked_s)
        return record

    async def _publish_trees(
        self, top: int, builder: TreeBuilder, request: Request, held: set[ChunkId], noted: Noted
    ) -> VersionRecord | None:
        """From the trees to the record; nothing that they name can be collected meanwhile."""
        tree = builder.build()
        top_entry = builder.top_entry(tree)
        await self._ingest.store_objects(builder.built.objects, held)
        facts = None
        if self._is_linked(top):  # at each wait it may be removed
            facts = await self._recorder.judge(self._recorder.known_unit(top), tree)
        if facts is None or not self._is_linked(top):
            builder.built.trees.clear()
            return None
        change = Change()
        for directory, built in builder.built.trees.items():
            change.put(Table.PUBLISHED, key_of(directory), built)
        if not self._recorder.has_unit(top) and not self._segments.read_tree(tree):
            # Nothing was ever saved here: no history for an empty directory.
            self._namespace.index.apply(change)
            return None
        unit = self._recorder.unit_of(top)
        return self._recorder.append(unit, top_entry, facts, request, change, noted)

    async def publish_now(self, top: int, request: Request) -> VersionRecord:
        """Make a version of what is there at once; the newest one if nothing is new."""
        directories = self.changed_dirs_by_unit().get(top, [])
        record = await self.publish(top, self.due_now(directories), request)
        if record is None:
            record = self._recorder.newest(top)
            if record is not None and request.step not in (None, record.step):
                # Nothing is new but what the caller knows of it.
                record = await self._recorder.append_again(record, request)
        if record is None:
            raise NotFound(
                "there is nothing to publish here yet: versioning is off, or all files are being written"
            )
        return record

    # -- the steps -------------------------------------------------------------------------

    async def _store_files(
        self, due: Due, now: float, held: set[ChunkId], patience_s: float = 0.0
    ) -> dict[int, Stored]:
        """Store what waits in the directories that are taken; logs that are open are copied.

        With passthrough the kernel lets go of a file a moment after it told us of the close: who
        asks for a version at once has his files waited for, up to `patience_s`.
        """
        waiting: dict[int, Waiting] = {}
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
                    waiting[ino] = Waiting(ino, name, inode, size)
        await self._storing.store(list(waiting.values()))
        until = time.monotonic() + patience_s
        while time.monotonic() < until and (left := self._left(waiting)):
            await trio.sleep(_LEASE_POLL_S)
            await self._storing.store(left)
        grown = {}
        for ino, name in growing:
            stored = await self._grow(ino, name, held)
            if stored is not None:
                grown[ino] = stored
        return grown

    def _left(self, waiting: dict[int, Waiting]) -> list[Waiting]:
        """Those that are closed and still not stored, as they are now; without what could not be synced."""
        left = []
        for ino, one in waiting.items():
            inode = self._namespace.find(ino)
            if inode is None or inode.content.staging in self._drafts.staging.failed:
                continue
            if inode.content.staging and not self._files.is_busy(ino):
                size = self._namespace.attributes_of(ino, inode).size
                left.append(Waiting(ino, one.name, inode, size))
        return left

    async def _grow(self, ino: int, name: bytes, held: set[ChunkId]) -> Stored | None:
        open_file = self._files.open_files.get(ino)
        if open_file is None or (open_file.writers and not open_file.growth.is_log(name)):
            return None
        try:
            return await self._storing.store_growing(ino, name, held)
        except Unavailable:
            return None  # truncated meanwhile: the next version takes it

    def _still_due(
        self, top: int, due: Due, asked_s: float, grown: dict[int, Stored], *, at_once: bool
    ) -> Due:
        """What may be taken as it is, now that files were stored and time has passed.

        A directory in which something happened, or with a file that is neither stored nor copied,
        is busy. Who asked for a version at once gets its other files all the same.
        """
        here = {d for d in due.quiet | due.settled_only if self._is_in(d, top)}
        busy = {
            d
            for d in due.quiet & here
            if self._quiet.happened_since(d, asked_s) or set(self._unstored(d)) - grown.keys()
        }
        settled_only = due.settled_only & here
        return Due(True, (due.quiet & here) - busy, settled_only | busy if at_once else settled_only)

    def _is_in(self, directory: int, top: int) -> bool:
        """Whether a directory is still there, in this unit, and versioned."""
        try:
            return (
                self._is_linked(directory)
                and self._units.top_of(directory) == top
                and not self._units.versions_off(directory)
            )
        except PosixError:
            return False

    def _is_linked(self, directory: int) -> bool:
        inode = self._namespace.find(directory)
        return inode is not None and bool(inode.links)

    def _finish(self, due: Due, built: set[int], asked_s: float) -> None:
        """Directories that were taken as they are, and are still so, are no news any more."""
        change = Change()
        for directory in due.quiet & built:
            if self._quiet.happened_since(directory, asked_s):
                continue
            if self._unstored(directory):
                self._quiet.published_open(directory, asked_s)
                continue
            self._provenance.published(directory)
            change.delete(Table.DIRTY, key_of(directory))
            self._drafts.changed_dirs.discard(directory)
            self._quiet.forget(directory)
        for directory in due.settled_only:
            self._quiet.published_settled(directory, asked_s)
        self._namespace.index.apply(change)

    def _unstored(self, directory: int) -> list[int]:
        """The files of a directory that are still in staging: busy, mapped, or being written."""
        return [
            ino
            for _, _, ino in self._namespace.entries(directory)
            if (inode := self._namespace.find(ino)) is not None and inode.content.staging
        ]
