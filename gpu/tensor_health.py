"""The health of tensors in memory.

One rule: as for verification, a tensor is looked at where it lies, and one that cannot be is named.
"""

from __future__ import annotations

from ckptfs.gpu.cpu_hasher import CPU, memory_at
from ckptfs.gpu.held import Held, Unheld
from ckptfs.gpu.holding import held_tensors
from ckptfs.gpu.report import Reason, Refusal
from ckptfs.store.difference import ELEMENT_BYTES
from ckptfs.store.health import Health, has_health

# Small enough for a processor's cache.
_WINDOW_BYTES = 64 * 1024 * ELEMENT_BYTES


def health_of(tensors: object) -> dict[str, Health | Refusal]:
    """The health of each tensor of a module or state dict, of a DTensor of this rank's part; InvalidRequest
    if it is neither."""
    return {one.name: _health(one) for one in held_tensors(tensors)}


def _health(one: Held | Unheld) -> Health | Refusal:
    if isinstance(one, Unheld):
        return one.refusal
    if one.device != CPU:
        return Refusal(Reason.DEVICE, f"on {one.device}; move it to the CPU, or look at what it was saved as")
    if not has_health(one.dtype):
        return Refusal(Reason.DTYPE, f"{one.dtype} has no infinities or subnormals that are looked for")
    health = Health(one.dtype)
    for at in range(0, one.length, _WINDOW_BYTES):
        health.add(memory_at(one.address + at, min(_WINDOW_BYTES, one.length - at)))
    return health
