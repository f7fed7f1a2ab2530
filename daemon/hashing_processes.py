"""The processes that cut and hash files, one for each core: started when first needed, gone with the mount.

One rule: the daemon never depends on one of them. Where one dies, or cannot read a file, its part is done
here from bytes that are read, so that a failing disk is an error of that file and nothing more.

They are processes and not threads because a thread that runs only when nothing else wants the core, and
then stops with the interpreter's lock held, would stop every request of the mount with it; and threads that
map pages, or take that lock after each chunk, wait for each other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import trio

from ckptfs.daemon.hashing_worker import Worker
from ckptfs.daemon.idling import may_be_hurried
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Unavailable
from ckptfs.store.spans import Cuts, Span, cut_span

log = logging.getLogger(__name__)
MOST_WORKERS = 4
_VAIN_STARTS = 3
_POLL_S = 0.01


class HashingProcesses:
    """An IdleCutter. Belongs to the index thread; a worker belongs to the one task that took it.

    Workers run when nothing else wants the core (idling.py, where we may take that back), but for what takes
    longer than `HURRIED_AFTER_S` so, inside of `hurried`, and while they are lent.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.width = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._limiter = trio.CapacityLimiter(self.width)
        self._free: list[Worker] = []
        self._all: list[Worker] = []
        self._starting: list[Worker] = []
        self._killed: list[Worker] = []
        self._lent: set[Worker] = set()
        self._hurries = 0
        self._vain_starts = 0

    async def cut(self, fd: int, spans: Sequence[Span]) -> list[Cuts]:
        """As SpanCutter."""
        async with self._limiter:
            # Not idle where it is given back: readers borrow one for each few MiB, and a change costs 0.1 ms.
            cuts = await self._cut_there(fd, spans, is_idle=not self._hurries)
        return cuts if cuts is not None else await trio.to_thread.run_sync(self._cut_here, fd, spans)

    async def cut_idly(self, fd: int, spans: Sequence[Span]) -> list[Cuts] | None:
        """As IdleCutter."""
        if self._hurries or not may_be_hurried():
            return None
        async with self._limiter:
            return await self._cut_there(fd, spans, is_idle=True)

    @contextmanager
    def lent(self) -> Iterator[Worker | None]:
        """As Hashers in store/bad_chunks.py. The worker is as important as everybody else meanwhile."""
        worker = self._taken() if len(self._lent) < self.width else None
        if worker is None:
            yield None
            return
        self._lent.add(worker)
        worker.set_idle(False)
        try:
            yield worker
        except trio.Cancelled:
            # The thread may use it still, and finds out that it has ended.
            self._lent.remove(worker)
            self._kill(worker)
            raise
        except BaseException:
            self._take_back(worker)
            raise
        self._take_back(worker)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Somebody waits for what is stored: the workers are as important as everybody else."""
        self._hurries += 1
        self._set_priorities()
        try:
            yield
        finally:
            self._hurries -= 1
            self._set_priorities()

    def close(self) -> None:
        """End all workers, and wait for their end."""
        for worker in self._all:
            worker.kill()
        for worker in [*self._all, *self._killed]:
            worker.wait()
        self._all, self._free, self._starting, self._killed = [], [], [], []
        self._lent = set()

    async def prepare(self) -> None:
        """Start all workers, and wait until they are ready or cannot be had."""
        while len(self._free) < self.width and self._vain_starts < _VAIN_STARTS:
            if (worker := self._taken()) is not None:
                self._free.append(worker)
            await trio.sleep(_POLL_S)

    async def _cut_there(self, fd: int, spans: Sequence[Span], *, is_idle: bool) -> list[Cuts] | None:
        worker = self._taken()
        if worker is None:
            return None
        worker.set_idle(is_idle)
        try:
            return await worker.cut(fd, spans)
        finally:
            self._give_back(worker)

    def _taken(self) -> Worker | None:
        """A worker; None while there is none that waits, and one more is then started. Nobody waits for its
        start: what is stored first is what a disk that is nearly full waits for."""
        for worker in [w for w in self._starting if w.is_ready() or w.has_ended() or w.is_overdue()]:
            self._starting.remove(worker)
            if worker.is_waiting:
                self._free.append(worker)
                continue
            self._kill(worker)
            self._vain_starts += 1
            if self._vain_starts == _VAIN_STARTS:
                log.error("processes to hash files in cannot be had; ingest and verify go on without, slower")
        if len(self._all) - len(self._lent) < self.width and self._vain_starts < _VAIN_STARTS:
            self._start()
        return self._free.pop() if self._free else None

    def _start(self) -> None:
        self._killed = [worker for worker in self._killed if not worker.has_ended()]
        try:
            worker = Worker()
        except OSError as e:
            log.warning("no process to hash files in can be started: %s", e)
            self._vain_starts += 1
            return
        self._all.append(worker)
        self._starting.append(worker)

    def _kill(self, worker: Worker) -> None:
        worker.kill()
        self._all.remove(worker)
        self._killed.append(worker)

    def _give_back(self, worker: Worker) -> None:
        if worker.is_waiting:
            self._vain_starts = 0
            self._free.append(worker)
        else:
            # Left in the middle of a request, it would answer the next with this one's answer.
            self._kill(worker)

    def _take_back(self, worker: Worker) -> None:
        self._lent.remove(worker)
        self._give_back(worker)

    def _set_priorities(self) -> None:
        for worker in self._all:
            worker.set_idle(not self._hurries and worker not in self._lent)

    def _cut_here(self, fd: int, spans: Sequence[Span]) -> list[Cuts]:
        return [cut_span(self._read(fd, span), span) for span in spans]

    def _read(self, fd: int, span: Span) -> memoryview:
        buffer = memoryview(bytearray(span.limit - span.offset))
        if self._disk.read_into(fd, buffer, span.offset) != len(buffer):
            raise Unavailable("the file became shorter while it was read")
        return buffer
