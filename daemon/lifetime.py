"""How a mount is told to stop or to read its configuration again, and how it stops taking requests.

One rule: a stop is bounded. The mount point is freed at once; who still has files open gets a few
seconds to finish; then the session ends, whatever is open. A second signal skips the waiting.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from ckptfs.daemon.held_signals import HAND_OVER, SIGNALS, receiver
from ckptfs.daemon.mountpoints import detach
from ckptfs.daemon.mounts import mount_at, mount_table, who_else_has
from ckptfs.store.errors import CkptfsError, Conflict

log = logging.getLogger(__name__)
BUSY_S = 5.0
RETRY_S = 0.25
_PAUSE_S = 1.0


async def keep_running(name: str, task: Callable[[], Awaitable[None]]) -> None:
    """Run a background task; a bug in it is logged and it starts anew, because the mount must live."""
    while True:
        try:
            await task()
            return
        except Exception:
            log.exception("%s failed, and that is a bug in ckptfs; it goes on", name)
        await trio.sleep(_PAUSE_S)


class Switched:
    """A background task that may be off, and that starts anew when what it depends on has changed.

    Belongs to the trio thread.
    """

    def __init__(self, name: str, make: Callable[[], Callable[[], Awaitable[None]] | None]) -> None:
        """`make` gives the task as it is to be now, None: there is to be none."""
        self._name = name
        self._make = make
        self._changed = trio.Event()

    def changed(self) -> None:
        """What it depends on is other than before."""
        self._changed.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            self._changed = trio.Event()
            async with trio.open_nursery() as nursery:
                task = self._make()
                if task is not None:
                    nursery.start_soon(keep_running, self._name, task)
                await self._changed.wait()
                nursery.cancel_scope.cancel()


class Stoppable(Protocol):
    """A session that serves requests; `is_kept`: the mount can outlive us."""

    is_kept: bool

    def stop(self) -> None:
        """Make it return; what is in flight is still answered."""


class Stop:
    """Watches for signals. Belongs to the trio thread; `is_asked` once there was one.

    `hands_over`: it was the one that leaves the mount to the next daemon, which goes on with it.
    """

    def __init__(
        self, session: Stoppable, path: str, reload: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`reload` is what SIGHUP asks for; without it, that is a stop as well: a terminal has gone."""
        self._session = session
        self._path = path
        self._reload = reload
        self.is_asked = False
        self.hands_over = False

    async def watch_signals(self) -> None:
        """Stop the session at the first signal, gently; at the second, at once."""
        # What was ignored when we were started (nohup) stays ignored.
        wanted = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        with receiver(wanted) as signals:
            async with trio.open_nursery() as nursery:
                async for number in signals:
                    if number == signal.SIGHUP and self._reload is not None:
                        nursery.start_soon(keep_running, "reading the configuration again", self._reload)
                        continue
                    if number == HAND_OVER and self._session.is_kept:
                        log.info("the next daemon goes on with the mount")
                        self.hands_over = True
                        break
                    how = "stopping at once" if self.is_asked else "stopping"
                    log.info("%s: %s", signal.Signals(number).name, how)
                    if self.is_asked:
                        nursery.cancel_scope.cancel()
                        break
                    self.is_asked = True
                    nursery.start_soon(self._unmount)
            self._session.stop()

    async def _unmount(self) -> None:
        """Unmount, waiting a little for those who are in it; the session then ends by itself, and this with
        it, unless somebody has the mount in a namespace of his own, where we cannot unmount it."""
        entry = mount_at(self._path, mount_table())
        for _ in range(int(BUSY_S / RETRY_S)):
            try:
                await trio.to_thread.run_sync(lambda: detach(self._path, lazy=False), abandon_on_cancel=True)
                break
            except Conflict:
                await trio.sleep(RETRY_S)
            except (CkptfsError, OSError) as e:
                log.info("cannot unmount: %s", e)
                self._session.stop()
                return
        else:
            log.warning("%s is still busy; whoever is in it loses it", self._path)
            self._session.stop()
            return
        await trio.sleep(BUSY_S)
        who = None if entry is None else await trio.to_thread.run_sync(who_else_has, entry)
        log.warning(
            "%s is unmounted here, but %s has it in a mount namespace of its own, and loses it now",
            self._path,
            who or "somebody else",
        )
        self._session.stop()
