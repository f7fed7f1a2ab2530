"""The loops over tensor bytes: the native ones where they were built, else their numpy twin.

One rule: both return the same bytes, so nobody needs to know which they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from ckptfs.store.codecs import context_twin, planes_twin
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


class ContextKernels(Protocol):
    """What `context_twin` documents. ValueError if lengths do not fit together."""

    def context_counts(self, source: Buffer, parent: Buffer, width: int, fraction_bits: int, /) -> bytes: ...

    def context_pack(
        self,
        source: Buffer,
        parent: Buffer,
        width: int,
        fraction_bits: int,
        context_of: Buffer,
        frequencies: Buffer,
        /,
    ) -> bytes: ...

    def context_unpack(
        self, body: Buffer, parent: Buffer, width: int, fraction_bits: int, /
    ) -> bytes | None: ...


Packed = tuple[Buffer, int, int]
"""A chunk that consists of planes: its body, the width of its elements, and their parameters."""
PackedChain = tuple[Sequence[Packed], Buffer | None, int]
"""A chain of them, what the first one is encoded against, and the length of each when plain."""


class Unpacker(Protocol):
    """Memory in which one thread at a time unpacks chunks."""

    def unpack(self, chunks: Sequence[Packed], parent: Buffer | None, length: int, /) -> bytes | None:
        """The `length` (at least 1) plain bytes of the last of a chain of chunks.

        Each is the difference to the one before it; the first is that to `parent`, or stands alone. None:
        whoever takes it apart piece by piece is told what is wrong, or can read it. ValueError if the parent
        has not `length` bytes.
        """

    def unpack_all(
        self, chains: Sequence[PackedChain], target: bytearray | memoryview, /
    ) -> tuple[bool, ...]:
        """The same of many chains, to `target`, one behind the other, and which of them are there: where
        `unpack` returns None, so many bytes are anything. ValueError, too, if there is no room."""


def new_unpacker() -> Unpacker | None:
    """None where there is no native code, or no libzstd."""
    return None if _planes is None or _planes.Unpacker is None else _planes.Unpacker()


def new_block(length: int) -> memoryview:
    """Memory of at least `length` bytes, for many chunks; anything is in it.

    It is used again once nobody has a view of it. Its own length is what it takes.
    """
    if _planes is None or length < _BLOCK_BYTES:
        return memoryview(bytearray(length))
    return memoryview(_planes.Block(length))


def huffman_frame(source: Buffer) -> bytes:
    """A zstd frame of Huffman codes alone; empty if zstd does better, or there is no native code.

    It is another frame than zstd would make, and decodes to the same: how a frame was made is no part of the
    format.
    """
    return b"" if _planes is None else _planes.huffman(source)


_BLOCK_BYTES: Final = 1 << 20
"""Memory of huge pages, two MiB each, would be too much for less."""
TWIN: Kernels = planes_twin
NATIVE: Kernels | None = _planes
KERNELS: Kernels = TWIN if NATIVE is None else NATIVE

CONTEXT_TWIN: ContextKernels = context_twin
CONTEXT_NATIVE: ContextKernels | None = _planes
CONTEXT_KERNELS: ContextKernels = CONTEXT_TWIN if CONTEXT_NATIVE is None else CONTEXT_NATIVE
