"""Which of many stored chunks are wrong: read, hash, compare; the hot loop of verify and scrub.

One rule: every chunk is compared with its own id, and a chunk counts as wrong here only after it was
read by itself, with pread.

Long runs of raw neighbours are hashed from a mapping, which saves the copy that pread makes: in another
process, if there is one (a PlaceHasher), which may die of a page that the disk does not give; else here, from
pages that cannot go away (`MappedFile.loaded`).

Blocking, for a worker thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ckptfs.store.chunk_files import ChunkFiles
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import DIGEST_BYTES, ChunkId
from ckptfs.store.places import NO_PARENTS, Places, Suspect, places_of
from ckptfs.store.segment_files import MAX_OFFSET, Bad, SegmentFiles, bad_of
from ckptfs.store.segment_format import BLOCK_BYTES, Codec, Location

_SMALL_BYTES = 256 << 10
# Pages are held by pipes, one for a MiB: a recipe of a huge file is one chunk, and would take very many.
_MOST_HELD_BYTES = 8 << 20
_WINDOW_BYTES = 1 << 20
_WORTH_ASKING_BYTES = 1 << 20
MOST_CHUNKS = 2048


def find_bad(
    disk: Disk, suspects: Iterable[Suspect], parents: Mapping[ChunkId, Location] = NO_PARENTS
) -> list[Bad]:
    """Read and hash each chunk; the wrong ones by place. Any thread may call.

    `parents` are the places of all chunks that encoded ones among them lead to (Segments.parents_of).

    One that says it has a codec of a later program is a bad one, too: nobody can tell here, and the others
    have to be checked. OSError: the disk fails in another way than by not giving the bytes of a chunk (which
    makes it a bad one).
    """
    return find_bad_places(disk, places_of(suspects, parents))


class PlaceHasher(Protocol):
    """Hashes chunks somewhere else."""

    def ids(self, fd: int, starts: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint32]) -> bytes | None:
        """The ids of up to MOST_CHUNKS chunks that begin at `starts` of a file and are `lengths` long, one
        behind the other; None: they cannot be had so."""


class Hashers(Protocol):
    """Has hashers to lend."""

    def lent(self) -> AbstractContextManager[PlaceHasher | None]:
        """One for a thread that the block waits for; None if none is free. Belongs to the trio thread."""


class _NoHashers:
    def lent(self) -> AbstractContextManager[PlaceHasher | None]:
        return nullcontext()


NO_HASHERS: Hashers = _NoHashers()


def find_bad_places(disk: Disk, places: Places, hasher: PlaceHasher | None = None) -> list[Bad]:
    """The same of many; `hasher` does what it can of it."""
    places = places.by_place()
    files = SegmentFiles(disk)
    try:
        if hasher is None:
            return _find_here(files, places)
        return [bad for part in _parts(places) for bad in _find_there(files, part, hasher)]
    finally:
        files.close()


def _parts(places: Places) -> Iterator[Places]:
    """Raw places of one file, or others, as many as a request takes."""
    segments, flags = places.rows["segment"], places.rows["flags"]
    is_odd = _is_odd(places)
    is_other = (segments[1:] != segments[:-1]) | (flags[1:] != flags[:-1]) | (is_odd[1:] != is_odd[:-1])
    bounds = [0, *(np.flatnonzero(is_other) + 1).tolist(), len(places)]
    for first, stop in pairwise(bounds):
        for at in range(first, stop, MOST_CHUNKS):
            yield places.taken(np.arange(at, min(at + MOST_CHUNKS, stop)))


def _find_there(files: SegmentFiles, part: Places, hasher: PlaceHasher) -> Iterable[Bad]:
    lengths = part.rows["stored"]
    ids = None
    if not _is_odd(part)[0] and lengths.sum(dtype=int) >= _WORTH_ASKING_BYTES:
        with suppress(OSError):  # it cannot be opened: who reads it piece by piece finds out why
            ids = hasher.ids(files.descriptor(part.location(0)), part.rows["offset"], lengths)
    if ids is None:
        return _find_here(files, part)
    if ids == b"".join(part.chunks):
        return ()
    got = [ids[at : at + DIGEST_BYTES] for at in range(0, len(ids), DIGEST_BYTES)]
    wrong = [at for at, chunk in enumerate(part.chunks) if got[at] != chunk]
    chunks = ChunkFiles(files)
    return filter(None, (_read_alone(chunks, part, at) for at in wrong))


def _find_here(files: SegmentFiles, places: Places) -> list[Bad]:
    if not len(places):
        return []
    starts, ends, runs = _runs(places)
    chunks = ChunkFiles(files, places.parents.get)
    bad: list[Bad] = []
    for run in runs:
        view = _bytes_of(files, places, run)
        if view is None:
            wrong = [*range(run.first, run.stop)]
        else:
            with view:
                wrong = _differing(places.chunks, starts, ends, run, view)
        bad += filter(None, (_read_alone(chunks, places, at) for at in wrong))
    return bad


class _Run(NamedTuple):
    """Places `first` to `stop`, which lie in `length` bytes of one file from `start` on. `length` 0: they
    are to be read one by one."""

    first: int
    stop: int
    start: int
    length: int


def _is_odd(places: Places) -> npt.NDArray[np.bool_]:
    """Which places are to be read one by one."""
    is_odd: npt.NDArray[np.bool_] = (places.rows["codec"] != Codec.RAW) | (places.rows["offset"] > MAX_OFFSET)
    return is_odd


def _runs(places: Places) -> tuple[list[int], list[int], list[_Run]]:
    """Where each place begins and ends, and the runs of raw neighbours, about _WINDOW_BYTES at a time."""
    rows, is_odd = places.rows, _is_odd(places)
    starts = np.where(is_odd, 0, rows["offset"]).astype(np.int64)
    ends = starts + rows["stored"]
    begins = np.ones(len(rows), bool)
    # A gap of a page or more may be a hole, and a tmpfs fills a hole whose mapping is touched.
    is_far = starts[1:] - ends[:-1] >= BLOCK_BYTES
    is_other = (rows["segment"][1:] != rows["segment"][:-1]) | (rows["flags"][1:] != rows["flags"][:-1])
    begins[1:] = is_far | is_other | (is_odd[1:] != is_odd[:-1])
    starts_of_runs = starts[np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))]
    window = (starts - starts_of_runs) // _WINDOW_BYTES
    begins[1:] |= window[1:] != window[:-1]
    firsts = np.flatnonzero(begins)
    lengths = np.where(is_odd[firsts], 0, np.maximum.reduceat(ends, firsts) - starts[firsts])
    columns = (firsts, np.append(firsts[1:], len(rows)), starts[firsts], lengths)
    runs = [_Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return starts.tolist(), ends.tolist(), runs


def _bytes_of(files: SegmentFiles, places: Places, run: _Run) -> memoryview | None:
    """The bytes of a run; None if they cannot all be had at once."""
    if not run.length:
        return None
    first = places.location(run.first)
    if _SMALL_BYTES < run.length <= _MOST_HELD_BYTES:
        return files.loaded(first, run.length)
    view = memoryview(bytearray(run.length))
    return view if files.read_into(first, view) else None


def _differing(
    chunks: Sequence[ChunkId], starts: Sequence[int], ends: Sequence[int], run: _Run, view: memoryview
) -> list[int]:
    """Which places of a run do not have their chunk in `view`, which holds the run's bytes."""
    base = run.start
    return [
        at
        for at in range(run.first, run.stop)
        if chunk_id(view[starts[at] - base : ends[at] - base]) != chunks[at]
    ]


def _read_alone(chunks: ChunkFiles, places: Places, at: int) -> Bad | None:
    """Read and hash one chunk by itself; None: it is right."""
    chunk, location = places.chunks[at], places.location(at)
    try:
        chunks.read(chunk, location)
    except Corrupt as e:
        return bad_of(chunk, location, e)
    except Unsupported:
        return Bad(chunk, location, None)
    return None
