"""What a unit's history has to encode: its files by save, and each chunk with what it may be encoded against.

One rule: what is read here is only looked at; the newest file of each kind, and what it shares with others,
is left out.

Belongs to the index thread; headers are parsed in a worker thread, since one that is large or hostile takes
seconds. Source: FORMAT.md, "Encoded segments"; store/encoding_plan.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from ckptfs.daemon.saved_files import Saved, walk
from ckptfs.store.encoding_plan import Candidates, PlannedChunk, Save, match_save, plan_file
from ckptfs.store.encoding_saves import SavedFile, SavedFiles, group_saves, newest_files
from ckptfs.store.errors import CkptfsError, Corrupt
from ckptfs.store.far_reader import FarReader
from ckptfs.store.formats import Layout, Reader, dcp_metadata, parse
from ckptfs.store.histories import Histories
from ckptfs.store.ids import RecipeId, TreeId, UnitId
from ckptfs.store.ingest_job import ask
from ckptfs.store.lru import Lru
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments

_NEAREST_SAVES = 4
_KNOWN_TENSORS = 1 << 18
_SLICE_PIECES = 512
_SLICE_FILES = 128
# What is smaller is not encoded, so it is remembered only if the layout of other files stands in it.
LEAST_FILE_BYTES = 32 << 10
_SIBLING_NAME = os.fsencode(dcp_metadata.FILE_NAME)
_KNOWN_VERSIONS = 64


@dataclass(slots=True)
class UnitFiles:
    """The files of a unit's versions, the earliest save first. `newest` are the contents that are the newest
    of their kind, `shared` the first 8 bytes of their chunks' ids; `unsettled` the files that are not known
    to be encoded or gone, from which whoever learns it takes them; `gone` the saves that are known to be."""

    saves: list[SavedFiles] = field(default_factory=list)
    newest: set[RecipeId] = field(default_factory=set)
    shared: set[bytes] = field(default_factory=set)
    unsettled: dict[SavedFile, None] = field(default_factory=dict)
    gone: set[tuple[int | None, int]] = field(default_factory=set)

    async def unsettled_but(self, is_settled: Callable[[SavedFile], bool]) -> list[SavedFile]:
        """The unsettled files, without those that turn out to be settled: no look costs more than what is
        new since the one before it. A slice at a time, as there may be a hundred thousand files."""
        left: list[SavedFile] = []
        for at, file in enumerate(tuple(self.unsettled), 1):
            if is_settled(file):
                self.unsettled.pop(file, None)
            else:
                left.append(file)
            if at % _SLICE_FILES == 0:
                await trio.lowlevel.checkpoint()
        return left

    async def saves_with(self, files: set[SavedFile]) -> list[SavedFiles]:
        """The saves that have any of these files, the earliest first."""
        found: list[SavedFiles] = []
        looked_at = 0
        for save in self.saves if files else ():
            for file in save.files.values():
                looked_at += 1
                if looked_at % _SLICE_FILES == 0:
                    await trio.lowlevel.checkpoint()
                if file in files:
                    found.append(save)
                    break
        return found


@dataclass(slots=True)
class _Known:
    """What of a unit was walked: up to which version, and how many."""

    version: int = 0
    walked: int = 0
    files: dict[tuple[str, RecipeId], SavedFile] = field(default_factory=dict)
    trees: set[tuple[bytes, TreeId]] = field(default_factory=set)
    found: UnitFiles = field(default_factory=UnitFiles)


class EncodingFiles:
    """Answers for all units of a store, and remembers what it walked."""

    def __init__(self, segments: Segments, histories: Histories) -> None:
        self._segments = segments
        self._histories = histories
        self._known: dict[UnitId, _Known] = {}
        self._walking = trio.Lock()
        # In a tuple: what has no layout is remembered too.
        self._layouts: Lru[RecipeId, tuple[Layout | None]] = Lru(_KNOWN_TENSORS)

    def forget_others(self, units: Iterable[UnitId]) -> None:
        """Forget what was walked of all but these units."""
        kept = set(units)
        for unit in self._known.keys() - kept:
            del self._known[unit]

    async def of_unit(self, unit: UnitId) -> UnitFiles:
        """What there is of a unit now."""
        async with self._walking:
            return await self._walked(unit)

    async def _walked(self, unit: UnitId) -> UnitFiles:
        numbers = self._histories.numbers(unit)
        known = self._known.setdefault(unit, _Known())
        if known.walked > 2 * len(numbers) + _KNOWN_VERSIONS:
            # Most of it has gone: what is left is walked anew, so that no run grows the daemon for ever.
            known = self._known[unit] = _Known()
        before = known.version
        for number in numbers:
            if number > known.version:
                await self._take(unit, number, known)
        if known.version != before:
            files = list(known.files.values())
            live = await self._newest_version(unit, known)
            saves, newest = await trio.to_thread.run_sync(
                lambda: (group_saves(files), newest_files(files) | newest_files(live))
            )
            shared = await self._chunks_of(newest)
            known.found = UnitFiles(saves, newest, shared, known.found.unsettled)
        return known.found

    async def _take(self, unit: UnitId, number: int, known: _Known) -> None:
        record = self._histories.version(unit, number)
        known.version = number
        known.walked += 1
        if record is None:
            return
        for saved in walk(self._segments, Saved(b"", record.top), lambda *_: None, known.trees):
            entry, path = saved.entry, os.fsdecode(saved.path)
            if entry.recipe is not None and (
                entry.size >= LEAST_FILE_BYTES or saved.path.endswith(_SIBLING_NAME)
            ):
                file = SavedFile(path, entry.recipe, entry.size, number, record.time_ns)
                # A content that comes back may have gone, and what was known of it with it.
                known.found.unsettled[known.files.setdefault((path, entry.recipe), file)] = None
            await trio.lowlevel.checkpoint()

    async def _newest_version(self, unit: UnitId, known: _Known) -> list[SavedFile]:
        """The files of the version that a job goes on with, behind a roll back too: then others are of later
        steps or versions than these."""
        found: list[SavedFile] = []
        record = self._histories.newest(unit)
        if record is not None:
            for at, saved in enumerate(walk(self._segments, Saved(b"", record.top), lambda *_: None), 1):
                if at % _SLICE_FILES == 0:
                    await trio.lowlevel.checkpoint()
                if saved.entry.recipe is not None:
                    file = known.files.get((os.fsdecode(saved.path), saved.entry.recipe))
                    found += [] if file is None else [file]
        return found

    async def _chunks_of(self, recipes: Iterable[RecipeId]) -> set[bytes]:
        found: set[bytes] = set()
        for recipe in recipes:
            with suppress(Corrupt):
                for at, chunk in enumerate(self._recipe(recipe).chunks()):
                    found.add(chunk[:8])
                    if at % _SLICE_PIECES == 0:
                        await trio.lowlevel.checkpoint()
        return found

    async def planned(
        self, files: UnitFiles, save: SavedFiles, chosen: Callable[[SavedFile], bool]
    ) -> list[tuple[SavedFile, list[PlannedChunk]]]:
        """The chosen files of a save, and all their chunks that may be encoded; what may be the cast of
        others comes behind them."""
        saves = [save, *await self._earlier(files, save)]
        looked_at = [Save(one.step, one.number, await self._layouts_of(one)) for one in saves]
        candidates = await trio.to_thread.run_sync(_candidates, looked_at)
        recipe_of: dict[tuple[int, str], Recipe] = {}
        for number, other in enumerate(saves):
            for path, one in other.files.items():
                if path in looked_at[number].files or not number:
                    # What cannot be read is left alone; a reader or a scrub says what is wrong with it.
                    with suppress(Corrupt):
                        recipe_of[number, path] = self._recipe(one.recipe)
                await trio.lowlevel.checkpoint()
        found: list[tuple[SavedFile, list[PlannedChunk]]] = []
        for path, one in save.files.items():
            if chosen(one) and (0, path) in recipe_of:
                planned = await self._plan(
                    recipe_of, looked_at[0], path, candidates.get(path, {}), files.shared
                )
                found.append((one, planned))
            await trio.lowlevel.checkpoint()
        return sorted(found, key=lambda pair: any(chunk.cast_of for chunk in pair[1]))

    async def _earlier(self, files: UnitFiles, save: SavedFiles) -> list[SavedFiles]:
        """The saves of which it may be the next one, the likeliest first: behind the nearest of its run comes
        what stood there before without a step, such as the model that a run began with."""
        at = next(number for number, one in enumerate(files.saves) if one is save)
        before = files.saves[:at][::-1]
        run = [one for one in before if (one.step is None) == (save.step is None)]
        found = await self._there(files, run, _NEAREST_SAVES)
        if save.step is not None:
            bases = [one for one in before if one.step is None and one.number <= save.number]
            found += await self._there(files, bases, 1)
        return found

    async def _there(self, files: UnitFiles, saves: Sequence[SavedFiles], most: int) -> list[SavedFiles]:
        """The first of these of which any file is stored still."""
        found: list[SavedFiles] = []
        for save in saves:
            if len(found) == most:
                break
            if (save.step, save.number) in files.gone:
                continue
            for at, one in enumerate(save.files.values(), 1):
                if at % _SLICE_FILES == 0:
                    await trio.lowlevel.checkpoint()
                if self._segments.locate(one.recipe) is not None:
                    found.append(save)
                    break
            else:
                files.gone.add((save.step, save.number))
                await trio.lowlevel.checkpoint()
        return found

    async def _plan(
        self,
        recipe_of: dict[tuple[int, str], Recipe],
        save: Save,
        path: str,
        candidates: dict[str, Candidates],
        shared: set[bytes],
    ) -> list[PlannedChunk]:
        """The chunks of a file that are not `shared`, a slice at a time: a shard has tens of thousands."""
        alone: list[PlannedChunk] = []
        casts: list[PlannedChunk] = []
        planned = plan_file(recipe_of[0, path], save.files.get(path), candidates, recipe_of)
        for at, one in enumerate(planned):
            if one.chunk[:8] not in shared:
                (casts if one.cast_of else alone).append(one)
            if at % _SLICE_PIECES == 0:
                await trio.lowlevel.checkpoint()
        return alone + casts

    async def _layouts_of(self, save: SavedFiles) -> dict[str, Layout]:
        found: dict[str, Layout] = {}
        for path, one in save.files.items():
            await trio.lowlevel.checkpoint()
            if self._segments.locate(one.recipe) is None:
                continue
            known = self._layouts.get(one.recipe)
            if known is None:
                known = (await trio.to_thread.run_sync(self._parsed, save, one),)
                self._layouts.put(one.recipe, known, 1 + (len(known[0].tensors) if known[0] else 0))
            if (layout := known[0]) is not None:
                found[path] = layout
        return found

    def _parsed(self, save: SavedFiles, one: SavedFile) -> Layout | None:
        """In a worker thread; the bytes come from the index thread."""
        folder = one.path.rpartition("/")[0]

        def sibling(name: str) -> Reader | None:
            other = save.files.get(f"{folder}/{name}" if folder else name)
            return None if other is None else self._reader(other.recipe)

        try:
            return parse(self._reader(one.recipe), one.path, sibling)
        except (CkptfsError, OSError):
            return None  # It is encoded as bytes of any kind, or a reader says what is wrong with it.

    def _reader(self, recipe: RecipeId) -> Reader:
        return FarReader(ask(lambda: self._segments.file_reader(self._recipe(recipe))))

    def _recipe(self, identity: RecipeId) -> Recipe:
        return self._segments.read_recipe(identity)


def _candidates(saves: Sequence[Save]) -> dict[str, dict[str, Candidates]]:
    """By path and tensor; in a worker thread, as there may be a hundred thousand tensors."""
    found: dict[str, dict[str, Candidates]] = {}
    for (path, name), one in match_save(saves[0], saves[1:]).items():
        found.setdefault(path, {})[name] = one
    return found


def raw_bytes(segments: Segments, planned: Sequence[PlannedChunk]) -> int:
    """How many bytes of these chunks are stored raw."""
    places = segments.locate_many({one.chunk for one in planned})
    return int(places.rows["stored"][places.rows["codec"] == 0].sum(dtype=int))
