"""`ckptfs umount`: take the mount away, then wait until its daemon has made everything durable.

One rule: the kernel is asked to unmount, not the daemon, so this works whatever state the daemon is in.
"""

from __future__ import annotations

import os
import select

from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.mountpoints import detach
from ckptfs.daemon.mounts import MountEntry, follow, mount_at, mount_table
from ckptfs.daemon.places import socket_path
from ckptfs.store.errors import CkptfsError, NotFound, Unavailable

END_S = 300.0


def unmount(mountpoint: str) -> str:
    """Unmount and wait for the daemon's end; returns the mount point.

    NotFound if no ckptfs is mounted there, Conflict if it is busy, Unavailable if the daemon does not end.
    """
    table = mount_table()
    path = follow(mountpoint, table)
    entry = mount_at(path, table)
    if entry is None or not entry.is_ckptfs:
        raise NotFound(f"no ckptfs is mounted at {path}")
    process = _daemon_of(entry)
    try:
        detach(path, lazy=process is None)
        if process is not None and not _ended(process):
            raise Unavailable(f"{path} is unmounted, but its daemon is still at work after {END_S:.0f} s")
    finally:
        if process is not None:
            os.close(process)
    return path


def _daemon_of(entry: MountEntry) -> int | None:
    """A descriptor of the daemon's process; None if it is dead."""
    try:
        with ControlClient(socket_path(entry.path, entry.user_id), entry.user_id) as client:
            return client.open_process()
    except (CkptfsError, OSError):
        return None


def _ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(END_S * 1000))
