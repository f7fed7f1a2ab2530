"""What a mount does every few seconds, whoever uses it: commits, and room that is given back.

One rule: what fails is tried again; nothing of it ends the mount.
"""

from __future__ import annotations

import logging

import trio

from ckptfs.daemon.open_store import OpenStore
from ckptfs.store.errors import CkptfsError, NoSpace
from ckptfs.store.index import Index

log = logging.getLogger(__name__)
_COMMIT_EVERY_S = 1.0
_RECLAIM_EVERY_S = 3.0


class Upkeep:
    """Belongs to the index thread. Both go on for ever."""

    def __init__(self, parts: OpenStore) -> None:
        self._index = parts.index
        self._reclaim = parts.ingest.reclaim

    async def commit(self) -> None:
        """Commit what waits."""
        while True:
            await trio.sleep(_COMMIT_EVERY_S)
            if self._index.pending:
                commit_or_warn(self._index)

    async def reclaim(self) -> None:
        """Punch duplicate ranges whose removal is committed; what somebody has mapped waits."""
        while True:
            await trio.sleep(_RECLAIM_EVERY_S)
            try:
                await self._reclaim.execute()
            except (CkptfsError, OSError) as e:
                log.error("room of duplicates was not given back: %s", e)


def commit_or_warn(index: Index) -> None:
    """Commit; on a full disk the journal keeps the changes, and the next commit tries again."""
    try:
        index.commit()
    except NoSpace as e:
        log.warning("%s", e)
