"""Whether a storage keeps its word: tried once, before anything relies on it.

One rule: a storage on which `create` replaces an object, or lets two callers of one name both succeed, is
refused: heads of two collectors, or of a node and its restored copy, would overwrite each other unseen.

Source: FORMAT.md, "Remotes", "What is assumed of the storage".
"""

from __future__ import annotations

import trio

from ckptfs.store.bucket import Bucket
from ckptfs.store.errors import CkptfsError, Conflict, Unsupported

_RACERS = 4


async def probe(bucket: Bucket, token: str) -> None:
    """Try what is assumed; Unsupported says what the storage lacks. Other errors as the bucket raises.

    `token` is random hex digits; what is made below `probe/` is removed again.
    """
    key = f"probe/{token}"
    try:
        await _alone(bucket, f"{key}/alone")
        await _racing(bucket, f"{key}/race")
    finally:
        with trio.move_on_after(10, shield=True):
            for name in ("alone", "race"):
                try:
                    await bucket.remove(f"{key}/{name}")
                except CkptfsError:
                    pass  # a few bytes stay behind


async def _alone(bucket: Bucket, key: str) -> None:
    await bucket.create(key, b"first")
    try:
        await bucket.create(key, b"second")
    except Conflict:
        pass
    else:
        raise _ignores(bucket, "it replaced an object that was there")
    found = await bucket.read(key)
    if found != b"first" or bytes(await bucket.read_range(key, 1, 3)) != b"irs":
        raise Unsupported(f"{bucket.url} gives back other bytes than it was sent")


async def _racing(bucket: Bucket, key: str) -> None:
    made: list[bytes] = []
    failures: list[CkptfsError] = []

    async def race(payload: bytes) -> None:
        try:
            await bucket.create(key, payload)
            made.append(payload)
        except Conflict:
            pass
        except CkptfsError as e:
            failures.append(e)

    async with trio.open_nursery() as nursery:
        for number in range(_RACERS):
            nursery.start_soon(race, b"%d" % number)
    if failures:
        raise failures[0]
    if len(made) > 1:
        raise _ignores(bucket, f"{len(made)} callers at once made the same object")
    if made and await bucket.read(key) != made[0]:
        raise _ignores(bucket, "an object was replaced by one that was refused")


def _ignores(bucket: Bucket, what: str) -> Unsupported:
    return Unsupported(
        f"{bucket.url} ignores `If-None-Match` ({what}); ckptfs cannot share such a storage safely"
    )
