"""Fetching chunks from a remote into the store: what it lacks, in few and long ranges.

One rule: a chunk is stored only if its bytes match its id, and is pinned from before it is looked for until
its owner's record is committed.

Source: FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.ids import ChunkId, cid_text
from ckptfs.store.ingest import Ingest
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.ranges import Got, RangeReader
from ckptfs.store.remote.shard import Keys, Rows, chunk_of_key, find_rows, keys_of
from ckptfs.store.segments import Segments

_SLICE = 4096


class Fetcher:
    """Belongs to the index thread. What is in memory is said in ranges.py.

    `held` pins all that was asked for. `fetched_bytes` counts payload.
    """

    def __init__(
        self,
        remote: Remote,
        known: KnownChunks,
        segments: Segments,
        ingest: Ingest,
        held: set[ChunkId],
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._remote = remote
        self._known = known
        self._reader = RangeReader(remote, known.packs, known.others_of)
        self._segments = segments
        self._ingest = ingest
        self._held = held
        self._on_progress = on_progress
        self.fetched_bytes = 0
        self.fetched_chunks = 0

    async def fetch(self, wanted: Keys) -> None:
        """Have all of these in the store. Corrupt names a chunk that the remote lacks or has with other
        bytes; other errors as the remote and the ingest raise. Durable when: this returned."""
        missing = [chunk for part in self._absent(wanted) for chunk in part]
        if not missing:
            return
        rows = self._known.rows_of(keys_of(missing))
        if len(rows) < len(missing):
            await self._known.refresh()
            rows = self._known.rows_of(keys_of(missing))
        if len(rows) < len(missing):
            raise self._lacking(missing, rows)
        await self._store(rows)

    def _absent(self, wanted: Keys) -> Iterator[list[ChunkId]]:
        """Those that are not stored, a slice at a time."""
        for start in range(0, len(wanted), _SLICE):
            chunks = [chunk_of_key(key) for key in wanted[start : start + _SLICE].tolist()]
            self._held.update(chunks)
            there = set(self._segments.locate_many(chunks).chunks)
            yield [chunk for chunk in chunks if chunk not in there]

    def _lacking(self, missing: list[ChunkId], rows: Rows) -> Corrupt:
        numbers = find_rows(rows[rows["chunk"].argsort()], keys_of(missing)) if len(rows) else [-1]
        lost = [chunk for chunk, at in zip(missing, numbers, strict=False) if at < 0] or missing
        why = f" ({self._known.problems[0]})" if self._known.problems else ""
        return Corrupt(
            f"{self._remote.url} lacks {len(missing) - len(rows)} chunks, {cid_text(lost[0])} for one{why}",
            expected=lost[0],
        )

    async def _store(self, rows: Rows) -> None:
        """Read ranges while those before are stored."""
        async with self._ingest.storing(self._held) as storing:

            async def take(batch: list[Got]) -> None:
                await storing.add(batch)
                self.fetched_chunks += len(batch)
                self.fetched_bytes += sum(len(payload) for _, payload in batch)
                self._on_progress(self.fetched_bytes)

            try:
                await self._reader.deliver(rows, take)
            except NotFound as e:  # a pack that shards list
                raise Corrupt(f"{self._remote.url} has lost something: {e}") from None
