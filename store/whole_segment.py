"""Stored files that lie whole, byte for byte, in one segment: whoever may read that file reads them.

One rule: a segment is handed out for a file only if each of the file's chunks was found right at its
place in it since the mount, and nothing was taken from the segment since. What lies there without a row
of its own (a header that an older save has too) is hashed each time.

Looking that up takes as long as a file has chunks, so it is done in steps, in the background; until then
the answer is None, and the reader goes the ordinary way. That verifies what he reads; of a file that was
only opened no more than a little is hashed here, except where all of it is in memory: then the first open
waits for that (`make_ready`), which costs less than what the reader saves. Source: ARCHITECTURE §4 "Read".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import trio

from ckptfs.store.bad_chunks import NO_HASHERS, Hashers, find_bad_places
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.lru import Lru
from ckptfs.store.places import Places, Suspect, places_of
from ckptfs.store.recipe import Recipe
from ckptfs.store.reclaim import FOREIGN_BYTES
from ckptfs.store.regions import CHUNK_BYTES
from ckptfs.store.segment_format import Codec, Location, segment_paths
from ckptfs.store.segments import Segments

log = logging.getLogger(__name__)
LEAST_BYTES = 1 << 20
_KNOWN_FILES = 1 << 16
_MOST_WANTED = 1024
_PIECES_AT_ONCE = 512
_HASHED_AT_ONCE = 256
_LOOKED_AT = 64
_LANES = min(8, len(os.sched_getaffinity(0)))
# Hashed in a quarter of a second by one core; nobody waits longer than _MOST_WAIT_S.
_NOW_BYTES = 1 << 30
_MOST_WAIT_S = 0.5
_MORE_S = 0.1
MOST_HASHED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Opened:
    """A descriptor of a segment whose bytes are exactly a file's; whoever asked for it closes it."""

    fd: int
    segment: int


@dataclass(frozen=True, slots=True)
class Whole:
    """The segment of a whole file; `foreign` are the (offset, length, id) of what has no row in it, `watch`
    says whether the segment is still as it was. `has_tensors`: most of it lies in chunks of 256 KiB."""

    segment: int
    watch: object
    foreign: tuple[tuple[int, int, ChunkId], ...]
    has_tensors: bool


