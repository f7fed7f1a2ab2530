"""Stored files that lie whole, byte for byte, in one segment: whoever may read that file reads them.

One rule: a segment is handed out for a file only if each of the file's chunks was found right at its
place in it since the mount, and nothing was taken from the segment since. What lies there without a row
of its own (a header that an older save has too) is hashed each time.

Looking that up takes as long as a file has chunks, so it is done in steps, in the background; until then
the answer is None, and the reader goes the ordinary way. That verifies what he reads; of a file that was
only opened no more than a little is hashed here. Source: ARCHITECTURE §4 "Read".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import trio

from ckptfs.store.bad_chunks import find_bad
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.lru import Lru
from ckptfs.store.places import Suspect
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

    def __init__(self, disk: Disk, segments: Segments) -> None:
        self._disk = disk
        self._segments = segments
        self._found: Lru[RecipeId, Whole | _Nowhere] = Lru(_KNOWN_FILES)
        self._wanted: dict[RecipeId, None] = {}
        self._asked = trio.Event()
        self._one_worker = trio.CapacityLimiter(1)

    def want(self, identity: RecipeId) -> None:
        """Look for the file's segment soon. Of too many, those that were asked for last."""
        if self._current(identity) is not None:
            return
        self._wanted.pop(identity, None)
        self._wanted[identity] = None
        if len(self._wanted) > _MOST_WANTED:
            del self._wanted[next(iter(self._wanted))]
        self._asked.set()

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
            fd = self._disk.open_read(segment_paths(found.segment)[0])
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

    async def _look_for(self, identity: RecipeId) -> Whole | _Nowhere | None:
        """The file's segment; None if it changed meanwhile, or too little of it is verified, so that
        somebody may ask again."""
        recipe = self._segments.read_recipe(identity)
        segment = self._likely_segment(recipe)
        if segment is None:
            return _NOWHERE
        watch = self._segments.verified.watch(segment)
        foreign: list[tuple[int, int, ChunkId]] = []
        foreign_bytes = tensor_bytes = unverified_bytes = 0
        unverified: list[Suspect] = []
        for index, start, length, chunk in _pieces(recipe):
            if index % _PIECES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            location = None if chunk is None else self._segments.locate(chunk)
            if chunk is None or location is None:
                return _NOWHERE
            tensor_bytes += length if length == CHUNK_BYTES else 0
            if location != Location(segment, start, length, length):
                foreign.append((start, length, chunk))
                foreign_bytes += length
                if foreign_bytes > FOREIGN_BYTES:
                    return _NOWHERE
            elif location not in self._segments.verified:
                unverified.append((chunk, location))
                unverified_bytes += length
                if unverified_bytes > MOST_HASHED_BYTES:
                    return None
        if not await self._all_good(unverified, watch):
            return _NOWHERE
        whole = Whole(segment, watch, tuple(foreign), 2 * tensor_bytes >= recipe.size)
        return whole if self._segments.verified.is_watched(segment, watch) else None

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

    async def _all_good(self, unverified: list[Suspect], watch: object) -> bool:
        """Hash what was not verified in this mount yet; what is wrong is noted, as a reader would."""
        verified = self._segments.verified
        for at in range(0, len(unverified), _HASHED_AT_ONCE):
            part = unverified[at : at + _HASHED_AT_ONCE]
            bad = await trio.to_thread.run_sync(find_bad, self._disk, part, limiter=self._one_worker)
            for one in bad:
                self._segments.note_bad(one)
            if bad:
                return False
            for _, location in part:
                if verified.is_watched(location.segment, watch):
                    self._segments.note_good(location)
        return True


class _Nowhere:
    """It was looked for, and there is no such segment."""


_NOWHERE = _Nowhere()


def _pieces(recipe: Recipe) -> Iterator[tuple[int, int, int, ChunkId | None]]:
    for index, piece in enumerate(recipe.pieces()):
        yield index, recipe.start(index), piece.length, piece.chunk
