"""When the daemon is killed: by the clock, or at the moment something of interest has just happened.

One rule: a moment is chosen before the round from the round's random numbers; what the store does then
only says when it comes. Every wait is bounded. Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x2, 0x80, 0x100, 0x200
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)
MOST_WAIT_S = 4.0


@dataclass(frozen=True, slots=True)
class Moment:
    """`kind` is what is waited for after `after_s`; it must happen `count` times, and then `delay_s` pass."""

    kind: str
    after_s: float
    count: int
    delay_s: float


KINDS = {
    "clock": 5,
    "close": 2,
    "settling": 2,
    "rename": 1,
    "publish": 2,
    "segment": 3,
    "punch": 2,
    "history": 3,
    "commit": 1,
    "drop": 2,
}
"""Kinds and their weights: by the clock; after a close (at once, or while it settles and is ingested), a
rename or a publish of some writer; while a segment is written, is punched, a history grows, the journal
starts anew, a staging file goes."""


def choose_moment(chance: random.Random, settle_s: float, longest_s: float) -> Moment:
    """A moment of a round that is to take about `longest_s` at most."""
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    after_s = chance.uniform(0.1, longest_s * 0.6)
    delay_s = chance.choice((0.0, 0.0, chance.uniform(0, 0.003), chance.uniform(0, 0.03)))
    if kind == "clock":
        return Moment(kind, chance.uniform(0.05, longest_s), 0, 0.0)
    if kind == "settling":
        delay_s = chance.uniform(settle_s * 0.8, settle_s + 0.6)
    return Moment(kind, after_s, chance.randint(1, 4), delay_s)


class Watch:
    """Tells when a moment has come. Owned by the thread that runs the round."""

    def __init__(self, store: Path, journals: list[Path]) -> None:
        self._store = store
        self._journals = journals

    def wait(self, moment: Moment) -> float:
        """Return when it is time, at the latest MOST_WAIT_S after `after_s`; the seconds waited."""
        begun = time.monotonic()
        time.sleep(moment.after_s)
        if moment.kind in ("close", "settling", "rename", "publish"):
            self._wait_for_calls("close" if moment.kind == "settling" else moment.kind, moment.count)
        elif moment.kind != "clock":
            self._wait_for_events(moment.kind, moment.count)
        time.sleep(moment.delay_s)
        return time.monotonic() - begun

    def _wait_for_calls(self, name: str, count: int) -> None:
        """Until the writers have recorded `count` more answered calls of this name."""
        word = f'"op": "{name}"'.encode()
        deadline = time.monotonic() + MOST_WAIT_S
        files = [os.open(path, os.O_RDONLY) for path in self._journals]
        try:
            for fd in files:
                os.lseek(fd, 0, os.SEEK_END)
            while time.monotonic() < deadline:
                for fd in files:
                    count -= os.read(fd, 1 << 20).count(word)
                if count <= 0:
                    return
                time.sleep(0.001)
        finally:
            for fd in files:
                os.close(fd)

    def _wait_for_events(self, kind: str, count: int) -> None:
        """Until inotify has told of `count` events of a kind."""
        folders, mask, ending = self._watched(kind)
        deadline = time.monotonic() + MOST_WAIT_S
        fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for folder in folders:
                _libc.inotify_add_watch(fd, os.fsencode(folder), mask)
            while count > 0 and (left := deadline - time.monotonic()) > 0:
                if select.select([fd], [], [], left)[0]:
                    count -= sum(name.endswith(ending) for name in _names(os.read(fd, 1 << 16)))
        finally:
            os.close(fd)

    def _watched(self, kind: str) -> tuple[list[Path], int, str]:
        if kind in ("segment", "punch"):
            folders = [
                self._store / "segments",
                *(p for p in (self._store / "segments").iterdir() if p.is_dir()),
            ]
            if kind == "segment":
                return folders, _IN_CREATE | _IN_MOVED_TO, ""
            return folders, _IN_MODIFY, ".seg"
        if kind == "history":
            return [self._store / "history"], _IN_MODIFY | _IN_CREATE, ".log"
        if kind == "commit":
            return [self._store / "index"], _IN_MODIFY, ""
        return [self._store / "staging"], _IN_DELETE, ""


def _names(events: bytes) -> list[str]:
    names, at = [], 0
    while at < len(events):
        _, _, _, length = _EVENT.unpack_from(events, at)
        names.append(events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0").decode())
        at += _EVENT.size + length
    return names
