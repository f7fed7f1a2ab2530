"""Encoding, as the daemon runs it: saves that are not the newest get smaller in the background, and at once
when somebody asks.

One rule: it is the last to get anything. One batch at a time, the earliest save first (what it may be
encoded against comes before it); it rests while a version is being made, somebody reads what nobody has read
before, or the disk is full, and its process runs only when nothing else wants the core.

META `tried:` ‖ recipe id: all chunks of a content were looked at. Source: FORMAT.md, "Encoded segments".
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate

import trio

from ckptfs.daemon.config import Config
from ckptfs.daemon.encoding_batches import CarefulEncoding, batches
from ckptfs.daemon.encoding_files import LEAST_FILE_BYTES, EncodingFiles, UnitFiles, raw_bytes
from ckptfs.daemon.encoding_worker import EncodingWorker
from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.retaining import Policies
from ckptfs.store.encoding_level import Level
from ckptfs.store.encoding_plan import PlannedChunk
from ckptfs.store.encoding_saves import SavedFile
from ckptfs.store.errors import CkptfsError, Corrupt, NoSpace
from ckptfs.store.histories import Histories
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.reclaim import TRIED
from ckptfs.store.reencode import BATCH_BYTES, Encoding, Reencoder
from ckptfs.store.scrub_run import Pace
from ckptfs.store.segments import Segments
from ckptfs.store.sweep import listed
from ckptfs.store.units import Unit

log = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
_AT_LATEST_S = 60.0
_RETRY_S = 60.0
AfterS = Callable[[bytes], float | None]
"""Of a unit by name: how long after its version a save is encoded; None: never."""


class EncodingTask:
    """Begins encodings when they are due, and answers those who ask. Belongs to the index thread.

    `total` is what was done since the mount; `pending_bytes` what the last look found due, at most.
    """

    def __init__(
        self,
        index: Index,
        segments: Segments,
        histories: Histories,
        reencoder: Reencoder,
        after_s: AfterS,
        bytes_s: Callable[[], float],
        may_work: Callable[[], bool],
        end: Callable[[], Awaitable[None]],
        *,
        has_room: Callable[[], bool] = lambda: True,
        level: Callable[[], Level] = lambda: "fast",
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`bytes_s`: so many plain bytes a second at most (0: as fast as it goes); `level` is that of whoever
        names none; `may_work` says whether
        nothing more urgent goes on, `has_room` whether what is to be kept free is; `end` is called when there
        is nothing to do for a while."""
        self._index = index
        self._segments = segments
        self._histories = histories
        self._careful = CarefulEncoding(reencoder.encode)
        self._after_s = after_s
        self._bytes_s = bytes_s
        self._may_work = may_work
        self._has_room = has_room
        self._level = level
        self._end = end
        self._now_ns = now_ns
        self._files = EncodingFiles(segments, histories)
        self._passes = 0
        self._one_at_a_time = trio.Lock()
        self.total = Encoding()
        self.pending_bytes = 0

    async def run(self) -> None:
        """Encode whatever is due, for ever; cancelled at shutdown."""
        seen: tuple[int, int] | None = None
        looked_at = float("-inf")
        while True:
            now = time.monotonic()
            if (state := listed(self._histories)) != seen or now - looked_at >= _AT_LATEST_S:
                seen, looked_at = state, now
                try:
                    await self.catch_up()
                except (CkptfsError, OSError) as e:
                    log.warning("saves are encoded later: %s", e)
                    await trio.sleep(_RETRY_S)
                finally:
                    await self._finish()
            await trio.sleep(LOOK_EVERY_S)

    async def catch_up(self) -> Encoding:
        """Encode what is due of all units; what came of it. Durable when: this returned."""
        done = Encoding()
        pace = Pace(self._bytes_s())
        units = [(unit, self._after_s(unit.name)) for unit in self._histories.units()]
        self._files.forget_others(unit.unit for unit, after_s in units if after_s is not None)
        for unit, after_s in units:
            if after_s is not None:
                before_ns = self._now_ns() - int(after_s * 1e9)
                await self._unit(unit, partial(_is_before, before_ns), self._level(), pace, done, None)
        return done

    async def now(
        self,
        unit: Unit,
        contents: set[RecipeId] | None,
        report: Callable[[Progress], None],
        dry_run: bool,
        level: Level | None = None,
    ) -> Json:
        """`ckptfs encode`: those of `contents` (None: of all) that are not the newest of their kind.

        It waits for no more than a batch of those who encode beside it. NoSpace if there is less room than
        is to be kept free. Durable when: this returned."""

        def chosen(file: SavedFile) -> bool:
            return contents is None or file.recipe in contents

        if dry_run:
            return _row(await self._survey(unit, chosen), dry_run=True)
        done = Encoding()
        try:
            await self._unit(unit, chosen, level or self._level(), Pace(0), done, report)
        finally:
            await self._finish()
        return _row(done, dry_run=False)

    def status(self) -> Json:
        """The key `encoding` of `status`."""
        total = self.total
        return {
            "pending_bytes": self.pending_bytes,
            "plain_bytes": total.encoded_plain_bytes,
            "encoded_bytes": total.encoded_bytes,
            "left_raw_chunks": len(self._careful.left_raw),
        }

    async def _unit(
        self,
        unit: Unit,
        chosen: Callable[[SavedFile], bool],
        level: Level,
        pace: Pace,
        done: Encoding,
        report: Callable[[Progress], None] | None,
    ) -> None:
        left = 0
        self._passes += 1
        try:
            files = await self._files.of_unit(unit.unit)
            due = await self._due(files, chosen)
            total = left = sum(file.size for file in due)
            self.pending_bytes += total

            def looked_at(file: SavedFile) -> None:
                nonlocal left
                left -= file.size
                self.pending_bytes -= file.size
                if report is not None:
                    report(Progress(done=total - left, total=total))

            for save in await files.saves_with(due):
                planned = await self._files.planned(files, save, due.__contains__)
                await self._save(files, planned, level, pace, done, looked_at, rests=report is None)
        finally:
            self.pending_bytes -= left
            self._passes -= 1

    async def _due(self, files: UnitFiles, chosen: Callable[[SavedFile], bool]) -> set[SavedFile]:
        def is_due(file: SavedFile) -> bool:
            return file.recipe not in files.newest and chosen(file)

        def is_settled(file: SavedFile) -> bool:
            return file.size < LEAST_FILE_BYTES or (is_due(file) and self._is_settled(file.recipe))

        return set(filter(is_due, await files.unsettled_but(is_settled)))

    def _is_settled(self, recipe: RecipeId) -> bool:
        """Whether a content was encoded, or is gone."""
        return (
            self._segments.locate(recipe) is None or self._index.get(Table.META, TRIED + recipe) is not None
        )

    async def _save(
        self,
        files: UnitFiles,
        planned: Sequence[tuple[SavedFile, Sequence[PlannedChunk]]],
        level: Level,
        pace: Pace,
        done: Encoding,
        looked_at: Callable[[SavedFile], None],
        *,
        rests: bool,
    ) -> None:
        """The files of a save, one batch behind the other whatever files it is of: a segment for each small
        file would take more than it saves."""
        waiting, at, again = deque(planned), 0, set[ChunkId]()
        ends = deque(accumulate(len(chunks) for _, chunks in planned))
        for batch in [*batches([one for _, chunks in planned for one in chunks]), []]:
            while waiting and ends[0] <= at:
                ends.popleft()
                file, chunks = waiting.popleft()
                self._settle(files, file, chunks, again)
                looked_at(file)
            if not batch:
                break
            await self._turn(rests)
            try:
                # Not held while it rests: whoever asks for it by hand is not kept waiting.
                async with self._one_at_a_time:
                    one = await self._careful.encode(batch, level)
            except Corrupt as e:
                log.error("%s, and what follows it, is not encoded: %s", waiting[0][0].path, e)
                again.update(chunk.chunk for chunk in batch)
            else:
                again |= one.passed_over
                one.passed_over = set()
                done.add(one)
                self.total.add(one)
                await pace.spent(one.plain_bytes)
            at += len(batch)

    def _settle(
        self, files: UnitFiles, file: SavedFile, chunks: Sequence[PlannedChunk], again: set[ChunkId]
    ) -> None:
        """All chunks of a file were looked at; those of `again` are to be at the next look."""
        if any(one.chunk in again for one in chunks):
            return
        if any(one.chunk in self._careful.left_raw for one in chunks):
            # By this daemon not again, but another one may have an encoder that does not fail.
            files.unsettled.pop(file, None)
        elif self._segments.locate(file.recipe) is not None:
            change = Change()
            change.put(Table.META, TRIED + file.recipe, b"")
            self._index.apply(change)

    async def _survey(self, unit: Unit, chosen: Callable[[SavedFile], bool]) -> Encoding:
        """What would be looked at."""
        found = Encoding()
        files = await self._files.of_unit(unit.unit)
        due = await self._due(files, chosen)
        for save in await files.saves_with(due):
            for _, planned in await self._files.planned(files, save, due.__contains__):
                found.chunks += len(planned)
                found.plain_bytes += raw_bytes(self._segments, planned)
        return found

    async def _finish(self) -> None:
        """Nothing is to be done for a while, unless somebody else is at it: then he comes here in the end."""
        with trio.CancelScope(shield=True):
            if not self._passes:
                await self._end()

    async def _turn(self, rests: bool) -> None:
        """Wait until a batch may be encoded; NoSpace if somebody waits for it, and there is no room."""
        while rests and not (self._may_work() and self._has_room()):
            await trio.sleep(LOOK_EVERY_S)
        if not self._has_room():
            raise NoSpace(
                "nothing is encoded while less room is free than min_free: what is encoded is written before "
                "what it replaces goes. Delete files or versions, or lower min_free"
            )


