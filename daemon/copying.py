"""Copies elsewhere: `push`, and what is copied after each publish.

One rule: a remote that is away or refuses holds back nobody: what waits for it is tried again, and `status`
says for how long.

Source: ARCHITECTURE.md, section 8; FORMAT.md, "Remotes".
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import trio

from ckptfs.daemon.config import RemoteConfig
from ckptfs.daemon.messages import Json, Progress, unreported
from ckptfs.daemon.metrics import RemoteFigures
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.queries import iso_time
from ckptfs.store.errors import CkptfsError, InvalidRequest, NotFound
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import UnitId
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.healing import HealReport
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.push import Pusher, PushReport, Wanted, complete_versions, own_versions, still_let_go
from ckptfs.store.remote.relaying import OtherRemote
from ckptfs.store.sweep import listed
from ckptfs.store.units import Unit

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
RETRY_S = 60.0
# So often what is noted of a remote is compared with what it has: others collect it, or damage it.
ASK_EVERY_S = 600.0
# So long a command waits for the other remotes once enough of them have what was asked for.
SLOW_S = 10.0
Report = Callable[[Progress], None]


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
    report: Report = unreported
    failure: str = ""
    last_seen: tuple[int, int] | None = None
    again_at: float = 0.0
    ask_at: float = 0.0

    @property
    def name(self) -> str:
        """What it is called."""
        return self.config.name

    @property
    def wanted(self) -> Wanted:
        """Which versions it gets without anybody's asking."""
        return own_versions if self.config.partial else complete_versions


