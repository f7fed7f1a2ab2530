"""A cutter that cuts in this process and says what it was asked for.

The one rule: it does nothing that it is not asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import trio

from ckptfs.store.spans import Cuts, Span, cut_span


class HereCutter:
    """An IdleCutter. `asked` and `asked_idly` have where the bunches began; `before` is called before each
    that is cut idly. Nothing is idle while `is_busy`."""

    width = 2

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.asked_idly: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self.is_busy = False

    async def cut(self, fd: int, spans: Sequence[Span]) -> list[Cuts]:
        """As SpanCutter."""
        self.asked.append(spans[0].offset)
        await trio.lowlevel.checkpoint()
        return [_cut(fd, span) for span in spans]

    async def cut_idly(self, fd: int, spans: Sequence[Span]) -> list[Cuts] | None:
        """As IdleCutter."""
        self.before()
        await trio.lowlevel.checkpoint()
        if self.is_busy:
            return None
        self.asked_idly.append(spans[0].offset)
        return [_cut(fd, span) for span in spans]


def _cut(fd: int, span: Span) -> Cuts:
    return cut_span(memoryview(os.pread(fd, span.limit - span.offset, span.offset)), span)
