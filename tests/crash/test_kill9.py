"""The share of kill9.py that every run of the tests takes: a few kills on each write path."""

from __future__ import annotations

from pathlib import Path

import pytest
from mounting import memory_folder
from rounds import WRITE_PATHS, campaign

ROUNDS = 4


@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_nothing_is_lost_when_the_daemon_is_killed_at_random_moments(
    write_path: str, seed: int, request: pytest.FixtureRequest
) -> None:
    with memory_folder() as memory:
        results = campaign(ROUNDS, seed, Path(memory), ROUNDS, write_paths=(write_path,), longest_s=1.2)
        findings = [f"kill {one.number} ({one.moment}): {line}" for one in results for line in one.findings]
        assert findings == [], "\n".join(findings)
        assert sum(one.calls for one in results) > 0
