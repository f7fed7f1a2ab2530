"""A daemon that dies between two steps of one call, where chance would rarely meet it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from kernelmounts import poll
from mounting import Mount

SIZE = 256 << 10
CUT = 8192


@pytest.mark.parametrize("write_path", ["auto", "plain"])
def test_what_a_dying_truncate_cut_off_stays_cut_off(
    mount_factory: Callable[..., Mount], write_path: str
) -> None:
    """The staging file of a stored file that is being changed was cut, the record of it not written."""
    mount = mount_factory(config={"settle_s": 0.2, "write_path": write_path}, on_tmpfs=True)
    run, staging = mount.path / "run", mount.store / "staging"
    run.mkdir()
    path = run / "model.bin"
    path.write_bytes(b"A" * SIZE)
    assert poll(lambda: not os.listdir(staging), 20), "never stored"
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"B", 0)
    mount.kill9()
    os.close(fd)
    [staged] = staging.iterdir()
    os.truncate(staged, CUT)
    mount.restart()
    assert path.stat().st_size == CUT
    os.truncate(path, SIZE)
    assert path.read_bytes() == b"B" + b"A" * (CUT - 1) + bytes(SIZE - CUT)
