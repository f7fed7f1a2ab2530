"""Lookup counts: as a dictionary of counts would have them, in less memory."""

from __future__ import annotations

import os
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.lookups import Lookups
from ckptfs.fusefs.requests import Requests

INOS = st.integers(1, 2000)


@given(st.lists(st.tuples(INOS, st.booleans(), st.integers(1, 3))))
def test_counts_are_those_of_a_dictionary(steps: list[tuple[int, bool, int]]) -> None:
    state = KeptState.make()
    lookups, counts = Lookups(state, Requests(state)), dict[int, int]()
    for ino, is_new, times in steps:
        if is_new:
            lookups.remember(ino)
            counts[ino] = counts.get(ino, 0) + 1
        else:
            left = max(0, counts.get(ino, 0) - times)
            assert lookups.forget(ino, times) == (left == 0 and ino != 1)
            counts[ino] = left
        assert lookups.is_known(ino) == (counts[ino] > 0)
    next_daemon = KeptState(state.fd)
    assert {ino: next_daemon.count(Kind.HELD, ino) for ino in counts} == counts
    state.close()


def kept_bytes(state: KeptState) -> int:
    return os.fstat(state.fd).st_blocks * 512


def test_memory_is_small_and_goes_with_the_counts() -> None:
    state = KeptState.make()
    lookups = Lookups(state, Requests(state))
    tracemalloc.start()
    try:
        for ino in range(2, 100_002):
            lookups.remember(ino)
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
        assert kept_bytes(state) < 1 << 20
        for ino in range(2, 100_002):
            lookups.forget(ino, 1)
        assert (
            kept_bytes(state) <= 2 * 4096
        )  # the pages that say where the notes end and how many counts there are
        assert tracemalloc.get_traced_memory()[0] < 64 << 10
    finally:
        tracemalloc.stop()
        state.close()
