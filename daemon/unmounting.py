"""`ckptfs umount`: take the mount away, then wait until its daemon has made everything durable.

One rule: the kernel is asked to unmount, not the daemon, so this works whatever state the daemon is in.
"""

from __future__ import annotations

import os
import select

from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.mountpoints import detach
from ckptfs.daemon.mounts import MountEntry, follow, mount_at, mount_table, who_else_has
from ckptfs.daemon.places import socket_path
from ckptfs.store.errors import CkptfsError, NotFound, Unavailable

END_S = 300.0
_ENDS_BY_ITSELF_S = 5.0


def unmount(mountpoint: str) -> str:
    """Unmount and wait for the daemon's end; returns the mount point.

    NotFound if no ckptfs is mounted there, Conflict if it is busy, Unavailable if the daemon does not end, or
    goes on for somebody who has the mount in a mount namespace of his own.
    """
    table = mount_table()
    path = follow(mountpoint, table)
    entry = mount_at(path, table)
    if entry is None or not entry.is_ckptfs:
        raise NotFound(f"no ckptfs is mounted at {path}")
    process = _daemon_of(entry)
    try:
        detach(path, lazy=process is None)
        if process is not None and not _ended(process, _ENDS_BY_ITSELF_S):
            _check_nobody_has(entry)
            if not _ended(process, END_S):
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


def _check_nobody_has(entry: MountEntry) -> None:
    who = who_else_has(entry)
    if who is not None:
        raise Unavailable(
            f"{entry.path} is unmounted here, but {who} has it in a mount namespace of its own (a "
            "container?), and its daemon goes on for that: end it, or stop the daemon"
        )


def _ended(process: int, most_s: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(most_s * 1000))
