"""Which processes wrote to which directories since these were published.

One rule: a request waits for the facts of a process at most once and only for a moment. They are read by a
thread, because a /proc entry, a working directory or a name service may hang; whoever waits for that is
answered without.

What is noted is in memory only: what is published after a restart does not name who wrote before it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import trio

from ckptfs.fusefs.process_reader import leader_of, read_writer, start_of
from ckptfs.store.ids import TreeId
from ckptfs.store.writers import MOST_WRITERS, Writer, WritersRecord

PATIENCE_S = 0.05
# An id is given again only after all others were: within a second it is the same thread.
_TRUSTED_S = 1.0
_THREADS = 4
_MOST_WAITING = 64
_MOST_KNOWN = 4096
_MOST_DIRECTORIES = 1 << 16
_MOST_NOTED = 4 * MOST_WRITERS


class Requester(Protocol):
    """Who a request comes from, as the kernel says."""

    @property
    def pid(self) -> int:
        """The thread; 0 if it is none that we can see."""

    @property
    def uid(self) -> int:
        """Its user."""


@dataclass(slots=True, eq=False)
class Process:
    """A process that was met. `writer` says little until its facts were read."""

    writer: Writer
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class _Known:
    """A thread or process: when it `began`, and when that was last looked at."""

    process: Process
    began: int
    looked_s: float


Noted = dict[Process, None]


class Provenance:
    """What is noted of writers. Belongs to the trio thread.

    `_threads` and `_processes` are those that were met, by id, with the time at which they began: an id is
    used again. `_open` are the writers of inodes that are open for writing, `_closed` those of directories.
    """

    def __init__(
        self,
        is_written: Callable[[int], bool],
        parents_of: Callable[[int], Iterable[int]],
        *,
        is_on: bool,
        read: Callable[[int, int], Writer] = read_writer,
    ) -> None:
        """`is_written` tells whether an inode is open for writing, `parents_of` which directories have it,
        `read` the facts of a process and user, in a thread."""
        self._is_on = is_on
        self._is_written = is_written
        self._parents_of = parents_of
        self._read = read
        self._threads: OrderedDict[int, _Known] = OrderedDict()
        self._processes: OrderedDict[int, _Known] = OrderedDict()
        self._open: dict[int, Noted] = {}
        self._closed: dict[int, Noted] = {}
        self._ask, self._asked = trio.open_memory_channel[tuple[Process, int]](_MOST_WAITING)
        self._hangs = False

    def switch(self, *, is_on: bool) -> None:
        """Note writers from now on, or no more; then those that are noted are forgotten."""
        self._is_on = is_on
        if not is_on:
            self._open.clear()
            self._closed.clear()

    async def run(self) -> None:
        """Read what is asked for, for ever; a thread that hangs is left behind when this is cancelled."""
        limiter = trio.CapacityLimiter(_THREADS)
        async with trio.open_nursery() as nursery:
            async for process, uid in self._asked:
                nursery.start_soon(self._read_one, process, uid, limiter)

    async def met(self, requester: Requester) -> Process | None:
        """The process that opens a file for writing; None if nothing is to be noted. The kernel keeps it
        waiting meanwhile, so that it is still there."""
        thread = requester.pid
        if not self._is_on or not thread:
            return None
        known, now_s = self._threads.get(thread), time.monotonic()
        if known is not None and now_s - known.looked_s < _TRUSTED_S:
            return known.process
        began = start_of(thread)
        if began is None:
            return None
        if known is not None and known.began == began:
            known.looked_s = now_s
            return known.process
        process = self._process_of(thread, requester.uid, now_s)
        _keep(self._threads, thread, _Known(process, began, now_s))
        if not process.done.is_set() and not self._hangs:
            with trio.move_on_after(PATIENCE_S) as waited:
                await process.done.wait()
            self._hangs = waited.cancelled_caught
        return process

    def opened(self, ino: int, process: Process | None) -> None:
        """A file is open for writing, by this process."""
        if process is not None:
            _note(self._open.setdefault(ino, {}), process)

    def released(self, ino: int) -> None:
        """Somebody has closed the file. With its last writer it becomes a matter of its directories."""
        if ino not in self._open or self._is_written(ino):
            return
        noted = self._open.pop(ino)
        for directory in self._parents_of(ino):
            if directory in self._closed or len(self._closed) < _MOST_DIRECTORIES:
                for process in noted:
                    _note(self._closed.setdefault(directory, {}), process)

    def noted(self, directories: Iterable[int], inodes: Iterable[int] = ()) -> Noted:
        """Who wrote to these directories since they were published, and who has these inodes open."""
        of_all = [self._closed.get(one, {}) for one in directories]
        of_all += [self._open.get(one, {}) for one in inodes]
        return dict.fromkeys(process for of in of_all for process in of)

    def directories(self) -> list[int]:
        """Those of which writers are noted."""
        return list(self._closed)

    def published(self, directory: int) -> None:
        """What was written to it is in a version, or it is gone."""
        self._closed.pop(directory, None)

    def _process_of(self, thread: int, uid: int, now_s: float) -> Process:
        pid = leader_of(thread) or thread
        began = start_of(pid) or 0
        known = self._processes.get(pid)
        if known is not None and known.began == began and known.process.writer.uid == uid:
            return known.process
        process = Process(Writer(pid=pid, uid=uid))
        _keep(self._processes, pid, _Known(process, began, now_s))
        try:
            self._ask.send_nowait((process, uid))
        except trio.WouldBlock:
            process.done.set()
        return process

    async def _read_one(self, process: Process, uid: int, limiter: trio.CapacityLimiter) -> None:
        read = partial(self._read, process.writer.pid, uid)
        try:
            process.writer = await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=limiter)
        except OSError:
            pass
        process.done.set()
        self._hangs = False


def writers_record(number: int, tree: TreeId, noted: Noted) -> WritersRecord:
    """The record of those who wrote a version: as many as a record takes, and how many there are more."""
    writers = tuple(dict.fromkeys(process.writer for process in noted))
    return WritersRecord(number, tree, writers[:MOST_WRITERS], max(0, len(writers) - MOST_WRITERS))


def _keep(known: OrderedDict[int, _Known], key: int, value: _Known) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MOST_KNOWN:
        known.popitem(last=False)


def _note(noted: Noted, process: Process) -> None:
    if len(noted) < _MOST_NOTED:
        noted[process] = None
