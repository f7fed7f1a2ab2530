"""An encode process that outlives its daemon is ended before the next daemon looks at the store.

One rule: nobody writes a segment whose daemon is dead: the next one gives its number away again.

The process has a record lock (fcntl(2)) on the store's lock file as long as it lives, beside the daemon's own
lock, which is of another kind; the kernel knows who has it. One that gets its lock too late to be found sees
that its parent is gone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Conflict
from ckptfs.store.layout import LOCK_PATH

_FLOCK = struct.Struct("hhqqi4x")
_WITHIN_S = 10.0
_POLL_S = 0.01


def hold_store(disk: Disk, parent: int) -> bool:
    """In the process itself: be found from now on, until it ends. False if the daemon `parent` has ended."""
    fcntl.lockf(disk.open_write(LOCK_PATH), fcntl.LOCK_EX)
    return os.getppid() == parent


def end_orphan(disk: Disk) -> None:
    """Kill the process that a dead daemon left, and wait for its end; by who has the store's lock.

    Conflict if it does not end in time.
    """
    fd = disk.open_write(LOCK_PATH)
    try:
        until = time.monotonic() + _WITHIN_S
        while (pid := _holder(fd)) is not None:
            if time.monotonic() > until:
                raise Conflict(
                    f"process {pid} still encodes for a daemon that is dead, and does not end; kill it"
                )
            if pid > 0:  # else it is of another namespace, and ends by itself with its batch
                os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
    except ProcessLookupError:
        pass
    finally:
        disk.close(fd)


def _holder(fd: int) -> int | None:
    """The process that has the record lock; 0 if it has no number here."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else pid
