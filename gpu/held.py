"""A tensor in memory, as a value.

One rule: `address` and `length` are of bytes that lie in the order in which files store them; what does not
lie so is `Unheld`, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.gpu.report import Refusal
from ckptfs.store.formats.torch_objects import TORCH_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """`length` bytes at `address` of `device`: a tensor, or this rank's part of one.

    `dtype` as in store/formats/layout.py (of those that are unknown there, its own name). `shape` is that
    of the whole tensor; the part has `local_shape` and begins at `offsets` in it. `owner` keeps the memory
    alive. Among `ways` ranks the rows are divided, so far as is known.
    """

    name: str
    device: str
    address: int
    length: int
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    owner: object
    ways: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.local_shape == self.shape

    @property
    def is_rows(self) -> bool:
        """Whether it is whole rows, so that its bytes are neighbours in the whole tensor too."""
        return self.local_shape[1:] == self.shape[1:]

    @property
    def start(self) -> int:
        """Where the rows begin, in bytes of the whole tensor."""
        assert self.is_rows, "only rows have a place in the bytes of the whole"
        rows = self.local_shape[0] if self.local_shape else 0
        return self.offsets[0] * (self.length // rows) if rows else 0


@dataclass(frozen=True, slots=True)
class Unheld:
    """A tensor that cannot be hashed where it lies."""

    name: str
    device: str
    size_bytes: int
    refusal: Refusal


def dtype_name(name: str) -> str:
    """The format's name of a dtype that torch or numpy calls `name`; the same name if there is none."""
    return TORCH_DTYPES.get(name, name)
