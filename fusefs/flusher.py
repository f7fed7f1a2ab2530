"""Making what was written durable after a while, whether or not anybody calls fsync.

One rule: after a power cut an unsynced staging file is not trusted at all, so nothing may stay
unsynced for long. A host's page cache is written back after about 30 s; so is this.

Ingest syncs what settles within seconds. What is left are files that stay open (logs), that are
mapped, or that lie where versioning is off. Source: ARCHITECTURE §5, "Power-cut order".
"""

from __future__ import annotations

import logging
import time

import trio

from ckptfs.fusefs.draft import Drafts
from ckptfs.fusefs.files import Files
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.errors import CkptfsError

log = logging.getLogger(__name__)
FLUSH_EVERY_S = 30.0


class Flusher:
    """Syncs staging files in the background. Belongs to the trio thread."""

    def __init__(self, namespace: Namespace, drafts: Drafts, files: Files) -> None:
        self._namespace = namespace
        self._drafts = drafts
        self._files = files

    async def run(self) -> None:
        """Look every `FLUSH_EVERY_S`, for ever; cancelled at shutdown."""
        while True:
            await trio.sleep(FLUSH_EVERY_S)
            await self.flush(time.time_ns() - int(FLUSH_EVERY_S * 1e9))

    async def flush(self, older_than_ns: int) -> int:
        """Sync files whose inode changed before that time; returns how many.

        Durable when: this returned, for the files that it counted.
        """
        done = 0
        for ino in self._unsynced(older_than_ns):
            inode = self._namespace.find(ino)
            if inode is None or not inode.content.staging or inode.content.synced:
                continue
            try:
                await self._files.sync_closed(ino)
                done += 1
            except (CkptfsError, OSError) as e:
                log.error("%s is not durable: %s", self._namespace.path_of(ino).decode(errors="replace"), e)
        return done

    def _unsynced(self, older_than_ns: int) -> list[int]:
        found = []
        for directory in list(self._drafts.changed_dirs):
            for _, _, ino in self._namespace.entries(directory):
                inode = self._namespace.find(ino)
                if inode is None or not inode.content.staging or inode.content.synced:
                    continue
                if inode.ctime_ns < older_than_ns:
                    found.append(ino)
        return found
