"""Cutting one large file in spans, several at a time, and looking its chunks up in order.

One rule: chunks are looked up in the order of the file, whichever span is cut first; so a file becomes the
same rows whatever the speed of those who cut.

Runs in the index thread. `_cuts` and `_is_cut`, by the number of a bunch of spans, are filled by the lanes
and read by `new_rows`, `_next` is shared by the lanes; all are tasks of one nursery, which ends with the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from ckptfs.store.chunk_table import ChunkTable
from ckptfs.store.cutting import Pieces
from ckptfs.store.errors import CkptfsError
from ckptfs.store.ids import DIGEST_BYTES, ChunkId
from ckptfs.store.ingest_job import Job, Outcome
from ckptfs.store.segment_format import Row
from ckptfs.store.spans import Cuts, Joiner, Span, SpanCutter, bunches_of

_CANCELLED_WITHIN_S = 0.02


class SpanRun:
    """One file's way through a SpanCutter. Used once."""

    def __init__(
        self, job: Job, spans: list[Span], cutter: SpanCutter, table: ChunkTable, held: set[ChunkId]
    ) -> None:
        self._job, self._cutter, self._table, self._held = job, cutter, table, held
        self._bunches = bunches_of(spans)
        self._next = 0
        self._cuts: list[list[Cuts]] = [[] for _ in self._bunches]
        self._is_cut = [trio.Event() for _ in self._bunches]
        self._joiner, self._pieces = Joiner(), Pieces()
        self._seen: set[ChunkId] = set()
        self._rows: list[Row] = []
        self._unreadable: Exception | None = None
        self._failure: Exception | None = None

    async def new_rows(self) -> list[Row]:
        """The chunks that the store lacks, at their offsets in the file; sets the job's outcome.

        Raises what looking them up raises."""
        async with trio.open_nursery() as nursery:
            for _ in range(min(self._cutter.width, len(self._bunches))):
                nursery.start_soon(self._cut_next, nursery.cancel_scope)
            nursery.start_soon(self._watch, nursery.cancel_scope)
            try:
                await self._join_all(nursery.cancel_scope)
            except (OSError, CkptfsError) as e:
                self._failure = e
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        if self._unreadable is not None:
            self._job.end_with(self._unreadable)
        elif self._job.stop:
            self._job.outcome = Outcome.CANCELLED
        else:
            await trio.to_thread.run_sync(self._job.finish_spans, self._pieces)
        return self._rows

    async def _cut_next(self, run: trio.CancelScope) -> None:
        """One lane: takes the next bunch as long as there is one."""
        while self._next < len(self._bunches):
            number, self._next = self._next, self._next + 1
            self._cuts[number] = await self._cut(self._bunches[number], run)
            self._is_cut[number].set()

    async def _cut(self, spans: Sequence[Span], run: trio.CancelScope) -> list[Cuts]:
        try:
            return await self._cutter.cut(self._job.fd, spans)
        except (OSError, CkptfsError) as e:
            self._unreadable = self._unreadable or e
            run.cancel()
            await trio.sleep_forever()
            raise AssertionError("a task of a cancelled run does not go on") from None

    async def _watch(self, run: trio.CancelScope) -> None:
        """A writer waits for a file until it is not read any more."""
        while not self._job.candidate.cancelled():
            await trio.sleep(_CANCELLED_WITHIN_S)
        self._job.stop = True
        run.cancel()

    async def _join_all(self, run: trio.CancelScope) -> None:
        for number, spans in enumerate(self._bunches):
            await self._is_cut[number].wait()
            cut, self._cuts[number] = self._cuts[number], []
            found = [await self._join(*pair, run) for pair in zip(spans, cut, strict=True)]
            await self._take(Cuts.joined([one for parts in found for one in parts]))

    async def _join(self, span: Span, cuts: Cuts, run: trio.CancelScope) -> list[Cuts]:
        """The chunks of a span, as they are in the file."""
        found: list[Cuts] = []
        while True:
            following, gap = self._joiner.add(span, cuts)
            if gap is None:
                return [*found, following]
            (bridge,) = await self._cut([gap], run)
            found.append(self._joiner.bridge(bridge, span, cuts))

    async def _take(self, cuts: Cuts) -> None:
        self._pieces.extend(cuts.lengths, cuts.ids)
        ids, at, rows = cuts.ids, cuts.offset, []
        for number, length in enumerate(cuts.lengths):
            chunk = ChunkId(ids[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)])
            rows.append(Row(chunk, at, length, length))
            at += length
        self._rows += await self._table.unknown(rows, self._held, self._seen)
