"""Which directories a job has said to hold a finished save, and when: commit points not yet in a version.

One rule: what was closed before its directory, or one above, was committed counts as settled. A job that
saves faster than versions are made may rotate such a save away before its version exists.
"""

from __future__ import annotations

import time

from ckptfs.fusefs.errnos import PosixError
from ckptfs.fusefs.namespace import Namespace

# The kernel tells of the last close a moment after close(2) returned.
_LATE_CLOSE_S = 1.0
_KEPT_S = 60.0


class Commits:
    """Belongs to the index thread."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._at: dict[int, float] = {}

    def note(self, directory: int) -> None:
        """What is in a directory and below is a finished save."""
        self._at[directory] = time.monotonic()

    def covers(self, directory: int, closed: float) -> bool:
        """Whether a file of `directory` that was closed then (monotonic) was part of a finished save."""
        if not self._at:
            return False
        try:
            above = self._namespace.ancestors(directory)
        except PosixError:  # removed with what is in it
            return False
        return any(closed <= self._at[one] + _LATE_CLOSE_S for one in above if one in self._at)

    def published(self, since: float) -> None:
        """A version was made that was asked for at `since`: what was committed long before is in it."""
        self._at = {one: at for one, at in self._at.items() if at > since - _KEPT_S}
