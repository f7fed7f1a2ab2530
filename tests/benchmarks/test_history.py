"""The benchmark of history goes with the program: each of its parts runs, on little."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import history


def test_each_part_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("FOLDERS", 2), ("FILES", 2), ("VERSIONS", 3), ("GIB", 1 << 20)):
        monkeypatch.setattr(history, name, few)
    taken = [
        *history.log_ms(1),
        *history.load_after_rollback_s(2),
        history.publish_ms(1),
        history.rollback_ms(2, 2, 2, 4096),
    ]
    assert all(one > 0 for one in taken)
