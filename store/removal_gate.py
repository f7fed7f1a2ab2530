"""The gate between the collector and whoever names what he read.

One rule: chunks leave the index only while nobody holds the gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class RemovalGate:
    """Keeps the collector from taking chunks out while somebody is about to name what he read.

    A publish reads recipes and trees from records, and names them in records of its own some
    awaits later. In between a job may remove the records it read. Whoever holds the gate from
    reading to naming is safe: marking goes on, but nothing is taken until the new records, which
    marking sees, are there. Held briefly, and never while waiting for room. Index thread.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._opened = trio.Event()

    @property
    def is_held(self) -> bool:
        """Whether chunks must stay now."""
        return self._holders > 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing is taken out until the block ends."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._opened.set()
                self._opened = trio.Event()

    async def opened(self) -> None:
        """Wait until nobody holds it."""
        while self._holders:
            await self._opened.wait()
