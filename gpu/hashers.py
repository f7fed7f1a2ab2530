"""Who hashes on which device.

One rule: a device that is not to be had is refused in one line that says what to install or to do.
"""

from __future__ import annotations

from ckptfs.gpu.cpu_hasher import CPU, CpuHasher
from ckptfs.gpu.extents import Hasher
from ckptfs.gpu.loading import HostLanding, Landing
from ckptfs.store.errors import Unsupported


def hasher_for(device: str) -> Hasher:
    """The Hasher of "cpu", "cuda" or "cuda:N". Unsupported if there is none."""
    if device == CPU:
        return CpuHasher()
    raise Unsupported(f"{device} is no device; there are cpu and cuda:0, cuda:1, …")


def landing_for(hasher: Hasher) -> Landing:
    """Memory of a Hasher's device to load files into. Unavailable if there is not enough of it."""
    return HostLanding()
