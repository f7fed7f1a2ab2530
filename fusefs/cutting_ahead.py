"""Which closed files are cut before a version is made of them, and when.

One rule: a job that saves never waits for it. It is done when nothing else wants a core, of bytes that are
still in memory, one file at a time; and it ends when a version is made, which takes what there is.

So a save of several files is cut while the job still writes the next of them, and who asks for a version
waits for the last. A file is left alone for a moment after its close, and for good if it was cut for nobody.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import trio

from ckptfs.fusefs.files import Files
from ckptfs.fusefs.storing import Storing
from ckptfs.store.cut_ahead import Ahead, CutsAhead
from ckptfs.store.errors import CkptfsError
from ckptfs.store.spans import LEAST_BYTES

log = logging.getLogger(__name__)
AFTER_CLOSE_S = 0.1
_MOST_FILES = 1024


class CuttingAhead:
    """Belongs to the trio thread. Does nothing while `run` does not run.

    `_files` are those that something is made for, as of their last close; `_wasted` those for which it was
    made in vain.
    """

    def __init__(
        self, files: Files, storing: Storing, cuts: CutsAhead | None, is_publishing: Callable[[], bool]
    ) -> None:
        self._open = files
        self._storing = storing
        self._cuts = cuts
        self._is_publishing = is_publishing
        self._files: dict[int, Ahead] = {}
        self._wasted: set[int] = set()
        self._waiting: deque[tuple[float, int, Ahead]] = deque()
        self._wake = trio.Event()
        self._is_running = False

    def closed(self, ino: int) -> None:
        """A file was closed that somebody had open for writing: what was made of it before is over."""
        before = self._files.pop(ino, None)
        if before is not None:
            before.is_over = True
            if before.is_wasted and len(self._wasted) < _MOST_FILES:
                self._wasted.add(ino)
        open_file = self._open.open_files.get(ino)
        is_long = open_file is not None and open_file.growth.end >= LEAST_BYTES
        if not self._is_running or not is_long or ino in self._wasted or len(self._files) >= _MOST_FILES:
            return
        ahead = self._files[ino] = Ahead()
        self._waiting.append((time.monotonic() + AFTER_CLOSE_S, ino, ahead))
        self._wake.set()

    def gone(self, ino: int) -> None:
        """The inode is gone."""
        before = self._files.pop(ino, None)
        if before is not None:
            before.is_over = True
        self._wasted.discard(ino)

    async def run(self) -> None:
        """Cut what was closed, until cancelled."""
        if self._cuts is None:
            return
        self._is_running = True
        try:
            while True:
                while not self._waiting:
                    self._wake = trio.Event()
                    await self._wake.wait()
                due_s, ino, ahead = self._waiting.popleft()
                await trio.sleep(max(0.0, due_s - time.monotonic()))
                while self._is_publishing() and not ahead.is_over:
                    await trio.sleep(AFTER_CLOSE_S)
                await self._cut(self._cuts, ino, ahead)
                if not ahead.made and self._files.get(ino) is ahead:
                    del self._files[ino]
                if len(self._files) > _MOST_FILES // 2:
                    self._let_go()
        finally:
            self._is_running = False
            self._waiting.clear()

    def _let_go(self) -> None:
        """Of what is stored nothing more is needed."""
        for ino, ahead in list(self._files.items()):
            if ahead.made and not self._storing.waits(ino):
                ahead.is_over = True
                del self._files[ino]

    async def _cut(self, cuts: CutsAhead, ino: int, ahead: Ahead) -> None:
        def is_cancelled() -> bool:
            return ahead.is_over or self._open.is_busy(ino) or self._is_publishing()

        if is_cancelled():
            return
        try:
            candidate = self._storing.candidate_ahead(ino, is_cancelled)
            if candidate is not None:
                await cuts.cut_ahead(candidate, ahead)
        except (CkptfsError, OSError) as e:
            log.debug("inode %d is not cut ahead: %s", ino, e)
