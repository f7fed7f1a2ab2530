"""The mount behaves as a plain directory does, whatever is done to it: random operations on both."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mounting import Mount
from walker import STEPS, Walker

WRITE_PATHS = ["plain", "auto"]
CI_S = 60.0 / len(WRITE_PATHS)
MountFactory = Callable[..., Mount]


def walk(mount: Mount, plain: Path, rng: random.Random, steps: int, seconds: float | None) -> int:
    plain.mkdir()
    plain.chmod(mount.path.stat().st_mode & 0o7777)
    walker = Walker(mount, plain, rng)
    done = walker.run(steps, None if seconds is None else time.monotonic() + seconds)
    walker.finish()
    print(f"{walker.mounted.kept} readers kept older bytes")
    print(f"{done} steps: {dict(walker.counts)}\nrefused: {dict(walker.outcomes)}")
    return done


def test_there_are_enough_kinds_of_operation() -> None:
    assert len(STEPS) >= 20


@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_same_answers_for_a_share_of_a_minute(
    mount_factory: MountFactory, tmp_path: Path, rng: random.Random, seed: int, write_path: str
) -> None:
    print(f"CKPTFS_SEED={seed}")
    mount = mount_factory(config={"settle_s": 0.2, "write_path": write_path})
    assert walk(mount, tmp_path / "plain", rng, 10**6, CI_S) > 100


@pytest.mark.heavy
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_same_answers_for_ten_thousand_steps(
    mount_factory: MountFactory, tmp_path: Path, rng: random.Random, seed: int, write_path: str
) -> None:
    print(f"CKPTFS_SEED={seed}")
    mount = mount_factory(config={"settle_s": 0.2, "write_path": write_path}, limit_s=3600.0)
    assert walk(mount, tmp_path / "plain", rng, 10_000, None) == 10_000
