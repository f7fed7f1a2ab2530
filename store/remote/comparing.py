"""Whether two files of a remote have the same bytes, though their recipes are not the same.

One rule: bytes are fetched only where the recipes do not tell; the first difference ends it.
"""

from __future__ import annotations

from collections.abc import Iterator

import trio

from ckptfs.store.recipe import Recipe
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.shard import keys_of
from ckptfs.store.segments import Segments

_WINDOW_BYTES = 1 << 20
Span = tuple[int, int]


def doubtful_spans(one: Recipe, other: Recipe) -> list[Span] | None:
    """Where two recipes of the same size must be compared by their bytes, as [start, end); None: they are of
    different bytes. Pure."""
    assert one.size == other.size
    spans: list[Span] = []
    mine = theirs = 0
    while mine < len(one):
        first = mine, theirs
        start = one.start(mine)
        mine, theirs = mine + 1, theirs + 1
        while one.start(mine) != other.start(theirs):
            if one.start(mine) < other.start(theirs):
                mine += 1
            else:
                theirs += 1
        if (mine, theirs) == (first[0] + 1, first[1] + 1):
            ours, others = one.piece(first[0]).chunk, other.piece(first[1]).chunk
            if ours == others:
                continue
            if ours is not None and others is not None:
                return None
        spans.append((start, one.start(mine)))
    return spans


async def is_same_content(fetcher: Fetcher, segments: Segments, one: Recipe, other: Recipe) -> bool:
    """Whether two files have the same bytes; fetches what it compares. Errors as the fetcher's."""
    if one.size != other.size:
        return False
    spans = doubtful_spans(one, other)
    for start, end in _windows(spans or ()):
        for recipe in (one, other):
            pieces = range(recipe.index_at(start), recipe.index_at(end - 1) + 1)
            chunks = {chunk for at in pieces if (chunk := recipe.piece(at).chunk) is not None}
            await fetcher.fetch(keys_of(sorted(chunks)))
        if segments.read_file(one, start, end - start) != segments.read_file(other, start, end - start):
            return False
        await trio.lowlevel.checkpoint()
    return spans is not None


def _windows(spans: list[Span] | tuple[()]) -> Iterator[Span]:
    for start, end in spans:
        for at in range(start, end, _WINDOW_BYTES):
            yield at, min(at + _WINDOW_BYTES, end)
