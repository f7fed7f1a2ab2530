"""Hashing stored files as a whole, in worker threads; every chunk is checked on the way.

One rule: a digest speaks for what was saved, so each chunk is read and hashed again, whatever is known of
it; a chunk counts as corrupt only if the index still says that its bytes are where they were read.

Source: FORMAT.md, "Digests".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import trio

from ckptfs.store.chunk_files import ChunkFiles
from ckptfs.store.digests import FileDigests, digests_of
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.hashing import WholeHash
from ckptfs.store.ids import ChunkId, RecipeId, cid_text
from ckptfs.store.places import Suspect
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.segment_files import Bad, SegmentFiles, bad_of, place_of
from ckptfs.store.segment_format import Location
from ckptfs.store.segments import Segments

_SLICE_BYTES = 16 << 20
_SLICE_PIECES = 1024
_TRIES = 3
Rest = Callable[[int], Awaitable[None]]
"""Awaited after each slice, with its bytes: the place for pacing and for progress."""


class Sink(Protocol):
    """Takes the bytes of a file in order, in a worker thread."""

    def update(self, payload: bytes, /) -> None:
        """The next bytes."""

    def update_zeros(self, length: int, /) -> None:
        """The next `length` bytes, all zero."""


class _Step(NamedTuple):
    """The next bytes of a file: a whole chunk and where it lies, or `length` zeros."""

    length: int
    chunk: ChunkId | None
    location: Location | None

    @property
    def suspects(self) -> list[Suspect]:
        """The chunk and its place, if there is one."""
        return [(self.chunk, self.location)] if self.chunk is not None and self.location is not None else []


class WholeFiles:
    """Hashes files of the store. Its tasks belong to the index thread."""

    def __init__(self, disk: Disk, segments: Segments, limiter: trio.CapacityLimiter) -> None:
        """`limiter` bounds the worker threads."""
        self._disk = disk
        self._segments = segments
        self._limiter = limiter

    async def digests(self, identity: RecipeId, rest: Rest, also: Sink | None = None) -> FileDigests:
        """The digests of a content, about 1 GB/s; `also` gets the bytes too, which were read once for both.
        Corrupt if a chunk of it is wrong or missing (NotFound: the whole content is gone)."""
        if self._segments.locate(identity) is None:
            raise NotFound("this content is not stored any more")
        whole = WholeHash()
        sinks = (whole,) if also is None else (whole, also)
        for pieces in _slices(self._segments.read_recipe(identity)):
            await self._hash(sinks, pieces)
            await rest(sum(piece.length for piece in pieces))
        return digests_of(whole)

    async def _hash(self, sinks: Sequence[Sink], pieces: Sequence[Piece]) -> None:
        """Feed one slice; a chunk that was moved meanwhile is looked for again."""
        done, tries = 0, 0
        while done < len(pieces):
            steps = [self._step(piece) for piece in pieces[done:]]
            parents = self._segments.parents_of(pair for step in steps for pair in step.suspects)
            taken, bad = await trio.to_thread.run_sync(
                _hash_steps, self._disk, sinks, steps, parents, limiter=self._limiter, abandon_on_cancel=True
            )
            done, tries = done + taken, 0 if taken else tries + 1
            if bad is None:
                continue
            still = self._segments.still_bad(bad)
            if still is not None or tries == _TRIES:
                bad = still or bad
                self._segments.note_bad(bad)
                what = f"chunk {cid_text(bad.chunk)} does not match its bytes"
                raise Corrupt(what, expected=bad.chunk, got=bad.got, place=bad.place)

    def _step(self, piece: Piece) -> _Step:
        if piece.chunk is None:
            return _Step(piece.length, None, None)
        location = self._segments.locate(piece.chunk)
        if location is None:
            raise Corrupt(f"chunk {cid_text(piece.chunk)} is not in the index", expected=piece.chunk)
        if location.length != piece.length:
            raise Corrupt("a recipe and its chunk differ in length", place=place_of(location))
        return _Step(piece.length, piece.chunk, location)


def _slices(recipe: Recipe) -> Iterator[list[Piece]]:
    """The pieces of a file, some at a time; a large hole comes in parts."""
    pieces: list[Piece] = []
    length = 0
    for piece in recipe.pieces():
        for part in _parts(piece):
            pieces.append(part)
            length += part.length
            if length >= _SLICE_BYTES or len(pieces) >= _SLICE_PIECES:
                yield pieces
                pieces, length = [], 0
    if pieces:
        yield pieces


def _parts(piece: Piece) -> Iterator[Piece]:
    if piece.chunk is not None:
        yield piece
        return
    for start in range(0, piece.length, _SLICE_BYTES):
        yield Piece(min(_SLICE_BYTES, piece.length - start), None)


def _hash_steps(
    disk: Disk, sinks: Sequence[Sink], steps: Sequence[_Step], parents: Mapping[ChunkId, Location]
) -> tuple[int, Bad | None]:
    """Feed steps; (how many were fed, the chunk behind them if that is wrong). Any thread may call."""
    files = SegmentFiles(disk)
    chunks = ChunkFiles(files, parents.get)
    try:
        for done, step in enumerate(steps):
            if step.chunk is None or step.location is None:
                for sink in sinks:
                    sink.update_zeros(step.length)
                continue
            try:
                payload = chunks.read(step.chunk, step.location)
            except Corrupt as e:
                return done, bad_of(step.chunk, step.location, e)
            for sink in sinks:
                sink.update(payload)
    finally:
        files.close()
    return len(steps), None
