"""The share of handover.py that every run of the tests takes: 20 kills in all, over both write paths."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path

import pytest
from handover import WRITE_PATHS, daemons, run_store
from handover_mutants import MUTANTS, kills_until_found
from mounting import may_pass_through, memory_folder

from ckptfs.fusefs.kept_notes import Kind

KILLS = 10
QUICK_MUTANTS = ("reopen", "orphans")  # found at the first kill


needs_kept_mounts = pytest.mark.skipif(
    not may_pass_through(), reason="a mount outlives its daemon as root, on Linux 6.9 and newer"
)


@needs_kept_mounts
@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_clients_do_not_notice_that_the_daemon_is_killed(write_path: str, seed: int) -> None:
    with memory_folder() as memory:
        result = run_store(Path(memory) / "store", write_path, KILLS, random.Random(seed))
    assert result.findings == [], "\n".join(result.findings)
    assert result.kills >= KILLS and result.calls > 1000


@needs_kept_mounts
def test_a_damaged_state_costs_what_is_open_and_nothing_else() -> None:
    """The daemon starts afresh; who had something open gets an error, and waits for nobody."""
    with memory_folder() as memory, daemons(Path(memory) / "store", "auto") as mount:
        fd = os.open(mount.path / "file", os.O_CREAT | os.O_RDWR)
        try:
            os.write(fd, b"content")
            with mount.state() as state:
                assert state is not None
                state.notes.put(Kind.NODE, 5, b"damaged")
            mount.kill()
            mount.wait_until_ready()
            with pytest.raises(OSError) as caught:
                os.fsync(fd)
            assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)
        assert (mount.path / "file").read_bytes() == b"content"
        assert "NODE of 5 is damaged" in mount.log()
        assert mount.stop() == 0


@needs_kept_mounts
def test_clients_would_notice(seed: int) -> None:
    """One part of the hand-over, switched off. handover_mutants.py does that with each."""
    name = random.Random(seed).choice(sorted(QUICK_MUTANTS))
    kills, finding = kills_until_found(name, seed)
    assert finding, f"nobody noticed in {kills} kills that {MUTANTS[name].text}"
