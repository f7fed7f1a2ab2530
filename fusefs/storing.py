"""Getting the files of a unit out of staging and into the store, before a publish.

One rule: a file that is opened for writing meanwhile is left alone: its result is dropped, and
the writer waits only until the file is not being read any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ckptfs.fusefs.draft import Draft, Drafts
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace
from ckptfs.fusefs.openfile import Growth, Ingesting, OpenFile, base_limit
from ckptfs.fusefs.treebuilder import Stored
from ckptfs.store.disk import Disk
from ckptfs.store.errors import NoSpace
from ckptfs.store.formats import Reader
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Candidate, Ingest, Ingested
from ckptfs.store.inode import Content, Inode
from ckptfs.store.merkle import file_root
from ckptfs.store.pins import PinnedFile, encode_pin
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments
from ckptfs.store.staging import Staging

log = logging.getLogger(__name__)
SMALL_BYTES = 128 << 10
_SMALL_AT_ONCE = 1024
_SMALL_BYTES_AT_ONCE = 32 << 20


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file in staging that is to be stored: a live inode, or (with `pin_key`) a pinned one."""

    ino: int
    name: bytes
    inode: Inode
    size: int
    pin_key: bytes | None = None
    pin: PinnedFile | None = None


class Storing:
    """Runs ingest for live and pinned files. Belongs to the trio thread.

    `pending_bytes` are those of the present call, `stored_bytes` and `stored_files` count live files since
    the mount.
    """

    def __init__(
        self,
        disk: Disk,
        namespace: Namespace,
        drafts: Drafts,
        files: Files,
        staging: Staging,
        segments: Segments,
        ingest: Ingest,
    ) -> None:
        self._disk = disk
        self._namespace = namespace
        self._drafts = drafts
        self._files = files
        self._staging = staging
        self._segments = segments
        self._ingest = ingest
        self._grown: dict[int, tuple[RecipeId, Recipe, Growth]] = {}
        self.pending_bytes = self.stored_bytes = self.stored_files = 0

    async def store(self, waiting: Sequence[Waiting]) -> set[object]:
        """Store what can be stored. Durable when: this returned (for each file that it committed).

        Files that are busy, or were changed meanwhile, stay in staging. Returns the keys (inode
        number or pin key) of those that cannot be stored at all; the log says why. NoSpace passes.
        """
        failed: set[object] = set()
        self.pending_bytes = sum(one.size for one in waiting)
        for group in _groups(waiting):
            failed |= await self._store_group(group)
            self.pending_bytes -= sum(one.size for one in group)
        return failed

    async def store_growing(self, ino: int, name: bytes, pin: set[ChunkId]) -> Stored | None:
        """Store a log as it is now, without closing it; None if it is not being written any more.

        What was stored is added to `pin` (see Segments.pins), because no record names it yet.
        """
        open_file = self._files.open_files.get(ino)
        inode = self._namespace.inode(ino)
        content = inode.content
        if open_file is None or not content.staging:
            return None
        size = self._namespace.attributes_of(ino, inode).size
        before, clean = self._start_of_copy(open_file, size)
        growth = open_file.growth
        fd = self._staging.open_read(content.staging)
        try:
            done = await self._ingest.store_growing(
                fd, size, _text(name), before, clean, base_limit=content.base_limit, pin=pin
            )
            torn = open_file.writers > 0 and not growth.is_log(name)
        finally:
            self._files.close_descriptor(fd)
        if torn:
            return None  # somebody began to write to what only readers had open
        self._grown[ino] = (done.recipe, self._segments.read_recipe(done.recipe), growth)
        return Stored(done.recipe, done.root, done.size)

    def forget_growing(self, ino: int) -> None:
        """The file was truncated, closed or removed: the next copy starts from nothing."""
        self._grown.pop(ino, None)

    def _start_of_copy(self, open_file: OpenFile, size: int) -> tuple[Recipe | None, int]:
        """(what was stored of the file, up to where that still holds)."""
        if open_file.content.base is not None:
            base = self._segments.read_recipe(open_file.content.base)
            first = next(iter(open_file.extents), (size, size))[0] if open_file.extents is not None else 0
            shown = base_limit(self._disk, open_file) if open_file.fd >= 0 else open_file.content.base_limit
            return base, min(first, base.size, size, shown)
        if self._files.is_attached(open_file.ino):
            return None, 0  # the kernel writes it by itself: nobody saw that it only grew
        # A truncate or a last close begins another growth: what was stored before says nothing then.
        _, before, growth = self._grown.get(open_file.ino, (None, None, None))
        if (
            before is None
            or growth is not open_file.growth
            or before.size > size
            or not open_file.growth.appends_only
        ):
            return None, 0
        return before, before.size

    def grown_recipes(self) -> list[RecipeId]:
        """What the next copies of logs start from, for the collector to leave alone."""
        return [identity for identity, _, _ in self._grown.values()]

    def root_of(self, recipe: Recipe) -> bytes:
        """The Merkle file root of a stored file."""
        return file_root(recipe.root_leaves())

    async def _store_group(self, group: Sequence[Waiting]) -> set[object]:
        flags: dict[int, Ingesting] = {}
        for one in group:
            if one.pin_key is None and one.ino not in self._files.ingesting:
                flags[one.ino] = self._files.ingesting[one.ino] = Ingesting()
        try:
            candidates = [self._candidate(one, _is_cancelled(flags.get(one.ino))) for one in group]
            by_key = {self._key(one): one for one in group}
            report = await self._ingest.store_files(candidates, self._committer(by_key, flags))
        except NoSpace:
            self._files.preimages.reload_pins()  # the change with their new places was not made
            raise
        finally:
            for ino, flag in flags.items():
                del self._files.ingesting[ino]
                flag.done.set()
        for key in report.busy:
            self._files.writers.note_mapped(by_key[key].ino)
        for key, error in report.failed:
            one = by_key[key]
            log.error(
                "%s (inode %d) cannot be stored, it stays in staging: %s", _text(one.name), one.ino, error
            )
        return {key for key, _ in report.failed}

    def waits(self, ino: int) -> bool:
        """Whether it is a file that waits in a staging file of its own."""
        inode = self._namespace.find(ino)
        if inode is None or not inode.is_file or not inode.links:
            return False
        return inode.content.staging != 0 and inode.content.base is None

    def candidate_ahead(self, ino: int, cancelled: Callable[[], bool]) -> Candidate | None:
        """A closed file as it would be stored now; None if it does not wait in a staging file of its own."""
        if not self.waits(ino):
            return None
        inode = self._namespace.inode(ino)
        size = self._namespace.attributes_of(ino, inode).size
        return self._candidate(Waiting(ino, inode.links[0][1], inode, size), cancelled)

    def _candidate(self, one: Waiting, cancelled: Callable[[], bool]) -> Candidate:
        content = one.inode.content
        return Candidate(
            key=self._key(one),
            staging=content.staging,
            size=one.size,
            name=_text(one.name),
            base=content.base,
            base_limit=content.base_limit,
            sibling=self._sibling(one),
            cancelled=cancelled,
        )

    @staticmethod
    def _key(one: Waiting) -> object:
        return one.pin_key if one.pin_key is not None else one.ino

    def _sibling(self, one: Waiting) -> Callable[[str], Reader | None] | None:
        """Other files of the same directory, as far as they are stored (DCP's `.metadata`)."""
        if not one.inode.links:
            return None
        parent = one.inode.links[0][0]

        def find(name: str) -> Reader | None:
            ino = self._namespace.child(parent, name.encode("utf-8", "surrogateescape"))
            inode = None if ino is None else self._namespace.find(ino)
            if inode is None or not inode.is_file or inode.content.staging or inode.content.base is None:
                return None
            return self._segments.file_reader(self._segments.read_recipe(inode.content.base))

        return find

    def _committer(
        self, by_key: dict[object, Waiting], flags: dict[int, Ingesting]
    ) -> Callable[[Change, list[Ingested]], list[object]]:
        def commit(change: Change, stored: list[Ingested]) -> list[object]:
            dropped: list[object] = []
            draft = self._drafts.begin()
            draft.change = change
            for done in stored:
                one = by_key[done.key]
                flag = flags.get(one.ino)
                if one.pin_key is not None:
                    if self._files.is_held_by_kernel(one.ino, one.inode.content.staging):
                        dropped.append(done.key)  # opened meanwhile: the next round stores a copy
                    else:
                        self._commit_pin(draft, one, done)
                elif (flag is not None and flag.cancel) or not self._is_same(one):
                    dropped.append(done.key)
                else:
                    self._commit_live(draft, one.ino, done)
            draft.commit_records()
            return dropped

        return commit

    def _is_same(self, one: Waiting) -> bool:
        live = self._namespace.find(one.ino)
        if live is None or self._files.is_busy(one.ino):
            return False
        now, then = live.content, one.inode.content  # an fsync meanwhile changes no byte
        if (now.staging, now.base, now.base_limit) != (then.staging, then.base, then.base_limit):
            return False
        # Pinned meanwhile: the pin is stored first, and the live inode with it.
        return live.content.staging not in self._drafts.pinned_staging

    def _commit_live(self, draft: Draft, ino: int, done: Ingested) -> None:
        """The inode now is what was stored; its times stay what its staging file showed, and ingest
        drops that once all is committed."""
        inode = draft.inode(ino)
        shown = self._namespace.attributes_of(ino, inode)
        content = Content(base=done.recipe)
        draft.update(
            ino,
            content=content,
            root=done.root,
            size=done.size,
            blocks=done.blocks,
            mtime_ns=shown.mtime_ns,
            ctime_ns=shown.ctime_ns,
        )
        self.stored_bytes += done.size
        self.stored_files += 1
        self._files.switch_to_stored(ino)
        self._files.note_stored(ino, done.recipe, done.size)
        self._files.preimages.closed_at.pop(ino, None)
        self._grown.pop(ino, None)

    def _commit_pin(self, draft: Draft, one: Waiting, done: Ingested) -> None:
        assert one.pin is not None and one.pin_key is not None
        pinned = _with_content(one.pin, done)
        draft.change.put(Table.PREIMAGE, one.pin_key, encode_pin(pinned))
        number = one.inode.content.staging
        self._drafts.pinned_staging.discard(number)
        live = self._namespace.find(one.ino)
        if live is not None and live.content.staging == number:
            self._commit_live(draft, one.ino, done)


def _is_cancelled(flag: Ingesting | None) -> Callable[[], bool]:
    return lambda: flag is not None and flag.cancel


def _with_content(pin: PinnedFile, done: Ingested) -> PinnedFile:
    stored = msgspec.structs.replace(
        pin.inode, content=Content(base=done.recipe), root=done.root, size=done.size, blocks=done.blocks
    )
    return msgspec.structs.replace(pin, inode=stored)


def _groups(waiting: Sequence[Waiting]) -> list[list[Waiting]]:
    """Large files one by one, small ones together: the writer of a file waits for its group only."""
    groups: list[list[Waiting]] = []
    small: list[Waiting] = []
    small_bytes = 0
    for one in waiting:
        if one.size >= SMALL_BYTES:
            groups.append([one])
            continue
        small.append(one)
        small_bytes += one.size
        if len(small) >= _SMALL_AT_ONCE or small_bytes >= _SMALL_BYTES_AT_ONCE:
            groups.append(small)
            small, small_bytes = [], 0
    return groups + ([small] if small else [])


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
