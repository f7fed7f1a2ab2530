"""One call of `Ingest.store_files`: which way each file takes, and what is committed together.

One rule: a file is reported stored only after the change that names its recipe was applied and
synced; every candidate ends up in exactly one list of the report, or the call raises.

Owned by one task of the index thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from ckptfs.store.cutting import CONTENT_WINDOW_BYTES, Slab
from ckptfs.store.disk import Disk
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change
from ckptfs.store.ingest_commit import Committer, Pack
from ckptfs.store.ingest_job import Candidate, Ingested, Job, Outcome
from ckptfs.store.packing import Adoption, SyncFailed, adopt, copy_ranges
from ckptfs.store.segment_format import Row
from ckptfs.store.segments import Segments
from ckptfs.store.span_run import SpanRun
from ckptfs.store.spans import SpanCutter
from ckptfs.store.staging import Staging, staging_path

SMALL_FILE_BYTES = 128 * 1024
PACK_BYTES = 64 << 20
PACK_FILES = 2048
SLAB_BYTES = 8 << 20
_ADOPT_STEP_BYTES = 16 << 20
_FILES_PER_STEP = 256
AT_ONCE_UNLINKED_BYTES = 64 << 20
_COPY_ONE_IN = 8
"""A file is copied into the pack instead of adopted if at most one byte in so many is new."""

CommitFiles = Callable[[Change, list[Ingested]], list[object]]
"""Adds the inode records of the files to the change; returns the keys that were changed meanwhile
and must be dropped (of these it adds nothing)."""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What became of each candidate: `stored`, or by key: `busy` (try later), `cancelled`, or
    `failed` with the reason (unreadable, the base is corrupt)."""

    stored: list[Ingested] = field(default_factory=list)
    busy: list[object] = field(default_factory=list)
    cancelled: list[object] = field(default_factory=list)
    failed: list[tuple[object, Exception]] = field(default_factory=list)


