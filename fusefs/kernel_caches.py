"""What the kernel believes of names and attributes, taken back.

One rule: the kernel is told from a thread of its own, never from a request handler: telling it waits
for requests that are in flight on the same directory, and those wait for the trio thread.

Source: KERNEL facts in SEMANTICS.md; fuse(4), FUSE_NOTIFY_INVAL_ENTRY and FUSE_NOTIFY_INVAL_INODE.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pyfuse3
import trio

from ckptfs.fusefs.nodes import Nodes

log = logging.getLogger(__name__)
_LIMIT_S = 10.0


class KernelCaches:
    """Tells the kernel to forget. Belongs to the trio thread; one worker thread at a time tells of names,
    and another of attributes, which waits for nobody's requests: so a handler may wait for that."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._limiter = trio.CapacityLimiter(1)
        self._attributes_limiter = trio.CapacityLimiter(1)

    async def drop(self, names: Sequence[tuple[int, bytes]], inodes: Sequence[int]) -> None:
        """Make the kernel ask again for (directory, name) pairs and for attributes of inodes.

        Returns when it has been told, or after 10 s: then it goes on being told, and the log says so.
        """
        nodes = [node for ino in inodes for node in self._nodes.all_of(ino)]
        await self._tell(names, nodes, self._limiter)

    async def drop_attributes(self, node: int) -> None:
        """Make the kernel ask again for the attributes of one node."""
        await self._tell([], [node], self._attributes_limiter)

    async def _tell(
        self, names: Sequence[tuple[int, bytes]], nodes: Sequence[int], limiter: trio.CapacityLimiter
    ) -> None:
        with trio.move_on_after(_LIMIT_S) as scope:
            await trio.to_thread.run_sync(_tell, names, nodes, abandon_on_cancel=True, limiter=limiter)
        if scope.cancelled_caught:
            log.warning("the kernel is busy, it may show old names for a moment longer")


def _tell(names: Sequence[tuple[int, bytes]], nodes: Sequence[int]) -> None:
    for directory, name in names:
        _ask(pyfuse3.invalidate_entry, directory, name)
    for node in nodes:
        _ask(pyfuse3.invalidate_inode, node, True)


def _ask(tell: Callable[..., None], *args: object) -> None:
    try:
        tell(*args)
    except FileNotFoundError:
        pass  # it knew nothing of it
    except OSError as e:
        log.warning("the kernel could not be told to forget: %s", e)
