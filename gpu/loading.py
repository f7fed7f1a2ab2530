"""Loading a saved file into a device's memory and hashing it there, a window at a time.

One rule: while one half of the memory is hashed the other one is filled, so the slower of reading and
hashing sets the pace, and the host never holds more than the two halves.

A part that cannot be read counts as corrupt: a mount refuses bytes that are not those of the version.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ckptfs.gpu.expected import ExpectedFile, ExpectedTensor
from ckptfs.gpu.extents import Extent, Hasher
from ckptfs.gpu.parts import Part
from ckptfs.store.errors import Unsupported

# Large enough for a bus and a device to be worth the launch, small enough to be pinned anywhere.
WINDOW_BYTES = 32 << 20
Read = Callable[[memoryview, int], int]


class Buffer(Protocol):
    """Two halves of memory of the host, each with as much of the device's. A half is used by one thread at
    a time."""

    def host(self, half: int) -> memoryview:
        """Half 0 or 1, to be filled."""

    def send(self, half: int, size: int) -> int:
        """Bring the first `size` bytes of a half to the device; their address there."""


class LoadingHasher(Hasher, Protocol):
    """A Hasher that files can be loaded for."""

    def double_buffer(self, part_bytes: int) -> AbstractContextManager[Buffer]:
        """Room for parts of a file on their way to the device. Unavailable if there is not enough."""


@dataclass(frozen=True, slots=True)
class BadPart:
    """A part of a file that is not what the version says, and the tensors that it belongs to."""

    path: str
    part: Part
    tensors: tuple[ExpectedTensor, ...]


def check_file(
    file: ExpectedFile, read: Read, hasher: Hasher, buffer: Buffer, on_bytes: Callable[[int], None]
) -> list[BadPart]:
    """What is wrong with a file, in order; `read(buffer, offset)` fills a buffer from it and says how far.

    `on_bytes(count)` is told of what was read. OSError: the file cannot be read at all.
    """
    hashed: list[Future[list[Part]]] = []
    unread: list[Part] = []
    with ThreadPoolExecutor(1, thread_name_prefix="ckptfs-device") as device:
        for number, window in enumerate(_windows(file.parts())):
            half = number % 2
            if number >= 2:
                hashed[number - 2].result()
            missing = _fill(window, read, buffer.host(half))
            unread += missing
            hashed.append(device.submit(_mismatches, window, missing, hasher, buffer, half))
            on_bytes(sum(part.length for part in window))
    bad = [*unread, *(part for one in hashed for part in one.result())]
    return [_bad_part(file, part) for part in sorted(bad, key=lambda part: part.offset)]


def _fill(window: Sequence[Part], read: Read, buffer: memoryview) -> list[Part]:
    """Read a window; the parts that cannot be read."""
    start, length = window[0].offset, _length(window)
    try:
        if read(buffer[:length], start) == length:
            return []
    except OSError as e:
        if e.errno != errno.EIO:
            raise
    return [part for part in window if not _is_read(part, read, buffer, start)]


def _is_read(part: Part, read: Read, buffer: memoryview, start: int) -> bool:
    at = part.offset - start
    try:
        return read(buffer[at : at + part.length], part.offset) == part.length
    except OSError as e:
        if e.errno != errno.EIO:
            raise
        return False


def _mismatches(
    window: Sequence[Part], missing: Sequence[Part], hasher: Hasher, buffer: Buffer, half: int
) -> list[Part]:
    there = [part for part in window if part not in missing]
    if not there:
        return []
    address = buffer.send(half, _length(window))
    extents = [Extent(address + p.offset - window[0].offset, p.length, p.digest) for p in there]
    return [there[index] for index in hasher.mismatches(extents)]


def _length(window: Sequence[Part]) -> int:
    return window[-1].offset + window[-1].length - window[0].offset


def _windows(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Neighbours that fit into a half together."""
    window: list[Part] = []
    for part in parts:
        if part.length > WINDOW_BYTES:
            raise Unsupported(f"a chunk of {part.length} bytes is longer than any that ckptfs makes")
        if window and part.offset + part.length - window[0].offset > WINDOW_BYTES:
            yield window
            window = []
        window.append(part)
    if window:
        yield window


def _bad_part(file: ExpectedFile, part: Part) -> BadPart:
    stop = part.offset + part.length
    within = tuple(one for one in file.tensors if one.offset < stop and part.offset < one.end)
    return BadPart(file.path, part, within)
