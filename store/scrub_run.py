"""What one scrub carries along: how fast it may go, what it has found, who wants it to stop.

Source: FORMAT.md, "Scrub".
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from ckptfs.store.ids import ChunkId
from ckptfs.store.scrub_state import Finding, ScrubRun
from ckptfs.store.segment_format import Location


class Interrupted(Exception):
    """Somebody wants the scrub to stop; it can go on later from where it is."""


@dataclass(frozen=True, slots=True)
class Met:
    """Where a chunk was met that is bad or missing."""

    path: str
    tensor: str | None


Uses = Callable[[set[ChunkId]], Awaitable[dict[ChunkId, Met]]]
"""Finds what refers to these chunks, and to chunks that the index lacks."""

Tell = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Pace:
    """Keeps work at a rate. `bytes_s` 0: as fast as it goes."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._due = time.monotonic()

    async def spent(self, count: int) -> None:
        """Wait until `count` more bytes may have been read."""
        if not self._bytes_s:
            await trio.lowlevel.checkpoint()
            return
        now = time.monotonic()
        self._due = max(self._due, now - 1) + count / self._bytes_s
        await trio.sleep(max(0.0, self._due - now))


@dataclass(slots=True)
class Found:
    """What one run has found; `bad` are the chunks that are wrong where the index says they are."""

    run: ScrubRun
    bad: dict[ChunkId, Location | None] = field(default_factory=dict)
    miscounted: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
