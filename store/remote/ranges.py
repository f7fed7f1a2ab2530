"""Reading chunks of packs in few and long ranges.

One rule: a chunk is handed out only if its bytes match its id.

Source: FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import trio

from ckptfs.store.bucket import Payload
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.ids import ChunkId
from ckptfs.store.remote.names import pack_key
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pack import check_chunk
from ckptfs.store.remote.several import done_for_each
from ckptfs.store.remote.shard import ROW, PackFacts, Rows

# All payloads of a usual pack: with half of that a pull took twice the requests, and 6 % more CPU time.
RANGE_BYTES = 16 << 20
_GAP_BYTES = 64 << 10
_NONE: Rows = np.zeros(0, ROW)
_PARALLEL = 4
# So many ranges are read and not taken yet, at the most.
AHEAD = 4
Got = tuple[ChunkId, bytes | memoryview]
Whole = tuple[ChunkId, bytes]
Take = Callable[[list[Got]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PackRange:
    """`length` bytes from `offset` of a pack, which holds the chunks of `rows`."""

    pack: int
    offset: int
    length: int
    rows: Rows


class RangeReader:
    """Reads chunks from the packs of a remote. Keeps no state; any task of one thread may call."""

    def __init__(
        self,
        remote: Remote,
        packs: Sequence[PackFacts],
        others_of: Callable[[ChunkId], Rows] = lambda chunk: _NONE,
    ) -> None:
        """`packs` are numbered as rows name them; more may join them. `others_of`: where a chunk lies as
        well, for when it is not right where a row says."""
        self._remote = remote
        self._packs = packs
        self._others_of = others_of

    async def deliver(self, rows: Rows, take: Take) -> None:
        """Read the chunks of `rows`, which are in the order of pack and offset, and hand them to `take` in
        that order, one call at a time, while the next are read: AHEAD ranges are in memory. What is handed
        over are views of what was read. Corrupt or NotFound names what the remote lacks or has with other
        bytes; other errors as the remote and `take` raise."""
        ranges = list(_ranges(rows))
        room, failures = trio.Semaphore(AHEAD), list[CkptfsError | OSError]()
        arrived = [trio.Event() for _ in ranges]
        found: dict[int, list[Got]] = {}
        numbers = iter(range(len(ranges)))

        async def read() -> None:
            while not failures:
                await room.acquire()
                number = next(numbers, None)
                if number is None:
                    return
                try:
                    found[number] = await self._read_range(ranges[number])
                except (CkptfsError, OSError) as e:
                    failures.append(e)
                arrived[number].set()

        async with trio.open_nursery() as nursery:
            for _ in range(min(_PARALLEL, len(ranges))):
                nursery.start_soon(read)
            try:
                for number, event in enumerate(arrived):
                    await event.wait()
                    if number not in found:
                        break
                    await take(found.pop(number))
                    room.release()
            except (CkptfsError, OSError) as e:
                failures.append(e)
            nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]

    async def read(self, rows: Rows) -> list[Whole]:
        """All of them at once: for what is small."""
        found: list[Whole] = []

        async def take(got: list[Got]) -> None:
            found.extend((chunk, bytes(payload)) for chunk, payload in got)

        await self.deliver(rows, take)
        return found

    async def read_right(self, rows: Rows) -> list[Whole]:
        """The same of what is there and right; the others are left out."""

        async def read(one: PackRange) -> list[Whole]:
            try:
                return [(chunk, bytes(payload)) for chunk, payload in await self._read_once(one)]
            except (Corrupt, NotFound):
                pass  # which of them it is, is told below
            found: list[Whole] = []
            for at in range(len(one.rows)):
                try:
                    chunk, payload = await self._read_anywhere(one.rows[at : at + 1])
                    found.append((chunk, bytes(payload)))
                except (Corrupt, NotFound):
                    continue
            return found

        parts = await done_for_each(read, list(_ranges(rows)), _PARALLEL)
        return [one for part in parts for one in part]

    async def _read_range(self, one: PackRange) -> list[Got]:
        try:
            return await self._read_once(one)
        except (Corrupt, NotFound):
            # Which of them it is, and whether there is another copy.
            return [await self._read_anywhere(one.rows[at : at + 1]) for at in range(len(one.rows))]

    async def _read_anywhere(self, row: Rows) -> Got:
        """The chunk of a row, from there or from another pack; raises as reading from the row's own does."""
        chunk, first = ChunkId(row[0]["chunk"].tobytes()), None
        others = self._others_of(chunk)
        for candidate in (row, *(others[at : at + 1] for at in range(len(others)))):
            (alone,) = _ranges(candidate)
            try:
                (got,) = await self._read_once(alone)
                return got
            except (Corrupt, NotFound) as e:
                first = first or e
        assert first is not None
        raise first

    async def _read_once(self, one: PackRange) -> list[Got]:
        pack = self._packs[one.pack]
        key = pack_key(pack.name)
        content = await self._remote.get_range(key, one.offset, one.length, pack.size)
        try:
            return await trio.to_thread.run_sync(_cut, one, content)
        except Corrupt as e:
            raise Corrupt(f"{self._remote.url}/{key}: {e}", expected=e.expected, got=e.got) from None


def _cut(one: PackRange, content: Payload) -> list[Got]:
    view = memoryview(content)
    found: list[Got] = []
    for row in one.rows:
        chunk, start = ChunkId(row["chunk"].tobytes()), int(row["offset"]) - one.offset
        payload = view[start : start + int(row["stored"])]
        check_chunk(chunk, payload)
        found.append((chunk, payload))
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
