"""Hashing memory of this process: the Hasher that every other one has to equal.

One rule: nothing is copied. An extent is hashed where it lies, so the address must be of memory that is
mapped and stays so; a wrong one ends the process, as it would in C.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from ckptfs.gpu.extents import Extent
from ckptfs.store.hashing import chunk_id, crc64

CPU = "cpu"
_EMPTY = memoryview(b"")
# One task of a thread; blake3 frees the GIL, and handing over a task costs some 20 µs.
_BATCH_BYTES = 8 << 20
_BATCH_EXTENTS = 1024
_Result = TypeVar("_Result")


class CpuHasher:
    """Behind the Hasher protocol. May be used by one thread at a time; it uses `threads` of its own (by
    default as many as there are cores to run on)."""

    def __init__(self, threads: int | None = None) -> None:
        self.device = CPU
        self._threads = threads or len(os.sched_getaffinity(0))

    def mismatches(self, extents: Sequence[Extent]) -> list[int]:
        """Indices of the extents whose BLAKE3-256 is not `expected`, ascending."""
        good = self._each(extents, lambda one: chunk_id(memory_at(one.address, one.length)) == one.expected)
        return [index for index, is_good in enumerate(good) if not is_good]

    def crc64(self, extents: Sequence[Extent]) -> list[int]:
        """CRC-64/NVME of each extent."""
        return self._each(extents, lambda one: crc64(memory_at(one.address, one.length)))

    @contextmanager
    def double_buffer(self, part_bytes: int) -> Iterator[HostBuffer]:
        """Room for parts of a file: memory is the device here."""
        yield HostBuffer(part_bytes)

    def _each(self, extents: Sequence[Extent], work: Callable[[Extent], _Result]) -> list[_Result]:
        batches = list(_batches(extents))
        if len(batches) <= 1 or self._threads == 1:
            return [work(one) for one in extents]
        with ThreadPoolExecutor(self._threads, thread_name_prefix="ckptfs-hash") as pool:
            return [
                result for done in pool.map(lambda batch: [*map(work, batch)], batches) for result in done
            ]


class HostBuffer:
    """Two halves of memory that are hashed where they are filled."""

    def __init__(self, part_bytes: int) -> None:
        self._halves = [memoryview(bytearray(part_bytes)) for _ in range(2)]

    def host(self, half: int) -> memoryview:
        """Half 0 or 1, to be filled."""
        return self._halves[half]

    def send(self, half: int, size: int) -> int:
        """Nothing to send; the half's address."""
        assert size <= len(self._halves[half]), "a part fits into a half"
        return address_of(self._halves[half])


def address_of(buffer: memoryview) -> int:
    """Where a writable buffer begins; valid as long as the buffer is held."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def memory_at(address: int, length: int) -> memoryview:
    """Bytes of this process, not copied; valid as long as the memory is."""
    if length == 0:
        return _EMPTY
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _batches(extents: Sequence[Extent]) -> Iterator[Sequence[Extent]]:
    start = total = 0
    for index, extent in enumerate(extents):
        if index > start and (total + extent.length > _BATCH_BYTES or index - start >= _BATCH_EXTENTS):
            yield extents[start:index]
            start, total = index, 0
        total += extent.length
    if start < len(extents):
        yield extents[start:]
