"""Cutting a file into chunks and hashing them, a slab of memory at a time.

One rule: what is hashed is the buffer, and the buffer is what is stored; a byte that is not in the
buffer (a hole, a piece of the base that nothing touched) is not looked at.

The buffer is small on purpose: bytes that are hashed while they are still in the processor's cache
take 2.8 GB/s on the way from the page cache to the digest, in slabs of 8 MiB 0.9 (measured).

Overlays: cutting starts at the first changed byte's piece and stops as soon as a cut falls
together with a cut of the base, which holds because FastCDC starts anew at each cut.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import HOLE, Piece, Recipe
from ckptfs.store.regions import CHUNK_BYTES, CONTENT_MAX_BYTES, Mode, Region, cut_content
from ckptfs.store.source import Source

WINDOW_BYTES = 4 * CHUNK_BYTES
CONTENT_WINDOW_BYTES = 2 * WINDOW_BYTES
RESYNC_BYTES = 2 * CONTENT_MAX_BYTES
HOLE_BYTES = 64 * 1024
"""A shorter hole in a content-cut region is cut as the zeros that it reads as."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """A chunk that was cut and hashed; `payload` is valid until its slab is cleared."""

    chunk: ChunkId
    offset: int
    length: int
    payload: memoryview | bytes


class Slab:
    """A buffer that chunks are cut in. Owned by one task, filled by one thread at a time.

    With `keep` every payload stays in place until `clear`; without, a window overwrites the one
    before, and `step_bytes` only says after how many bytes it is time for a pause.
    """

    def __init__(self, capacity_bytes: int, *, keep: bool, step_bytes: int = 0) -> None:
        assert capacity_bytes >= CONTENT_WINDOW_BYTES, "a slab holds at least one window"
        self._buffer = memoryview(bytearray(capacity_bytes))
        self._keep = keep
        self._limit = capacity_bytes if keep else step_bytes
        self._used = 0
        self.fresh: list[Fresh] = []

    def fits(self, length: int) -> bool:
        """Whether `take(length)` may be called before the next `clear`."""
        return self._used + length <= self._limit or self._used == 0

    def take(self, length: int) -> memoryview:
        """Room for `length` bytes."""
        at = self._used if self._keep else 0
        self._used += length
        return self._buffer[at : at + length]

    def give_back(self, length: int) -> None:
        """The last `length` bytes taken were not needed."""
        self._used -= length

    def clear(self) -> None:
        """Forget all chunks; their payloads become invalid."""
        self._used = 0
        self.fresh = []


class Pieces:
    """The recipe of a file as it grows. 40 bytes a piece."""

    __slots__ = ("_ids", "_lengths", "data_bytes")

    def __init__(self) -> None:
        self._lengths = array("Q")
        self._ids = bytearray()
        self.data_bytes = 0

    def add(self, length: int, chunk: ChunkId) -> None:
        """A chunk follows."""
        self._lengths.append(length)
        self._ids += chunk
        self.data_bytes += length

    def extend(self, lengths: array[int], ids: bytes) -> None:
        """Chunks follow, their ids one behind the other."""
        self._lengths.fromlist(lengths.tolist())
        self._ids += ids
        self.data_bytes += sum(lengths)

    def add_hole(self, length: int) -> None:
        """Zeros follow; they join a hole right before."""
        if self._lengths and self._ids.endswith(HOLE):
            self._lengths[-1] += length
        else:
            self._lengths.append(length)
            self._ids += HOLE

    def recipe(self) -> Recipe:
        """The finished recipe."""
        ids = bytes(self._ids)
        return Recipe(
            Piece(length, None if (one := ids[32 * i : 32 * i + 32]) == HOLE else ChunkId(one))
            for i, length in enumerate(self._lengths)
        )


class Cutter:
    """Cuts one file. `run` pauses (yields) whenever the slab is full; its owner then takes what
    is in the slab and clears it. Blocking, for a worker thread."""

    def __init__(self, source: Source, regions: Sequence[Region], slab: Slab) -> None:
        self._source = source
        self._regions = regions
        self._slab = slab
        self.pieces = Pieces()

    def run(self) -> Iterator[None]:
        """Cut all regions. What the last pause left in the slab is still there at the end."""
        for region in self._regions:
            end = region.offset + region.length
            if region.mode is Mode.FIXED:
                yield from self._fixed(region.offset, end)
            else:
                yield from self._content(region.offset, end)

    def _fixed(self, at: int, end: int) -> Iterator[None]:
        source = self._source
        while at < end:
            at += self._reuse(at, end, is_fixed=True)
            if at == end:
                return
            length = min(CHUNK_BYTES, end - at)
            zeros = min(source.zero_until(at), end)
            if zeros - at >= length:
                hole = zeros - at if zeros == end else (zeros - at) // CHUNK_BYTES * CHUNK_BYTES
                self.pieces.add_hole(hole)
                at += hole
                continue
            stop = self._fixed_window_end(at + length, end, at + WINDOW_BYTES)
            yield from self._pause_for(stop - at)
            window = self._slab.take(stop - at)
            source.read_into(window, at)
            for start in range(0, stop - at, CHUNK_BYTES):
                self._hash(window[start : start + CHUNK_BYTES], at + start)
            at = stop

    def _fixed_window_end(self, at: int, end: int, limit: int) -> int:
        """How far a window reaches in which every piece has to be read."""
        while at < end and at < limit:
            length = min(CHUNK_BYTES, end - at)
            piece = next(self._source.unchanged(at, end), None)
            if piece is not None and piece.length == length:
                break
            if self._source.zero_until(at) >= at + length:
                break
            at += length
        return min(at, end)

    def _content(self, at: int, end: int) -> Iterator[None]:
        source = self._source
        while at < end:
            at += self._reuse(at, end, is_fixed=False)
            zeros = min(source.zero_until(at), end)
            if zeros - at >= HOLE_BYTES:
                self.pieces.add_hole(zeros - at)
                at = zeros
            elif at < end:
                want = min(end, at + self._content_window(at))
                stop = source.next_hole(at, want, HOLE_BYTES, end)
                yield from self._pause_for(stop - at)
                at += self._cut_window(at, stop, stop < want or stop == end, end)

    def _content_window(self, at: int) -> int:
        """How much to read at once: all of a large change, but little where only the way back to
        the base's cuts is looked for."""
        if self._source.recipe is None:
            return CONTENT_WINDOW_BYTES
        changed = self._source.changed.next_at(at)
        if changed is None or changed[0] > at + CONTENT_MAX_BYTES:
            return RESYNC_BYTES
        return max(RESYNC_BYTES, min(changed[1] + RESYNC_BYTES - at, CONTENT_WINDOW_BYTES))

    def _cut_window(self, at: int, stop: int, is_end: bool, end: int) -> int:
        """Cut [at, stop) as far as its cuts are final; returns how many bytes that is."""
        window = self._slab.take(stop - at)
        self._source.read_into(window, at)
        done = 0
        for length in cut_content(window):
            if not is_end and done + CONTENT_MAX_BYTES > stop - at:
                break
            self._hash(window[done : done + length], at + done)
            done += length
            if next(self._source.unchanged(at + done, end), None) is not None:
                break
        self._slab.give_back(stop - at - done)
        assert done, "a window of two maximal chunks holds a final cut"
        return done

    def _reuse(self, at: int, end: int, *, is_fixed: bool) -> int:
        """Take over the base's pieces from `at` on; returns how many bytes they are."""
        done = 0
        for piece in self._source.unchanged(at, end):
            if is_fixed and piece.length != min(CHUNK_BYTES, end - at - done):
                break
            assert piece.chunk is not None, "an unchanged piece is data"
            self.pieces.add(piece.length, piece.chunk)
            done += piece.length
        return done

    def _hash(self, payload: memoryview, offset: int) -> None:
        chunk = chunk_id(payload)
        self.pieces.add(len(payload), chunk)
        self._slab.fresh.append(Fresh(chunk, offset, len(payload), payload))

    def _pause_for(self, length: int) -> Iterator[None]:
        if not self._slab.fits(length):
            yield
            assert self._slab.fits(length), "the owner clears the slab in each pause"
