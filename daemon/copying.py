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
from enum import Enum

import trio

from ckptfs.daemon.config import RemoteConfig
from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.metrics import RemoteFigures
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.queries import iso_time
from ckptfs.store.errors import CkptfsError, InvalidRequest, NotFound
from ckptfs.store.history import PULLED, VersionRecord
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.healing import HealReport
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.push import Pusher, PushReport, complete_versions
from ckptfs.store.sweep import listed
from ckptfs.store.units import Unit

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
RETRY_S = 60.0
Report = Callable[[Progress], None]


def _ignore(progress: Progress) -> None:
    """Nobody wants to know."""


class Check(Enum):
    """How far a push looks at what was copied before: not at all, at lists, or at every byte."""

    NO = 0
    LISTS = 1
    READ = 2


@dataclass(slots=True)
class Target:
    """A remote of the configuration. `pusher` keeps what it has learnt of it (52 bytes a chunk), and tells
    `report` how far it is; `failure`: why the last try to copy in the background failed."""

    config: RemoteConfig
    open: Callable[[], Remote]
    copied: CopiedUnits
    lock: trio.Lock = field(default_factory=trio.Lock)
    pusher: Pusher | None = None
    report: Report = _ignore
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
        check: Check,
        report: Report,
    ) -> Json:
        """`ckptfs push`: copy now; `number`: that version only. A row for each remote and unit."""

        def wanted(record: VersionRecord) -> bool:
            if number is not None:
                return record.number == number
            return complete_versions(record) or (partial and record.origin != PULLED)

        answer: list[Json] = []
        for target in self.targets(remote):
            rows = await self._push(target, units, wanted, check=check, report=report)
            answer += [_row(target, unit, one) for unit, one in rows]
        return answer

    async def _push(
        self,
        target: Target,
        units: Iterable[Unit],
        wanted: Callable[[VersionRecord], bool],
        *,
        check: Check = Check.NO,
        report: Report = _ignore,
    ) -> list[tuple[Unit, PushReport]]:
        parts, done, again = self._parts, list[tuple[Unit, PushReport]](), check is not Check.NO
        async with target.lock:
            if target.pusher is None or again:
                target.pusher = self._pusher(target)
            pusher, target.report = target.pusher, report
            healed = await pusher.heal(read=check is Check.READ) if again else HealReport()
            for unit in units:
                if parts.histories.newest(unit.unit) is None:
                    continue
                found = await pusher.push(unit.unit, wanted, again=again)
                if found.copied:
                    log.info("%d versions of %s are copied to %s", len(found.copied), unit.text, target.name)
                found.problems += healed.damaged + healed.healed
                healed = HealReport()
                done.append((unit, found))
        return done

    def _pusher(self, target: Target) -> Pusher:
        parts = self._parts
        return Pusher(
            target.open(),
            parts.disk,
            parts.segments,
            parts.histories,
            target.copied,
            self._node,
            lambda done, total: target.report(Progress(done=done, total=total)),
        )

    def status(self) -> Json:
        """What `status` says of the remotes."""
        return [self._status_row(target) for target in self._targets]

    def _status_row(self, target: Target) -> Json:
        waiting, safe_ns = self._waiting(target)
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

    def figures(self) -> tuple[RemoteFigures, ...]:
        """The same for metrics."""
        found = []
        for target in self._targets:
            waiting, safe_ns = self._waiting(target)
            figures = RemoteFigures(
                name=target.name,
                waiting_versions=len(waiting),
                waiting_bytes=sum(one.logical_bytes for one in waiting),
                waiting_age_s=_age_s(min((one.time_ns for one in waiting), default=0)),
                newest_safe_age_s=_age_s(safe_ns),
            )
            found.append(figures)
        return tuple(found)

    def _waiting(self, target: Target) -> tuple[list[VersionRecord], int]:
        """The complete versions that are not copied yet, and the time of the newest that is (0: none)."""
        histories, waiting, safe_ns = self._parts.histories, list[VersionRecord](), 0
        for unit in histories.units():
            copied = target.copied.of(unit.unit)
            done = frozenset(copied.versions if copied is not None else ())
            safe_ns = max(safe_ns, copied.newest_ns if copied is not None else 0)
            left = (number for number in histories.numbers(unit.unit) if number not in done)
            records = (histories.version(unit.unit, number) for number in left)
            waiting += [one for one in records if one is not None and complete_versions(one)]
        return waiting, safe_ns


def _age_s(time_ns: int) -> float | None:
    return max(0.0, (time.time_ns() - time_ns) / 1e9) if time_ns else None


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
