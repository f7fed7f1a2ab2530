"""What the log says of a request that failed.

One rule: an ordinary answer (no such name, disk full) is not worth a line; damage names file, tensor, chunk
and place; what nobody foresaw is logged with its operation and path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ckptfs.fusefs.browse import Browse
from ckptfs.fusefs.errnos import is_expected
from ckptfs.fusefs.namespace import Namespace
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO
from ckptfs.fusefs.nodes import Nodes
from ckptfs.fusefs.versioned_files import VersionedFiles
from ckptfs.store.errors import Corrupt
from ckptfs.store.inode import ROOT_INO

log = logging.getLogger(__name__)
_BY_HANDLE = {"read", "write", "fsync", "release", "readdir", "releasedir", "fsyncdir"}


class Failures:
    """Logs errors of request handlers. Belongs to the trio thread."""

    def __init__(self, namespace: Namespace, browse: Browse, versioned: VersionedFiles) -> None:
        self._namespace = namespace
        self._browse = browse
        self._versioned = versioned

    def report(self, operation: str, args: Sequence[object], error: Exception) -> None:
        """Log an error that is not an ordinary answer, with the path that it is about."""
        if is_expected(error):
            return
        number = next((a for a in args if isinstance(a, int)), ROOT_INO)
        ino = Nodes.ino_of(number >> 1 if operation in _BY_HANDLE else number)
        try:
            path = self._path_of(ino)
        except Exception:  # the report must not fail where the operation did
            path = f"inode {ino}"
        if isinstance(error, Corrupt):
            if (what := self._versioned.describe(ino, path, error)) is not None:
                log.error("%s of %s refused: %s", operation, path, what)
        else:
            log.error("%s of %s failed unexpectedly", operation, path, exc_info=error)

    def _path_of(self, ino: int) -> str:
        if ino >= FIRST_VIRTUAL_INO:
            return os.fsdecode(self._browse.path_of(ino))
        return os.fsdecode(self._namespace.path_of(ino))
