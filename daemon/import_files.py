"""The bytes of files outside become files of the store: taken, stored, and compared with what they were.

One rule: a file counts as taken only if, after it was stored, it was read again where it came from and every
byte of that is in the recipe.

How the bytes come: shared blocks where the store's file system can, else a copy. Never by a second name for
the file: who has it open, or finds it by its old name, would write to a segment.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import trio

from ckptfs.daemon.import_plan import Found, Path, holds_weights
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.outside import Outside, found_of, xattrs_of
from ckptfs.store.errors import Unavailable
from ckptfs.store.formats import Reader
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.index import Change
from ckptfs.store.ingest import Candidate, Ingested
from ckptfs.store.packing import full_disk_is_no_space
from ckptfs.store.recipe import Recipe

SMALL_BYTES = 128 << 10
_METADATA = b".metadata"
_FILES_AT_ONCE = 512
_BYTES_AT_ONCE = 32 << 20
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Taken:
    """A file that is stored. `seen` is what it was when its bytes were taken."""

    seen: Found
    recipe: RecipeId
    root: bytes
    blocks: int


@dataclass(slots=True)
class _Staged:
    number: int
    path: Path
    seen: Found


class FileTaker:
    """Takes the files of one directory. Belongs to the index thread; disk work runs in worker threads.

    `held` pins all that is stored, until its owner's record is committed. `counts` are the files and bytes
    that came by each way: "cloned", "copied".
    """

    def __init__(
        self, parts: OpenStore, outside: Outside, held: set[ChunkId], tell: Callable[[int], None]
    ) -> None:
        """`tell` hears the bytes of each that is taken."""
        self._parts = parts
        self._outside = outside
        self._held = held
        self._tell = tell
        self._stored: dict[Path, RecipeId] = {}
        self.counts: dict[str, int] = {"cloned": 0, "copied": 0}
        self.bytes_by_way: dict[str, int] = dict.fromkeys(self.counts, 0)

    async def take(self, files: Sequence[tuple[Path, Found]]) -> dict[Path, Taken]:
        """Store these files. Unavailable: one is being written, or was changed meanwhile; NoSpace; OSError if
        one cannot be read. Then nothing names what is stored so far. Durable when: this returned."""
        taken: dict[Path, Taken] = {}
        first: dict[tuple[int, int], Path] = {}
        for group in _groups(files):
            new = []
            for path, found in group:
                if found.names > 1 and first.setdefault((found.device, found.inode), path) != path:
                    continue
                new.append((path, found))
            taken |= await self._take_group(new)
        for path, found in files:
            if path not in taken:
                one = taken[first[found.device, found.inode]]
                taken[path] = replace(one, seen=replace(one.seen, name=found.name))
        return taken

    async def _take_group(self, group: Sequence[tuple[Path, Found]]) -> dict[Path, Taken]:
        staged: list[_Staged] = []
        try:
            for path, found in group:
                number, fd = self._parts.staging.create()
                staged.append(_Staged(number, path, found))
                try:
                    staged[-1].seen = await trio.to_thread.run_sync(self._bring, path, found, fd)
                finally:
                    self._parts.disk.close(fd)
            return await self._store(staged)
        except BaseException:
            # Of those that were stored the name may go early: nothing but the segment is needed.
            for one in staged:
                self._parts.staging.drop(one.number)
            raise

    async def _store(self, staged: Sequence[_Staged]) -> dict[Path, Taken]:
        stored: dict[object, Ingested] = {}

        def commit(change: Change, done: list[Ingested]) -> list[object]:
            stored.update({one.key: one for one in done})
            return []

        candidates = [self._candidate(one) for one in staged]
        report = await self._parts.ingest.store_files(candidates, commit, self._held)
        for _, error in report.failed:
            raise error
        if len(stored) < len(staged):
            busy = next(one for one in staged if one.path not in stored)
            raise Unavailable(f"{self._outside.text(busy.path)} is being written; import it again later")
        result = {}
        for one in staged:
            done = stored[one.path]
            await self._compare(one, done)
            self._stored[one.path] = done.recipe
            result[one.path] = Taken(one.seen, done.recipe, done.root, done.blocks)
            self._tell(one.seen.size)
        return result

    def _bring(self, path: Path, found: Found, fd: int) -> Found:
        """Its bytes into the staging file `fd`; what it was then."""
        with self._outside.opened(path, found) as source:
            seen = _seen(found, source)
            way = "cloned" if seen.size and self._clone(source, fd, seen.size) else "copied"
            if way == "copied":
                self._copy(source, fd, seen.size)
            self._count(way, seen.size)
            return seen

    def _clone(self, source: int, fd: int, size: int) -> bool:
        if not self._parts.disk.clone(source, fd):
            return False
        # It may have grown since it was looked at.
        self._parts.disk.truncate(fd, size)
        return True

    def _copy(self, source: int, fd: int, size: int) -> None:
        disk = self._parts.disk
        with full_disk_is_no_space():
            for offset, length in disk.data_extents(source, size):
                disk.copy_from(source, fd, offset, length)
            disk.truncate(fd, size)

    def _count(self, way: str, size: int) -> None:
        self.counts[way] += 1
        self.bytes_by_way[way] += size

    def _candidate(self, one: _Staged) -> Candidate:
        name = one.path[-1].decode("utf-8", "surrogateescape")
        sibling = partial(self._sibling, one.path[:-1])
        return Candidate(one.path, one.number, one.seen.size, name, None, 0, sibling, lambda: False)

    def _sibling(self, folder: Path, name: str) -> Reader | None:
        """Another file of the same directory (DCP's `.metadata`), which was stored before."""
        recipe = self._stored.get((*folder, name.encode("utf-8", "surrogateescape")))
        return (
            None
            if recipe is None
            else self._parts.segments.file_reader(self._parts.segments.read_recipe(recipe))
        )

    async def _compare(self, one: _Staged, done: Ingested) -> None:
        """See that the file still is what was stored."""
        pieces = self._parts.segments.read_recipe(done.recipe)
        if not await trio.to_thread.run_sync(self._is_equal, one, pieces):
            raise Unavailable(
                f"{self._outside.text(one.path)} was changed while it was read; import it again"
            )

    def _is_equal(self, one: _Staged, recipe: Recipe) -> bool:
        with self._outside.opened(one.path, one.seen) as source:
            if os.fstat(source).st_size != one.seen.size:
                return False
            at, buffer = 0, memoryview(bytearray(_BUFFER_BYTES))
            extents = self._parts.disk.data_extents(source, one.seen.size)
            for piece in recipe.pieces():
                end = at + piece.length
                if piece.chunk is None:
                    if not self._is_hole(source, at, end, buffer, extents):
                        return False
                elif chunk_id(self._read(source, at, end, buffer)) != piece.chunk:
                    return False
                at = end
            if at != one.seen.size:
                return False
            if holds_weights(one.seen) and not self._outside.has_no_writer(source):
                raise Unavailable(
                    f"{self._outside.text(one.path)} is open for writing; import it again when it is closed"
                )
            return True

    def _is_hole(
        self, source: int, at: int, end: int, buffer: memoryview, extents: Sequence[tuple[int, int]]
    ) -> bool:
        """Whether there are zeros only; what has no blocks is not read."""
        first = max(0, bisect_right(extents, (at, 0)) - 1)
        for start, length in itertools.islice(extents, first, None):
            if start >= end:
                break
            stop = min(end, start + length)
            for window in range(max(at, start), stop, len(buffer)):
                part = self._read(source, window, min(stop, window + len(buffer)), buffer)
                if bytes(part).strip(b"\0"):
                    return False
        return True

    def _read(self, source: int, at: int, end: int, buffer: memoryview) -> memoryview | bytes:
        if end - at > len(buffer):
            return self._parts.disk.pread(source, end - at, at)
        return buffer[: self._parts.disk.read_into(source, buffer[: end - at], at)]


def _seen(found: Found, source: int) -> Found:
    """What the open file is now."""
    return found_of(found.name, os.fstat(source), names=found.names, xattrs=xattrs_of(source))


def _groups(files: Sequence[tuple[Path, Found]]) -> Iterator[list[tuple[Path, Found]]]:
    """Large files one by one, small ones together; what says how others are cut comes first."""
    files = sorted(files, key=lambda one: (not one[0][-1].endswith(_METADATA), one[1].size >= SMALL_BYTES))
    small: list[tuple[Path, Found]] = []
    small_bytes = 0
    for path, found in files:
        if found.size >= SMALL_BYTES:
            yield [(path, found)]
            continue
        small.append((path, found))
        small_bytes += found.size
        if len(small) >= _FILES_AT_ONCE or small_bytes >= _BYTES_AT_ONCE:
            yield small
            small, small_bytes = [], 0
    if small:
        yield small
