"""Who hashes on which device.

One rule: a device that is not to be had is refused in one line that says what to install or to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ckptfs.gpu.cpu_hasher import CPU, CpuHasher
from ckptfs.gpu.loading import LoadingHasher
from ckptfs.store.errors import InvalidRequest

_CUDA: Final = re.compile(r"cuda(?::(\d{1,3}))?")


@contextmanager
def hasher_for(device: str, *, with_torch: bool = False) -> Iterator[LoadingHasher]:
    """The Hasher of "cpu", "cuda" (the first one) or "cuda:N", for as long as the block runs.

    `with_torch`: what is hashed was written by torch, so the device waits for torch's current stream.
    Unsupported: no PyCUDA, driver or device; InvalidRequest: no device of that name.
    """
    matched = _CUDA.fullmatch(device)
    if device == CPU:
        yield CpuHasher()
    elif matched is not None:
        from ckptfs.gpu.device import DeviceHasher, after_torch

        ordinal = int(matched[1] or 0)
        with DeviceHasher(ordinal, after_torch(ordinal) if with_torch else None) as hasher:
            yield hasher
    else:
        raise InvalidRequest(f"{device} is no device; there are cpu and cuda:0, cuda:1, …")
