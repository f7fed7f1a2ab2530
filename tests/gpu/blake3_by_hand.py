"""BLAKE3's inner values, which the package does not show: of a leaf, and of a perfect tree of leaves.

One rule: it is written from the specification (sections 2.2 to 2.5) and from nothing of ours; a test compares
its root with the package.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_QUARTERS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
_MASK = (1 << 32) - 1
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
LEAF_BYTES, BLOCK_BYTES = 1024, 64


def subtree(leaves: Sequence[bytes], first: int, *, is_root: bool = False) -> bytes:
    """The chaining value of leaves number `first` and following, a power of two of them, each but the last
    whole; of a whole input (`is_root`) its digest."""
    values = [
        _leaf(leaf, first + number, _ROOT if is_root and len(leaves) == 1 else 0)
        for number, leaf in enumerate(leaves)
    ]
    while len(values) > 1:
        flags = _PARENT | (_ROOT if is_root and len(values) == 2 else 0)
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [_compress(_IV, (*left, *right), 0, BLOCK_BYTES, flags) for left, right in pairs]
    return struct.pack("<8I", *values[0])


def _leaf(leaf: bytes, number: int, root: int) -> Sequence[int]:
    value: Sequence[int] = _IV
    blocks = [leaf[at : at + BLOCK_BYTES] for at in range(0, max(len(leaf), 1), BLOCK_BYTES)]
    for at, block in enumerate(blocks):
        flags = (_CHUNK_START if at == 0 else 0) | (_CHUNK_END | root if at == len(blocks) - 1 else 0)
        words = struct.unpack("<16I", block.ljust(BLOCK_BYTES, b"\0"))
        value = _compress(value, words, number, len(block), flags)
    return value


def _compress(
    value: Sequence[int], words: Sequence[int], counter: int, length: int, flags: int
) -> Sequence[int]:
    v = [*value, *_IV[:4], counter & _MASK, counter >> 32, length, flags]
    for turn in range(7):
        if turn:
            words = [words[at] for at in _PERMUTATION]
        for (a, b, c, d), x, y in zip(_QUARTERS, words[::2], words[1::2], strict=True):
            v[a] = (v[a] + v[b] + x) & _MASK
            v[d] = _rotated(v[d] ^ v[a], 16)
            v[c] = (v[c] + v[d]) & _MASK
            v[b] = _rotated(v[b] ^ v[c], 12)
            v[a] = (v[a] + v[b] + y) & _MASK
            v[d] = _rotated(v[d] ^ v[a], 8)
            v[c] = (v[c] + v[d]) & _MASK
            v[b] = _rotated(v[b] ^ v[c], 7)
    return [v[at] ^ v[at + 8] for at in range(8)]


def _rotated(word: int, bits: int) -> int:
    return (word >> bits | word << (32 - bits)) & _MASK
