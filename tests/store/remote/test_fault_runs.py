"""Three nodes and one remote, with faults and deaths: some runs of tests/remoteruns.py, which does 1,000."""

from __future__ import annotations

from pathlib import Path

import trio
from mounting import memory_folder
from remoteruns import Outcome, run_once

RUNS = 12


def test_nothing_is_lost_and_no_head_goes_back(seed: int) -> None:
    total = Outcome()
    for number in range(RUNS):
        with memory_folder() as folder:
            outcome = trio.run(run_once, seed + number, Path(folder))
        total.counts += outcome.counts
        total.faults |= outcome.faults
    assert total.counts["push"] and total.counts["pull"] and total.counts["killed"], total
    assert total.faults == {"refused", "lost", "in_flight", "stale", "torn"}, total
