"""When a directory is quiet, and when its unit is due for a version.

One rule: time is passed in, so the policy is a function of what happened and when.

A *major* event is one that a save consists of: a written file was closed, a name was made,
moved or removed, an attribute changed. A *minor* one is a small append to something that only
grows (a log, an event file): it neither holds back its directory nor asks for a version soon,
else a run that logs once a second would never settle, or would get a version a second.
Source: ARCHITECTURE, "Publish".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LOG_SETTLE_S = 30.0
LOG_MAX_S = 600.0
_REMEMBERED_CHANGES = 10_000


@dataclass(slots=True)
class _Activity:
    """What happened in one directory since it was last published; `look_at` is when to publish
    although nothing is known to have happened."""

    changed: dict[int, float] = field(default_factory=dict)
    last_major: float = float("-inf")
    first_minor: float | None = None
    last_minor: float = float("-inf")
    look_at: float = float("inf")


@dataclass(frozen=True, slots=True)
class Due:
    """The answer for one unit: whether to publish, and which directories as they are now.

    `quiet` are taken as they are; in `settled_only` just the files closed for long enough are
    taken, because the directory has not been quiet for `settle_max_s`.
    """

    publish: bool
    quiet: frozenset[int]
    settled_only: frozenset[int]

    @property
    def is_empty(self) -> bool:
        """Whether no directory is taken."""
        return not self.quiet and not self.settled_only


class Quiet:
    """Activity of all directories by inode number. Touched only by the trio thread."""

    def __init__(self, settle_s: float, settle_max_s: float) -> None:
        self.settle_s = settle_s
        self.settle_max_s = settle_max_s
        self._dirs: dict[int, _Activity] = {}

    def major(self, directory: int, ino: int, now: float) -> None:
        """Something of a save happened to `ino` in `directory`."""
        activity = self._dirs.setdefault(directory, _Activity())
        activity.last_major = now
        if len(activity.changed) < _REMEMBERED_CHANGES or ino in activity.changed:
            activity.changed[ino] = now

    def minor(self, directory: int, now: float) -> None:
        """A log in `directory` grew."""
        activity = self._dirs.setdefault(directory, _Activity())
        activity.last_minor = now
        if activity.first_minor is None:
            activity.first_minor = now

    def forget(self, directory: int) -> None:
        """The directory was published as it is, or is gone."""
        self._dirs.pop(directory, None)

    def published_open(self, directory: int, now: float) -> None:
        """The directory was published with a copy of files that are still open: what comes next is
        their next growth, or their close."""
        self._dirs[directory] = _Activity(look_at=now + LOG_MAX_S)

    def postpone(self, directory: int, now: float) -> None:
        """The directory could not be taken as it is after all: not before another `settle_s`."""
        activity = self._dirs.setdefault(directory, _Activity(look_at=now))
        activity.last_major = max(activity.last_major, now)

    def published_settled(self, directory: int, now: float) -> None:
        """The settled files of a busy directory were published; the rest goes on waiting. What could
        not be stored is looked at again."""
        activity = self._dirs.get(directory)
        if activity is not None:
            activity.changed = {i: t for i, t in activity.changed.items() if now - t < self.settle_s}
            activity.look_at = now + self.settle_max_s

    def is_quiet(self, directory: int, now: float, writers: Iterable[int]) -> bool:
        """No major event for `settle_s`, and nobody writes a file in it (logs left out)."""
        activity = self._dirs.get(directory)
        if any(True for _ in writers):
            return False
        if activity is None:
            return True
        noticed = activity.look_at if activity.look_at <= now else float("-inf")
        return now - max(activity.last_major, noticed) >= self.settle_s

    def is_settled(self, directory: int, ino: int, now: float) -> bool:
        """Nothing happened to this file for `settle_s`."""
        activity = self._dirs.get(directory)
        if activity is None:
            return True
        forgotten = activity.last_major if len(activity.changed) >= _REMEMBERED_CHANGES else float("-inf")
        return now - activity.changed.get(ino, forgotten) >= self.settle_s

    def happened_since(self, directory: int, then: float) -> bool:
        """Whether a major event came after `then`."""
        activity = self._dirs.get(directory)
        return activity is not None and activity.last_major > then

    def waiting_s(self, now: float) -> float:
        """For how long the oldest change that is in no version has been waiting; 0 if none is."""
        oldest = min((min(one.changed.values()) for one in self._dirs.values() if one.changed), default=now)
        return now - oldest

    def due(self, directories: Iterable[int], now: float, writers_of: Callable[[int], set[int]]) -> Due:
        """What to do with the unit whose changed directories these are."""
        quiet, settled_only, publish = set(), set(), False
        for directory in directories:
            activity = self._dirs.setdefault(directory, _Activity(look_at=now))
            writers = writers_of(directory)
            if self.is_quiet(directory, now, writers):
                quiet.add(directory)
                publish |= bool(activity.changed) or now >= activity.look_at or self._log_due(activity, now)
            elif self._overdue(activity, now, writers):
                settled_only.add(directory)
                publish = True
        return Due(publish, frozenset(quiet), frozenset(settled_only))

    def _overdue(self, activity: _Activity, now: float, writers: set[int]) -> bool:
        waiting = [
            t for ino, t in activity.changed.items() if ino not in writers and now - t >= self.settle_s
        ]
        return bool(waiting) and now - min(waiting) >= self.settle_max_s

    @staticmethod
    def _log_due(activity: _Activity, now: float) -> bool:
        if activity.first_minor is None:
            return False
        return now - activity.last_minor >= LOG_SETTLE_S or now - activity.first_minor >= LOG_MAX_S