class Batch:
    """Stores the candidates of one call."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        staging: Staging,
        committer: Committer,
        commit_files: CommitFiles,
        cutter: SpanCutter | None,
    ) -> None:
        self.report = IngestReport()
        self._disk = disk
        self._segments = segments
        self._staging = staging
        self._committer = committer
        self._commit_files = commit_files
        self._cutter = cutter
        self._done: list[Job] = []
        self._pin: set[ChunkId] | None = None
        self._pack: Pack

    async def run(self, candidates: Sequence[Candidate], pin: set[ChunkId] | None) -> None:
        """Store them all; raises NoSpace or OSError, and then leaves nothing half stored. What is stored, or
        was found, is added to `pin`."""
        self._pin = pin
        await self._committer.reclaim.remove_files()
        jobs = [Job(one, self._disk, self._segments) for one in candidates]
        with self._segments.pins.hold() as held:
            self._pack = Pack(self._committer, held)
            try:
                await self._run(jobs)
            except BaseException:
                self._pack.discard()
                raise
            finally:
                for job in jobs:
                    job.close()

    async def _run(self, jobs: list[Job]) -> None:
        small: list[Job] = []
        for job in jobs:
            if self._is_turned_away(job):
                self._note(job)
            elif job.candidate.size < SMALL_FILE_BYTES:
                small.append(job)
            else:
                await self._store_large(job)
        await self._store_packed(small)
        await self._commit_pack(between_files=True)

    def _is_turned_away(self, job: Job) -> bool:
        if job.candidate.cancelled():
            job.outcome = Outcome.CANCELLED
        elif (error := self._staging.failed.get(job.candidate.staging)) is not None:
            job.fail(error)
        return job.outcome is not Outcome.RUNNING

    async def _store_large(self, job: Job) -> None:
        await trio.to_thread.run_sync(job.open)
        if job.outcome is not Outcome.RUNNING:
            self._note(job)
        elif job.is_whole:
            await self._adopt(job)
        else:
            await self._store_packed([job])
        job.close()

    async def _store_packed(self, jobs: Sequence[Job]) -> None:
        """Copy what is new of the files into packs; commits the packs that are full."""
        if not jobs:
            return
        slab = Slab(SLAB_BYTES, keep=True)
        steps = _cut_all(jobs, slab)
        ahead = deque(jobs)
        while True:
            current = await trio.to_thread.run_sync(next, steps, None)
            await self._pack.add(slab.fresh)
            slab.clear()
            while ahead and ahead[0].outcome is not Outcome.RUNNING:
                self._finished(ahead.popleft())
            if self._pack.payload_bytes >= PACK_BYTES or len(self._done) >= PACK_FILES:
                await self._commit_pack(between_files=current is None or current not in ahead)
            if current is None:
                return
            current.stop = current.candidate.cancelled()

    def _finished(self, job: Job) -> None:
        if job.outcome is Outcome.DONE:
            job.recipe_chunk = None
            self._done.append(job)
        else:
            self._note(job)

    async def _commit_pack(self, *, between_files: bool) -> None:
        done, self._done = self._done, []
        stored: list[Ingested] = []
        await self._pack.commit(partial(self._fill, done, stored))
        self.report.stored.extend(stored)
        if between_files:
            # The records that name these chunks are committed: the pins have done their work.
            self._hand_over(self._pack.held)
            self._pack.held.clear()

    def _hand_over(self, held: set[ChunkId]) -> None:
        """Whoever wants them pinned for longer sees to that; nothing is awaited since they were committed."""
        if self._pin is not None:
            self._pin |= held

    def _fill(
        self, done: Sequence[Job], stored: list[Ingested], change: Change, *, is_linked: bool = False
    ) -> bool:
        """Add the files' records to the change; what was dropped stays out of `stored`."""
        ingested = [one.ingested for one in done if one.ingested is not None]
        dropped = set(self._commit_files(change, ingested)) if ingested else set()
        for job in done:
            assert job.ingested is not None, "only DONE jobs get here"
            if job.ingested.key in dropped:
                self.report.cancelled.append(job.ingested.key)
            else:
                stored.append(job.ingested)
                change.after_commit(partial(self._drop_staging, job.candidate, is_linked))
        return True

    def _drop_staging(self, one: Candidate, is_linked: bool) -> None:
        """Unlink a staging file, at once if that frees little."""
        if is_linked or one.size < AT_ONCE_UNLINKED_BYTES:
            self._staging.drop(one.staging)
        else:
            self._committer.reclaim.superfluous.append(staging_path(one.staging))

    async def _adopt(self, job: Job) -> None:
        """Let a staging file become a segment, unless nearly all of it is stored already."""
        with self._segments.pins.hold() as held:
            rows = await self._new_rows(job, held)
            if job.outcome is not Outcome.DONE:
                self._note(job)
                return
            new_bytes = sum(row.stored for row in rows)
            if await self._is_better_copied(new_bytes, job.data_bytes):
                await self._copy(job, rows, held)
            else:
                await self._commit_adoption(job, rows, held)

    async def _new_rows(self, job: Job, held: set[ChunkId]) -> list[Row]:
        """Cut and hash the file; the chunks that the store lacks, at their offsets in the file."""
        if self._cutter is not None and (spans := await trio.to_thread.run_sync(job.plan_spans)):
            return await SpanRun(job, spans, self._cutter, self._committer.table, held).new_rows()
        if job.outcome is not Outcome.RUNNING:
            return []
        slab = Slab(CONTENT_WINDOW_BYTES, keep=False, step_bytes=_ADOPT_STEP_BYTES)
        seen: set[ChunkId] = set()
        rows: list[Row] = []
        steps = job.cut(slab)
        running = True
        while running:
            running = await trio.to_thread.run_sync(advance, steps)
            new = await self._committer.table.unknown(slab.fresh, held, seen)
            rows += [Row(one.chunk, one.offset, one.length, one.length) for one in new]
            slab.clear()
            job.stop = job.candidate.cancelled()
        if job.stop:
            job.outcome = Outcome.CANCELLED
        return rows

    async def _is_better_copied(self, new_bytes: int, data_bytes: int) -> bool:
        if new_bytes * _COPY_ONE_IN <= data_bytes and new_bytes <= PACK_BYTES:
            return True
        many = (data_bytes - new_bytes) * _COPY_ONE_IN > data_bytes
        return many and not await self._committer.reclaim.can_punch()

    async def _copy(self, job: Job, rows: Sequence[Row], held: set[ChunkId]) -> None:
        pack = self._pack
        rows = [row for row in rows if row.chunk not in pack.seen]
        if rows:
            changed = await trio.to_thread.run_sync(copy_ranges, self._disk, job.fd, rows, pack.writer)
            pack.seen.update(row.chunk for row in rows)
            pack.seen.difference_update(changed)
            if changed:
                job.outcome = Outcome.BUSY
                self._note(job)
                return
        pack.held |= held
        assert job.recipe_chunk is not None
        await pack.add([job.recipe_chunk])
        self._finished(job)
        if pack.payload_bytes >= PACK_BYTES or len(self._done) >= PACK_FILES:
            await self._commit_pack(between_files=True)

    async def _commit_adoption(self, job: Job, rows: Sequence[Row], held: set[ChunkId]) -> None:
        one, recipe = job.candidate, job.recipe_chunk
        assert recipe is not None
        inline = await self._committer.table.unknown([recipe], held, set())
        plan = Adoption(
            self._committer.take_number(),
            self._committer.now_ns(),
            staging_path(one.staging),
            one.size,
            rows,
            inline[0] if inline else None,
            sum(row.stored for row in rows) < job.data_bytes,
        )
        try:
            built = await trio.to_thread.run_sync(adopt, self._disk, job.fd, plan)
        except OSError as e:
            if isinstance(e, SyncFailed):
                self._staging.note_failed(one.staging, e)
            job.fail(e)
            if isinstance(e, FileNotFoundError):
                job.outcome = Outcome.CANCELLED  # the file was removed meanwhile
            self._note(job)
            return
        stored: list[Ingested] = []

        def fill(change: Change) -> bool:
            self._fill([job], stored, change, is_linked=True)
            return bool(stored)

        self._committer.commit(built, fill)
        self.report.stored.extend(stored)
        self._hand_over(held)

    def _note(self, job: Job) -> None:
        key = job.candidate.key
        if job.outcome is Outcome.BUSY:
            self.report.busy.append(key)
        elif job.outcome is Outcome.CANCELLED:
            self.report.cancelled.append(key)
        else:
            assert job.error is not None, "a job that failed says why"
            self.report.failed.append((key, job.error))


def advance(steps: Iterator[None]) -> bool:
    """Run to the next pause; False if that was the end."""
    return next(steps, _END) is not _END


_END = object()


def _cut_all(jobs: Sequence[Job], slab: Slab) -> Iterator[Job]:
    """Cut the files one after the other into the slab, with their recipes; yields the current
    job whenever the slab is full and, for tiny files, every now and then."""
    for count, job in enumerate(jobs, 1):
        for _ in job.cut(slab):
            yield job
        job.close()
        if job.recipe_chunk is not None:
            slab.fresh.append(job.recipe_chunk)
        if count % _FILES_PER_STEP == 0:
            yield job
