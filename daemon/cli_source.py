"""Where a command finds its answer: the daemon of a mount, or a store that no daemon holds.

One rule: the daemon answers wherever there is one, because only it knows what is not committed yet;
a bare store is read as of its last commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.messages import AnyRequest, Progress
from ckptfs.daemon.mounts import MountEntry, find_mounted, mount_at, mount_table
from ckptfs.daemon.places import socket_path
from ckptfs.store.errors import InvalidRequest, NotFound, Unavailable


class Source(Protocol):
    """Answers requests."""

    def ask(self, request: AnyRequest, on_progress: Callable[[Progress], None] | None = None) -> object:
        """The result; the error of whoever answers is raised here."""


@contextmanager
def opened(path: str, store: str | None, key: str = "") -> Iterator[tuple[Source, str]]:
    """Who answers for `path`, and the path as seen from the root of the mount. `key`, as in a configuration,
    signs for a store that no daemon has."""
    if store is not None:
        with _of_store(store, key) as source:
            yield source, seen_from_mount(path)
        return
    mount, inner = locate(path)
    with _of_mount(mount) as client:
        yield client, inner


@contextmanager
def opened_all(paths: Sequence[str], store: str | None) -> Iterator[tuple[Source, list[str]]]:
    """Who answers for all of `paths`, and each as seen from the root of the mount."""
    if store is not None:
        with _of_store(store) as source:
            yield source, [seen_from_mount(path) for path in paths]
        return
    located = [locate(path) for path in paths]
    mount = located[0][0]
    for path, (other, _) in zip(paths, located, strict=True):
        if other != mount:
            raise InvalidRequest(f"{path} is not on the same mount as {paths[0]}")
    with _of_mount(mount) as client:
        yield client, [inner for _, inner in located]


@contextmanager
def store_for_import(path: str, key: str) -> Iterator[Source]:
    """Whoever can import into the store at `path`: its daemon, or, if it has none, this process; `key`, as in
    a configuration, signs then."""
    from ckptfs.daemon.offline_import import importing_store
    from ckptfs.store.layout import holder_of, open_store

    disk = open_store(path, writing=False)
    holder = holder_of(disk)
    if holder is not None and holder.socket:
        with ControlClient(holder.socket, disk.stat("").st_uid) as client:
            yield client
        return
    with importing_store(path, key) as store:
        yield store


def the_only_mount() -> str:
    """The mount that is meant where none was named: the one we are in, or the only one."""
    mounts = [entry.path for entry in mount_table() if entry.is_ckptfs]
    try:
        return find_mounted(".").mount.path
    except NotFound:
        pass
    if not mounts:
        raise NotFound("no ckptfs is mounted; name a store with --store DIR")
    if len(mounts) > 1:
        raise InvalidRequest(f"there are several mounts, name one: {', '.join(mounts)}")
    return mounts[0]


def seen_from_mount(path: str) -> str:
    """A path that a user gave together with --store."""
    return "/" + os.path.normpath("/" + path).lstrip("/")


def locate(path: str) -> tuple[MountEntry, str]:
    """The mount and the path within; `MOUNTPOINT@VERSION` is the root at that version."""
    try:
        found = find_mounted(path)
    except NotFound:
        front, _, version = path.rpartition("@")
        entry = mount_at(os.path.abspath(front), mount_table()) if front and "/" not in version else None
        if entry is None or not entry.is_ckptfs:
            raise
        return entry, f"/@{version}"
    return found.mount, found.inner


def _of_mount(mount: MountEntry) -> ControlClient:
    try:
        return ControlClient(socket_path(mount.path, mount.user_id), mount.user_id)
    except Unavailable as e:
        raise Unavailable(f"{mount.path}: {e}; start it again, or ask its store with --store DIR") from None


@contextmanager
def _of_store(path: str, key: str = "") -> Iterator[Source]:
    from ckptfs.store.layout import holder_of, open_store

    disk = open_store(path, writing=False)
    holder = holder_of(disk)
    if holder is not None and holder.socket:
        with ControlClient(holder.socket, disk.stat("").st_uid) as client:
            yield client
        return
    from ckptfs.daemon.offline import OfflineStore

    with OfflineStore(disk, key) as store:
        yield store
