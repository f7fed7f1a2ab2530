"""A store whose index is as large as one likes, without the bytes: for what costs metadata alone.

Real are the index (every row put through Index.apply, with its journal and its commits), recipes and trees
(stored as segments, so that the collector reads and verifies them), and the history. Not real are payloads:
no segment file and no `.idx` lies where the chunk table says, and Merkle roots are zeros. So nothing may read
a file of these versions, scrub them, or make digests of them.

One rule: the ids are as random as those of real chunks and come in the order in which saves bring them, so
the pages of the index are as full and as scattered as they are in use.
"""

from __future__ import annotations

import random
import stat
from collections.abc import Iterator

import trio
from small_face import SmallFace

from ckptfs.store.hashing import chunk_id
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.segment_format import (
    Location,
    SegmentFacts,
    SegmentKind,
    encode_facts,
    encode_location,
    segment_key,
)
from ckptfs.store.tree import Entry, encode_tree
from ckptfs.store.version_names import version_name

UNIT = "old"
CHUNK_BYTES = 256 << 10
FILE_CHUNKS = 20_000
VERSION_CHUNKS = 250_000
_FIRST_SEGMENT = 1 << 32
_ROWS_A_CHANGE = 2_000
_ROWS_A_COMMIT = 50_000
_NOW_NS = 10**18


class LargeIndex:
    """Grows the index of a store version by version. `known` is a sample of the ids in it."""

    def __init__(self, small: SmallFace) -> None:
        self._small = small
        self._index: Index = small.parts.index
        self._random = random.Random(1)
        self._segment = _FIRST_SEGMENT
        self.known: list[ChunkId] = []
        small.make(ROOT_INO, {UNIT: {}})

    def grow(self, chunks: int) -> None:
        """Add versions until there are so many chunks. Durable when: this returned."""
        while (missing := chunks - self._index.count(Table.CHUNK)) > 0:
            self._add_version(min(missing, VERSION_CHUNKS))
        self._index.commit()

    def new_ids(self, count: int) -> Iterator[ChunkId]:
        """Ids that no chunk has."""
        drawn = self._random.randbytes(32 * count)
        return (ChunkId(drawn[at : at + 32]) for at in range(0, len(drawn), 32))

    def _add_version(self, chunks: int) -> None:
        objects: list[tuple[ChunkId, bytes]] = []
        entries: list[Entry] = []
        for start in range(0, chunks, FILE_CHUNKS):
            recipe = self._add_file(min(FILE_CHUNKS, chunks - start))
            encoded = recipe.encode()
            identity = RecipeId(chunk_id(encoded))
            objects.append((identity, encoded))
            entries.append(_file(f"model-{len(entries):05d}.safetensors", identity, recipe.size))
        encoded = encode_tree(entries)
        objects.append((chunk_id(encoded), encoded))
        trio.run(self._store, objects, _directory(TreeId(chunk_id(encoded))), len(entries))

    def _add_file(self, chunks: int) -> Recipe:
        """The rows of a file that was adopted as a segment."""
        ids = list(self.new_ids(chunks))
        segment, self._segment = self._segment, self._segment + 1
        size = chunks * CHUNK_BYTES
        for start in range(0, chunks, _ROWS_A_CHANGE):
            change = Change()
            for at, chunk in enumerate(ids[start : start + _ROWS_A_CHANGE], start):
                location = Location(segment, at * CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES)
                change.put(Table.CHUNK, chunk, encode_location(location))
            if start + _ROWS_A_CHANGE >= chunks:
                facts = SegmentFacts(SegmentKind.ADOPTED, size, size, chunks, _NOW_NS, _NOW_NS)
                change.put(Table.SEGMENT, segment_key(segment), encode_facts(facts))
            self._index.apply(change)
            if self._index.pending >= _ROWS_A_COMMIT:
                self._index.commit()
        self.known += ids[:: max(1, chunks // 100)]
        return Recipe(Piece(CHUNK_BYTES, chunk) for chunk in ids)

    async def _store(self, objects: list[tuple[ChunkId, bytes]], top: Entry, files: int) -> None:
        small = self._small
        with small.parts.segments.pins.hold() as held:
            await small.parts.ingest.store_objects(objects, held)
            row = small.face.recorder.unit_of(small.at(UNIT))
            record = VersionRecord(
                unit=row.unit, number=row.next_number, name=version_name(row.next_number, _NOW_NS),
                time_ns=_NOW_NS, origin="command", top=top, root=bytes(32), files=files,
                logical_bytes=1, state=State.OPAQUE, step=None, steps=(), missing=(), before=row.head,
            )  # fmt: skip
            change = Change()
            small.parts.histories.append_version(record, change)
            self._index.apply(change, sync=True)


def _file(name: str, recipe: RecipeId, size: int) -> Entry:
    mode = stat.S_IFREG | 0o644
    return Entry(
        name=name.encode(), mode=mode, uid=0, gid=0, mtime_ns=5, ctime_ns=5,
        size=size, recipe=recipe, root=bytes(32),
    )  # fmt: skip


def _directory(tree: TreeId) -> Entry:
    return Entry(name=b"top", mode=stat.S_IFDIR | 0o755, uid=0, gid=0, mtime_ns=5, ctime_ns=5, tree=tree)
