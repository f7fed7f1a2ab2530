"""`ckptfs keys rotate` in a running mount: the files first (key_rotation.py), then each unit's history."""

from __future__ import annotations

import time

import trio

from ckptfs.daemon.key_rotation import read_rotations, rotate_key
from ckptfs.daemon.keys import key_path
from ckptfs.daemon.open_store import OpenStore
from ckptfs.store.errors import InvalidRequest


async def exchange_key(parts: OpenStore, configured: str) -> None:
    """A new key signs from now on; `configured` is the `key` of the configuration.

    InvalidRequest if versions are not signed. Durable when: this returned; a crash in between leaves either
    key.
    """
    path = key_path(configured)
    if path is None:
        raise InvalidRequest('versions are not signed here (`key = "none"`), so there is no key to rotate')
    key = await trio.to_thread.run_sync(rotate_key, path, time.time_ns())
    parts.keyring.rotations, parts.keyring.signing = read_rotations(path), key
    for unit in parts.histories.units():
        parts.histories.record_rotation(unit.unit)
        await trio.lowlevel.checkpoint()
