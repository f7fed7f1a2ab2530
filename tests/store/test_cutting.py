"""store/cutting.py and store/source.py: whatever is allocated, stored below or missing, the pieces
put together are the bytes, and their lengths are the size."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.store.cutting import CONTENT_WINDOW_BYTES, Cutter, Slab
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Recipe
from ckptfs.store.regions import Mode, Region
from ckptfs.store.source import BLOCK_BYTES, Ranges, Source, block_ranges

KIB = 1024


@dataclass
class Memory:
    """A store of chunks in a dict, and the Base protocol over one recipe."""

    chunks: dict[ChunkId, bytes] = field(default_factory=dict)
    recipe: Recipe | None = None

    def bytes_of(self, recipe: Recipe) -> bytes:
        return b"".join(
            bytes(piece.length) if piece.chunk is None else self.chunks[piece.chunk]
            for piece in recipe.pieces()
        )

    def pread(self, offset: int, length: int) -> bytes:
        assert self.recipe is not None
        return self.bytes_of(self.recipe)[offset : offset + length]

    def cut(self, source: Source, regions: list[Region], slab: Slab) -> Recipe:
        cutter = Cutter(source, regions, slab)
        for _ in cutter.run():
            self._take(slab)
        self._take(slab)
        return cutter.pieces.recipe()

    def _take(self, slab: Slab) -> None:
        for one in slab.fresh:
            assert len(one.payload) == one.length
            self.chunks[one.chunk] = bytes(one.payload)
        slab.clear()


def regions_of(data: st.DataObject, size: int) -> list[Region]:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=4)) | {0, size})
    spans = [(a, b) for a, b in pairwise(cuts) if a < b <= size]
    return [Region(a, b - a, data.draw(st.sampled_from(Mode))) for a, b in spans]


def extents_of(data: st.DataObject, size: int) -> list[tuple[int, int]]:
    """Allocated ranges of whole blocks."""
    blocks = -(-size // BLOCK_BYTES)
    spans = data.draw(st.lists(st.tuples(st.integers(0, blocks), st.integers(1, 60)), max_size=5))
    return [(a * BLOCK_BYTES, n * BLOCK_BYTES) for a, n in spans if a < blocks]


def laid_over(base: bytes, limit: int, own: Ranges, size: int, seed: int) -> bytes:
    """What an overlay of random bytes in `own` reads as."""
    model = bytearray(base[:limit] + bytes(max(0, size - limit)))[:size]
    fill = random.Random(seed)
    at = 0
    while (found := own.next_at(at)) is not None:
        start, at = found
        model[start:at] = fill.randbytes(at - start)
    return bytes(model)


def keeping_slab() -> Slab:
    return Slab(CONTENT_WINDOW_BYTES, keep=True)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_overlay_is_cut_into_its_bytes(data: st.DataObject) -> None:
    draw = data.draw
    memory = Memory()
    base_size = draw(st.integers(0, 1500 * KIB))
    base_own = block_ranges(extents_of(data, base_size), base_size)
    base = laid_over(b"", 0, base_own, base_size, 1)

    def read_base(view: memoryview, offset: int) -> int:
        view[:] = base[offset : offset + len(view)]
        return len(view)

    memory.recipe = memory.cut(
        Source(read_base, base_size, base_own), regions_of(data, base_size), keeping_slab()
    )
    assert memory.bytes_of(memory.recipe) == base

    size = draw(st.integers(0, 1800 * KIB))
    limit = draw(st.integers(0, min(size, base_size)))
    own = block_ranges(extents_of(data, size), size)
    model = laid_over(base, limit, own, size, 2)

    def read_own(view: memoryview, offset: int) -> int:
        found = own.next_at(offset)
        assert found is not None and found[0] <= offset and offset + len(view) <= found[1]
        view[:] = model[offset : offset + len(view)]
        return len(view)

    source = Source(
        read_own,
        size,
        own,
        recipe=memory.recipe,
        base=memory,
        base_limit=limit,
        changed=own.joined([(limit, size)]),
    )
    recipe = memory.cut(source, regions_of(data, size), keeping_slab())
    assert recipe.size == size
    assert memory.bytes_of(recipe) == model
    at, length = draw(st.integers(0, size)), draw(st.integers(0, 100 * KIB))
    assert source.pread(at, length) == model[at : at + length]


def test_slabs_of_both_kinds_cut_alike() -> None:
    payload = random.Random(3).randbytes(9_000_000)
    regions = [Region(0, 5_000_000, Mode.CONTENT), Region(5_000_000, 4_000_000, Mode.FIXED)]

    def read(view: memoryview, offset: int) -> int:
        view[:] = payload[offset : offset + len(view)]
        return len(view)

    kept, passed = Memory(), Memory()
    source = Source(read, len(payload), Ranges([(0, len(payload))]))
    one = kept.cut(source, regions, keeping_slab())
    stepwise = Slab(CONTENT_WINDOW_BYTES, keep=False, step_bytes=1)
    assert passed.cut(source, regions, stepwise).identity() == one.identity()
    assert kept.bytes_of(one) == payload


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))), st.integers(0, 70))
def test_ranges_are_the_set_of_their_offsets(spans: list[tuple[int, int]], at: int) -> None:
    ranges = Ranges(spans)
    inside = {offset for start, end in spans for offset in range(start, end)}
    found = ranges.next_at(at)
    later = sorted(offset for offset in inside if offset >= at)
    assert (found is None) == (not later)
    if found is not None:
        assert max(found[0], at) == later[0]
        assert found[1] - 1 in inside and found[1] not in inside
    assert ranges.cover(at) == (set(range(at)) <= inside)
