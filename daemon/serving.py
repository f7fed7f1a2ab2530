"""The process of one mount: what has to be there before there is a store, and what is said when it ends.

One rule: what goes wrong is raised to whoever called, as one error.
"""

from __future__ import annotations

import logging
import os
import sys

import trio

from ckptfs.daemon.config import Config
from ckptfs.daemon.kept_session import KeptSession, kept_fds, refusal, take_over
from ckptfs.daemon.keys import load_keyring
from ckptfs.daemon.mounting import Mount
from ckptfs.daemon.mountpoints import check_fuse, prepare_mountpoint, real_mountpoint
from ckptfs.daemon.open_store import opened_store
from ckptfs.daemon.places import make_socket_folder, socket_path
from ckptfs.daemon.service_manager import ServiceManager
from ckptfs.fusefs.requests import read_rows
from ckptfs.store.errors import Corrupt, Unavailable
from ckptfs.store.index import Index

log = logging.getLogger(__name__)


def serve_mount(
    mountpoint: str, store: str, config: Config, config_path: str | None, *, as_json: bool
) -> None:
    """Mount `store` at `mountpoint` and serve it until it is unmounted or told to stop. `config` is what the
    file `config_path` has, which is read again at a SIGHUP.

    Raises what there is to be said to the person who called. Durable when: this returned.
    """
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    path = real_mountpoint(mountpoint, store)
    inherited = take_over(kept_fds(os.environ, os.getpid()), path, store)
    kept = inherited.session
    for name in inherited.stale:
        # As long as its session is kept by somebody, a mount that nobody serves is not dead.
        ServiceManager(os.environ).let_go(name)
    if kept is None:
        prepare_mountpoint(path)
        check_fuse()
    is_held = kept.state.is_held if kept is not None else lambda ino: False
    uid = os.geteuid()
    make_socket_folder(uid)
    socket = socket_path(path, uid)
    try:
        with opened_store(store, path, socket, lambda: load_keyring(config.key), is_held) as parts:
            kept = _still_good(kept, parts.index, path)
            trio.run(Mount(parts, path, socket, config, config_path, kept).serve, as_json)
    except BaseExceptionGroup as group:
        error = lone_error(group)
        if isinstance(error, trio.TooSlowError):
            raise Unavailable(f"the kernel did not start a FUSE session at {path}; try again") from None
        raise error from None


def _still_good(kept: KeptSession | None, index: Index, path: str) -> KeptSession | None:
    """The session, if the index has what is needed to go on with it; else the mount is cleared."""
    try:
        if kept is not None:
            read_rows(index)
    except Corrupt as e:
        assert kept is not None
        log.error("%s", refusal(path, e))
        kept.close()
        for name in (kept.names.session, kept.names.state):
            ServiceManager(os.environ).let_go(name)
        prepare_mountpoint(path)
        return None
    return kept


def lone_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a nursery wrapped, if that is one error."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
