"""What is read is what was written: the exerciser's share of every run, and its long run (heavy)."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from exerciser import Exerciser
from mounting import Mount

WRITE_PATHS = ["plain", "auto"]
MountFactory = Callable[..., Mount]


def exercise(
    mount: Mount,
    rng: random.Random,
    *,
    handles: int,
    operations: int,
    seconds: float,
    tensors: bool = False,
) -> int:
    directory = mount.path / f"by{handles}"
    directory.mkdir()
    path = directory / ("exercised.safetensors" if tensors else "exercised.bin")
    exerciser = Exerciser(path, rng, handles, publish=True, tensors=tensors)
    done = exerciser.run(operations, time.monotonic() + seconds)
    print(f"{done} operations, {exerciser.counts}")
    exerciser.finish()
    mount.wait_until_ingested()
    exerciser.finish()
    assert mount.facts("status", str(mount.path))["write_path"] != "plain" or not exerciser.counts["kept"]
    return done


@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_one_handle_then_many(mount_factory: MountFactory, rng: random.Random, write_path: str) -> None:
    mount = mount_factory(config={"settle_s": 0.1, "write_path": write_path}, on_tmpfs=True)
    one = exercise(mount, rng, handles=1, operations=10**6, seconds=4)
    many = exercise(mount, rng, handles=8, operations=10**6, seconds=6)
    assert one > 200 and many > 200, f"only {one} and {many} operations"


@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_tensors_that_are_changed_in_place(
    mount_factory: MountFactory, rng: random.Random, write_path: str
) -> None:
    mount = mount_factory(config={"settle_s": 0.1, "write_path": write_path}, on_tmpfs=True)
    done = exercise(mount, rng, handles=8, operations=10**6, seconds=6, tensors=True)
    assert done > 100, f"only {done} operations"


@pytest.mark.heavy
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("write_path", WRITE_PATHS)
def test_a_million_operations(mount_factory: MountFactory, rng: random.Random, write_path: str) -> None:
    config = {"settle_s": 0.1, "write_path": write_path}
    mount = mount_factory(config=config, on_tmpfs=True, limit_s=7000)
    assert exercise(mount, rng, handles=1, operations=300_000, seconds=6000) == 300_000
    assert exercise(mount, rng, handles=8, operations=700_000, seconds=6000) == 700_000
