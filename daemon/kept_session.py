"""Taking over the mount of a daemon that died: the two descriptors that a service manager kept for us.

One rule: what was kept is used whole or not at all. If it is not that of this mount and store, or of another
layout, or cannot be read, or the mount is gone, it is let go, and mounting begins anew. Whatever has a name
of ours is ours, of whichever release: a session that nobody lets go is a mount that never answers nor dies.

A session and its state have a name each, with a token in it that is made for the two of them: what is kept
of two mounts, of one that is gone and the next, is never put together. Source: sd_listen_fds(3), FDSTORE= in
sd_notify(3); SEMANTICS.md, "When the daemon dies".
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptfs.daemon.mounts import mount_at, mount_table
from ckptfs.fusefs.kept_check import check_kept
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.store.errors import CkptfsError

log = logging.getLogger(__name__)
_FIRST_FD = 3
_TOKEN_BYTES = 8
_OURS = "ckptfs-"
_NAME = re.compile(r"ckptfs-(session|state)(?:-([0-9a-f]{1,32}))?")


@dataclass(frozen=True, slots=True)
class Names:
    """What the two descriptors of one mount are called; no other mount has the same."""

    session: str
    state: str

    @classmethod
    def of(cls, token: str) -> Names:
        return cls(f"ckptfs-session-{token}", f"ckptfs-state-{token}")

    @classmethod
    def new(cls) -> Names:
        """For a mount that begins."""
        return cls.of(os.urandom(_TOKEN_BYTES).hex())


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A kernel session that goes on, and its state."""

    fuse_fd: int
    state: KeptState
    names: Names

    def close(self) -> None:
        """Let go of it. The kernel ends the session once nobody else keeps it."""
        os.close(self.fuse_fd)
        self.state.close()


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a daemon finds when it starts. `stale` are the names of what nobody goes on with: the service
    manager keeps it as long as it is not told to let it go, and then that mount answers nobody."""

    session: KeptSession | None
    stale: tuple[str, ...]


def kept_fds(environment: Mapping[str, str], pid: int) -> list[tuple[str, int]]:
    """The descriptors that were passed to this process, and their names. They are not passed on to
    children."""
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(pid) or not count.isdecimal():
        return []
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    found = [*zip(names, range(_FIRST_FD, _FIRST_FD + int(count)), strict=False)]
    for _, fd in found:
        os.set_inheritable(fd, False)
    return found


def take_over(fds: Iterable[tuple[str, int]], path: str, store: str) -> Inherited:
    """Find the session of the mount of `store` at `path`, if it goes on; all else of ours is closed."""
    pairs: dict[str, list[tuple[str, str, int]]] = {}
    unknown: list[tuple[str, int]] = []
    for name, fd in fds:
        if (match := _NAME.fullmatch(name)) is not None:
            pairs.setdefault(match[2] or "", []).append((match[1], name, fd))
        elif name.startswith(_OURS):
            log.warning("%s was kept by another release of ckptfs; it is let go", name)
            unknown.append((name, fd))
    session, stale = None, [name for name, _ in unknown]
    for _, fd in unknown:
        os.close(fd)
    for kept in pairs.values():
        taken = None if session is not None else _taken(kept, path, store)
        if taken is None:
            stale += [name for _, name, _ in kept]
            for _, _, fd in kept:
                os.close(fd)
        session = session or taken
    return Inherited(session, tuple(dict.fromkeys(stale)))


def _taken(kept: list[tuple[str, str, int]], path: str, store: str) -> KeptSession | None:
    by_kind = {kind: (name, fd) for kind, name, fd in kept}
    if len(kept) != 2 or len(by_kind) != 2:
        return None
    (session_name, session_fd), (state_name, state_fd) = by_kind["session"], by_kind["state"]
    try:
        state = KeptState.adopt(state_fd)
        if not _goes_on(state, path, store):
            log.warning("the mount that was kept is not the one of %s at %s, or is gone", store, path)
            return None
        check_kept(state)
    except CkptfsError as e:
        log.error("%s", refusal(path, e))
        return None
    return KeptSession(session_fd, state, Names(session_name, state_name))


def refusal(path: str, error: CkptfsError) -> str:
    """What the log says of a session that nobody goes on with."""
    return (
        f"the mount at {path} cannot be taken over: {error}. It is mounted anew: whoever has something open "
        "in it gets errors and must open it again; what was written is there"
    )


def _goes_on(state: KeptState, path: str, store: str) -> bool:
    kept, entry = state.negotiated, mount_at(path, mount_table())
    if entry is None or not entry.is_ckptfs or entry.minor != kept.minor:
        return False
    return (kept.mountpoint, os.path.realpath(kept.store)) == (path, os.path.realpath(store))
