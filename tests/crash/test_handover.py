"""The share of handover.py that every run of the tests takes: 20 kills in all, over both write paths."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from handover import WRITE_PATHS, run_store
from mounting import may_pass_through, memory_folder

KILLS = 10


@pytest.mark.skipif(
    not may_pass_through(), reason="a mount outlives its daemon as root, on Linux 6.9 and newer"
)
@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_clients_do_not_notice_that_the_daemon_is_killed(write_path: str, seed: int) -> None:
    with memory_folder() as memory:
        result = run_store(Path(memory) / "store", write_path, KILLS, random.Random(seed))
    assert result.findings == [], "\n".join(result.findings)
    assert result.kills >= KILLS and result.calls > 1000