class Copying:
    """Copies the units of one store. Belongs to the index thread; one push to a remote at a time."""

    def __init__(
        self,
        parts: OpenStore,
        remotes: Sequence[RemoteConfig],
        open_remote: Callable[[RemoteConfig], Remote],
        node: str,
        copies: int | None = None,
    ) -> None:
        """A version counts as copied once `copies` of the remotes have it (None: all of them)."""
        self._copies = len(remotes) if copies is None else copies
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
            now = time.monotonic()
            is_due = now >= target.ask_at or (target.failure and now >= target.again_at)
            if state != target.last_seen or is_due:
                target.ask_at = now + ASK_EVERY_S
                await self._catch_up(target)
                # What failed is tried again after a while, and when there is something new.
                target.last_seen = state
            await trio.sleep(LOOK_EVERY_S)

    async def _catch_up(self, target: Target) -> None:
        before = target.failure
        try:
            rows = await self._push(target, self._parts.histories.units(), target.wanted)
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
        """`ckptfs push`: copy now; `number`: that version only, even if a collector let it go there. A row
        for each remote and unit, and one for a remote to which nothing could be copied. The error itself, if
        that is all of them."""

        def wanted(record: VersionRecord) -> bool:
            if number is not None:
                return record.number == number
            return (own_versions if partial else complete_versions)(record)

        targets, asked = self.targets(remote), list(units)
        rows: dict[str, list[tuple[Unit, PushReport]]] = {}
        failures: dict[str, CkptfsError | OSError] = {}
        enough = trio.Event()

        async def push_to(target: Target) -> None:
            try:
                rows[target.name] = await self._push(
                    target, asked, wanted, check=check, even_let_go=number is not None, report=report
                )
            except (CkptfsError, OSError) as e:
                failures[target.name] = e
            if len(rows) >= min(self._copies, len(targets)) or len(rows) + len(failures) == len(targets):
                enough.set()

        async with trio.open_nursery() as nursery:
            for target in targets:
                nursery.start_soon(push_to, target)
            await enough.wait()
            # What is slow goes on by itself, if it is one that follows.
            if any(target.name not in rows and not target.config.push for target in targets):
                continue_s = float("inf")
            else:
                continue_s = SLOW_S
            nursery.cancel_scope.deadline = trio.current_time() + continue_s
        if failures and not rows:
            raise next(iter(failures.values()))
        return self._rows(targets, asked, rows, failures, wanted)

    def _rows(
        self,
        targets: Sequence[Target],
        asked: Iterable[Unit],
        rows: Mapping[str, Sequence[tuple[Unit, PushReport]]],
        failures: Mapping[str, CkptfsError | OSError],
        wanted: Callable[[VersionRecord], bool],
    ) -> Json:
        answer: list[Json] = []
        least = min(self._copies, len(targets))
        lacking = set(self._lacking(targets, asked, least, wanted))
        for target in targets:
            for unit, found in rows.get(target.name, ()):
                answer.append(_row(target, unit, found, is_enough=unit.unit not in lacking))
            if target.name not in rows:
                target.last_seen = None  # what was given up is gone on with
                why = failures.get(target.name, "it is slow; the copy goes on by itself")
                nothing = _row(target, None, PushReport(), is_enough=not lacking)
                answer.append({**nothing, "failure": str(why)})
        return answer

    def _lacking(
        self,
        targets: Sequence[Target],
        asked: Iterable[Unit],
        least: int,
        wanted: Callable[[VersionRecord], bool],
    ) -> Iterator[UnitId]:
        """Those of these units of which some version that is wanted has fewer copies."""
        for unit in asked:
            copies = self._copies_of(unit.unit, targets, settled=True)
            for record in self._parts.histories.versions(unit.unit):
                if wanted(record) and copies[record.number] < least:
                    yield unit.unit
                    break

    def _copies_of(self, unit: UnitId, targets: Sequence[Target], *, settled: bool = False) -> Counter[int]:
        """How many of the remotes have each version; or, `settled`, are not to get it (any more)."""
        found: Counter[int] = Counter()
        for target in targets:
            copied = target.copied.of(unit)
            if copied is not None:
                found.update(copied.versions)
                found.update(still_let_go(self._parts.histories, unit, copied.let_go) if settled else ())
        return found

    async def _push(
        self,
        target: Target,
        units: Iterable[Unit],
        wanted: Callable[[VersionRecord], bool],
        *,
        check: Check = Check.NO,
        even_let_go: bool = False,
        report: Report = unreported,
    ) -> list[tuple[Unit, PushReport]]:
        parts, done, again = self._parts, list[tuple[Unit, PushReport]](), check is not Check.NO
        async with target.lock:
            if target.pusher is None or again:
                target.pusher = self._pusher(target)
            pusher, target.report = target.pusher, report
            others = [OtherRemote(one.open()) for one in self._targets if one is not target] if again else []
            healed = await pusher.heal(read=check is Check.READ, others=others) if again else HealReport()
            for unit in units:
                if parts.histories.newest(unit.unit) is None:
                    continue
                found = await pusher.push(unit.unit, wanted, again=again, even_let_go=even_let_go)
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

    def let_go(
        self,
        target: Target,
        went: Iterable[tuple[UnitId, int]],
        lost: Iterable[tuple[UnitId, int]] = (),
    ) -> None:
        """A collection let versions go on a remote, or found that they are lost: they do not count as copied
        there any more. What it let go is not sent again by itself."""
        kept_away = set(went)
        gone: dict[UnitId, set[int]] = {}
        for unit, number in [*kept_away, *lost]:
            gone.setdefault(unit, set()).add(number)
        for unit, numbers in gone.items():
            copied = target.copied.of(unit)
            if copied is None:
                continue
            left = tuple(number for number in copied.versions if number not in numbers)
            let_go = {*copied.let_go, *(number for one, number in kept_away if one == unit)}
            records = (self._parts.histories.version(unit, number) for number in left)
            newest_ns = max((record.time_ns for record in records if record is not None), default=0)
            noted = msgspec.structs.replace(
                copied, versions=left, newest_ns=newest_ns, let_go=tuple(sorted(let_go))
            )
            target.copied.note(unit, noted)

    def status(self) -> Json:
        """What `status` says of the remotes."""
        return [self._status_row(target) for target in self._targets]

    def copies(self) -> Json:
        """What it says of all of them: the complete versions that too few have, and the newest that enough
        have. None without remotes."""
        if not self._targets:
            return None
        waiting, safe_ns = 0, 0
        for unit in self._parts.histories.units():
            copies = self._copies_of(unit.unit, self._targets)
            settled = self._copies_of(unit.unit, self._targets, settled=True)
            for record in self._parts.histories.versions(unit.unit):
                if copies[record.number] >= self._copies:
                    safe_ns = max(safe_ns, record.time_ns)
                elif settled[record.number] < self._copies and complete_versions(record):
                    waiting += 1
        newest_safe = iso_time(safe_ns) if safe_ns else None
        return {"wanted": self._copies, "waiting_versions": waiting, "newest_safe": newest_safe}

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
        """The versions that it wants and are not copied yet, and the time of the newest that is (0: none)."""
        histories, waiting, safe_ns = self._parts.histories, list[VersionRecord](), 0
        for unit in histories.units():
            copied = target.copied.of(unit.unit)
            done = set(copied.versions if copied is not None else ())
            done |= still_let_go(histories, unit.unit, copied.let_go if copied is not None else ())
            safe_ns = max(safe_ns, copied.newest_ns if copied is not None else 0)
            left = (number for number in histories.numbers(unit.unit) if number not in done)
            records = (histories.version(unit.unit, number) for number in left)
            waiting += [one for one in records if one is not None and target.wanted(one)]
        return waiting, safe_ns


def _age_s(time_ns: int) -> float | None:
    return max(0.0, (time.time_ns() - time_ns) / 1e9) if time_ns else None


def _row(target: Target, unit: Unit | None, found: PushReport, *, is_enough: bool) -> dict[str, Json]:
    return {
        "remote": target.name,
        "unit": "" if unit is None else os.fsdecode(unit.name),
        "enough": is_enough,
        "failure": None,
        "copied": [*sorted(found.copied)],
        "safe": list(found.safe),
        "sent_bytes": found.sent.bytes,
        "sent_chunks": found.sent.chunks,
        "problems": list(found.problems),
    }
