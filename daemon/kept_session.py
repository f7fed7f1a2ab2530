"""Taking over the mount of a daemon that died: the two descriptors that a service manager kept for us.

One rule: what was kept is used whole or not at all. If it is not that of this mount and store, or of another
layout, or the mount is gone, it is let go, and mounting begins anew.

Source: sd_listen_fds(3), FDSTORE= in sd_notify(3); SEMANTICS.md, "When the daemon dies".
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ckptfs.daemon.mounts import mount_at, mount_table
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.store.errors import CkptfsError

log = logging.getLogger(__name__)
SESSION_NAME = "ckptfs-session"
STATE_NAME = "ckptfs-state"
_FIRST_FD = 3


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A kernel session that goes on, and its state."""

    fuse_fd: int
    state: KeptState


def kept_fds(environment: Mapping[str, str], pid: int) -> dict[str, int]:
    """The descriptors that were passed to this process, by name. They are not passed on to children. Of a
    name that several have nobody knows which is the right one: it has none."""
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(pid) or not count.isdecimal():
        return {}
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, int] = {}
    several: set[str] = set()
    for fd, name in zip(range(_FIRST_FD, _FIRST_FD + int(count)), names, strict=False):
        os.set_inheritable(fd, False)
        if name in found:
            os.close(fd)
            several.add(name)
        else:
            found[name] = fd
    for name in several:
        os.close(found.pop(name))
    return found


def take_over(fds: Mapping[str, int], path: str, store: str) -> KeptSession | None:
    """The session of the mount of `store` at `path`, if it goes on; else what was kept is closed."""
    ours = {name: fd for name, fd in fds.items() if name in (SESSION_NAME, STATE_NAME)}
    if len(ours) == 2:
        try:
            state = KeptState.adopt(ours[STATE_NAME])
            if _goes_on(state, path, store):
                return KeptSession(ours[SESSION_NAME], state)
            log.warning("the mount that was kept is not the one of %s at %s, or is gone", store, path)
        except CkptfsError as e:
            log.warning("the mount cannot be taken over: %s", e)
    for fd in ours.values():
        os.close(fd)
    return None


def _goes_on(state: KeptState, path: str, store: str) -> bool:
    kept, entry = state.negotiated, mount_at(path, mount_table())
    if entry is None or not entry.is_ckptfs or entry.minor != kept.minor:
        return False
    return (kept.mountpoint, os.path.realpath(kept.store)) == (path, os.path.realpath(store))
