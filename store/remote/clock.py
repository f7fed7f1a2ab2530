"""What time it is by a storage's clock.

One rule: a time is taken from an object that the storage has just got; a node's clock decides nothing.

Source: FORMAT.md, "Remotes" ("Times are those of the storage").
"""

from __future__ import annotations

import trio

from ckptfs.store.errors import CkptfsError
from ckptfs.store.remote.names import probe_key
from ckptfs.store.remote.objects import Random, Remote

_TOKEN_BYTES = 16


async def storage_now_ns(remote: Remote, random: Random) -> int:
    """Now, in ns since the epoch; an object is made for it, and removed. Raises as the remote does."""
    key = probe_key(random(_TOKEN_BYTES).hex())
    try:
        await remote.create_unnamed(key, b"now")
        return (await remote.stat(key)).modified_ns
    finally:
        with trio.move_on_after(10, shield=True):
            try:
                await remote.remove(key)
            except CkptfsError:
                pass  # a few bytes stay behind
