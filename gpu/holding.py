"""Which tensors lie where in memory: a module, a state dict or arrays, flattened.

One rule: a tensor is described without being touched, moved or made contiguous; what cannot be hashed where
it lies is refused by name.

torch is not imported here: where nobody has imported it yet, nothing can be a tensor of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from ckptfs.gpu.cpu_hasher import CPU
from ckptfs.gpu.held import Held, Unheld, dtype_name
from ckptfs.gpu.report import Reason, Refusal
from ckptfs.store.errors import InvalidRequest
from ckptfs.store.formats.layout import DTYPE_BITS

_MAX_DEPTH: Final = 64


def held_tensors(tensors: object) -> Iterator[Held | Unheld]:
    """All tensors of a torch module, or of a state dict of torch tensors or numpy arrays, nested or not.

    Names are joined with dots, as in saved files; what is no tensor is left out. InvalidRequest if
    `tensors` is neither.
    """
    state_dict = getattr(tensors, "state_dict", None)
    state: object = state_dict() if callable(state_dict) else tensors
    if not isinstance(state, Mapping):
        raise InvalidRequest(f"a {type(tensors).__name__} is neither a module nor a state dict")
    pending: list[tuple[str, object, int]] = [("", state, 0)]
    while pending:
        name, value, depth = pending.pop()
        found = _described(name, value)
        if found is not None:
            yield found
        elif depth < _MAX_DEPTH:
            pending += reversed([(_joined(name, key), one, depth + 1) for key, one in _children(value)])


def _described(name: str, value: object) -> Held | Unheld | None:
    if isinstance(value, np.ndarray):
        return _array(name, value)
    if "torch" in sys.modules:
        from ckptfs.gpu.torch_tensors import described

        return described(name, value)
    return None


def _array(name: str, array: np.ndarray) -> Held | Unheld:
    if not array.flags.c_contiguous:
        refusal = Refusal(Reason.NOT_CONTIGUOUS, "not contiguous; np.ascontiguousarray makes a copy that is")
        return Unheld(name, CPU, array.nbytes, refusal)
    dtype = dtype_name(array.dtype.name)
    if dtype not in DTYPE_BITS or not array.dtype.isnative:
        refusal = Refusal(Reason.DTYPE, f"arrays of {array.dtype} are stored by no format")
        return Unheld(name, CPU, array.nbytes, refusal)
    return Held(
        name=name,
        device=CPU,
        address=array.ctypes.data,
        length=array.nbytes,
        dtype=dtype,
        shape=array.shape,
        local_shape=array.shape,
        offsets=(0,) * array.ndim,
        owner=array,
    )


def _children(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
