"""Merkle roots in the shape of RFC 6962 with SHA3-256.

One rule: a leaf is H(0x00 ‖ bytes), a node H(0x01 ‖ left ‖ right), a list splits at the largest
power of two below its length, and the empty list is H(""). So no leaf can pose as a node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from ckptfs.store.ids import ChunkId

_BLOCK = 64
_EMPTY = hashlib.sha3_256(b"").digest()


def leaf_hash(content: bytes) -> bytes:
    """The hash of one leaf."""
    return hashlib.sha3_256(b"\x00" + content).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of an inner node over two hashes of 32 bytes."""
    return hashlib.sha3_256(b"\x01" + left + right).digest()


def root_of(leaves: Iterable[bytes]) -> bytes:
    """The root over leaf *contents*, in order."""
    level = [leaf_hash(content) for content in leaves]
    return _reduced(level) if level else _EMPTY


def _reduced(level: list[bytes]) -> bytes:
    """The root over hashes of one level, at least one.

    Works level by level: promoting an odd last node is the same tree as RFC 6962's recursive
    split, without its recursion.
    """
    while len(level) > 1:
        paired = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        if len(level) % 2:
            paired.append(level[-1])
        level = paired
    return level[0]


def file_root(chunks: Iterable[ChunkId]) -> bytes:
    """The root of a file: over its chunk ids in order (a hole counts as 32 zero bytes)."""
    return root_of(chunks)


def version_leaf(path: bytes, root: bytes) -> bytes:
    """The leaf content of one file of a version: u32le path length, path, file root.

    The length keeps (path, root) pairs apart whatever bytes a path holds.
    """
    assert len(root) == 32, "a file root is 32 bytes"
    return len(path).to_bytes(4, "little") + path + root


def version_root(files: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The root of a version over (path, file root) pairs, sorted by path."""
    leaves = [version_leaf(path, root) for path, root in sorted(files)]
    # A block of a power of two of leaves is a subtree, and so is what is left behind the last one.
    blocks = [_block_root(tuple(leaves[at : at + _BLOCK])) for at in range(0, len(leaves), _BLOCK)]
    return _reduced(blocks) if blocks else _EMPTY


@lru_cache(maxsize=1024)
def _block_root(leaves: tuple[bytes, ...]) -> bytes:
    """Remembered, because one version differs from the next in few files."""
    return root_of(leaves)
