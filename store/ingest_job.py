"""One file on its way into the store: opened, probed for writers, cut, its recipe made.

One rule: a job ends in exactly one outcome, and only a DONE one has a recipe; whatever goes wrong
with one file is told in its outcome and does not touch the other files of the batch.

Blocking, for a worker thread; what needs the index (the base's bytes, a sibling file) is asked of
the index thread, which waits for nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar, TypeVarTuple

import trio

from ckptfs.store.cutting import Cutter, Fresh, Pieces, Slab
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Unavailable
from ckptfs.store.far_reader import FarReader
from ckptfs.store.formats import Reader, parse
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import RecipeId
from ckptfs.store.merkle import file_root
from ckptfs.store.recipe import Recipe
from ckptfs.store.regions import plan_regions
from ckptfs.store.segments import Segments
from ckptfs.store.source import Ranges, Source, block_ranges
from ckptfs.store.spans import LEAST_BYTES, Span, spans_of
from ckptfs.store.staging import staging_path

Sibling = Callable[[str], Reader | None]
A = TypeVarTuple("A")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A closed staging file that is to be stored.

    `key` names it to the caller (hashable). `size` is its length; `base` and `base_limit` are
    those of inode.Content. `name` and `sibling` (another file of its directory, by name) help to
    find the tensors; `sibling` and what it returns are used in the index thread. `cancelled` is
    asked there between steps: once true, the file is left alone.
    """

    key: object
    staging: int
    size: int
    name: str
    base: RecipeId | None
    base_limit: int
    sibling: Sibling | None
    cancelled: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Ingested:
    """What a file became. `root` is its Merkle file root, `blocks` its st_blocks (512 B each)."""

    key: object
    recipe: RecipeId
    root: bytes
    size: int
    blocks: int


class Outcome(Enum):
    """How far a job got."""

    RUNNING = auto()
    DONE = auto()
    BUSY = auto()
    """Somebody may still write to the file, or did while it was read: try again later."""
    CANCELLED = auto()
    FAILED = auto()