class WholeSegments:
    """Finds the segments of whole files. Belongs to the index thread; hashing is done in a worker."""

    def __init__(self, disk: Disk, segments: Segments, hashers: Hashers = NO_HASHERS) -> None:
        self._disk = disk
        self._segments = segments
        self._hashers = hashers
        self._found: Lru[RecipeId, Whole | _Nowhere] = Lru(_KNOWN_FILES)
        self._wanted: dict[RecipeId, None] = {}
        self._asked = trio.Event()
        self._workers = trio.CapacityLimiter(_LANES + 1)
        self._one_at_a_time = trio.Lock()
        self._soon: dict[RecipeId, trio.Event] = {}
        self._waited_for: Lru[RecipeId, bool] = Lru(_KNOWN_FILES)

    def want(self, identity: RecipeId) -> None:
        """Look for the file's segment soon. Of too many, those that were asked for last."""
        if self._current(identity) is not None:
            return
        self._wanted.pop(identity, None)
        self._wanted[identity] = None
        if len(self._wanted) > _MOST_WANTED:
            del self._wanted[next(iter(self._wanted))]
        self._asked.set()

    async def make_ready(self, identity: RecipeId, *, only_tensors: bool) -> None:
        """Before a first open: hash what is needed for `open` to succeed, if all of it is in memory and that
        takes a moment. A file is waited for once; who reads it the ordinary way then verifies it, too."""
        if self._current(identity) is not None or self._waited_for.get(identity):
            return
        others = self._soon.get(identity)
        if others is not None:
            await others.wait()
            return
        done = self._soon[identity] = trio.Event()
        now = _Now(_LANES * _NOW_BYTES, time.monotonic() + _MOST_WAIT_S, only_tensors)
        try:
            with trio.move_on_after(_MOST_WAIT_S + _MORE_S):
                async with self._one_at_a_time:
                    found = await self._look_for(identity, now)
                if found is not None:
                    self._found.put(identity, found, 1)
        except (CkptfsError, OSError) as e:
            log.debug("a stored file is not read by the kernel itself: %s", e)
        finally:
            self._waited_for.put(identity, True, 1)
            del self._soon[identity]
            done.set()

    def open(self, identity: RecipeId, *, only_tensors: bool) -> Opened | None:
        """The segment whose bytes are exactly the file's, verified since the mount; None if there is none,
        or it cannot be read, or nobody has looked yet (then it is `want`ed).

        As long as it, or what was opened through it, is open, nothing of it is punched. `only_tensors`
        asks for files that consist of tensors in the main.
        """
        found = self._current(identity)
        if found is None:
            self.want(identity)
            return None
        if isinstance(found, _Nowhere) or (only_tensors and not found.has_tensors):
            return None
        if self.is_damaged(found.segment):
            return None
        try:
            # While duplicates of it are punched: not now.
            fd = self._disk.open_read(segment_paths(found.segment)[0], waits=False)
        except OSError:
            return None
        is_whole = False
        try:
            is_whole = self._is_whole(fd, found, self._segments.read_recipe(identity).size)
        except (CkptfsError, OSError) as e:
            log.debug("a stored file is not read by the kernel itself: %s", e)  # its reader is told
        finally:
            if not is_whole:
                self._disk.close(fd)
                self._found.put(identity, _NOWHERE, 1)
        return Opened(fd, found.segment) if is_whole else None

    def is_damaged(self, segment: int) -> bool:
        """Whether something in a segment was found wrong, after it was handed out perhaps."""
        return segment in self._segments.suspect

    def given_back(self, segment: int) -> None:
        """One of those who had a segment open needs it no longer."""
        self._segments.given_back(segment)

    async def run(self) -> None:
        """Look for what is wanted, for ever; cancelled at shutdown."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            await self.execute()

    async def execute(self) -> None:
        """Look for all that is wanted now."""
        while self._wanted:
            identity = next(reversed(self._wanted))
            del self._wanted[identity]
            try:
                found = await self._look_for(identity)
            except (CkptfsError, OSError) as e:
                log.debug("a stored file is not read by the kernel itself: %s", e)
                found = _NOWHERE
            if found is not None:
                self._found.put(identity, found, 1)
            await trio.lowlevel.checkpoint()

    def _current(self, identity: RecipeId) -> Whole | _Nowhere | None:
        found = self._found.get(identity)
        if isinstance(found, Whole) and not self._segments.verified.is_watched(found.segment, found.watch):
            return None
        return found

    def _is_whole(self, fd: int, found: Whole, size: int) -> bool:
        if self._disk.fstat(fd).st_size != size:
            return False
        return all(
            chunk_id(self._disk.pread(fd, length, offset)) == chunk for offset, length, chunk in found.foreign
        )

    async def _look_for(self, identity: RecipeId, now: _Now | None = None) -> Whole | _Nowhere | None:
        """The file's segment; None if it changed meanwhile, or too much of it is to be hashed first, so that
        somebody may ask again."""
        recipe = self._segments.read_recipe(identity)
        segment = self._likely_segment(recipe)
        if segment is None:
            return _NOWHERE
        verified = self._segments.verified
        watch, since = verified.watch(segment), verified.epoch
        pieces = await self._sort(recipe, segment, MOST_HASHED_BYTES if now is None else now.most_bytes)
        if pieces is None:
            return _NOWHERE
        has_tensors = 2 * pieces.tensor_bytes >= recipe.size
        if pieces.is_too_much or not (
            now is None or self._is_worth_waiting(now, segment, recipe, has_tensors)
        ):
            return None
        is_good = await self._all_good(pieces.unverified, since, None if now is None else now.until)
        if is_good and verified.is_watched(segment, watch):
            return Whole(segment, watch, tuple(pieces.foreign), has_tensors)
        return _NOWHERE if is_good is False else None

    async def _sort(self, recipe: Recipe, segment: int, most_bytes: int) -> _Sorted | None:
        """Which pieces lie in the segment as they do in the file; None: too many lie elsewhere. Stops where
        more than `most_bytes` would have to be hashed."""
        verified, pieces = self._segments.verified, _Sorted()
        for first in range(0, len(recipe), _PIECES_AT_ONCE):
            await trio.lowlevel.checkpoint()
            for start, length, chunk, location in self._located(recipe, first):
                if location is None:
                    return None
                pieces.tensor_bytes += length if length == CHUNK_BYTES else 0
                if location != Location(segment, start, length, length):
                    pieces.foreign.append((start, length, chunk))
                    pieces.foreign_bytes += length
                elif location not in verified:
                    pieces.unverified.append((chunk, location))
                    pieces.unverified_bytes += length
            if pieces.foreign_bytes > FOREIGN_BYTES:
                return None
            pieces.is_too_much = pieces.unverified_bytes > most_bytes
            if pieces.is_too_much:
                break
        return pieces

    def _likely_segment(self, recipe: Recipe) -> int | None:
        """Where the longest of some pieces lies, if it lies as it does in the file."""
        if recipe.size < LEAST_BYTES:
            return None
        some = range(0, len(recipe), max(1, len(recipe) // _LOOKED_AT))
        longest = max(some, key=lambda index: recipe.piece(index).length)
        chunk = recipe.piece(longest).chunk
        location = None if chunk is None else self._segments.locate(chunk)
        if location is None or location.in_idx or location.codec != Codec.RAW:
            return None
        return location.segment if location.offset == recipe.start(longest) else None

    def _located(self, recipe: Recipe, first: int) -> Iterator[tuple[int, int, ChunkId, Location | None]]:
        """(first byte, length, chunk, place) of some pieces from number `first` on; a hole has no place."""
        ids = recipe.ids(first, first + _PIECES_AT_ONCE)
        places = self._segments.locate_many(set(ids))
        there = {chunk: places.location(at) for at, chunk in enumerate(places.chunks)}
        for index, chunk in enumerate(ids, first):
            start = recipe.start(index)
            yield start, recipe.start(index + 1) - start, chunk, there.get(chunk)

    def _is_worth_waiting(self, now: _Now, segment: int, recipe: Recipe, has_tensors: bool) -> bool:
        """Whether the kernel may read it then, and no disk is waited for."""
        if now.only_tensors and not has_tensors:
            return False
        fd = self._disk.open_read(segment_paths(segment)[0])
        try:
            return self._disk.is_in_memory(fd, recipe.size)
        finally:
            self._disk.close(fd)

    async def _all_good(self, unverified: list[Suspect], since: int, until: float | None) -> bool | None:
        """Hash what was not verified in this mount yet, on all cores if it is done `until` then; what is
        wrong is noted, as a reader would. None: it took too long."""
        parts = (unverified[at : at + _HASHED_AT_ONCE] for at in range(0, len(unverified), _HASHED_AT_ONCE))
        is_good: bool | None = True

        async def work() -> None:
            nonlocal is_good
            for part in parts:
                if until is not None and time.monotonic() > until:
                    is_good = None
                if not is_good:
                    return
                if not await self._is_good(places_of(part), since):
                    is_good = False

        async with trio.open_nursery() as nursery:
            for _ in range(1 if until is None else _LANES):
                nursery.start_soon(work)
        return is_good

    async def _is_good(self, part: Places, since: int) -> bool:
        with self._hashers.lent() as hasher:
            bad = await trio.to_thread.run_sync(
                find_bad_places, self._disk, part, hasher, limiter=self._workers, abandon_on_cancel=True
            )
        for one in bad:
            if self._segments.still_bad(one) is not None:
                self._segments.note_bad(one)
        self._segments.note_all_good(part.without({one.chunk for one in bad}), since)
        return not bad


@dataclass(slots=True)
class _Sorted:
    """The pieces of a file: `foreign` are (offset, length, id) of those that have no row in the segment,
    `unverified` those that have, and were not hashed since the mount."""

    foreign: list[tuple[int, int, ChunkId]] = field(default_factory=list)
    unverified: list[Suspect] = field(default_factory=list)
    foreign_bytes: int = 0
    unverified_bytes: int = 0
    tensor_bytes: int = 0
    is_too_much: bool = False


@dataclass(frozen=True, slots=True)
class _Now:
    """Somebody waits: how much may be hashed, and until when (monotonic seconds)."""

    most_bytes: int
    until: float
    only_tensors: bool


class _Nowhere:
    """It was looked for, and there is no such segment."""


_NOWHERE = _Nowhere()
