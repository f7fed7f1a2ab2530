"""Which files somebody is writing just now, as the publisher asks before it calls a directory quiet.

One rule: a file counts as being written until its last writer is known to be gone, mappings included; a
log, which only ever grows by small appends, holds nothing back.
"""

from __future__ import annotations

import time

from ckptfs.fusefs.namespace import Namespace
from ckptfs.fusefs.passthrough import Passthrough
from ckptfs.fusefs.quiet import Quiet
from ckptfs.fusefs.staged import StagedFiles


class Writers:
    """Who writes. Every field belongs to the trio thread.

    `_mapped` are closed files that were found to have a writable mapping: they count as being written
    until their lease says otherwise.
    """

    def __init__(
        self, namespace: Namespace, staged: StagedFiles, passthrough: Passthrough, quiet: Quiet
    ) -> None:
        self._namespace = namespace
        self._staged = staged
        self._passthrough = passthrough
        self._quiet = quiet
        self._mapped: set[int] = set()

    def note_mapped(self, ino: int) -> None:
        """The file is closed, and its lease was refused: somebody goes on writing through a mapping."""
        self._mapped.add(ino)

    def forget(self, ino: int) -> None:
        """Its bytes are in the store now."""
        self._mapped.discard(ino)

    def sample_growth(self, ticks: float) -> None:
        """Look at files that the kernel writes by itself: logs that grew are minor events.

        `ticks` says how many of its periods have passed, so that a late look does not make a log
        seem to grow fast.
        """
        now = time.monotonic()
        for ino, open_file in list(self._staged.open_files.items()):
            if not open_file.writers or not self._passthrough.is_attached(ino):
                continue
            if self._staged.sample(open_file, ticks):
                for parent, name in self._namespace.inode(ino).links:
                    if open_file.growth.is_log(name):
                        self._quiet.minor(parent, now)

    def in_directory(self, directory: int) -> set[int]:
        """Files of a directory that are open for writing and are not logs."""
        writers = {ino for ino in list(self._mapped) if self._is_mapped_in(ino, directory)}
        for ino, open_file in self._staged.open_files.items():
            if open_file.writers and open_file.growth.wrote | (open_file.content.staging != 0):
                links = [name for parent, name in self._namespace.inode(ino).links if parent == directory]
                if links and not open_file.growth.is_log(links[0]):
                    writers.add(ino)
        return writers

    def note_unprivileged_writer(self, ino: int) -> None:
        """Somebody who is not root has it open for writing: set-id bits go at the first write."""
        self._staged.note_unprivileged(self._staged.open_files[ino])

    def note_privileges(self, ino: int) -> None:
        """Its mode or capabilities changed: the next write has to look at them again."""
        if ino in self._staged.open_files:
            self._staged.open_files[ino].privileges_checked = False

    def privileges_at_write(self, ino: int) -> bool | None:
        """What goes with this write: nothing (None), capabilities (False), or set-id bits too (True)."""
        open_file = self._staged.open_files[ino]
        checked, open_file.privileges_checked = open_file.privileges_checked, True
        return None if checked else open_file.unprivileged

    def _is_mapped_in(self, ino: int, directory: int) -> bool:
        inode = self._namespace.find(ino)
        if inode is None or not inode.content.staging or not self._staged.is_mapped(inode.content.staging):
            self._mapped.discard(ino)
            return False
        return any(parent == directory for parent, _ in inode.links)
