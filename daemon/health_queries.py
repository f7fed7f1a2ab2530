"""What can be asked of the health of tensors in a version.

One rule: what was looked at before is answered as that; what was not is looked at now, in chunks that are
checked on the way. Nothing is changed.

All of it belongs to the index thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal

import trio

from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.saved_files import Saved
from ckptfs.daemon.saved_layouts import content_layout, saved_layout
from ckptfs.store.errors import Corrupt
from ckptfs.store.health_log import HealthLog
from ckptfs.store.health_records import ContentHealth, HealthSum, TensorHealth
from ckptfs.store.health_run import HealthRun
from ckptfs.store.history import VersionRecord
from ckptfs.store.segments import Segments
from ckptfs.store.whole_files import WholeFiles

Report = Callable[[Progress], None]


class HealthQueries:
    """Answers for one store."""

    def __init__(
        self, segments: Segments, files: WholeFiles, log: HealthLog, limiter: trio.CapacityLimiter
    ) -> None:
        self._segments = segments
        self._files = files
        self._log = log
        self._limiter = limiter

    async def rows(
        self, record: VersionRecord, found: Sequence[tuple[bytes, Saved]], report: Report
    ) -> tuple[list[Json], list[Json]]:
        """A row for each file with float tensors, and the paths of the others; `found` are (path to show,
        file by its path in the version). `damage` of a row says why the file has a part of which nothing can
        be told. Corrupt if something cannot be read."""
        rows: list[Json] = []
        others: list[Json] = []
        total_bytes, done_bytes = sum(saved.entry.size for _, saved in found), 0
        for path, saved in found:
            row = None if saved.entry.recipe is None else await self._row(record, path, saved)
            if row is None:
                others.append(os.fsdecode(path))
            else:
                rows.append(row)
            done_bytes += saved.entry.size
            report(Progress(done=done_bytes, total=total_bytes))
            await trio.lowlevel.checkpoint()
        return rows, others

    async def _row(self, record: VersionRecord, path: bytes, saved: Saved) -> Json:
        recipe = saved.entry.recipe
        assert recipe is not None, "only regular files have a health"
        source: Literal["index", "chunks"] = "index"
        known, damage = self._known(saved), None
        if self._log.has_no_tensors(recipe):
            return None
        if known is None:
            found = await content_layout(self._segments, self._limiter, recipe)
            run, source = HealthRun(() if found is None else found.tensors), "chunks"
            damage = None if found is None else found.damage
            if run.is_empty and damage is None:
                return None
            if not run.is_empty:
                await self._files.digests(recipe, _go_on, run)
                known = run.finish()
        total, listed = (HealthSum(), ()) if known is None else (known.total, known.listed)
        layout = await saved_layout(self._segments, self._limiter, record.top, saved)
        named = {(one.offset, one.length): one.name for one in (layout.tensors if layout is not None else ())}
        return {
            "path": os.fsdecode(path),
            "source": source,
            "damage": damage,
            **total.facts(),
            "listed": [_tensor_row(one, named.get((one.offset, one.length))) for one in listed],
        }

    def _known(self, saved: Saved) -> ContentHealth | None:
        assert saved.entry.recipe is not None, "only regular files have a health"
        try:
            return self._log.of(saved.entry.recipe)
        except Corrupt:
            return None


def _tensor_row(one: TensorHealth, name: str | None) -> Json:
    """What is known of a tensor; `name` is None where the file does not tell it any more."""
    return {
        "name": name,
        "offset": one.offset,
        "bytes": one.length,
        "dtype": one.dtype,
        "nan": one.nan,
        "inf": one.infinite,
        "saturated": one.saturated,
        "over_f16": one.over_f16,
        "over_bf16": one.over_bf16,
        "subnormal": one.subnormal,
        "zero": one.zero,
        "largest": one.largest,
    }


async def _go_on(_: int) -> None:
    await trio.lowlevel.checkpoint()
