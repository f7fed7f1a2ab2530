"""The loops over tensor bytes: the native ones where they were built, else their numpy twin.

One rule: both return the same bytes, so nobody needs to know which they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckptfs.store.codecs import planes_twin
from ckptfs.store.hashing import Buffer

try:
    from ckptfs.store import _planes
except ImportError:
    _planes = None  # type: ignore[assignment]


class Kernels(Protocol):
    """What `planes_twin` documents. ValueError if lengths do not fit together."""

    def split(self, source: Buffer, parent: Buffer | None, width: int, parameters: int, /) -> bytes: ...

    def join(
        self, planes: Sequence[Buffer], parent: Buffer | None, width: int, parameters: int, tail: Buffer, /
    ) -> bytes: ...

    def cast(self, source: Buffer, /) -> bytes: ...

    def sample(self, source: Buffer, parent: Buffer | None, width: int, parameters: int, /) -> bytes: ...

    def repeats(self, source: Buffer, /) -> int: ...


def huffman_frame(source: Buffer) -> bytes:
    """A zstd frame of Huffman codes alone; empty if zstd does better, or there is no native code.

    It is another frame than zstd would make, and decodes to the same: how a frame was made is no part of the
    format.
    """
    return b"" if _planes is None else _planes.huffman(source)


TWIN: Kernels = planes_twin
NATIVE: Kernels | None = _planes
KERNELS: Kernels = TWIN if NATIVE is None else NATIVE