class Job:
    """Cuts one candidate. `stop` may be set between steps; `recipe_chunk` is the recipe as a chunk
    that is to be stored, and there only when DONE."""

    def __init__(self, candidate: Candidate, disk: Disk, segments: Segments) -> None:
        self.candidate = candidate
        self.outcome = Outcome.RUNNING
        self.error: Exception | None = None
        self.stop = False
        self.ingested: Ingested | None = None
        self.recipe_chunk: Fresh | None = None
        self.data_bytes = 0
        self.fd = -1
        self._disk = disk
        self._segments = segments
        self._source: Source | None = None
        self._is_dense = False
        self._stamp = (0, 0)

    @property
    def is_whole(self) -> bool:
        """Whether the staging file alone holds all of the content, so that it can be adopted."""
        source = self._source
        return source is not None and (self.candidate.base is None or source.own.cover(source.size))

    def open(self) -> None:
        """Open the staging file and see that nobody can write to it. Sets `outcome` if so."""
        try:
            self._open()
        except (OSError, CkptfsError) as e:
            self.end_with(e)

    def cut(self, slab: Slab) -> Iterator[None]:
        """Cut the file; pauses whenever the slab is full. Opens the file if need be."""
        mark = len(slab.fresh)
        try:
            if self._source is None:
                self._open()
            assert self._source is not None
            layout = parse(self._source, self.candidate.name, self._sibling())
            cutter = Cutter(self._source, plan_regions(self.candidate.size, layout), slab)
            for _ in cutter.run():
                yield
                mark = 0
                if self.stop:
                    break
            self._finish(cutter.pieces)
        except (OSError, CkptfsError) as e:
            self.end_with(e)
        if self.outcome is not Outcome.DONE:
            del slab.fresh[mark:]

    def plan_spans(self) -> list[Span]:
        """The spans of a large file without holes or a base, to be cut by others; empty for any other, which
        `cut` cuts. Sets `outcome` if the file cannot be read."""
        try:
            if self._source is None:
                self._open()
            assert self._source is not None
            if not self._is_dense or self.candidate.size < LEAST_BYTES:
                return []
            layout = parse(self._source, self.candidate.name, self._sibling())
            return spans_of(plan_regions(self.candidate.size, layout))
        except (OSError, CkptfsError) as e:
            self.end_with(e)
            return []

    def finish_spans(self, pieces: Pieces) -> None:
        """All spans are cut into `pieces`. Sets `outcome`."""
        try:
            self._finish(pieces)
        except (OSError, CkptfsError) as e:
            self.end_with(e)

    def end_with(self, error: Exception) -> None:
        """End the job because of what reading the file, or what it lies on, came to."""
        self.error = error
        if isinstance(error, Unavailable):
            self.outcome = Outcome.BUSY
        elif isinstance(error, FileNotFoundError):
            self.outcome = Outcome.CANCELLED
        else:
            self.outcome = Outcome.FAILED

    def fail(self, error: Exception) -> None:
        """End the job for a reason that lies outside of it."""
        self.outcome, self.error = Outcome.FAILED, error

    def close(self) -> None:
        """Close the staging file."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self._disk.close(fd)

    def _open(self) -> None:
        one = self.candidate
        self.fd = self._disk.open_read(staging_path(one.staging))
        # Only probed: a lease that is held while a file is hashed would block, inside of open(2),
        # the thread that opens the file for a new writer and then cancels this job.
        if not self._disk.lease(self.fd, "read"):
            raise Unavailable("somebody still has the file open for writing")
        self._disk.unlease(self.fd)
        found = self._disk.fstat(self.fd)
        self._stamp = (found.st_size, found.st_mtime_ns)
        if found.st_size != one.size:
            raise Unavailable("the file has another size than at its last close")
        sparse = one.base is not None or found.st_blocks * 512 < one.size
        self._is_dense = not sparse
        extents = self._disk.data_extents(self.fd, one.size) if sparse else [(0, one.size)]
        self._source = self._make_source(block_ranges(extents, one.size))

    def _make_source(self, own: Ranges) -> Source:
        one = self.candidate
        if one.base is None or own.cover(one.size):
            return Source(self._read_own, one.size, own)
        recipe = ask(self._segments.read_recipe, one.base)
        limit = min(one.base_limit, one.size)
        changed = own.joined([(limit, one.size)])
        return overlay(self._segments, self._read_own, one.size, own, recipe, limit, changed)

    def _read_own(self, view: memoryview, offset: int) -> int:
        return self._disk.read_into(self.fd, view, offset)

    def _sibling(self) -> Sibling | None:
        sibling = self.candidate.sibling
        if sibling is None:
            return None

        def open_sibling(name: str) -> Reader | None:
            reader = ask(sibling, name)
            return None if reader is None else FarReader(reader)

        return open_sibling

    def _finish(self, pieces: Pieces) -> None:
        if self.stop:
            self.outcome = Outcome.CANCELLED
            return
        if not self._unchanged():
            raise Unavailable("the file was changed while it was read")
        recipe = pieces.recipe()
        encoded = recipe.encode()
        identity = RecipeId(chunk_id(encoded))
        root = file_root(recipe.root_leaves())
        blocks = -(-pieces.data_bytes // 4096) * 8
        self.data_bytes = pieces.data_bytes
        self.ingested = Ingested(self.candidate.key, identity, root, recipe.size, blocks)
        self.recipe_chunk = Fresh(identity, 0, len(encoded), encoded)
        self.outcome = Outcome.DONE

    def _unchanged(self) -> bool:
        found = self._disk.fstat(self.fd)
        return self._stamp == (found.st_size, found.st_mtime_ns)


class GrowingJob(Job):
    """Cuts the first bytes of a file that others go on writing to, through a descriptor of theirs.

    The pieces of `recipe` below `clean_below` are taken over. Holes below `base_limit` are read
    from it (0: the staging file stands alone).
    """

    def __init__(
        self,
        candidate: Candidate,
        disk: Disk,
        segments: Segments,
        fd: int,
        recipe: Recipe | None,
        clean_below: int,
    ) -> None:
        super().__init__(candidate, disk, segments)
        self.fd = fd
        self._recipe = recipe
        self._clean_below = clean_below

    def close(self) -> None:
        """The descriptor is the caller's."""

    def _open(self) -> None:
        size, limit = self.candidate.size, self.candidate.base_limit
        extents = self._disk.data_extents(self.fd, size) if limit else [(0, size)]
        own = block_ranges(extents, size)
        if self._recipe is None:
            self._source = Source(self._read_own, size, own)
            return
        changed = Ranges([(self._clean_below, size)])
        self._source = overlay(self._segments, self._read_own, size, own, self._recipe, limit, changed)

    def _unchanged(self) -> bool:
        return True


def overlay(
    segments: Segments,
    read_own: Callable[[memoryview, int], int],
    size: int,
    own: Ranges,
    recipe: Recipe,
    base_limit: int,
    changed: Ranges,
) -> Source:
    """A source with a stored base, whose bytes are read in the index thread."""
    base = FarReader(segments.file_reader(recipe))
    return Source(read_own, size, own, recipe=recipe, base=base, base_limit=base_limit, changed=changed)


def ask(function: Callable[[*A], R], *arguments: *A) -> R:
    """Call a function in the index thread, from a worker thread that it started."""
    return trio.from_thread.run_sync(function, *arguments)
