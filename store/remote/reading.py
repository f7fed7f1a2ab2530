"""Which chunks a stored version has, and their bytes: what a push reads of its own store.

One rule: a chunk leaves the store only if its bytes match its id.
"""

from __future__ import annotations

import numpy as np
import trio

from ckptfs.store.chunk_files import ChunkFiles
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.places import Places
from ckptfs.store.recipe import HOLE, Recipe
from ckptfs.store.remote.shard import Keys, chunk_of_key
from ckptfs.store.segment_files import SegmentFiles
from ckptfs.store.segments import Segments

_FOLD_AT = 1 << 20


class KeySet:
    """Chunk ids, each once, at 32 bytes of memory each."""

    def __init__(self) -> None:
        self._folded = np.zeros(0, "S32")
        self._added: list[bytes] = []
        self._added_bytes = 0

    def add(self, packed: bytes) -> None:
        """Add ids, 32 bytes each, one behind the other."""
        self._added.append(packed)
        self._added_bytes += len(packed)
        if self._added_bytes > max(_FOLD_AT, self._folded.nbytes):
            self.all()

    def all(self) -> Keys:
        """All of them, sorted; a hole is none."""
        added = np.frombuffer(b"".join(self._added), "S32")
        self._added, self._added_bytes = [], 0
        self._folded = np.unique(np.concatenate([self._folded, added[added != HOLE]]))
        return self._folded


def add_recipe(found: KeySet, recipe: Recipe) -> None:
    """Add the chunks of a file."""
    if len(recipe):
        found.add(recipe.packed_ids())


async def chunks_of(segments: Segments, record: VersionRecord) -> Keys:
    """The ids of all that a version leads to: trees, recipes, chunks. Corrupt if one cannot be read."""
    assert record.top.tree is not None, "a version is a directory"
    found, seen, waiting = KeySet(), {record.top.tree}, [record.top.tree]
    files: set[ChunkId] = set()
    while waiting:
        tree = waiting.pop()
        found.add(tree)
        for entry in segments.read_tree(tree):
            if entry.tree is not None and entry.tree not in seen:
                seen.add(entry.tree)
                waiting.append(entry.tree)
            elif entry.recipe is not None and entry.recipe not in files:
                files.add(entry.recipe)
                found.add(entry.recipe)
                add_recipe(found, segments.read_recipe(entry.recipe))
        await trio.lowlevel.checkpoint()
    return found.all()


def locate(segments: Segments, wanted: Keys) -> Places:
    """Where chunks lie, in that order; Corrupt if one has no place."""
    chunks = [chunk_of_key(key) for key in wanted.tolist()]
    places = segments.locate_many(chunks)
    if len(places) < len(chunks):
        lost = next(iter(set(chunks).difference(places.chunks)))
        raise Corrupt(f"chunk {cid_text(lost)} is not in the index", expected=lost)
    return places.by_place()


async def read_chunks(disk: Disk, segments: Segments, places: Places) -> list[tuple[ChunkId, bytes]]:
    """Chunks with their bytes, hashed; one that is not where it was is looked for once more. Corrupt names
    the first that is wrong."""
    read = await trio.to_thread.run_sync(_read, disk, places)
    return [
        (chunk, payload if payload is not None else segments.read_once(chunk))
        for chunk, payload in zip(places.chunks, read, strict=True)
    ]


async def read_right_chunks(disk: Disk, segments: Segments, places: Places) -> dict[ChunkId, bytes]:
    """The same of those that are right; the others are left out."""
    found: dict[ChunkId, bytes] = {}
    for chunk, payload in zip(places.chunks, await trio.to_thread.run_sync(_read, disk, places), strict=True):
        try:
            found[chunk] = payload if payload is not None else segments.read_once(chunk)
        except (Corrupt, NotFound):
            continue
    return found


def _read(disk: Disk, places: Places) -> list[bytes | None]:
    files = SegmentFiles(disk)
    chunks = ChunkFiles(files, places.parents.get)
    found: list[bytes | None] = []
    try:
        for at, chunk in enumerate(places.chunks):
            try:
                found.append(chunks.read(chunk, places.location(at)))
            except Corrupt:
                found.append(None)
    finally:
        files.close()
    return found
