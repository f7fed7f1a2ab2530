"""Worker threads that go from one batch of chunks to the next without waiting for the index thread.

One rule: a thread gives its place back after a while, so that several requests share the threads; and
what a thread found is looked at in the index thread, never in the thread itself.

On a busy machine the index thread runs some milliseconds after it was woken; a thread that waited for it
behind each batch would be idle so long.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

from ckptfs.store.bad_chunks import Hashers, PlaceHasher, find_bad_places
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.places import Places
from ckptfs.store.segment_files import Bad

_TURN_S = 0.5
Job = TypeVar("Job")


@dataclass(frozen=True, slots=True)
class Hashed(Generic[Job]):
    """What became of a batch: the wrong ones of its `places`, or why that could not be found out."""

    job: Job
    places: Places
    bad: list[Bad]
    failure: CkptfsError | OSError | None = None


class HashingThreads(Generic[Job]):
    """Checks places for one request. Belongs to a task of the index thread, but for `_waiting`."""

    def __init__(
        self,
        disk: Disk,
        limiter: trio.CapacityLimiter,
        nursery: trio.Nursery,
        hashers: Hashers,
    ) -> None:
        """`limiter` bounds the threads of all requests together; the threads' tasks live in `nursery`."""
        self._disk = disk
        self._hashers = hashers
        self._limiter = limiter
        self._nursery = nursery
        self._waiting: deque[tuple[Job, Places]] = deque()
        self._threads = 0
        self._token = trio.lowlevel.current_trio_token()
        # The caller bounds how many batches are under way.
        self._send, self.results = trio.open_memory_channel[Hashed[Job]](math.inf)

    def add(self, job: Job, places: Places) -> None:
        """Have places checked; `results` gets a Hashed with `job`."""
        self._waiting.append((job, places))
        if self._threads < self._limiter.total_tokens:
            self._threads += 1
            self._nursery.start_soon(self._keep_one)

    def close(self) -> None:
        """Nothing is under way any more: `results` ends."""
        assert not self._waiting
        self._send.close()

    async def _keep_one(self) -> None:
        try:
            while self._waiting:
                await self._take_turn()
        except trio.Cancelled:
            self._waiting.clear()
            raise
        finally:
            self._threads -= 1

    async def _take_turn(self) -> None:
        with self._hashers.lent() as hasher:
            await trio.to_thread.run_sync(self._work, hasher, limiter=self._limiter, abandon_on_cancel=True)

    def _work(self, hasher: PlaceHasher | None) -> None:
        """In the worker thread: one batch after the other."""
        until = time.monotonic() + _TURN_S
        while self._waiting and time.monotonic() < until:
            try:
                job, places = self._waiting.popleft()
            except IndexError:
                return  # another thread was faster
            try:
                found = Hashed(job, places, find_bad_places(self._disk, places, hasher))
            except (CkptfsError, OSError) as e:
                found = Hashed(job, places, [], e)
            self._token.run_sync_soon(self._send.send_nowait, found)
