"""Several requests to a remote at once.

One rule: after the first failure nothing new is begun; what is under way is waited for, then it is raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from ckptfs.store.errors import CkptfsError

T = TypeVar("T")
R = TypeVar("R")


async def done_for_each(work: Callable[[T], Awaitable[R]], items: Sequence[T], most: int) -> list[R]:
    """What `work` gives for each item, in their order; at most `most` at a time."""
    found: dict[int, R] = {}
    failures: list[CkptfsError | OSError] = []
    numbers = iter(range(len(items)))

    async def work_off() -> None:
        while not failures and (number := next(numbers, None)) is not None:
            try:
                found[number] = await work(items[number])
            except (CkptfsError, OSError) as e:
                failures.append(e)

    async with trio.open_nursery() as nursery:
        for _ in range(min(most, len(items))):
            nursery.start_soon(work_off)
    if failures:
        raise failures[0]
    return [found[number] for number in range(len(items))]


async def done_beside(work: Callable[[], Awaitable[R]], beside: Callable[[], Awaitable[None]]) -> R:
    """What `work` gives, while `beside` runs; that is cancelled when it is done."""
    found: list[R] = []
    failures: list[CkptfsError | OSError] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside)
        try:
            found.append(await work())
        except (CkptfsError, OSError) as e:
            failures.append(e)
        nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return found[0]
