"""Files that are cut before anybody stores them, while nothing else wants the core.

One rule: what is cut ahead is taken only for the bytes that it was cut from. So it goes with the staging file
as that was (its size and both its times; ctime nobody can set), and is over as soon as whoever had it made
says that somebody has closed the file once more.

Both are needed: a mapping may change bytes of a tmpfs and no time, and whoever writes within a tick of the
kernel's clock changes none either. But each of them has the file open for writing, and closes it.

It lives in memory only, and is no more than chunk ids and lengths: 36 bytes for each chunk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from ckptfs.store.disk import Disk
from ckptfs.store.ids import DIGEST_BYTES
from ckptfs.store.ingest_job import Candidate, Job, Outcome
from ckptfs.store.segments import Segments
from ckptfs.store.spans import Cuts, Span, SpanCutter, bunches_of

MOST_BYTES = 16 << 20
"""What is known may take so much memory: that is 116 GiB of tensors."""
_CHUNK_BYTES = DIGEST_BYTES + 4
_BUSY_AFTER_S = 0.5
"""Cores that leave so little time for 16 MiB are not idle."""
Stamp = tuple[int, int, int]


class IdleCutter(SpanCutter, Protocol):
    """A SpanCutter that knows whether it is in the way of others."""

    async def cut_idly(self, fd: int, spans: Sequence[Span]) -> list[Cuts] | None:
        """As `cut`, but only while nothing else wants the core; None where that cannot be."""


@dataclass(slots=True, eq=False)
class Ahead:
    """What is made for one file as it was at one close. `is_over`: it may have been changed since; set by
    whoever asked, and never taken back. `made` and `taken` count bunches of spans."""

    is_over: bool = False
    made: int = 0
    taken: int = 0

    @property
    def is_wasted(self) -> bool:
        """Whether it was made for nobody, so far."""
        return self.made > 0 and not self.taken


@dataclass(slots=True)
class _Known:
    """The cuts of a staging file, by where a bunch of spans begins."""

    ahead: Ahead
    stamp: Stamp
    bunches: dict[int, tuple[list[Span], list[Cuts]]] = field(default_factory=dict)
    weight_bytes: int = 0


class CutsAhead:
    """A SpanCutter that has some answers ready. Belongs to the index thread."""

    def __init__(self, disk: Disk, segments: Segments, cutter: IdleCutter) -> None:
        self._disk = disk
        self._segments = segments
        self._cutter = cutter
        self._known: dict[int, _Known] = {}
        self._weight_bytes = 0

    @property
    def width(self) -> int:
        """As SpanCutter."""
        return self._cutter.width

    async def cut(self, fd: int, spans: Sequence[Span]) -> list[Cuts]:
        """As SpanCutter."""
        cuts = self._take(fd, spans)
        return cuts if cuts is not None else await self._cutter.cut(fd, spans)

    async def cut_ahead(self, candidate: Candidate, ahead: Ahead) -> None:
        """Cut a closed staging file, as far as it is in memory and cores are idle, until `candidate` is
        cancelled. What cannot be read is left to whoever stores it, and told to him."""
        job = Job(candidate, self._disk, self._segments)
        try:
            await trio.to_thread.run_sync(job.open)
            if job.outcome is Outcome.RUNNING and job.is_whole:
                await self._cut_all(job, ahead)
        finally:
            job.close()

    async def _cut_all(self, job: Job, ahead: Ahead) -> None:
        found = self._disk.fstat(job.fd)
        number, stamp = found.st_ino, _stamp_of(found)
        for spans in bunches_of(await trio.to_thread.run_sync(job.plan_spans)):
            # What was evicted is not to be read twice from a slow disk.
            if not await trio.to_thread.run_sync(self._disk.is_in_memory, job.fd, stamp[0]):
                return
            if job.candidate.cancelled() or not self._has_room():
                return
            began_s = trio.current_time()
            cuts = await self._cutter.cut_idly(job.fd, spans)
            if cuts is None or ahead.is_over or _stamp_of(self._disk.fstat(job.fd)) != stamp:
                return
            self._keep(number, stamp, ahead, spans, cuts)
            if trio.current_time() - began_s > _BUSY_AFTER_S:
                return

    def _has_room(self) -> bool:
        if self._weight_bytes >= MOST_BYTES:
            for number in [number for number, one in self._known.items() if one.ahead.is_over]:
                self._drop(number)
        return self._weight_bytes < MOST_BYTES

    def _keep(self, number: int, stamp: Stamp, ahead: Ahead, spans: list[Span], cuts: list[Cuts]) -> None:
        known = self._known.get(number)
        if known is None or known.ahead is not ahead:
            self._drop(number)
            known = self._known[number] = _Known(ahead, stamp)
        known.bunches[spans[0].offset] = spans, cuts
        self._weigh(known, _weight_bytes(cuts))
        ahead.made += 1

    def _take(self, fd: int, spans: Sequence[Span]) -> list[Cuts] | None:
        """What is known of a bunch of spans, which is then known no more."""
        if not self._known:
            return None
        found = self._disk.fstat(fd)
        known = self._known.get(found.st_ino)
        if known is None:
            return None
        if known.ahead.is_over or known.stamp != _stamp_of(found):
            self._drop(found.st_ino)
            return None
        planned, cuts = known.bunches.pop(spans[0].offset, ([], []))
        self._weigh(known, -_weight_bytes(cuts))
        if not known.bunches:
            self._drop(found.st_ino)
        if planned != list(spans):
            return None
        known.ahead.taken += 1
        return cuts

    def _weigh(self, known: _Known, weight_bytes: int) -> None:
        known.weight_bytes += weight_bytes
        self._weight_bytes += weight_bytes

    def _drop(self, number: int) -> None:
        known = self._known.pop(number, None)
        if known is not None:
            self._weight_bytes -= known.weight_bytes


def _weight_bytes(cuts: Sequence[Cuts]) -> int:
    return _CHUNK_BYTES * sum(len(one.lengths) for one in cuts)


def _stamp_of(found: os.stat_result) -> Stamp:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns
