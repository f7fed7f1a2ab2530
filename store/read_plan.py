"""What one read of a stored file takes: where its bytes lie, and which of them were never hashed.

One rule: a plan is true in the step of the event loop in which it was made, and not after it: the
next step may move a chunk or forget what was verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckptfs.store.codecs import Plain
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Recipe
from ckptfs.store.segment_files import place_of
from ckptfs.store.segment_format import Codec, Location
from ckptfs.store.verified import Verified


@dataclass(slots=True)
class Run:
    """`length` neighbouring bytes from `offset` of a segment (or, with `in_idx`, of its `.idx`), all
    of them verified; zeros if `segment` is -1."""

    segment: int
    in_idx: bool
    offset: int
    length: int

    @property
    def is_hole(self) -> bool:
        """Whether these are zeros that lie nowhere."""
        return self.segment < 0


@dataclass(frozen=True, slots=True)
class Unverified:
    """`length` bytes, `skip` bytes into a chunk that has to be hashed first."""

    chunk: ChunkId
    location: Location
    skip: int
    length: int

    @property
    def is_encoded(self) -> bool:
        """Whether it has to be decoded as well."""
        return self.location.codec != Codec.RAW

    @property
    def is_whole(self) -> bool:
        """Whether all of the chunk is wanted, and lies there as it is."""
        return self.length == self.location.length and not self.is_encoded


@dataclass(slots=True)
class Decoded:
    """`length` bytes from `start` of a buffer with the plain bytes of chunks."""

    buffer: memoryview
    start: int
    length: int

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.buffer[self.start : self.start + self.length]


Part = Run | Unverified | Decoded


@dataclass(slots=True)
class ReadPlan:
    """The parts of a read in file order, `length` bytes in all. `unverified` are the chunks that have to be
    hashed, or decoded, first."""

    length: int = 0
    parts: list[Part] = field(default_factory=list)
    unverified: list[ChunkId] = field(default_factory=list)


def plan_read(
    recipe: Recipe,
    offset: int,
    length: int,
    located: Callable[[ChunkId], Location],
    verified: Verified,
    decoded: Callable[[ChunkId], Plain | None],
) -> ReadPlan:
    """Plan up to `length` bytes from `offset`, fewer only where the file ends. `decoded` gives the plain
    bytes of an encoded chunk, if they are at hand.

    Corrupt if a chunk has no place, or not the length that the recipe says.
    """
    plan = ReadPlan()
    stop = min(offset + length, recipe.size)
    if offset >= stop:
        return plan
    plan.length = stop - offset
    index = recipe.index_at(offset)
    run: Run | None = None
    near: Decoded | None = None
    while offset < stop:
        chunk, start, end = recipe.row(index)
        upto = min(stop, end)
        take = upto - offset
        if chunk is None:
            run, near = Run(-1, False, 0, take), None
            plan.parts.append(run)
        else:
            location = located(chunk)
            if location.length != end - start:
                raise Corrupt("a recipe and its chunk differ in length", place=place_of(location))
            is_raw = location.codec == Codec.RAW
            if is_raw and location in verified:
                run, near = _extended(plan, run, location, offset - start, take), None
            elif not is_raw and (plain := decoded(chunk)) is not None:
                run, near = None, _lengthened(plan, near, plain, offset - start, take)
            else:
                run = near = None
                plan.parts.append(Unverified(chunk, location, offset - start, take))
                plan.unverified.append(chunk)
        offset = upto
        index += 1
    return plan


def _extended(plan: ReadPlan, run: Run | None, location: Location, skip: int, length: int) -> Run:
    at = location.offset + skip
    if (
        run is not None
        and run.segment == location.segment
        and run.offset + run.length == at
        and run.in_idx == location.in_idx
    ):
        run.length += length
        return run
    run = Run(location.segment, location.in_idx, at, length)
    plan.parts.append(run)
    return run


def _lengthened(plan: ReadPlan, near: Decoded | None, plain: Plain, skip: int, length: int) -> Decoded:
    """Chunks that were decoded in one go are answered in one piece, which need not be copied."""
    at = plain.start + skip
    if near is not None and near.buffer is plain.buffer and near.start + near.length == at:
        near.length += length
        return near
    near = Decoded(plain.buffer, at, length)
    plan.parts.append(near)
    return near
