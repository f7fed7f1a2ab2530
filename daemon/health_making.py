"""The health of tensors, looked at on the way when digests are made: no byte is read for it alone.

One rule: it decides nothing and holds nothing up. What cannot be looked at is counted as not known.

Source: FORMAT.md, "Health".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio

from ckptfs.daemon.saved_files import Saved, walk
from ckptfs.daemon.saved_layouts import content_layout
from ckptfs.store.errors import Corrupt
from ckptfs.store.health_log import HealthLog
from ckptfs.store.health_records import ContentHealth, HealthSum, VersionHealth, encoded_records
from ckptfs.store.health_run import HealthRun
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import RecipeId, TreeId, UnitId
from ckptfs.store.segments import Segments

_SLICE = 256


class HealthMaking:
    """Belongs to the index thread."""

    def __init__(
        self,
        segments: Segments,
        log: HealthLog,
        limiter: trio.CapacityLimiter,
        is_wanted: Callable[[], bool],
    ) -> None:
        """`limiter` bounds the worker threads; `is_wanted` says whether tensors are looked at at all."""
        self._segments = segments
        self._log = log
        self._limiter = limiter
        self._is_wanted = is_wanted

    def lacks(self, recipe: RecipeId) -> bool:
        """Whether a content is to be looked at, and was not."""
        return self._is_wanted() and not self._log.has(recipe)

    async def begin(self, recipe: RecipeId) -> HealthRun | None:
        """What looks at the bytes of a content; None if a part of its tensors cannot be told from them, so
        that it stays not known. Corrupt if its header cannot be read."""
        layout = await content_layout(self._segments, self._limiter, recipe)
        if layout is not None and layout.damage is not None:
            return None
        return HealthRun(() if layout is None else layout.tensors)

    async def record(self, unit: UnitId, found: Mapping[RecipeId, ContentHealth | None]) -> None:
        """Record what was found (None: no float tensor); as HealthLog.record."""
        contents = {recipe: one for recipe, one in found.items() if one is not None}
        made = await trio.to_thread.run_sync(encoded_records, contents, limiter=self._limiter)
        await self._log.record(unit, made, found.keys() - contents.keys())

    async def sum_up(self, record: VersionRecord, rest: Callable[[int], Awaitable[None]]) -> None:
        """Note what the contents of a version add up to; `rest` is called again and again, with a number that
        tells how far it is. Durable when: the next commit was made."""
        if not self._is_wanted():
            return
        total, unknown = HealthSum(), 0
        seen: set[RecipeId] = set()

        def pass_over(path: bytes, tree: TreeId, error: Corrupt) -> None:
            nonlocal unknown
            unknown += 1

        for step, saved in enumerate(walk(self._segments, Saved(b"", record.top), pass_over)):
            recipe = saved.entry.recipe
            if recipe is not None and recipe not in seen:
                seen.add(recipe)
                found = self._of(recipe)
                unknown += found is None
                total += found or HealthSum()
            if step % _SLICE == 0:
                await rest(step)
        self._log.put_version(record.unit, record.number, VersionHealth(total, unknown))

    def _of(self, recipe: RecipeId) -> HealthSum | None:
        """The sum over a content's tensors; None if that is not known."""
        try:
            return self._log.sum_of(recipe)
        except Corrupt:
            return None
