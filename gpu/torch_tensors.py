"""torch's tensors as memory: the one door to torch in this package.

One rule: address and length are what `data_ptr()` and the number of elements say, for those tensors only
whose bytes lie there in the order in which files store them.

Sources: torch's documentation of `Tensor.data_ptr`, of DTensor and of `__create_chunk_list__` (what DCP
itself asks a sharded tensor).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch.nn.parameter import is_lazy

from ckptfs.gpu.held import Held, Unheld, dtype_name
from ckptfs.gpu.report import Reason, Refusal

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _Shard(Protocol):
    """torch's ChunkStorageMetadata."""

    offsets: Sequence[int]
    sizes: Sequence[int]


class _Sharded(Protocol):
    """What DCP asks of a tensor of which a rank holds a part."""

    def __create_chunk_list__(self) -> list[_Shard]: ...


def described(name: str, value: object) -> Held | Unheld | None:
    """Where a tensor lies, or why it cannot be hashed there; None if it is no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    if is_lazy(value):
        # Of what has no shape yet torch answers nothing.
        shapeless = Refusal(Reason.NO_MEMORY, "not initialised yet; run the module once, or load it")
        return Unheld(name, str(value.device), 0, shapeless)
    local, offsets = value, (0,) * value.dim()
    distributed = _distributed(value)
    if distributed is not None:
        local = distributed.to_local()
        placed = _offsets(distributed, local)
        if isinstance(placed, Refusal):
            return Unheld(name, str(local.device), _size(local), placed)
        offsets = placed
    refusal = _refusal(local)
    if refusal is not None:
        return Unheld(name, str(local.device), _size(local), refusal)
    return Held(
        name=name,
        device=str(local.device),
        address=local.data_ptr(),
        length=_size(local),
        dtype=dtype_name(str(local.dtype).removeprefix("torch.")),
        shape=tuple(value.shape),
        local_shape=tuple(local.shape),
        offsets=offsets,
        owner=local,
        ways=1 if distributed is None else _ways(distributed),
    )


def _distributed(value: torch.Tensor) -> DTensor | None:
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(value, module.DTensor):
        return None
    return cast("DTensor", value)


def _offsets(whole: DTensor, local: torch.Tensor) -> tuple[int, ...] | Refusal:
    """Where this rank's part of a tensor begins in it."""
    if any(placement.is_partial() for placement in whole.placements):
        return Refusal(Reason.PARTIAL, "a partial sum of several ranks; redistribute it first")
    try:
        (part,) = cast(_Sharded, whole).__create_chunk_list__()
    except (NotImplementedError, ValueError):
        part = None
    if part is None or tuple(part.sizes) != tuple(local.shape):
        return Refusal(Reason.COLUMN_SHARD, "this rank's part is no block of neighbours in the tensor")
    return tuple(part.offsets)


def _ways(whole: DTensor) -> int:
    """Among how many ranks its rows are divided; 1 if in another way than torch.chunk does it."""
    sharded = [at for at, placement in enumerate(whole.placements) if not placement.is_replicate()]
    return whole.device_mesh.size(sharded[0]) if len(sharded) == 1 else 1


def _refusal(value: torch.Tensor) -> Refusal | None:
    """Why a tensor's bytes do not lie at its address as a file has them; None if they do."""
    kind = value.device.type
    refusal = None
    if kind == "meta":
        refusal = Refusal(Reason.NO_MEMORY, "on the meta device it has no bytes; load it first")
    elif value.layout != torch.strided or value.is_quantized or value.is_nested:
        refusal = Refusal(Reason.NOT_DENSE, f"a {_kind(value)} tensor")
    elif kind not in ("cpu", "cuda"):
        refusal = Refusal(Reason.DEVICE, f"on {value.device}; verify it on cpu or cuda, or move it there")
    elif not value.is_contiguous():
        refusal = Refusal(Reason.NOT_CONTIGUOUS, "not contiguous; `.contiguous()` makes a copy that is")
    elif value.is_conj() or value.is_neg():
        refusal = Refusal(Reason.NOT_CONTIGUOUS, "a lazy view; `.resolve_conj().resolve_neg()` makes a copy")
    elif value.numel() and _address(value) == 0:
        refusal = Refusal(Reason.NO_MEMORY, f"a {type(value).__name__} has no memory of its own")
    elif _end(value) > value.untyped_storage().nbytes():
        # FSDP does this between steps, and what a view then points to is nobody's.
        refusal = Refusal(Reason.NO_MEMORY, "its memory has been given back; gather the parameters first")
    return refusal


def _kind(value: torch.Tensor) -> str:
    if value.is_nested:
        return "nested"
    return "quantized" if value.is_quantized else "sparse"


def _end(value: torch.Tensor) -> int:
    """Where a contiguous tensor ends in its storage, in bytes."""
    return int(value.storage_offset()) * value.element_size() + _size(value) if value.numel() else 0


def _address(value: torch.Tensor) -> int:
    try:
        return value.data_ptr()
    except RuntimeError:  # a wrapper, as those of torchao are
        return 0


def _size(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
