"""The processes that cut large files, one for each core: started when first needed, gone with the mount.

One rule: the daemon never depends on one of them. Where one dies, or cannot read a file, the span is cut here
from bytes that are read and not mapped, so that a failing disk is an error of that file and nothing more.

They are processes and not threads because a thread that runs only when nothing else wants the core, and
then stops with the interpreter's lock held, would stop every request of the mount with it. Over a SEQPACKET
socket goes one request (a span, with the file) and one reply (its cuts) at a time.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from ckptfs.daemon.cut_worker import MODES, REPLY, REQUEST
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Unavailable
from ckptfs.store.ids import DIGEST_BYTES
from ckptfs.store.spans import Cuts, Span, cut_span

log = logging.getLogger(__name__)
MOST_WORKERS = 4
HURRIED_AFTER_S = 1.0
GIVEN_UP_AFTER_S = 60.0
_VAIN_STARTS = 3
_POLL_S = 0.01
_END_S = 5.0
_REPLY_BYTES = 1 << 20
_LENGTH_BYTES = array("I").itemsize


class CutWorkers:
    """A SpanCutter. Belongs to the index thread; a worker belongs to the one task that took it.

    Workers run when nothing else wants the core (SCHED_IDLE, for root: nobody else may take that back),
    but for a span that takes longer than `HURRIED_AFTER_S` so, and inside of `hurried`.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.width = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._limiter = trio.CapacityLimiter(self.width)
        self._free: list[Worker] = []
        self._all: list[Worker] = []
        self._starting: list[Worker] = []
        self._killed: list[Worker] = []
        self._hurries = 0
        self._vain_starts = 0

    async def cut(self, fd: int, span: Span) -> Cuts:
        """As SpanCutter."""
        async with self._limiter:
            worker, cuts = self._taken(), None
            if worker is not None:
                try:
                    cuts = await worker.cut(fd, span)
                finally:
                    self._give_back(worker)
        return cuts if cuts is not None else await trio.to_thread.run_sync(self._cut_here, fd, span)

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

    async def prepare(self) -> None:
        """Start all workers, and wait until they are ready or cannot be had."""
        while len(self._free) < self.width and self._vain_starts < _VAIN_STARTS:
            if (worker := self._taken()) is not None:
                self._free.append(worker)
            await trio.sleep(_POLL_S)

    def _taken(self) -> Worker | None:
        """A worker; None while there is none that waits, and one more is then started. Nobody waits for its
        start: what is stored first is what a disk that is nearly full waits for."""
        for worker in [one for one in self._starting if one.is_ready() or one.has_ended()]:
            self._starting.remove(worker)
            if worker.is_waiting:
                self._free.append(worker)
                continue
            self._kill(worker)
            self._vain_starts += 1
            if self._vain_starts == _VAIN_STARTS:
                log.error("processes to cut files in cannot be had; ingest goes on without, slower")
        if len(self._all) < self.width and self._vain_starts < _VAIN_STARTS:
            self._start()
        return self._free.pop() if self._free else None

    def _start(self) -> None:
        self._killed = [worker for worker in self._killed if not worker.has_ended()]
        try:
            worker = Worker()
        except OSError as e:
            log.warning("no process to cut files in can be started: %s", e)
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
            worker.set_idle(not self._hurries)
            self._free.append(worker)
        else:
            # Left in the middle of a span, it would answer the next with the cuts of this one.
            self._kill(worker)

    def _set_priorities(self) -> None:
        for worker in self._all:
            worker.set_idle(not self._hurries)

    def _cut_here(self, fd: int, span: Span) -> Cuts:
        buffer = memoryview(bytearray(span.limit - span.offset))
        if self._disk.read_into(fd, buffer, span.offset) != len(buffer):
            raise Unavailable("the file became shorter while it was read")
        return cut_span(buffer, span)


class Worker:
    """One process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # Never looked for below the working directory, which may lie in the mount.
                    [sys.executable, "-P", "-m", "ckptfs.daemon.cut_worker"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._socket = ours
        self._is_idle = False
        self._is_waiting = False

    @property
    def is_waiting(self) -> bool:
        """Whether it has answered what it was asked."""
        return self._is_waiting

    def is_ready(self) -> bool:
        """Whether one that was started has said that it is ready."""
        try:
            self._is_waiting = bool(self._socket.recv(_REPLY_BYTES))
        except OSError:
            pass  # not yet, or it is gone
        return self._is_waiting

    async def cut(self, fd: int, span: Span) -> Cuts | None:
        """The cuts of a span; None if this process died or cannot read it."""
        self._is_waiting = False
        request = REQUEST.pack(span.offset, span.end, span.region_end, MODES.index(span.mode))
        try:
            socket.send_fds(self._socket, [request], [fd])
            reply = await self._reply()
        except OSError:
            reply = b""
        if not reply:
            log.warning("a process that cuts files has died or is stuck; its span is cut here")
            return None
        self._is_waiting = True
        return _decoded(reply, span)

    async def _reply(self) -> bytes:
        """Nothing, if it has died or takes far too long."""
        for patience_s in (HURRIED_AFTER_S, GIVEN_UP_AFTER_S):
            with trio.move_on_after(patience_s):
                await trio.lowlevel.wait_readable(self._socket)
                return self._socket.recv(_REPLY_BYTES)
            self.set_idle(False)
        return b""

    def set_idle(self, is_idle: bool) -> None:
        """Whether it runs only when nothing else wants the core; always False where that is for ever."""
        if is_idle == self._is_idle or os.geteuid() != 0:
            return
        try:
            policy = os.SCHED_IDLE if is_idle else os.SCHED_OTHER
            os.sched_setscheduler(self._process.pid, policy, os.sched_param(0))
            self._is_idle = is_idle
        except OSError:
            pass  # It is gone, or may not be told; either way it is only about speed.

    def kill(self) -> None:
        """Whatever it does. It is not waited for: on a busy machine that may take its time."""
        self.set_idle(False)
        self._socket.close()
        self._process.kill()

    def has_ended(self) -> bool:
        """Whether a killed one is gone."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Until a killed one is gone, for a while."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            log.warning("a process that cuts files does not end")


def _decoded(reply: bytes, span: Span) -> Cuts | None:
    """None: it could not read the file, or it is of another version of the program."""
    (count,) = REPLY.unpack_from(reply)
    ids_at = REPLY.size + count * _LENGTH_BYTES
    if not count or len(reply) != ids_at + count * DIGEST_BYTES:
        return None
    cuts = Cuts(span.offset, array("I", reply[REPLY.size : ids_at]), reply[ids_at:])
    return cuts if span.end <= span.offset + sum(cuts.lengths) <= span.limit else None
