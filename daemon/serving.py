"""The process of one mount: what has to be there before there is a store, and what is said when it ends.

One rule: what goes wrong is raised to whoever called, as one error.
"""

from __future__ import annotations

import logging
import os
import sys

import trio

from ckptfs.daemon.config import Config
from ckptfs.daemon.kept_session import SESSION_NAME, STATE_NAME, kept_fds, take_over
from ckptfs.daemon.keys import load_keyring
from ckptfs.daemon.mounting import Mount
from ckptfs.daemon.mountpoints import check_fuse, prepare_mountpoint, real_mountpoint
from ckptfs.daemon.open_store import opened_store
from ckptfs.daemon.places import make_socket_folder, socket_path
from ckptfs.daemon.service_manager import ServiceManager
from ckptfs.store.errors import Unavailable


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
    fds = kept_fds(os.environ, os.getpid())
    kept = take_over(fds, path, store)
    if kept is None:
        if fds:
            # As long as its session is kept by somebody, a mount that nobody serves is not dead.
            manager = ServiceManager(os.environ)
            for name in (SESSION_NAME, STATE_NAME):
                manager.let_go(name)
        prepare_mountpoint(path)
        check_fuse()
    is_held = kept.state.is_held if kept is not None else lambda ino: False
    uid = os.geteuid()
    make_socket_folder(uid)
    socket = socket_path(path, uid)
    try:
        with opened_store(store, path, socket, lambda: load_keyring(config.key), is_held) as parts:
            trio.run(Mount(parts, path, socket, config, config_path, kept).serve, as_json)
    except BaseExceptionGroup as group:
        error = lone_error(group)
        if isinstance(error, trio.TooSlowError):
            raise Unavailable(f"the kernel did not start a FUSE session at {path}; try again") from None
        raise error from None


def lone_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a nursery wrapped, if that is one error."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
