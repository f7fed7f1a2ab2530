"""Room: history gives way before a writer is refused.

One rule: `min_free` is kept free as long as there is history that may go; what may go, and in which
order, is for retention to say.

Source: ARCHITECTURE.md, section 1, promise 6.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import trio

from ckptfs.daemon.config import Config
from ckptfs.store.disk import Disk, Space
from ckptfs.store.errors import CkptfsError
from ckptfs.store.histories import Histories
from ckptfs.store.index import Index
from ckptfs.store.retention import default_min_free
from ckptfs.store.sweep import Sweeper, listed

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
_NEXT_SAVE = 1.05
_WANTED_FOR_S = 0.1
_SURVEY_EVERY_S = 2.0
_SURVEY_SHARE = 30
_VAIN_PAUSE_S = 5.0
_PATIENCE_S = 5.0
_POLL_S = 0.01
_MARGIN_BYTES = 64 << 20


class SpaceKeeper:
    """Watches the room on the disk below the store. Belongs to the trio thread."""

    def __init__(
        self,
        disk: Disk,
        index: Index,
        histories: Histories,
        sweeper: Sweeper,
        config: Config,
        give_up_pins: Callable[[], int],
        last_save_bytes: Callable[[], int],
        is_publishing: Callable[[], bool],
        publish_soon: Callable[[], bool],
    ) -> None:
        self._disk = disk
        self._index = index
        self._give_up_pins = give_up_pins
        self._last_save_bytes = last_save_bytes
        self._is_publishing = is_publishing
        self._publish_soon = publish_soon
        self._histories = histories
        self._sweeper = sweeper
        self._config = config
        self._vain_until = 0.0
        self._impatient_until = 0.0
        self._vain_state = (-1, -1)
        self._warned = False
        self._surveyed: tuple[int, int] = (-1, -1)
        self._survey_due = 0.0
        self._wanted_bytes = 0
        self._wanted_until = 0.0

    def space(self) -> Space:
        """What statfs shows: history that would give way counts as free."""
        real = self._disk.space()
        extra = min(self._sweeper.reclaimable_bytes, real.total - real.free)
        return replace(real, free=real.free + extra, available=real.available + extra)

    def configure(self, config: Config) -> None:
        """Another configuration, from now on."""
        self._config = config

    def min_free_bytes(self) -> int:
        """The room that is to be kept free now: what is configured or suits the last saves, and never so
        little that the disk counts as full."""
        total = self._disk.space().total
        configured = self._config.min_free_bytes(total)
        wanted = default_min_free(self._last_save_bytes(), total) if configured is None else configured
        return max(wanted, self._margin_bytes())

    async def make_room(self, wanted_bytes: int) -> bool:
        """The disk is full for a writer: True if a second try makes sense."""
        return await self._free(wanted_bytes + self._margin_bytes()) > 0

    def lacks_room_for_a_save(self) -> bool:
        """Whether there is too little for one as large as the last.

        Where the kernel writes by itself (passthrough) nobody is asked when the disk gets full.
        """
        if time.monotonic() >= self._wanted_until:
            # The save itself, and what index, journal and trees need beside it.
            saved = self._last_save_bytes()
            beside = min(_MARGIN_BYTES, self._disk.space().total // 16) if saved else 0
            self._wanted_bytes = max(self.min_free_bytes(), int(_NEXT_SAVE * saved) + beside)
            self._wanted_until = time.monotonic() + _WANTED_FOR_S
        return self._disk.space().available < self._wanted_bytes

    async def make_room_for_a_save(self) -> None:
        """Let history give way before one begins, if it lacks room."""
        if self.lacks_room_for_a_save():
            await self._free(self._wanted_bytes)
            await self._wait_for_publish(self._wanted_bytes)

    async def run(self) -> None:
        """Keep `min_free` free, for ever; cancelled at shutdown."""
        while True:
            await trio.sleep(LOOK_EVERY_S)
            if self._disk.space().available < (wanted := self.min_free_bytes()):
                await self._free(wanted)
            elif time.monotonic() >= self._survey_due:
                await self._survey()

    async def _free(self, free_bytes: int) -> int:
        """Bytes that were gained. Versions are not looked through again shortly after that was in
        vain, unless some have come or gone since."""
        before = self._disk.space().available
        for step in (self._commit_removals, self._forget_versions, self._let_pins_go):
            if self._disk.space().available >= free_bytes:
                break
            if step == self._forget_versions and self._is_in_vain():
                continue
            if step == self._let_pins_go and self._disk.space().available >= self._margin_bytes():
                break  # what is free is less than what is wished for; nobody is refused yet
            try:
                await step(free_bytes)
            except (CkptfsError, OSError) as e:
                log.error("not all room could be made: %s", e)
        gained = self._disk.space().available - before
        if gained > 0:
            log.info("gave %d bytes back to the disk", gained)
            self._warned = False
            return gained
        self._vain_until = time.monotonic() + _VAIN_PAUSE_S
        self._vain_state = listed(self._histories)
        if not self._warned:
            log.warning("the disk is nearly full, and there is no history left that may go")
            self._warned = True
        return 0

    async def _wait_for_publish(self, free_bytes: int) -> None:
        """What is not in a version yet is published now and waited for, because that version lets an
        older one go that must stay until then: without this a save that begins in between finds a disk
        that is full of what may go a moment later."""
        until = time.monotonic() + _PATIENCE_S
        state, is_hastened = listed(self._histories), False
        while self._disk.space().available < free_bytes and time.monotonic() >= self._impatient_until:
            if time.monotonic() >= until:
                self._impatient_until = until + _VAIN_PAUSE_S
            elif listed(self._histories) != state:
                state = listed(self._histories)
                await self._free(free_bytes)
            elif not self._is_publishing():
                if is_hastened or not self._publish_soon():
                    break
                is_hastened = True
            await trio.sleep(_POLL_S)

    async def _commit_removals(self, _: int) -> None:
        """What was removed since the last commit gives its room back only with the next."""
        if self._index.pending:
            self._index.commit()

    async def _forget_versions(self, free_bytes: int) -> None:
        await self._sweeper.make_room(free_bytes)

    async def _let_pins_go(self, _: int) -> None:
        """The last resort: files that were removed before they were in a version. What was overwritten in a
        unit that has no version yet stays: it may be all there is of its only good save."""
        if pins := self._give_up_pins():
            log.warning("the disk is full: %d removed files were let go without a version", pins)
            self._index.commit()

    def _margin_bytes(self) -> int:
        """Less than this is a full disk."""
        return min(_MARGIN_BYTES, self._disk.space().total // 64)

    def _is_in_vain(self) -> bool:
        return time.monotonic() < self._vain_until and listed(self._histories) == self._vain_state

    async def _survey(self) -> None:
        """Find out what could give way, if versions came or went since the last time."""
        self._survey_due = time.monotonic() + _SURVEY_EVERY_S
        state = listed(self._histories)
        if state == self._surveyed:
            return
        started = time.monotonic()
        try:
            await self._sweeper.survey()
            self._surveyed = state
            self._survey_due += _SURVEY_SHARE * (time.monotonic() - started)
        except (CkptfsError, OSError) as e:
            log.error("history could not be surveyed: %s", e)
