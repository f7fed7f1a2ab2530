"""The share of gcsoak.py that every run of the tests takes: twenty seconds, half on each write path."""

from __future__ import annotations

from pathlib import Path

import pytest
from mounting import memory_folder
from soaking import WRITE_PATHS, soak

SECONDS = 10.0


@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_what_is_needed_stays_and_what_is_not_goes_while_all_work(write_path: str, seed: int) -> None:
    with memory_folder() as memory:
        result = soak(SECONDS, seed, Path(memory), write_path)
    assert result.findings == [], "\n".join(result.findings)
    assert result.cycles and result.forgotten and result.freed_bytes
    done = ("saves", "resaved", "changed", "read", "mapped", "live", "held", "tensors")
    assert all(result.clients[what] for what in done)
    assert bool(result.kernel_reads) == (write_path == "auto")
