"""store/spans.py: a file cut in spans has the chunks that one pass over it has, wherever the spans begin."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_store import random_bytes, safetensors

from ckptfs.store.formats import parse
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId
from ckptfs.store.regions import (
    CHUNK_BYTES,
    CONTENT_MAX_BYTES,
    Mode,
    Region,
    cut_content,
    cut_fixed,
    plan_regions,
)
from ckptfs.store.spans import MOST_SPANS, SPAN_BYTES, Cuts, Joiner, Span, bunches_of, cut_span, spans_of

Chunk = tuple[int, ChunkId]


def in_one_pass(content: bytes, regions: list[Region]) -> list[Chunk]:
    found, at = [], 0
    for one in regions:
        part = content[one.offset : one.offset + one.length]
        for length in cut_fixed(one.length) if one.mode is Mode.FIXED else cut_content(part):
            found.append((length, chunk_id(content[at : at + length])))
            at += length
    return found


def in_spans(content: bytes, regions: list[Region], span_bytes: int) -> tuple[list[Chunk], int]:
    """The chunks, and how many gaps had to be cut anew."""
    view = memoryview(content)

    joiner, found, gaps = Joiner(), [], 0
    for span in spans_of(regions, span_bytes):
        cuts = cut_span(view[span.offset : span.limit], span)
        while True:
            part, gap = joiner.add(span, cuts)
            if gap is not None:
                gaps += 1
                part = joiner.bridge(cut_span(view[gap.offset : gap.limit], gap), span, cuts)
            assert not part.lengths or part.offset == sum(length for length, _ in found)
            found += [
                (length, ChunkId(part.ids[32 * at : 32 * at + 32])) for at, length in enumerate(part.lengths)
            ]
            if gap is None:
                break
    return found, gaps


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 3_000_000, 9_000_001])
@pytest.mark.parametrize("spans", [1, 2, 4])
def test_content_is_cut_as_in_one_pass(size: int, spans: int) -> None:
    content = random_bytes(size, seed=size)
    regions = plan_regions(size, None)
    found, gaps = in_spans(content, regions, spans * CHUNK_BYTES)
    assert found == in_one_pass(content, regions)
    assert gaps > 0 or size <= spans * CHUNK_BYTES + CONTENT_MAX_BYTES


def test_bytes_without_any_cut_of_their_own_are_cut_as_in_one_pass() -> None:
    """Zeros have no cut before the longest chunk, so cuts that were begun elsewhere never meet."""
    content = b"x" * 100_000 + bytes(5_000_000) + random_bytes(2_000_000)
    regions = plan_regions(len(content), None)
    assert in_spans(content, regions, 2 * CHUNK_BYTES)[0] == in_one_pass(content, regions)


@given(
    st.lists(st.integers(0, 700_000), min_size=1, max_size=4),
    st.integers(0, 400_000),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 99),
)
def test_files_with_tensors_are_cut_as_in_one_pass(
    tensors: list[int], tail: int, spans: int, seed: int
) -> None:
    chance = random.Random(seed)
    named = {f"t{n}": chance.randbytes(length // 4 * 4) for n, length in enumerate(tensors)}
    content = safetensors(named) + chance.randbytes(tail)

    class Reader:
        size = len(content)

        def pread(self, offset: int, length: int) -> bytes:
            return content[offset : offset + length]

    regions = plan_regions(len(content), parse(Reader(), "model.safetensors", None))
    assert in_spans(content, regions, spans * CHUNK_BYTES)[0] == in_one_pass(content, regions)


def test_short_spans_are_cut_together() -> None:
    """A checkpoint has a few bytes before each tensor, and tensors of some MiB."""
    regions, at = [], 0
    for length in [64, 4 << 20] * 60:
        regions.append(Region(at, length, Mode.FIXED))
        at += length
    spans = spans_of(regions)
    bunches = bunches_of(spans)
    assert [span for bunch in bunches for span in bunch] == spans
    assert all(bunch[-1].end - bunch[0].offset <= SPAN_BYTES for bunch in bunches)
    assert len(bunches) == 20

    long = spans_of([Region(0, 3 * SPAN_BYTES + 1, Mode.CONTENT)])
    assert bunches_of(long) == [[span] for span in long]
    tiny = [Span(at, at + 1, at + 1, Mode.FIXED) for at in range(3 * MOST_SPANS)]
    assert [len(bunch) for bunch in bunches_of(tiny)] == [MOST_SPANS] * 3
    assert bunches_of([]) == []


def test_cuts_are_joined() -> None:
    content = random_bytes(2_000_000)
    whole = Span(0, len(content), len(content), Mode.FIXED)
    cuts = cut_span(memoryview(content), whole)
    parts = [cuts.part(range(0)), cuts.part(range(3)), cuts.part(range(3, 3)), cuts.part(range(3, 8))]
    joined = Cuts.joined(parts)
    assert (joined.offset, joined.lengths, joined.ids) == (cuts.offset, cuts.lengths, cuts.ids)
    assert Cuts.joined(parts[:1]).starts() == [0]
