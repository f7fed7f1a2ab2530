"""A save that is many times what the daemon's memory may be: written, stored and read, and nobody is killed.

The store lies on a disk, the daemon and all that it starts in a control group, as with MemoryMax= of systemd.
The whole run, 10 GiB with 512 MiB, is `./dev test --all tests/daemon/test_memory_limit.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import kernelmounts
import numpy as np
import pytest
from kernelmounts import poll
from mounting import Mount

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
BLOCK_BYTES = 16 << 20
FILE_BLOCKS = 16


class Limit:
    """A control group with a limit, of either version."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        self.path = root / f"ckptfs-test-{os.getpid()}"
        self._is_old = root == V1
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if self._is_old else "memory.max")).write_text(str(most_bytes))

    def add(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            (self.path / "cgroup.procs").write_text(str(pid))

    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self._is_old else "memory.peak"
        return int((self.path / name).read_text())

    def kills(self) -> int:
        name = "memory.oom_control" if self._is_old else "memory.events"
        counts = dict(line.split() for line in (self.path / name).read_text().splitlines())
        return int(counts["oom_kill"])

    def remove(self) -> None:
        assert poll(lambda: not (self.path / "cgroup.procs").read_text(), 30), "somebody is left in it"
        self.path.rmdir()


def usable_root() -> Path | None:
    """Where memory can be limited here."""
    if os.geteuid() != 0:
        return None
    if (V1 / "memory.limit_in_bytes").exists():
        return V1
    has_memory = (V2 / "cgroup.subtree_control").exists() and (
        "memory" in (V2 / "cgroup.subtree_control").read_text().split()
    )
    return V2 if has_memory else None


@pytest.fixture
def limit(request: pytest.FixtureRequest) -> Iterator[Limit]:
    root = usable_root()
    if root is None:
        pytest.skip("needs root and a control group in which memory can be limited")
    one = Limit(root, int(request.param))
    try:
        yield one
    finally:
        one.remove()


def block(number: int) -> bytes:
    """Unlike all others, and known without keeping it."""
    return np.random.default_rng(number).bytes(BLOCK_BYTES)


@pytest.mark.parametrize("write_path", ["plain", "auto"])
@pytest.mark.parametrize(
    ("limit", "total_bytes"),
    [
        pytest.param(256 << 20, 1 << 30, id="1 GiB in 256 MiB"),
        pytest.param(512 << 20, 10 << 30, id="10 GiB in 512 MiB", marks=pytest.mark.heavy),
    ],
    indirect=["limit"],
)
@pytest.mark.timeout(1800)
def test_nobody_is_killed(
    limit: Limit,
    total_bytes: int,
    write_path: str,
    mount_factory: Callable[..., Mount],
    figure: Callable[[str, object], None],
) -> None:
    mount = mount_factory(config={"settle_s": 0.5, "write_path": write_path}, limit_s=1800)
    before = mount.pid
    for pid in kernelmounts.family(before):
        limit.add(pid)
    run = mount.path / "run"
    run.mkdir()
    count = total_bytes // BLOCK_BYTES
    for first in range(0, count, FILE_BLOCKS):
        with (run / f"shard-{first:05}.bin").open("wb", buffering=0) as file:
            for number in range(first, min(first + FILE_BLOCKS, count)):
                file.write(block(number))
            os.fsync(file.fileno())
    mount.ask("publish", str(run), timeout_s=900)
    for first in range(0, count, FILE_BLOCKS):
        with (run / f"shard-{first:05}.bin").open("rb", buffering=0) as file:
            for number in range(first, min(first + FILE_BLOCKS, count)):
                assert file.read(BLOCK_BYTES) == block(number)
    verified = mount.facts("verify", str(run), timeout_s=900)
    assert verified["corrupt"] == [] and int(str(verified["checked_bytes"])) >= total_bytes
    figure("most memory, with the page cache", f"{limit.peak_bytes() >> 20} MiB")
    figure("anonymous memory at the end", f"{mount.rss_anon_bytes() >> 20} MiB")
    assert limit.kills() == 0 and mount.is_alive() and mount.pid == before
    mount.stop()
