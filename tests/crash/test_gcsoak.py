"""The share of gcsoak.py that every run of the tests takes: twenty seconds, half on each write path."""

from __future__ import annotations

from pathlib import Path

import pytest
from mounting import memory_folder
from soaking import WRITE_PATHS, SoakResult, soak

SECONDS = 10.0
LONGER = (1, 3, 9)
"""Times SECONDS: a machine that is busy gets less done."""
DONE = ("saves", "resaved", "changed", "read", "mapped", "live", "held", "tensors")


@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_what_is_needed_stays_and_what_is_not_goes_while_all_work(write_path: str, seed: int) -> None:
    for times in LONGER:
        with memory_folder() as memory:
            result = soak(times * SECONDS, seed, Path(memory), write_path)
        assert result.findings == [], "\n".join(result.findings)
        if has_done_all(result):
            return
    pytest.fail(f"not everything was done: {result}")


def has_done_all(result: SoakResult) -> bool:
    collected = result.cycles and result.forgotten and result.freed_bytes
    by_kernel = bool(result.kernel_reads) == (result.write_path == "auto")
    return bool(collected) and by_kernel and all(result.clients[what] for what in DONE)
