"""Signals that come before there is a mount to tell: held, and answered once somebody watches for them.

One rule: they are held by a handler and not by the mask, which children and threads would inherit. A daemon
that dies of a reload, or of being told to stop, before it has taken over the session that was kept for it,
would lose that session: to systemd this is a clean end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Final

HAND_OVER: Final = signal.SIGUSR1
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, HAND_OVER)


class Held:
    """The handler of signals that are held; `came` are those that came, in order."""

    def __init__(self) -> None:
        self.came: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)


def hold_early(environment: Mapping[str, str], pid: int) -> None:
    """When a daemon starts. One to which nothing was passed on has nothing to lose: a stop ends it at once,
    and so does a terminal that goes away."""
    if environment.get("LISTEN_PID") == str(pid):
        hold(SIGNALS)
    elif not os.isatty(0):
        hold((signal.SIGHUP, HAND_OVER))


def hold(numbers: Iterable[int]) -> None:
    """From now on these wait. What is ignored stays ignored (nohup); what is held, or handled, stays so. In
    the main thread only."""
    held = Held()
    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, held)


@contextmanager
def receiver(numbers: Iterable[int]) -> Iterator[AsyncIterator[int]]:
    """These signals, one after another, those that were held first. Behind it they end the process again."""
    import trio  # takes a moment, in which the signals are held already

    numbers = tuple(numbers)
    # From here to the receiver none may come that would meet neither: a moment, in which nothing is started.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        came = _let_go(numbers)
        with trio.open_signal_receiver(*numbers) as signals:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for number in came:
                signal.raise_signal(number)
            yield signals
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _let_go(numbers: Iterable[int]) -> list[int]:
    """Give what is held its default again; what came."""
    handlers: list[Held] = []
    for number in numbers:
        handler = signal.getsignal(number)
        if isinstance(handler, Held):
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
            if handler not in handlers:
                handlers.append(handler)
    return [number for handler in handlers for number in handler.came]
