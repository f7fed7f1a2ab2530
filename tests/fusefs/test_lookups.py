"""Lookup counts: as a dictionary of counts would have them, in less memory."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.fusefs.lookups import Lookups

INOS = st.integers(1, 2000)


@given(st.lists(st.tuples(INOS, st.booleans(), st.integers(1, 3))))
def test_counts_are_those_of_a_dictionary(steps: list[tuple[int, bool, int]]) -> None:
    lookups, counts = Lookups(), dict[int, int]()
    for ino, is_new, times in steps:
        if is_new:
            lookups.remember(ino)
            counts[ino] = counts.get(ino, 0) + 1
        else:
            left = max(0, counts.get(ino, 0) - times)
            assert lookups.forget(ino, times) == (left == 0 and ino != 1)
            counts[ino] = left
        assert lookups.is_known(ino) == (counts[ino] > 0)


def test_memory_is_small_and_goes_with_the_counts() -> None:
    lookups = Lookups()
    tracemalloc.start()
    try:
        for ino in range(2, 100_002):
            lookups.remember(ino)
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
        for ino in range(2, 100_002):
            lookups.forget(ino, 1)
        assert tracemalloc.get_traced_memory()[0] < 64 << 10
    finally:
        tracemalloc.stop()