def encoding_of(
    parts: OpenStore,
    config: Callable[[], Config],
    policies: Policies,
    min_free_bytes: Callable[[], int],
    may_work: Callable[[], bool],
) -> EncodingTask:
    """The task of a mount, with a process of its own that encodes; `config` is what holds at that moment."""
    worker = EncodingWorker(parts.disk)

    def after_s(name: bytes) -> float | None:
        said = policies.encode_after_s(name, config().encode_after_s)
        # Where room gets short, at once: history is encoded before any of it has to go.
        is_short = parts.disk.space().available < 2 * min_free_bytes()
        return 0.0 if said is not None and is_short else said

    def may_take_room() -> bool:
        # What is encoded needs room before it gives any; the last of it is the writers'.
        return may_work() and parts.disk.space().available >= min_free_bytes() + 2 * BATCH_BYTES

    return EncodingTask(
        parts.index,
        parts.segments,
        parts.histories,
        Reencoder(parts.disk, parts.index, parts.segments, parts.ingest.committer, worker.run),
        after_s,
        lambda: config().encode_rate_mib_s * (1 << 20),
        may_take_room,
        worker.close,
        has_room=lambda: parts.disk.space().available >= min_free_bytes(),
        level=lambda: config().encode_level,
    )


def _is_before(limit_ns: int, file: SavedFile) -> bool:
    return file.time_ns <= limit_ns


def _row(done: Encoding, *, dry_run: bool) -> Json:
    return {
        "dry_run": dry_run,
        "chunks": done.chunks,
        "looked_at_bytes": done.plain_bytes,
        "encoded_chunks": done.encoded_chunks,
        "plain_bytes": done.encoded_plain_bytes,
        "encoded_bytes": done.encoded_bytes,
    }
