"""Which unit is published when: the loop that makes versions without anybody asking.

One rule: a failed publish is logged and tried again; it never ends the loop, and never holds
back another unit.

Commit points (a directory renamed into place, a tracker file written) publish at once.
Source: ARCHITECTURE §4 "Publish".
"""

from __future__ import annotations

import logging
import time

import trio

from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace
from ckptfs.fusefs.preimage import Preimages
from ckptfs.fusefs.publish import Publisher
from ckptfs.fusefs.quiet import Due
from ckptfs.fusefs.recording import Recorder, Request
from ckptfs.fusefs.units import Units
from ckptfs.store.errors import NoSpace

log = logging.getLogger(__name__)
TICK_S = 0.25
_RETRY_S = 5.0
_LONGEST_PAUSE_S = 2.0
_TRACKERS = frozenset(
    (
        b"latest",
        b"latest_checkpointed_iteration.txt",
        b".metadata",
        b"trainer_state.json",
        b"commit_success.txt",
    )
)


class Scheduler:
    """Runs the publisher. Belongs to the trio thread."""

    def __init__(
        self,
        namespace: Namespace,
        units: Units,
        files: Files,
        preimages: Preimages,
        publisher: Publisher,
        recorder: Recorder,
    ) -> None:
        self._namespace = namespace
        self._units = units
        self._files = files
        self._preimages = preimages
        self._publisher = publisher
        self._recorder = recorder
        self._wake = trio.Event()
        self._commit_points: set[int] = set()
        self._not_before: dict[int, float] = {}

    def file_closed(self, ino: int) -> None:
        """A written file was closed: a tracker file is a commit point."""
        links = self._namespace.inode(ino).links
        if links and links[0][1] in _TRACKERS:
            self._note(links[0][0])

    def renamed(self, ino: int, old_parent: int, old_name: bytes) -> None:
        """Something was renamed: a directory, or a tracker file, is a commit point."""
        inode = self._namespace.inode(ino)
        if inode.is_dir:
            self._recorder.unit_moved(ino)
            self._note(ino)
        elif inode.links and inode.links[0][1] in _TRACKERS:
            self._note(inode.links[0][0])

    @property
    def is_publishing(self) -> bool:
        """Whether a version is being made, or is about to be because somebody committed a save."""
        return bool(self._commit_points) or self._publisher.is_publishing

    def publish_soon(self) -> bool:
        """Have everything published that no version has, as if it had been committed just now; False
        if there is nothing."""
        waiting = {*self._publisher.changed_dirs_by_unit(), *self._preimages.units_with_pins()}
        self._commit_points |= waiting
        self._wake.set()
        return bool(waiting)

    async def run(self) -> None:
        """Publish what is due, for ever; cancelled at shutdown."""
        while True:
            planning_s = await self._round()
            with trio.move_on_after(max(TICK_S, min(_LONGEST_PAUSE_S, 5 * planning_s))):
                await self._wake.wait()
            self._wake = trio.Event()

    async def sample(self) -> None:
        """Watch logs that the kernel writes by itself, for ever; cancelled at shutdown."""
        looked = time.monotonic()
        while True:
            await trio.sleep(TICK_S)
            now = time.monotonic()
            self._files.writers.sample_growth((now - looked) / TICK_S)
            looked = now

    async def _round(self) -> float:
        """One look at all units; returns the seconds that the looking took, publishing left out."""
        started = time.monotonic()
        at_once, self._commit_points = self._commit_points, set()
        changed = self._publisher.changed_dirs_by_unit()
        for top in set(self._preimages.units_with_pins()) - changed.keys():
            changed[top] = []
        planned = []
        for top, directories in changed.items():
            if top not in at_once and time.monotonic() < self._not_before.get(top, 0.0):
                continue
            due = self._publisher.due_now(directories) if top in at_once else self._publisher.due(directories)
            planned.append((top, due))
        planning_s = time.monotonic() - started
        for top, due in planned:
            if due.publish:
                await self._publish(top, due, Request("commit-point" if top in at_once else "settled"))
            elif top in self._preimages.units_with_pins():
                await self._publish(top, None, Request("pre-image"))
        await self._store_unversioned()
        return planning_s

    async def _store_unversioned(self) -> None:
        try:
            await self._publisher.store_unversioned()
        except Exception as e:  # as for a publish: it never ends the loop
            log.error("files without versions could not be stored yet: %s", e, exc_info=e)

    async def _publish(self, top: int, due: Due | None, request: Request) -> None:
        try:
            if due is None:
                await self._publisher.publish_preimage(top)
            else:
                await self._publisher.publish(top, due, request)
            self._not_before.pop(top, None)
        except NoSpace as e:
            self._not_before[top] = time.monotonic() + _RETRY_S
            log.warning("no version of %s yet: %s", self._name(top), e)
        except Exception as e:  # whatever it is: a failed publish never ends the loop
            self._not_before[top] = time.monotonic() + _RETRY_S
            log.error("publishing %s failed, trying again: %s", self._name(top), e, exc_info=e)

    def _note(self, directory: int) -> None:
        try:
            self._commit_points.add(self._units.top_of(directory))
            self._preimages.commits.note(directory)
        except PosixError:  # a directory that is gone again needs no version of its own
            return
        self._wake.set()

    def _name(self, top: int) -> str:
        inode = self._namespace.find(top)
        if inode is None or not inode.links:
            return f"the removed directory {top}"
        return self._units.name_of(top).decode(errors="replace")
