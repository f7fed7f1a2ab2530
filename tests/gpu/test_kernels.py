"""The shipped kernels, run thread by thread on the CPU, against the packages that define the answers.

Each byte that they touch is one they may touch, no two threads race, and the undefined-behaviour
sanitizer ends a run that does what C++ does not define.
"""

from __future__ import annotations

import ctypes
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blake3_by_hand import LEAF_BYTES, subtree
from emulated import SOURCES, EmulatedHasher, EmulatorFault, Order

from ckptfs.gpu import launch
from ckptfs.gpu.extents import Extent
from ckptfs.store.hashing import chunk_id, crc64

RUNNER = Path(__file__).parent / "kernel_cases.py"


def run_cases(library: Path, seed: int, which: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), str(library), str(seed), which]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)


def test_equal_to_the_packages(kernels: Path, seed: int) -> None:
    done = run_cases(kernels, seed, "all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 1000


def test_more_segments_than_threads_that_join_them(kernels: Path, seed: int) -> None:
    done = run_cases(kernels, seed, "long")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("order", Order)
def test_extents_that_share_memory(kernels: Path, order: Order) -> None:
    payload = bytes(range(256)) * 1200
    held = ctypes.create_string_buffer(payload, len(payload))
    start = ctypes.addressof(held)
    ranges = [(0, len(payload)), (0, len(payload)), (1, 1025), (1026, 0), (1026, 70_000), (300, 200_000)]
    parts = [payload[at : at + length] for at, length in ranges]
    extents = [Extent(start + at, length, chunk_id(payload[at : at + length])) for at, length in ranges]
    hasher = EmulatedHasher(kernels)
    hasher.order = order
    assert hasher.mismatches(extents) == []
    assert hasher.crc64(extents) == [crc64(part) for part in parts]
    ctypes.memset(start + 1030, 0, 1)
    assert hasher.mismatches(extents) == [0, 1, 4, 5]


def test_segments_far_within_an_extent(kernels: Path, seed: int) -> None:
    done = run_cases(kernels, seed, "far")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("length", [0, 1, 64, 1000, 1024, 2000, 4096, 8192])
def test_the_values_made_by_hand(rng: random.Random, length: int) -> None:
    payload = rng.randbytes(length)
    leaves = [payload[at : at + LEAF_BYTES] for at in range(0, max(length, 1), LEAF_BYTES)]
    assert subtree(leaves, 0, is_root=True) == chunk_id(payload)


def test_the_emulator_sees_a_byte_too_many(kernels: Path) -> None:
    """Or else the other tests would not say that the kernels stay within their extents."""
    held = ctypes.create_string_buffer(4096)
    start = ctypes.addressof(held)
    hasher = EmulatedHasher(kernels)
    with pytest.raises(EmulatorFault, match="out of bounds"):
        hasher.mismatches([_Beyond(start, 100, chunk_id(b""))])


class _Beyond(Extent):
    """Longer for the kernels than for the list of what they may touch."""

    __slots__ = ("_asked",)

    def __getattribute__(self, name: str) -> object:
        if name != "length":
            return super().__getattribute__(name)
        try:
            asked = super().__getattribute__("_asked")
        except AttributeError:
            asked = 0
        object.__setattr__(self, "_asked", asked + 1)
        return 101 if asked == 0 else 100


def test_the_constants_of_both_sides_are_the_same() -> None:
    text = (SOURCES / "load.cuh").read_text()
    leaf, leaves, join = (
        int(re.search(rf"constexpr uint32_t {name} = (\d+);", text)[1])  # type: ignore[index]
        for name in ("LEAF_BYTES", "SEGMENT_LEAVES", "JOIN_THREADS")
    )
    assert (leaf * leaves, leaves, join) == (
        launch.SEGMENT_BYTES,
        launch.SEGMENT_THREADS,
        launch.JOIN_THREADS,
    )
