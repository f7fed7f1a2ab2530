"""Which versions of a remote lack something there.

One rule: a version is whole if every tree and recipe of it can be read and every chunk lies in a pack that
counts; why one is not is said, and nobody guesses.

Source: FORMAT.md, "Remotes", "What is lost".
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np
import trio

from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import ChunkId
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.remote_walk import RemoteWalk
from ckptfs.store.remote.shard import ROW
from ckptfs.store.remote.stock import Missing, Stock, stock_of


@dataclass(frozen=True, slots=True)
class Lack:
    """What a version lacks. `is_missing`: chunks lie in no pack that counts; else something is damaged, which
    may yet be healed."""

    why: str
    is_missing: bool


async def lost_versions(remote: Remote, stock: Stock, records: Iterable[VersionRecord]) -> dict[int, Lack]:
    """The numbers of those of these versions that lack something, and what; raises as the remote does. What
    whole ones share is read once."""
    found: dict[int, Lack] = {}
    whole: Set[ChunkId] = frozenset()
    for record in records:
        assert record.top.tree is not None, "a version is a directory"
        walk = RemoteWalk(remote, whole)
        try:
            await walk.walk(stock, [record.top.tree])
            await trio.to_thread.run_sync(stock.rows_of, walk.all())
        except (Corrupt, NotFound) as e:
            found[record.number] = Lack(str(e), isinstance(e, Missing))
        else:
            whole = walk.seen
    return found


async def stock_of_shards(known: KnownChunks) -> Stock:
    """All rows that count, of one that keeps every row."""
    assert known.every is not None, "it keeps every row"
    rows = [np.zeros(0, ROW), *known.every]
    return await trio.to_thread.run_sync(lambda: stock_of(known.packs, np.concatenate(rows)))
