"""The tensors of a version by name, put together where several ranks have stored one.

One rule: a tensor is put together only of rows that follow one another without a gap; of anything else it
is said what it is, and it is verified only where a rank holds exactly what one file does.

Source: torch/distributed/checkpoint (an item of a sharded tensor is `name[offset,…]`, as dcp_metadata.py
has it); the other formats store a tensor in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ckptfs.gpu.expected import Expectation, ExpectedFile, ExpectedTensor
from ckptfs.gpu.parts import Parts
from ckptfs.gpu.report import Reason, Refusal
from ckptfs.store.formats import dcp

UNKNOWN_DTYPE: Final = "U8"
_SHARD_NAME: Final = re.compile(r"(.*)\[(\d{1,19}(?:,\d{1,19}){0,63})\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Slab:
    """A block of a tensor that lies in one file; it begins at `offsets` of the whole."""

    offsets: tuple[int, ...]
    file: ExpectedFile
    tensor: ExpectedTensor

    def parts(self) -> Parts:
        """Its bytes, in order."""
        return self.file.parts_of(self.tensor)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the version. `slabs` follow one another, unless `refusal` says why they do not."""

    name: str
    folder: str
    dtype: str
    shape: tuple[int, ...]
    slabs: tuple[Slab, ...]
    refusal: Refusal | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is stored of it."""
        return sum(slab.tensor.length for slab in self.slabs)

    @property
    def is_untyped(self) -> bool:
        """Whether only its bytes are known."""
        return self.dtype == UNKNOWN_DTYPE and self.shape == (self.size_bytes,)


def stored_tensors(expectation: Expectation) -> Mapping[str, list[Stored]]:
    """All tensors of a version by their names; several where several files have one of that name."""
    found: dict[tuple[str, str], list[Slab]] = {}
    for file in expectation.files:
        folder = file.path.rpartition("/")[0]
        for tensor in file.tensors:
            name, offsets = _whole_name(file, tensor)
            # Only DCP spreads one tensor over files.
            place = folder if file.format == dcp.NAME else file.path
            found.setdefault((place, name), []).append(Slab(offsets, file, tensor))
    tensors: dict[str, list[Stored]] = {}
    for (place, name), slabs in found.items():
        tensors.setdefault(name, []).append(_put_together(name, place, slabs))
    return tensors


def _whole_name(file: ExpectedFile, tensor: ExpectedTensor) -> tuple[str, tuple[int, ...]]:
    matched = _SHARD_NAME.fullmatch(tensor.name) if file.format == dcp.NAME else None
    if matched is not None:
        offsets = tuple(map(int, matched[2].split(",")))
        if len(offsets) == len(tensor.shape):
            return matched[1], offsets
    return tensor.name, (0,) * len(tensor.shape)


def _put_together(name: str, folder: str, slabs: list[Slab]) -> Stored:
    slabs.sort(key=lambda slab: slab.offsets)
    first = slabs[0].tensor
    if len(slabs) == 1 and not any(slabs[0].offsets):
        return Stored(name, folder, first.dtype, first.shape, tuple(slabs))
    rows, refusal = 0, None
    for slab in slabs:
        one = slab.tensor
        if any(slab.offsets[1:]):
            sentence = "stored in column shards; a rank can verify it that holds exactly one of them"
            refusal = Refusal(Reason.COLUMN_SHARD, sentence)
        elif (one.dtype, one.shape[1:]) != (first.dtype, first.shape[1:]) or slab.offsets[0] != rows:
            sentence = f"row {rows} and those behind it are not in the version; was a rank's file lost?"
            refusal = refusal or Refusal(Reason.DAMAGED, sentence)
        rows += one.shape[0]
    return Stored(name, folder, first.dtype, (rows, *first.shape[1:]), tuple(slabs), refusal)
