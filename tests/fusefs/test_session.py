"""fusefs/session.py: which mount is ours, whatever else is mounted, and whatever that is called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ckptfs.fusefs.session import device_of


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs, which needs root")
@pytest.mark.parametrize("name", ["plain", "two words", "tab\there", "back\\slash", "ümlaut", "\udcff\udcc3"])
def test_a_mount_of_any_name_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir()
    below = device_of(str(path))
    subprocess.run(["mount", "-t", "tmpfs", "ckptfs-test", os.fsencode(path)], check=True, timeout=20)
    try:
        device = path.stat().st_dev
        assert below is None
        assert device_of(str(path)) == f"{os.major(device)}:{os.minor(device)}"
    finally:
        subprocess.run(["umount", "-l", os.fsencode(path)], check=True, timeout=20)
    assert device_of(str(path)) is None
