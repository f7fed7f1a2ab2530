"""Publishing pre-images: versions of what destructive calls were about to take away.

One rule: the pins of a unit go only when a version lists what they hold.

The version is the tree of the last one with the pinned files put over it. Source: FORMAT.md,
"Publishing".
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ckptfs.fusefs.draft import Drafts
from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.provenance import Provenance
from ckptfs.fusefs.recording import Recorder, Request
from ckptfs.fusefs.storing import Storing, Waiting
from ckptfs.fusefs.treebuilder import TOP_NAME, Stored, overlay_pins
from ckptfs.fusefs.units import Units
from ckptfs.store.histories import Histories, Unit
from ckptfs.store.ids import ChunkId, TreeId
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Ingest
from ckptfs.store.inode import Inode
from ckptfs.store.pins import PinnedFile
from ckptfs.store.recipe import EMPTY
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry


class GoneTop(msgspec.Struct, frozen=True, array_like=True):
    """The directory of a unit that was removed while the unit still had pins."""

    name: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int


_gone_decoder = msgspec.msgpack.Decoder(GoneTop)


class PreimagePublisher:
    """Makes pre-images. Belongs to the trio thread; the caller keeps publishes one at a time."""

    def __init__(
        self,
        namespace: Namespace,
        drafts: Drafts,
        units: Units,
        preimages: Preimages,
        segments: Segments,
        ingest: Ingest,
        storing: Storing,
        histories: Histories,
        recorder: Recorder,
        files: Files,
        provenance: Provenance,
    ) -> None:
        self._namespace = namespace
        self._drafts = drafts
        self._units = units
        self._preimages = preimages
        self._segments = segments
        self._ingest = ingest
        self._storing = storing
        self._histories = histories
        self._recorder = recorder
        self._files = files
        self._provenance = provenance

    async def publish(self, top: int) -> None:
        """Make a version of the unit's pins, if there are any. Durable when: this returned."""
        for _, pin in self._preimages.pins_of(top):
            if self._files.is_held_by_kernel(pin.ino, pin.inode.content.staging):
                await self._files.free_from_pins(pin.ino)
        pins = self._preimages.pins_of(top)
        if not pins:
            return
        failed = await self._storing.store(
            [
                Waiting(pin.ino, pin.name, pin.inode, pin.inode.size, key, pin)
                for key, pin in pins
                if pin.inode.content.staging
            ]
        )
        pins = self._preimages.pins_of(top)
        kept = [(key, pin) for key, pin in pins if key not in failed]
        if any(pin.inode.content.staging for _, pin in kept):
            return  # somebody has a pinned file mapped: the next round tries again
        if kept:
            with self._namespace.index.removals.hold(), self._segments.pins.hold() as held:
                await self._append(top, [pin for _, pin in kept], held)
        draft = self._drafts.begin()
        self._preimages.release(top, pins, draft)
        if top not in self._preimages.units_with_pins():
            draft.change.delete(Table.META, _gone_key(top))
        draft.commit()

    def directory_gone(self, ino: int) -> None:
        """A directory is about to be removed. Needs no room but the journal's, so that `rm` works on
        a full disk: a unit that has pins and no history yet gets it with the pre-image."""
        change = Change()
        if ino in self._preimages.units_with_pins():
            inode = self._namespace.inode(ino)
            gone = _gone_top(self._units.name_of(ino), inode)
            change.put(Table.META, _gone_key(ino), msgspec.msgpack.encode(gone))
        self._recorder.unit_gone(ino, change)
        self._provenance.published(ino)
        self._namespace.index.apply(change)

    async def _append(self, top: int, pins: list[PinnedFile], held: set[ChunkId]) -> None:
        unit, entry = self._unit_and_top(top)
        newest = self._histories.newest(unit.unit)
        base = newest.top.tree if newest is not None else None
        stored = {i: self._stored(pin) for i, pin in enumerate(pins)}
        tree, objects = overlay_pins(self._segments, base, pins, stored)
        await self._ingest.store_objects(objects, held)
        facts = await self._recorder.judge(unit.unit, tree)
        noted = self._provenance.noted(d for d in self._provenance.directories() if self._is_in(d, top))
        self._recorder.append(unit, replace(entry, tree=tree), facts, Request("pre-image"), Change(), noted)

    def _is_in(self, directory: int, top: int) -> bool:
        try:
            return self._units.top_of(directory) == top
        except PosixError:
            return False  # It was removed.

    def _stored(self, pin: PinnedFile) -> Stored:
        recipe = pin.inode.content.base
        if recipe is None:
            return Stored(EMPTY.identity(), self._storing.root_of(EMPTY), 0)
        root = pin.inode.root or self._storing.root_of(self._segments.read_recipe(recipe))
        return Stored(recipe, root, pin.inode.size)

    def _unit_and_top(self, top: int) -> tuple[Unit, Entry]:
        encoded = self._namespace.index.get(Table.META, _gone_key(top))
        if encoded is None:
            inode = self._namespace.inode(top)
            return self._recorder.unit_of(top), _top_entry(_gone_top(b"", inode))
        gone = _gone_decoder.decode(encoded)
        return self._recorder.unit_named(gone.name, 0), _top_entry(gone)


def _gone_key(top: int) -> bytes:
    return b"gone:" + key_of(top)


def _gone_top(name: bytes, inode: Inode) -> GoneTop:
    return GoneTop(name, inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.ctime_ns)


def _top_entry(gone: GoneTop) -> Entry:
    return Entry(
        name=TOP_NAME,
        mode=gone.mode,
        uid=gone.uid,
        gid=gone.gid,
        mtime_ns=gone.mtime_ns,
        ctime_ns=gone.ctime_ns,
        tree=TreeId(ChunkId(bytes(32))),
    )
