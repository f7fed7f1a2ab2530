"""Marking while jobs go on: walks from the records of the index to every chunk that they lead to.

One rule: whatever becomes reachable during the walk becomes so by a record that is put, and every
such record is a root as well, in the same step. So the order in which records are scanned, moved
from one table to another and removed does not matter. (What an ingest or a publish has found and
not named yet is not reachable; its pins protect it, or the RemovalGate.)

Runs in the index thread in slices of about 2 ms. Source: Dijkstra et al., "On-the-fly garbage
collection: an exercise in cooperation", CACM 21(11), 1978: this is its write barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from time import perf_counter

import trio

from ckptfs.store.errors import Corrupt
from ckptfs.store.gc import (
    KEPT,
    Census,
    Edges,
    GcPlan,
    Kind,
    Marker,
    Reference,
    marks_of_chunks,
    reference_to_recipe,
    references_of_inode,
    references_of_pin,
    references_of_published,
    references_of_tree,
    references_of_version,
)
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_mirror import version_of
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.index import Index, Table
from ckptfs.store.journal import Op
from ckptfs.store.parent_table import decode_lineage
from ckptfs.store.segment_format import MAX_DEPTH, Codec, decode_location
from ckptfs.store.segments import Segments

_SLICE_S = 0.002
_SLICE_ROWS = 256
_LARGE_TREE_BYTES = 32 << 10
_LARGE_TREE_PART = 1024


def _references_of_version_row(encoded: bytes) -> Iterator[Reference]:
    return references_of_version(version_of(encoded))


Row = tuple[bytes, bytes]
References = Callable[[bytes], Iterator[Reference]]

_ROOTS: dict[int, References] = {
    Table.INODE: references_of_inode,
    Table.PREIMAGE: references_of_pin,
    Table.PUBLISHED: references_of_published,
    Table.VERSION: _references_of_version_row,
}


class _Pace:
    """Lets other tasks run whenever a slice of time is used up."""

    def __init__(self) -> None:
        self._until = perf_counter() + _SLICE_S

    async def rest(self) -> None:
        if perf_counter() >= self._until:
            await trio.lowlevel.checkpoint()
            self._until = perf_counter() + _SLICE_S


class Marking:
    """One walk, and the questions that it answers. One task of the index thread, which has given
    `watch` to the index before.

    `stages`: the stage of each version that may go, by its key in the version table; all else
    is kept. So is what pre-images pin, unless `preimage_stage` tells it apart.
    """

    def __init__(
        self,
        index: Index,
        segments: Segments,
        stages: Mapping[bytes, int],
        preimage_stage: int = KEPT,
    ) -> None:
        self._index, self._segments, self._stages = index, segments, stages
        self._preimage_stage = preimage_stage
        self._marker = Marker()
        self._fresh: list[ChunkId] = []
        self._large: list[tuple[Iterator[Reference], int]] = []
        self._pace = _Pace()

    def watch(self, operations: list[Op]) -> None:
        """The barrier: what is put while the walk goes on is reached, and so is what is stored."""
        for table, key, value in operations:
            if value is None:
                continue
            if table == Table.CHUNK:
                self._fresh.append(ChunkId(key))
            elif (references := _ROOTS.get(table)) is not None:
                self._marker.reach(references(value), self._stage(table, key))

    def keep(self, references: Iterable[Reference], stage: int = KEPT) -> None:
        """Note more roots."""
        self._marker.reach(references, stage)

    def keep_recipes(self, recipes: Iterable[RecipeId], stage: int = KEPT) -> None:
        """Note contents that somebody has open."""
        self.keep(map(reference_to_recipe, recipes), stage)

    def keep_records(self, records: Iterable[VersionRecord]) -> None:
        """Note versions that have no row."""
        for record in records:
            self.keep(references_of_version(record))

    def keep_version(self, key: bytes) -> None:
        """A version that was to go stays after all."""
        value = self._index.get(Table.VERSION, key)
        if value is not None:
            self.keep(_references_of_version_row(value))

    async def run(self) -> None:
        """Walk from all records. Corrupt if a tree or recipe cannot be read."""
        for table, references in _ROOTS.items():

            def reach(rows: list[Row], table: int = table, references: References = references) -> None:
                for key, value in rows:
                    self._marker.reach(references(value), self._stage(table, key))

            await self._scan(Table(table), reach)
        await self.finish()
        await trio.to_thread.run_sync(self._marker.marks.settle)
        await self.finish()

    async def finish(self) -> None:
        """Walk on from what was added since. When this returns, and until the caller awaits,
        every record of the index is accounted for."""
        while True:
            if (found := self._marker.next()) is not None:
                await self._visit(*found)
            elif self._large:
                await self._walk_on()
            else:
                break
            await self._pace.rest()
            if self._marker.marks.is_settling_due:
                await trio.to_thread.run_sync(self._marker.marks.settle)
        for chunk in self._fresh:
            self._marker.marks.add_one(chunk, KEPT)
        self._fresh.clear()

    async def census(self) -> Census:
        """How many stored bytes each stage has."""
        census = Census()

        def count(rows: list[Row]) -> None:
            for _, value, stage in self._unkept(rows):
                census.add(stage, decode_location(value).stored)

        await self._follow_parents()
        await self._scan(Table.CHUNK, count)
        return census

    async def plan(self, lowest_stage: int) -> GcPlan:
        """The chunks whose stage is `lowest_stage` or above."""
        dead: dict[tuple[int, int], list[ChunkId]] = {}
        stored_bytes = 0
        await self._follow_parents()

        def pick(rows: list[Row]) -> None:
            nonlocal stored_bytes
            for chunk, value, stage in self._unkept(rows):
                if stage >= lowest_stage:
                    location = decode_location(value)
                    depth = self._segments.parents.depth(chunk) if location.codec != Codec.RAW else 0
                    dead.setdefault((MAX_DEPTH - depth, location.segment), []).append(chunk)
                    stored_bytes += location.stored

        await self._scan(Table.CHUNK, pick)
        return GcPlan({place: tuple(chunks) for place, chunks in sorted(dead.items())}, stored_bytes)

    async def _follow_parents(self) -> None:
        """Mark what marked chunks are encoded against. That is for the accounts: none of these can be removed
        while the chunk table has a child of it, whatever comes meanwhile."""
        edges = Edges()

        def take(rows: list[Row]) -> None:
            by_depth: dict[int, tuple[list[bytes], list[bytes]]] = {}
            for child, value in rows:
                lineage = decode_lineage(value)
                children, parents = by_depth.setdefault(lineage.depth, ([], []))
                children += [child] * len(lineage.parents)
                parents += lineage.parents
            for depth, (children, parents) in by_depth.items():
                edges.add(depth, children, parents)

        await self._scan(Table.PARENT, take)
        edges.follow(self._marker.marks)

    def still_dead(self, chunks: Sequence[ChunkId], lowest_stage: int) -> list[ChunkId]:
        """Those that are still not reached; true until the caller awaits if `finish` just returned."""
        stages = self._marker.marks.stages_of(marks_of_chunks(chunks))
        return [chunk for chunk, stage in zip(chunks, stages, strict=True) if stage >= lowest_stage]

    def _stage(self, table: int, key: bytes) -> int:
        if table == Table.VERSION:
            return self._stages.get(key, KEPT)
        return self._preimage_stage if table == Table.PREIMAGE else KEPT

    async def _visit(self, reference: Reference, stage: int) -> None:
        encoded = self._read(reference)
        if reference.kind is Kind.RECIPE:
            self._marker.take_recipe(encoded, stage)
        elif len(encoded) < _LARGE_TREE_BYTES:
            self._marker.reach(references_of_tree(encoded), stage)
        else:
            self._large.append((references_of_tree(encoded), stage))

    async def _walk_on(self) -> None:
        """The next part of the large tree that was met last: what waits to be read stays little."""
        references, stage = self._large[-1]
        part = await trio.to_thread.run_sync(lambda: list(islice(references, _LARGE_TREE_PART)))
        if part:
            self._marker.reach(part, stage)
        else:
            self._large.pop()

    def _read(self, reference: Reference) -> bytes:
        try:
            return self._segments.read_once(reference.chunk)
        except Corrupt as e:
            what = f"nothing is collected while a {reference.kind.value} cannot be read: {e}"
            raise Corrupt(what, expected=e.expected, got=e.got) from e

    def _unkept(self, rows: list[Row]) -> Iterator[tuple[ChunkId, bytes, int]]:
        """(chunk, row, stage) of those rows of the chunk table that are not kept."""
        stages = self._marker.marks.stages_of(marks_of_chunks([key for key, _ in rows]))
        for at in stages.nonzero()[0].tolist():
            yield ChunkId(rows[at][0]), rows[at][1], int(stages[at])

    async def _scan(self, table: Table, take: Callable[[list[Row]], None]) -> None:
        """Hand out all rows of a table, a slice at a time; the table may change meanwhile."""
        start: bytes | None = None
        while rows := self._index.scan(table, start=start, limit=_SLICE_ROWS):
            start = rows[-1][0] + b"\0"
            take(rows)
            await self._pace.rest()
