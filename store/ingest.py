"""Ingest: closed staging files, growing files and metadata objects become chunks of the store.

One rule: a file's chunks are synced before the one change that makes its recipe visible, and its
staging file goes only after the commit of that change. Before it, a crash loses nothing but work.

Large files are adopted, one commit each; small ones, overlays and files that are nearly all known
go into a pack, one commit for many. Source: FORMAT.md, "Segments", write order.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import trio

from ckptfs.store.chunk_table import ChunkTable
from ckptfs.store.cutting import Fresh, Slab
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Unavailable
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index
from ckptfs.store.ingest_batch import PACK_BYTES, SLAB_BYTES, Batch, CommitFiles, IngestReport, advance
from ckptfs.store.ingest_commit import Committer, Pack
from ckptfs.store.ingest_job import Candidate, GrowingJob, Ingested, Outcome, Sibling
from ckptfs.store.recipe import Recipe
from ckptfs.store.reclaim import Reclaim
from ckptfs.store.segments import Segments
from ckptfs.store.spans import SpanCutter
from ckptfs.store.staging import Staging

__all__ = ["Candidate", "CommitFiles", "Ingest", "IngestReport", "Ingested"]


class Storing:
    """Takes chunks into a pack; see Ingest.storing. One task at a time."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack

    async def add(self, chunks: Iterable[tuple[ChunkId, bytes | memoryview]]) -> None:
        """Store those that are not stored yet; the payloads are the caller's again when this returned."""
        await _add(self._pack, [Fresh(chunk, 0, len(payload), payload) for chunk, payload in chunks])


class Ingest:
    """The way into the store. Every method belongs to the index thread; cutting, hashing and disk
    work run in worker threads, at most 10 MiB of payload in memory for each of the two kinds.

    `committer` numbers segments; `reclaim` gives back the room of duplicate ranges: somebody calls its
    `execute` from time to time, after `Index.commit`.
    """

    def __init__(
        self,
        disk: Disk,
        index: Index,
        segments: Segments,
        staging: Staging,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        cutter: SpanCutter | None = None,
    ) -> None:
        """`cutter` cuts large files without holes; without one they are cut here like all others."""
        self._disk = disk
        self._cutter = cutter
        self._segments = segments
        self._staging = staging
        self.reclaim = Reclaim(disk, index, segments)
        table = ChunkTable(disk, index, segments, now_ns)
        self.committer = self._committer = Committer(disk, index, table, self.reclaim, now_ns)
        self._one_batch = trio.Lock()
        self._one_growing = trio.Lock()

    async def store_files(
        self, candidates: Sequence[Candidate], commit: CommitFiles, pin: set[ChunkId] | None = None
    ) -> IngestReport:
        """Store closed staging files; `commit` is called in this thread once per commit.

        `pin` as for `store_objects`: for whoever names what is stored later than in `commit`.
        Durable when: a file is in the report's `stored`, and `commit` saw it. Its staging file is
        dropped after the next commit of the index. Raises NoSpace or OSError: the commits so far
        stand, of the rest nothing is visible.
        """
        async with self._one_batch:
            batch = Batch(self._disk, self._segments, self._staging, self._committer, commit, self._cutter)
            await batch.run(candidates, pin)
        return batch.report

    async def store_objects(
        self, objects: Iterable[tuple[ChunkId, bytes]], pin: set[ChunkId] | None = None
    ) -> None:
        """Store recipes, trees and the like that are not stored yet.

        Durable when: this returned. `pin` is a set from `Segments.pins.hold()`; the ids are added
        to it, so that they stay until their owner's record is committed. Raises NoSpace.
        """
        async with self.storing(pin) as storing:
            waiting: list[tuple[ChunkId, bytes]] = []
            waiting_bytes = 0
            for one in objects:
                waiting.append(one)
                waiting_bytes += len(one[1])
                if waiting_bytes >= SLAB_BYTES:
                    await storing.add(waiting)
                    waiting, waiting_bytes = [], 0
            await storing.add(waiting)

    @asynccontextmanager
    async def storing(self, pin: set[ChunkId] | None = None) -> AsyncIterator[Storing]:
        """The same, of chunks that come bit by bit. Durable when: the block was left without an error."""
        with self._segments.pins.hold() as held:
            pack = Pack(self._committer, held if pin is None else pin)
            try:
                yield Storing(pack)
                await pack.commit(_nothing_more)
            except BaseException:
                pack.discard()
                raise

    async def store_growing(
        self,
        fd: int,
        size: int,
        name: str,
        base: Recipe | None,
        clean_below: int,
        *,
        base_limit: int = 0,
        key: object = None,
        sibling: Sibling | None = None,
        pin: set[ChunkId] | None = None,
    ) -> Ingested:
        """Store the bytes [0, size) of a file that is still being written.

        `fd` reads its staging file and stays the caller's. `base` is the recipe of what was
        stored of it last; its pieces wholly below `clean_below` are taken over. If the staging
        file is an overlay, `base_limit` is its inode's, and holes below it are read from `base`.
        Durable when: this returned; `pin` as for `store_objects`. Raises Unavailable if the file
        became shorter, NoSpace, Corrupt if the base is damaged.
        """
        limit = base_limit if base is not None else 0
        one = Candidate(key, 0, size, name, None, limit, sibling, lambda: False)
        job = GrowingJob(one, self._disk, self._segments, fd, base, clean_below)
        reused = base.chunks() if base is not None else ()
        async with self._one_growing:
            with self._segments.pins.hold(reused) as held:
                if pin is not None:
                    pin |= held
                pack = Pack(self._committer, held if pin is None else pin)
                try:
                    await self._store_growing(job, pack)
                except BaseException:
                    pack.discard()
                    raise
        assert job.ingested is not None, "a job that is done has a result"
        return job.ingested

    async def _store_growing(self, job: GrowingJob, pack: Pack) -> None:
        slab = Slab(SLAB_BYTES, keep=True)
        steps = job.cut(slab)
        more = True
        while more:
            more = await trio.to_thread.run_sync(advance, steps)
            await _add(pack, slab.fresh)
            slab.clear()
        if job.outcome is not Outcome.DONE:
            raise job.error if job.error is not None else Unavailable("the file cannot be read now")
        assert job.recipe_chunk is not None
        await pack.add([job.recipe_chunk])
        await pack.commit(_nothing_more)


async def _add(pack: Pack, fresh: Sequence[Fresh]) -> None:
    await pack.add(fresh)
    if pack.payload_bytes >= PACK_BYTES:
        await pack.commit(_nothing_more)


def _nothing_more(change: Change) -> bool:
    return True
