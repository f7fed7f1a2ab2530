"""The share of lmdbcuts.py that every run of the tests takes."""

from __future__ import annotations

from lmdbcuts import cut_lmdb

CHANGES = 14


def test_lmdb_opens_as_a_committed_state_wherever_power_ends(seed: int) -> None:
    cuts = cut_lmdb(str(seed), CHANGES)
    assert cuts.findings == [], "\n".join(cuts.findings)
    assert sum(cuts.points.values()) > 100
