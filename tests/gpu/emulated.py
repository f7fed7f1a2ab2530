"""The kernels' own text, compiled for the CPU: a Hasher that runs them thread by thread.

One rule: what is compiled here is the shipped source, or a mutant of it that a test has made.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import ckptfs.gpu
from ckptfs.gpu.crc64 import from_remainder
from ckptfs.gpu.extents import Extent
from ckptfs.gpu.launch import JOIN_THREADS, SEGMENT_THREADS, Launch, plan

SOURCES = Path(ckptfs.gpu.__file__).parent / "native"
_NATIVE = Path(__file__).parent / "native"
_FLAGS = ["-std=c++17", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-clobbered"]
_UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
# A call before each load and store, to the emulator's hooks; no runtime of the compiler's own.
_HOOKS = [
    "-fsanitize=kernel-address",
    *("--param=asan-instrumentation-with-call-threshold=0", "--param=asan-stack=0", "--param=asan-globals=0"),
]


Memory = NDArray[np.uint8]


class Order(IntEnum):
    """In which order the threads of a block run between two barriers."""

    FORWARD = 0
    REVERSE = 1
    RANDOM = 2


class EmulatorFault(Exception):
    """A kernel did what no kernel may: touched foreign memory, raced, or left others at a barrier."""


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_size_t), ("bytes", ctypes.c_size_t), ("writable", ctypes.c_bool))


def build_emulator(folder: Path) -> Path:
    """Compiles what runs the kernels; one object serves any number of them."""
    _compile([*_FLAGS, "-c", str(_NATIVE / "emulator.cc"), "-o", str(folder / "emulator.o")])
    return folder / "emulator.o"


def build_kernels(folder: Path, emulator: Path, sources: Path = SOURCES) -> Path:
    """Compiles the kernels in `sources` and links them with `emulator`; returns the shared library."""
    kernels, library = folder / "kernels.o", folder / "kernels_on_cpu.so"
    shim = ["-include", str(_NATIVE / "cuda_on_cpu.h"), f'-DKERNELS="{sources / "kernels.cu"}"']
    text = ["-c", str(_NATIVE / "kernels_on_cpu.cc"), "-o", str(kernels)]
    _compile([*_FLAGS, "-fno-strict-aliasing", *_UNDEFINED, *_HOOKS, *shim, *text])
    _compile([*_UNDEFINED, "-shared", str(kernels), str(emulator), "-o", str(library)])
    return library


def _compile(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"g++ {' '.join(arguments)}\n{done.stderr}")


class EmulatedHasher:
    """A Hasher of this process's memory. One thread at a time; `order` and `seed` are of the next calls."""

    device = "emulated"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.launch_kernel.restype = ctypes.c_char_p
        self.order = Order.FORWARD
        self.seed = 0

    def mismatches(self, extents: Sequence[Extent]) -> list[int]:
        launch, memory = self._started(extents)
        at = launch.layout
        self._run(
            memory, "blake3_segments", launch.segments, SEGMENT_THREADS, at.extents, at.extent_of, at.nodes
        )
        places = (at.extents, at.nodes, at.expected, at.results, at.bad_count)
        self._run(memory, "blake3_extents", launch.count, JOIN_THREADS, *places)
        bad = np.flatnonzero(memory[at.results : at.results + launch.count])
        count = int(memory[at.bad_count : at.bad_count + 4].view(np.uint32)[0])
        assert count == len(bad), "the counter and the flags agree"
        return [int(index) for index in bad]

    def crc64(self, extents: Sequence[Extent]) -> list[int]:
        launch, memory = self._started(extents)
        at = launch.layout
        self._run(
            memory, "crc64_segments", launch.segments, SEGMENT_THREADS, at.extents, at.extent_of, at.nodes
        )
        self._run(memory, "crc64_extents", launch.count, JOIN_THREADS, at.extents, at.nodes, at.results)
        remainders = memory[at.results : at.results + 8 * launch.count].view(np.uint64).tolist()
        return [
            from_remainder(int(rest), extent.length) for rest, extent in zip(remainders, extents, strict=True)
        ]

    def one_segment(self, name: str, extent: Extent, segment: int, size: int) -> bytes:
        """What the kernel `name` makes of one segment of an extent: `size` bytes. No other segment is run."""
        launch, memory = self._started([extent], [Extent(extent.address, 1, extent.expected)])
        at = launch.layout
        # The launch's first segment is number `segment` of the extent, modulo 2^64 as on a device.
        row = (extent.address, extent.length, -segment % (1 << 64))
        memory[at.extents : at.extents + 24] = np.array(row, np.uint64).view(np.uint8)
        self._run(memory, name, 1, SEGMENT_THREADS, at.extents, at.extent_of, at.nodes)
        return memory[at.nodes : at.nodes + size].tobytes()

    def _run(self, memory: Memory, name: str, grid: int, threads: int, *places: int) -> None:
        """Runs one kernel, all of whose arguments are addresses in the device's memory."""
        packed = np.array([memory.ctypes.data + place for place in places], np.uint64)
        said = self._library.launch_kernel(
            name.encode(),
            ctypes.c_uint32(grid),
            ctypes.c_uint32(threads),
            ctypes.c_void_p(packed.ctypes.data),
            ctypes.c_uint64(packed.nbytes),
            int(self.order),
            ctypes.c_uint64(self.seed),
        )
        if said is not None:
            raise EmulatorFault(said.decode())

    def _started(
        self, extents: Sequence[Extent], planned: Sequence[Extent] | None = None
    ) -> tuple[Launch, Memory]:
        """The launch of those that are `planned` (all of `extents`, which may be touched), and the device's
        memory as the kernels find it: what was not uploaded is poison."""
        launch = plan(extents if planned is None else planned)
        memory = np.full(launch.layout.size, 0xA5, np.uint8)
        memory[: launch.layout.upload] = launch.upload
        start, rest = memory.ctypes.data, launch.layout.size - launch.layout.upload
        allowed = [_Range(start, 4, True), _Range(start + 4, launch.layout.upload - 4, False)]
        allowed.append(_Range(start + launch.layout.upload, rest, True))
        allowed += [_Range(first, behind - first, False) for first, behind in _without_overlap(extents)]
        self._library.allow_ranges((_Range * len(allowed))(*allowed), ctypes.c_size_t(len(allowed)))
        return launch, memory


def _without_overlap(extents: Sequence[Extent]) -> list[list[int]]:
    """The ranges that the extents cover; those that only touch stay apart."""
    merged: list[list[int]] = []
    for start, end in sorted({(each.address, each.address + each.length) for each in extents if each.length}):
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
