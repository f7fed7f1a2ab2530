"""Reading chunks of packs in few and long ranges.

One rule: a chunk is handed out only if its bytes match its id.

Source: FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import trio

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.remote.names import pack_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import checked_chunk
from ckptfs.store.remote.several import done_for_each
from ckptfs.store.remote.shard import PackFacts, Rows

RANGE_BYTES = 8 << 20
BATCH_BYTES = 32 << 20
_GAP_BYTES = 64 << 10
_PARALLEL = 4
Got = tuple[ChunkId, bytes]


@dataclass(frozen=True, slots=True)
class PackRange:
    """`length` bytes from `offset` of a pack, which holds the chunks of `rows`."""

    pack: int
    offset: int
    length: int
    rows: Rows


class RangeReader:
    """Reads chunks from the packs of a remote. Keeps no state; any task of one thread may call."""

    def __init__(self, remote: Remote, packs: Sequence[PackFacts]) -> None:
        """`packs` are numbered as rows name them; more may join them."""
        self._remote = remote
        self._packs = packs

    async def read(self, ranges: Sequence[PackRange]) -> list[Got]:
        """The chunks of these ranges. Corrupt or NotFound names what the remote lacks or has with other
        bytes; other errors as the remote raises."""
        read = await done_for_each(self._read_range, ranges, _PARALLEL)
        return [got for some in read for got in some]

    async def batches(self, rows: Rows) -> AsyncIterator[list[Got]]:
        """The chunks of `rows`, which are in the order of pack and offset, about BATCH_BYTES at a time."""
        for ranges in batches_of(rows):
            yield await self.read(ranges)

    async def _read_range(self, one: PackRange) -> list[Got]:
        pack = self._packs[one.pack]
        key = pack_key(pack.name)
        content = await self._remote.get_range(key, one.offset, one.length, pack.size)
        try:
            return await trio.to_thread.run_sync(_cut, one, content)
        except Corrupt as e:
            raise Corrupt(f"{self._remote.url}/{key}: {e}", expected=e.expected, got=e.got) from None


def _cut(one: PackRange, content: bytes) -> list[Got]:
    view = memoryview(content)
    found = []
    for row in one.rows:
        chunk, start = ChunkId(row["chunk"].tobytes()), int(row["offset"]) - one.offset
        found.append((chunk, checked_chunk(chunk, view[start : start + int(row["stored"])])))
    return found


def _ranges(rows: Rows) -> Iterator[PackRange]:
    """Runs of neighbours, of rows in the order of pack and offset."""
    packs, starts = rows["pack"].tolist(), rows["offset"].tolist()
    ends = (rows["offset"].astype("u8") + rows["stored"]).tolist()
    first = 0
    for at in range(1, len(rows) + 1):
        is_near = (
            at < len(rows)
            and packs[at] == packs[first]
            and starts[at] - ends[at - 1] <= _GAP_BYTES
            and ends[at] - starts[first] <= RANGE_BYTES
        )
        if not is_near:
            yield PackRange(packs[first], starts[first], ends[at - 1] - starts[first], rows[first:at])
            first = at


def batches_of(rows: Rows) -> Iterator[list[PackRange]]:
    """The ranges of `rows`, which are in the order of pack and offset, in groups of about BATCH_BYTES."""
    batch: list[PackRange] = []
    size = 0
    for one in _ranges(rows):
        batch.append(one)
        size += one.length
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
