"""What a remote has: the rows of its shards, in memory.

One rule: a chunk is known only if a shard that was read whole says so; what cannot be read is named, and its
chunks count as missing, so the next push sends them anew.

52 bytes of memory a chunk, and as many for each further pack with it. Source: FORMAT.md, "Remotes", "Shard".
"""

from __future__ import annotations

import numpy as np
import trio

from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.ids import ChunkId
from ckptfs.store.remote.kept import EVERYTHING, Kept
from ckptfs.store.remote.names import SHARDS, parse_shard_key, shard_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.shard import (
    ROW,
    Keys,
    PackFacts,
    Rows,
    Shard,
    decode_shard,
    find_rows,
    keys,
    keys_of,
    sorted_rows,
)

_PARALLEL = 8
_SETTLE_ROWS = 1 << 16
_SETTLE_SHARE = 8


class KnownChunks:
    """Belongs to one thread; one `refresh` or `add` at a time. `packs` are numbered as rows name them,
    `counting` says which of them count."""

    def __init__(self, remote: Remote, kept: Kept = EVERYTHING, *, every: bool = False) -> None:
        """`kept` says what counts; what does not is not known. `every`: keep all rows of a chunk, too."""
        self._remote = remote
        self._kept = kept
        self._settled, self._recent = np.zeros(0, ROW), np.zeros(0, ROW)
        self._adding = trio.Lock()
        self._doubled: list[Rows] = []
        self._read: set[bytes] = set()
        self._shard_names: list[bytes] = []
        self.packs: list[PackFacts] = []
        self.counting: list[bool] = []
        self.every: list[Rows] | None = [] if every else None
        self.problems: list[str] = []

    async def refresh(self) -> None:
        """Read the shards that are there and were not read yet. What is wrong with one goes to `problems`;
        other errors as the remote raises."""
        listed = await self._remote.list_objects(SHARDS)
        names = {name for meta in listed if (name := parse_shard_key(meta.key)) is not None}
        # A list may leave out what has to be there.
        fresh = sorted((names | self._kept.shards) - self._read)
        failures: list[CkptfsError] = []
        limiter = trio.CapacityLimiter(_PARALLEL)
        async with trio.open_nursery() as nursery:
            for name in fresh:
                nursery.start_soon(self._load, name, limiter, failures)
        if failures:
            raise failures[0]

    async def _load(self, name: bytes, limiter: trio.CapacityLimiter, failures: list[CkptfsError]) -> None:
        async with limiter:
            if failures:
                return
            try:
                content = await self._remote.get(shard_key(name), name)
                shard = await trio.to_thread.run_sync(decode_shard, content)
            except (Corrupt, NotFound) as e:
                self.problems.append(str(e))
                return
            except CkptfsError as e:
                failures.append(e)
                return
        async with self._adding:
            await trio.to_thread.run_sync(self.add, name, shard)  # it sorts

    def add(self, name: bytes, shard: Shard) -> None:
        """Know what a shard lists."""
        if name in self._read:
            return
        self._read.add(name)
        counting = np.array([self._kept.counts(name, pack) for pack in shard.packs])
        rows = shard.rows[counting[shard.rows["pack"]]]
        rows["pack"] += len(self.packs)
        self.packs += shard.packs
        self.counting += counting.tolist()
        self._shard_names += [name] * len(shard.packs)
        if self.every is not None:
            self.every.append(rows)
        have = keys(rows)
        doubled = rows[(find_rows(self._settled, have) >= 0) | (find_rows(self._recent, have) >= 0)]
        if len(doubled):
            self._doubled.append(doubled)
        self._recent = sorted_rows(np.concatenate([self._recent, rows]))
        if len(self._recent) > max(_SETTLE_ROWS, len(self._settled) // _SETTLE_SHARE):
            self._settled = sorted_rows(np.concatenate([self._settled, self._recent]))
            self._recent = self._recent[:0]

    def shard_of(self, pack: int) -> bytes:
        """The name of the shard that lists a pack."""
        return self._shard_names[pack]

    @property
    def shards(self) -> frozenset[bytes]:
        """The names of the shards that were read."""
        return frozenset(self._read)

    def __len__(self) -> int:
        return len(self._settled) + len(self._recent)

    def missing(self, wanted: Keys) -> Keys:
        """Those of `wanted` that no shard lists."""
        wanted = wanted[find_rows(self._settled, wanted) < 0]
        return wanted[find_rows(self._recent, wanted) < 0]

    def others_of(self, chunk: ChunkId) -> Rows:
        """Where a chunk lies besides where rows_of says."""
        wanted = keys_of([chunk])
        found = [rows[at[at >= 0]] for rows in self._doubled for at in [find_rows(rows, wanted)]]
        others: Rows = np.concatenate([np.zeros(0, ROW), *found])
        return others

    def rows_of(self, wanted: Keys) -> Rows:
        """The rows of those that some shard lists, in the order of pack and offset."""
        found = [
            rows[at[at >= 0]] for rows in (self._settled, self._recent) for at in [find_rows(rows, wanted)]
        ]
        rows = sorted_rows(np.concatenate(found))
        return rows[np.lexsort((rows["offset"], rows["pack"]))]
