"""Diff: what is different in one version from another, by file and by tensor.

One rule: what has the same tree, recipe or chunks is not read; all else is compared byte by byte, in
windows, so neither large files nor many of them cost memory. What lies in a directory, or stands in a
file, that the caller may not read by its saved modes is not told: there it only says that something is
different.

The walk and every read belong to the index thread; a worker thread compares.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import trio

from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.saved_files import Saved
from ckptfs.store.difference import ELEMENT_BYTES, Difference, is_float
from ckptfs.store.errors import CkptfsError
from ckptfs.store.far_reader import FarReader
from ckptfs.store.formats import Layout, Reader, Tensor, parse
from ckptfs.store.health import Health, has_health
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

_WINDOW_BYTES = 64 * 1024 * ELEMENT_BYTES
Report = Callable[[Progress], None]
Row = dict[str, Json]


@dataclass(frozen=True, slots=True)
class _Pair:
    """A path that is different: in one version only, or of other content or attributes."""

    path: bytes
    before: Entry | None
    after: Entry | None

    @property
    def kind(self) -> str:
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"


@dataclass(frozen=True, slots=True)
class _Side:
    """A file of one version: its recipe, and where its tensors lie (None: no format that is known)."""

    recipe: Recipe
    layout: Layout | None


class Differ:
    """Compares two versions. One task of the index thread."""

    def __init__(
        self,
        segments: Segments,
        limiter: trio.CapacityLimiter,
        report: Report,
        may_read: Callable[[Entry], bool],
    ) -> None:
        self._segments = segments
        self._may_read = may_read
        self._limiter = limiter
        self._report = report
        self._done_bytes = 0
        self._total_bytes = 0

    async def compare(self, before: Saved | None, after: Saved | None) -> list[Row]:
        """One row for each path that differs, in order. Corrupt if something cannot be read."""
        start = after or before
        assert start is not None, "one of the two versions has the place"
        old, new = before.entry if before else None, after.entry if after else None
        pairs = list(self._pairs(start.path, old, new))
        self._total_bytes = sum(pair.after.size for pair in pairs if pair.kind == "changed" and pair.after)
        rows = []
        for pair in pairs:
            rows.append(await self._row(pair))
            self._done_bytes += pair.after.size if pair.kind == "changed" and pair.after is not None else 0
            self._report(Progress(done=self._done_bytes, total=self._total_bytes))
            await trio.lowlevel.checkpoint()
        return rows

    def _pairs(self, path: bytes, before: Entry | None, after: Entry | None) -> Iterator[_Pair]:
        if before is not None and after is not None and before.is_dir and after.is_dir:
            is_closed = before.tree != after.tree and not self._may_read_both(before, after)
            if is_closed or _attributes(before) != _attributes(after):
                yield _Pair(path, before, after)
            if is_closed or before.tree == after.tree:
                return
        elif before is not None and after is not None:
            if before.is_dir or after.is_dir:
                yield from self._pairs(path, before, None)
                yield from self._pairs(path, None, after)
            elif _content(before) != _content(after) or _attributes(before) != _attributes(after):
                yield _Pair(path, before, after)
            return
        else:
            yield _Pair(path, before, after)
        old, new = self._children(before), self._children(after)
        for name in sorted(old.keys() | new.keys()):
            yield from self._pairs(path + b"/" + name if path else name, old.get(name), new.get(name))

    def _children(self, entry: Entry | None) -> dict[bytes, Entry]:
        if entry is None or entry.tree is None or not self._may_read(entry):
            return {}
        return {child.name: child for child in self._segments.read_tree(entry.tree)}

    async def _row(self, pair: _Pair) -> Row:
        row: Row = {"path": os.fsdecode(pair.path), "change": pair.kind}
        before, after = pair.before, pair.after
        if before is not None and before.is_file:
            row["before_bytes"] = before.size
        if after is not None and after.is_file:
            row["after_bytes"] = after.size
        if before is None or after is None:
            return row
        row["attributes"] = _attributes(before) != _attributes(after)
        if before.is_file and after.is_file and not self._may_read_both(before, after):
            row["changed_bytes"] = None
        elif before.recipe is not None and after.recipe is not None:
            row |= await self._content_row(pair.path, before.recipe, after.recipe)
        return row

    def _may_read_both(self, before: Entry, after: Entry) -> bool:
        return self._may_read(before) and self._may_read(after)

    async def _content_row(self, path: bytes, before: RecipeId, after: RecipeId) -> Row:
        if before == after:
            return {"changed_bytes": 0, "tensors": []}
        name = os.fsdecode(path.rpartition(b"/")[2])
        old, new = self._segments.read_recipe(before), self._segments.read_recipe(after)
        return await trio.to_thread.run_sync(self._compared, name, old, new, limiter=self._limiter)

    # -- in the worker thread -------------------------------------------------------------------

    def _compared(self, name: str, before: Recipe, after: Recipe) -> Row:
        old, new = self._side(name, before), self._side(name, after)
        if old.layout is None or new.layout is None:
            rest = abs(before.size - after.size)
            both = min(before.size, after.size)
            difference = self._difference("U8", old, 0, new, 0, both) if both else Difference("U8")
            return {"changed_bytes": difference.changed_bytes + rest, "tensors": []}
        rows: list[Row] = []
        changed = 0
        olds = {tensor.name: tensor for tensor in old.layout.tensors}
        for tensor in new.layout.tensors:
            row = self._tensor_row(old, olds.pop(tensor.name, None), new, tensor)
            if row is not None:
                rows.append(row)
                changed += cast(int, row.get("changed_bytes", tensor.length))
        rows += [_described(tensor, "removed") for tensor in olds.values()]
        return {"changed_bytes": changed, "tensors": [*rows]}

    def _tensor_row(self, old: _Side, before: Tensor | None, new: _Side, after: Tensor) -> Row | None:
        """What is different of a tensor; None: nothing."""
        if before is None:
            return _described(after, "added")
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            was: Row = {"dtype": before.dtype, "shape": list(before.shape)}
            return _described(after, "changed") | {"before": was}
        if _parts(old.recipe, before.offset, before.length) == _parts(new.recipe, after.offset, after.length):
            return None
        healths = [Health(after.dtype), Health(after.dtype)] if has_health(after.dtype) else []
        found = self._difference(after.dtype, old, before.offset, new, after.offset, after.length, healths)
        if not found.changed_bytes:
            return None
        row = _described(after, "changed") | {"changed_bytes": found.changed_bytes}
        if is_float(after.dtype):
            row |= {"max_difference": found.largest, "l2_difference": found.l2}
        if healths:
            row |= {**healths[1].facts(), "health_before": {**healths[0].facts()}}
        return row

    def _difference(
        self,
        dtype: str,
        old: _Side,
        old_at: int,
        new: _Side,
        new_at: int,
        length: int,
        healths: Sequence[Health] = (),
    ) -> Difference:
        """`healths` count what was there and what is there."""
        found = Difference(dtype)
        for at in range(0, length, _WINDOW_BYTES):
            part = min(_WINDOW_BYTES, length - at)
            is_same = _parts(old.recipe, old_at + at, part) == _parts(new.recipe, new_at + at, part)
            if is_same and not healths:
                continue
            after = self._read(new.recipe, new_at + at, part)
            before = after if is_same else self._read(old.recipe, old_at + at, part)
            found.add(before, after)
            for health, window in zip(healths, (before, after), strict=False):
                health.add(window)
        return found

    def _side(self, name: str, recipe: Recipe) -> _Side:
        try:
            layout = parse(FarReader(self._segments.file_reader(recipe)), name, _no_sibling)
        except CkptfsError:
            layout = None  # whatever cannot be read is met again, and named, by the comparison
        return _Side(recipe, layout)

    def _read(self, recipe: Recipe, offset: int, length: int) -> bytes:
        return FarReader(self._segments.file_reader(recipe)).pread(offset, length)


def _parts(recipe: Recipe, offset: int, length: int) -> list[tuple[int, int, ChunkId | None]]:
    """What a range of a file is made of: (bytes, first byte within the chunk, chunk), in order."""
    parts = []
    index, stop = recipe.index_at(offset), offset + length
    while offset < stop:
        piece, start = recipe.piece(index), recipe.start(index)
        upto = min(stop, start + piece.length)
        parts.append((upto - offset, 0 if piece.chunk is None else offset - start, piece.chunk))
        offset, index = upto, index + 1
    return parts


def _described(tensor: Tensor, change: str) -> Row:
    return {
        "name": tensor.name,
        "change": change,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.length,
    }


def _content(entry: Entry) -> object:
    return entry.mode >> 12, entry.recipe, entry.target, entry.rdev


def _attributes(entry: Entry) -> object:
    """What `ls -l` and getfattr show, times left out: a save that changes nothing has new ones."""
    return entry.mode, entry.uid, entry.gid, entry.xattrs


def _no_sibling(_: str) -> Reader | None:
    return None
