"""Copies elsewhere: `push`, and what is copied after each publish.

One rule: a remote that is away or refuses holds back nobody: what waits for it is tried again, and `status`
says for how long.

Source: ARCHITECTURE.md, section 8; FORMAT.md, "Remotes".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from ckptfs.daemon.config import RemoteConfig
from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.queries import iso_time
from ckptfs.store.errors import CkptfsError, InvalidRequest, NotFound
from ckptfs.store.history import PULLED, VersionRecord
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.push import Pusher, PushReport, complete_versions
from ckptfs.store.sweep import listed
from ckptfs.store.units import Unit

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
RETRY_S = 60.0
Report = Callable[[Progress], None]


@dataclass(slots=True)
class Target:
    """A remote of the configuration. `failure`: why the last try to copy in the background failed."""

    config: RemoteConfig
    open: Callable[[], Remote]
    copied: CopiedUnits
    lock: trio.Lock = field(default_factory=trio.Lock)
    failure: str = ""
    last_seen: tuple[int, int] | None = None
    again_at: float = 0.0

    @property
    def name(self) -> str:
        """What it is called."""
        return self.config.name


class Copying:
    """Copies the units of one store. Belongs to the index thread; one push to a remote at a time."""

    def __init__(
        self,
        parts: OpenStore,
        remotes: Sequence[RemoteConfig],
        open_remote: Callable[[RemoteConfig], Remote],
        node: str,
    ) -> None:
        self._parts = parts
        self._node = node
        self._targets = [
            Target(one, lambda one=one: open_remote(one), CopiedUnits(parts.index, one.name))  # type: ignore[misc]
            for one in remotes
        ]

    def target(self, name: str | None) -> Target:
        """The remote of this name, or the only one. NotFound or InvalidRequest name those there are."""
        names = ", ".join(one.name for one in self._targets)
        if not self._targets:
            raise NotFound("no remote is configured; add a [[remote]] with `name` and `url`")
        if name is None and len(self._targets) > 1:
            raise InvalidRequest(f"there are several remotes, name one with --remote: {names}")
        found = next((one for one in self._targets if name in (None, one.name)), None)
        if found is None:
            raise NotFound(f"there is no remote {name!r}; there are {names}")
        return found

    def targets(self, name: str | None) -> list[Target]:
        """All remotes, or the one of this name."""
        return [self.target(name)] if name is not None or not self._targets else self._targets

    async def run(self) -> None:
        """Copy what is published, to all that want it, for ever; cancelled at shutdown."""
        async with trio.open_nursery() as nursery:
            for target in self._targets:
                if target.config.push:
                    nursery.start_soon(self._follow, target)

    async def _follow(self, target: Target) -> None:
        while True:
            state = listed(self._parts.histories)
            if state != target.last_seen or (target.failure and time.monotonic() >= target.again_at):
                await self._catch_up(target)
                # What failed is tried again after a while, and when there is something new.
                target.last_seen = state
            await trio.sleep(LOOK_EVERY_S)

    async def _catch_up(self, target: Target) -> None:
        before = target.failure
        try:
            rows = await self._push(target, self._parts.histories.units(), complete_versions)
            target.failure = next((said for _, one in rows for said in one.problems), "")
        except (CkptfsError, OSError) as e:
            target.failure = str(e)
        target.again_at = time.monotonic() + RETRY_S
        if target.failure and target.failure != before:
            log.error("copies to %s wait: %s", target.name, target.failure)

    async def push(
        self,
        units: Iterable[Unit],
        number: int | None,
        remote: str | None,
        *,
        partial: bool,
        again: bool,
        report: Report,
    ) -> Json:
        """`ckptfs push`: copy now; `number`: that version only. A row for each remote and unit."""

        def wanted(record: VersionRecord) -> bool:
            if number is not None:
                return record.number == number
            return complete_versions(record) or (partial and record.origin != PULLED)

        answer: list[Json] = []
        for target in self.targets(remote):
            rows = await self._push(target, units, wanted, again=again, report=report)
            answer += [_row(target, unit, one) for unit, one in rows]
        return answer

    async def _push(
        self,
        target: Target,
        units: Iterable[Unit],
        wanted: Callable[[VersionRecord], bool],
        *,
        again: bool = False,
        report: Report = lambda progress: None,
    ) -> list[tuple[Unit, PushReport]]:
        parts, done = self._parts, []
        async with target.lock:
            pusher = Pusher(
                target.open(),
                parts.disk,
                parts.segments,
                parts.histories,
                target.copied,
                self._node,
                lambda done, total: report(Progress(done=done, total=total)),
            )
            for unit in units:
                if parts.histories.newest(unit.unit) is None:
                    continue
                found = await pusher.push(unit.unit, wanted, again=again)
                if found.copied:
                    log.info("%d versions of %s are copied to %s", len(found.copied), unit.text, target.name)
                done.append((unit, found))
        return done

    def status(self) -> Json:
        """What `status` says of the remotes."""
        return [self._status_row(target) for target in self._targets]

    def _status_row(self, target: Target) -> Json:
        waiting: list[VersionRecord] = []
        safe_ns = 0
        for unit in self._parts.histories.units():
            copied = target.copied.of(unit.unit)
            numbers = frozenset(copied.versions if copied is not None else ())
            safe_ns = max(safe_ns, copied.newest_ns if copied is not None else 0)
            waiting += [one for one in self._complete(unit.unit) if one.number not in numbers]
        oldest_ns = min((one.time_ns for one in waiting), default=0)
        return {
            "name": target.name,
            "url": target.config.url,
            "push": target.config.push,
            "waiting_versions": len(waiting),
            "waiting_bytes": sum(one.logical_bytes for one in waiting),
            "waiting_since": iso_time(oldest_ns) if oldest_ns else None,
            "newest_safe": iso_time(safe_ns) if safe_ns else None,
            "failure": target.failure or None,
        }

    def _complete(self, unit_id: UnitId) -> list[VersionRecord]:
        return [one for one in self._parts.histories.versions(unit_id) if complete_versions(one)]


def _row(target: Target, unit: Unit, found: PushReport) -> Json:
    return {
        "remote": target.name,
        "unit": os.fsdecode(unit.name),
        "copied": [*sorted(found.copied)],
        "safe": list(found.safe),
        "sent_bytes": found.sent.bytes,
        "sent_chunks": found.sent.chunks,
        "problems": list(found.problems),
    }
