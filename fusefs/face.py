"""The parts of the POSIX face, put together once for one mount.

One rule: parts get each other here and nowhere else; nothing is global.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptfs.fusefs.attributes import Attributes
from ckptfs.fusefs.attributes_change import AttributeChanges
from ckptfs.fusefs.browse import Browse
from ckptfs.fusefs.browse_nodes import NodeTable
from ckptfs.fusefs.cutting_ahead import CuttingAhead
from ckptfs.fusefs.draft import Drafts
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.facts import VersionFacts
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.flusher import Flusher
from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.kernel_caches import KernelCaches
from ckptfs.fusefs.kernel_reads import KernelReads
from ckptfs.fusefs.lookups import Lookups
from ckptfs.fusefs.mutations import Mutations
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO, ino_of
from ckptfs.fusefs.nodes import Nodes
from ckptfs.fusefs.operations import CkptfsOperations
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.preimage_publish import PreimagePublisher
from ckptfs.fusefs.provenance import Provenance
from ckptfs.fusefs.publish import Publisher
from ckptfs.fusefs.quiet import Quiet
from ckptfs.fusefs.recording import Recorder, Request
from ckptfs.fusefs.requests import Requests
from ckptfs.fusefs.rollback import Rollback
from ckptfs.fusefs.scheduler import Scheduler
from ckptfs.fusefs.seams import Room
from ckptfs.fusefs.stored_reads import StoredReads
from ckptfs.fusefs.storing import Storing
from ckptfs.fusefs.units import Units
from ckptfs.fusefs.versioned_files import VersionedFiles
from ckptfs.store.bad_chunks import NO_HASHERS, Hashers
from ckptfs.store.cut_ahead import CutsAhead
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, NoSpace, NotFound
from ckptfs.store.histories import Histories
from ckptfs.store.ids import UNIT_ID_BYTES, RecipeId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.ingest import Ingest
from ckptfs.store.inode import ROOT_INO, Inode, encode_inode
from ckptfs.store.reading_ahead import ReadingAhead
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Marked, Segments
from ckptfs.store.staging import Staging
from ckptfs.store.version_names import check_tag
from ckptfs.store.whole_segment import WholeSegments
from ckptfs.store.writer_log import WriterLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreParts:
    """An open store, as the daemon wired it."""

    disk: Disk
    index: Index
    staging: Staging
    segments: Segments
    ingest: Ingest
    histories: Histories
    hashers: Hashers = NO_HASHERS
    cuts_ahead: CutsAhead | None = None


@dataclass(frozen=True, slots=True)
class FaceSettings:
    """What of the configuration concerns the face; `is_off` tells by a unit's name whether no versions
    are wanted of it, `provenance` whether versions say who wrote them."""

    settle_s: float
    settle_max_s: float
    units: tuple[str, ...]
    owner: tuple[int, int]
    is_off: Callable[[bytes], bool] | None = None
    provenance: bool = False


class Face:
    """All parts of one mount. Make it in the index thread, which is the trio thread."""

    def __init__(
        self,
        store: StoreParts,
        settings: FaceSettings,
        room: Room,
        taken_over: KeptState | None = None,
    ) -> None:
        """`taken_over`: what a daemon that died has left of the session that this one goes on with."""
        clock = time.time_ns
        self._store = store
        self.state = taken_over if taken_over is not None else KeptState.make()
        self.requests = Requests(self.state)
        self.namespace = Namespace(store.index, store.disk)
        self._make_root(settings.owner, clock())
        self.drafts = Drafts(self.namespace, store.staging, self.requests, clock)
        self.units = Units(self.namespace, settings.units, settings.is_off)
        self.quiet = Quiet(settings.settle_s, settings.settle_max_s)
        self.lookups = Lookups(self.state, self.requests)
        self.nodes = Nodes(self.lookups, self.state.notes)
        self.passthrough = Passthrough(self.state)
        self.whole_segments = WholeSegments(store.disk, store.segments, store.hashers)
        self.kernel_caches = KernelCaches(self.nodes)
        self.stored_reads = StoredReads(
            store.disk,
            self.whole_segments,
            self.passthrough,
            self.nodes,
            self.kernel_caches.drop_attributes,
            self.state.notes,
        )
        self.files = Files(
            store.disk,
            self.namespace,
            self.drafts,
            store.staging,
            store.segments,
            self.quiet,
            self.passthrough,
            self.stored_reads,
            room.make_room,
            self.state.notes,
        )
        self.preimages = Preimages(
            self.namespace, self.drafts, self.units, store.segments, settings.settle_s, self.files.is_written
        )
        self.files.preimages = self.preimages
        self.provenance = Provenance(self.files.is_written, self._parents_of, is_on=settings.provenance)
        self.mutations = Mutations(
            self.namespace,
            self.drafts,
            store.staging,
            self.files,
            self.preimages,
            self.units,
            self.quiet,
            self.lookups.is_known,
        )
        self._make_publisher(clock)
        self._make_operations(room)
        self.recorder.mend()
        if taken_over is None:
            self.requests.begin_anew(store.index)
        else:
            self.requests.resume(store.index)
            self._reopen()
        self._keep_failures()
        self._keep_suspects()

    def configure(self, settings: FaceSettings) -> None:
        """Other settings, from now on. Which directories are units, and who owns the root, stays."""
        self.quiet.settle_s, self.quiet.settle_max_s = settings.settle_s, settings.settle_max_s
        self.preimages.settle_s = settings.settle_s
        self.units.is_off = settings.is_off
        self.provenance.switch(is_on=settings.provenance)

    def open_recipes(self) -> list[RecipeId]:
        """What is open and must stay readable, for the collector."""
        live = [f.content.base for f in self.files.open_files.values() if f.content.base is not None]
        read = self.stored_reads.recipes() + self.versioned.recipes()
        return live + read + self.storing.grown_recipes()

    async def snapshot(self, directory: int, name: bytes) -> Attributes:
        """`mkdir DIR/.versions/NAME`: publish the unit and tag the version."""
        tag = name.decode("utf-8", "surrogateescape")
        check_tag(tag)
        top = self.units.top_of(directory)
        record = await self.publisher.publish_now(top, Request("snapshot"))
        self._store.histories.tag(record.unit, record.number, tag)
        return self.browse.version_directory(directory, record.unit, record.number)

    def snapshot_made(self, directory: int, name: bytes) -> Attributes:
        """As Snapshots in seams.py."""
        unit = self._store.histories.unit_of_ino(self.units.top_of(directory))
        number = None if unit is None else self._store.histories.tags(unit.unit).get(os.fsdecode(name))
        if unit is None or number is None:
            raise NotFound(f"there is no version {os.fsdecode(name)!r}")
        return self.browse.version_directory(directory, unit.unit, number)

    def _make_publisher(self, clock: Callable[[], int]) -> None:
        store = self._store
        self.storing = Storing(
            store.disk, self.namespace, self.drafts, self.files, store.staging, store.segments, store.ingest
        )
        self.recorder = Recorder(
            self.namespace,
            self.units,
            store.segments,
            store.histories,
            VersionFacts(store.segments),
            WriterLog(store.disk, store.index, store.histories),
            clock,
            lambda: os.urandom(UNIT_ID_BYTES),
        )
        preimage_publisher = PreimagePublisher(
            self.namespace,
            self.drafts,
            self.units,
            self.preimages,
            store.segments,
            store.ingest,
            self.storing,
            store.histories,
            self.recorder,
            self.files,
            self.provenance,
        )
        self.publisher = Publisher(
            self.namespace,
            self.drafts,
            self.units,
            self.files,
            self.preimages,
            self.quiet,
            store.segments,
            store.ingest,
            self.storing,
            self.recorder,
            preimage_publisher,
            self.provenance,
        )
        self.rollback = Rollback(
            self.namespace,
            self.drafts,
            self.units,
            store.segments,
            self.files,
            self.preimages,
            self.quiet,
            self.lookups.is_known,
            store.histories,
            self.recorder,
            self.publisher,
            self.kernel_caches.drop,
        )
        self.mutations.on_directory_gone = preimage_publisher.directory_gone
        self.scheduler = Scheduler(
            self.namespace, self.units, self.files, self.preimages, self.publisher, self.recorder
        )
        self.flusher = Flusher(self.namespace, self.drafts, self.files)
        self.cutting_ahead = CuttingAhead(
            self.files, self.storing, store.cuts_ahead, lambda: self.scheduler.is_publishing
        )
        self.files.on_closed = self._file_closed
        self.files.on_gone = self._file_gone
        self.mutations.on_renamed = self.scheduler.renamed

    def _file_closed(self, ino: int) -> None:
        self.cutting_ahead.closed(ino)
        self.scheduler.file_closed(ino)

    def _file_gone(self, ino: int) -> None:
        self.cutting_ahead.gone(ino)
        self.storing.forget_growing(ino)

    def _make_operations(self, room: Room) -> None:
        store = self._store
        self.browse = Browse(
            store.segments, store.histories, self.namespace, self.units, NodeTable(self.state, self.requests)
        )
        self.versioned = VersionedFiles(
            store.segments,
            self.stored_reads,
            self.browse,
            self._live_recipe,
            self._sibling_recipe,
            self.state.notes,
        )
        self.reading_ahead = ReadingAhead(store.disk, store.segments, store.hashers)
        attribute_changes = AttributeChanges(store.disk, self.namespace, self.drafts, self.files, self.quiet)
        self.operations = CkptfsOperations(
            self.namespace,
            self.files,
            self.mutations,
            attribute_changes,
            self.nodes,
            self.browse,
            self.versioned,
            KernelReads(store.segments, self.files, self.versioned, self.reading_ahead),
            self,
            self.passthrough,
            self.stored_reads,
            self.provenance,
            self.requests,
            room,
        )

    def _reopen(self) -> None:
        """Open what the daemon before us had open. What cannot be is none any more: its last use was on its
        way when that one died."""
        notes, opened, reopened = self.state.notes, dict[int, list[int]](), set[int]()
        for fh, value in notes.items(Kind.HANDLE):
            opened.setdefault(fh >> 1, [0, 0])[fh & 1] = int.from_bytes(value, "little")
        for node, (readers, writers) in opened.items():
            try:
                if node >= FIRST_VIRTUAL_INO:
                    self.versioned.resume(node, readers)
                elif self.nodes.is_left(node):
                    self.stored_reads.resume(node, readers)
                else:
                    self.files.resume(ino_of(node), readers, writers)
                reopened.add(node)
            except (CkptfsError, PosixError) as e:
                log.warning("node %d is not open any more: %s", node, e)
                notes.delete(Kind.HANDLE, node << 1)
                notes.delete(Kind.HANDLE, node << 1 | 1)
        self.passthrough.expect(self.files.open_files.keys(), reopened)

    def _keep_failures(self) -> None:
        """Which syncs failed is known as long as the mount is there."""
        staging, notes = self._store.staging, self.state.notes
        for number, value in notes.items(Kind.FAILED):
            staging.failed[number] = OSError(int.from_bytes(value, "little"), "a sync of it has failed")
        staging.on_failed = lambda number, error: notes.put(
            Kind.FAILED, number, (error.errno or errno.EIO).to_bytes(8, "little")
        )

    def _keep_suspects(self) -> None:
        """Which segments are not trusted, too: who opens one of them anew is refused, by every daemon; and
        which of them a copy is still to be made of."""
        self._store.segments.is_lent = self.stored_reads.reads
        self._keep_marks(Kind.SUSPECT, self._store.segments.suspect)
        self._keep_marks(Kind.DAMAGED, self._store.segments.damaged)

    def _keep_marks(self, kind: Kind, marked: Marked) -> None:
        notes = self.state.notes
        for number, _ in notes.items(kind):
            marked.add(number)

        def keep(number: int, is_marked: bool) -> None:
            if not is_marked:
                notes.delete(kind, number)
                return
            try:
                notes.put(kind, number, b"")
            except NoSpace as e:
                log.warning("a segment is not trusted, and the next daemon will not know: %s", e)

        marked.on_change = keep

    def _live_recipe(self, ino: int) -> Recipe | None:
        content = self.namespace.inode(ino).content
        return self._store.segments.read_recipe(content.base) if content.base is not None else None

    def _parents_of(self, ino: int) -> list[int]:
        inode = self.namespace.find(ino)
        return [] if inode is None else [parent for parent, _ in inode.links]

    def _sibling_recipe(self, ino: int, name: bytes) -> RecipeId | None:
        """The stored content of another file in the directory of a file, live or of a version."""
        if ino >= FIRST_VIRTUAL_INO:
            return self.browse.sibling_recipe(ino, name)
        links = self.namespace.inode(ino).links
        child = self.namespace.child(links[0][0], name) if links else None
        content = None if child is None else self.namespace.inode(child).content
        return None if content is None or content.staging else content.base

    def _make_root(self, owner: tuple[int, int], now_ns: int) -> None:
        """A new store starts with an empty root directory, the daemon's user its owner."""
        if self.namespace.find(ROOT_INO) is not None:
            return
        uid, gid = owner
        root = Inode(
            mode=0o040755,
            uid=uid,
            gid=gid,
            links=((ROOT_INO, b""),),
            atime_ns=now_ns,
            mtime_ns=now_ns,
            ctime_ns=now_ns,
        )
        change = Change()
        change.put(Table.INODE, key_of(ROOT_INO), encode_inode(root))
        self._store.index.apply(change)
