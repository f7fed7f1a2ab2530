"""Merkle roots in the shape of RFC 6962 with SHA3-256.

One rule: a leaf is H(0x00 ‖ bytes), a node H(0x01 ‖ left ‖ right), a list splits at the largest
power of two below its length, and the empty list is H(""). So no leaf can pose as a node.

Also proofs that leaves belong to a root: the hashes that are missing to compute it again.

Source: RFC 6962, section 2.1; RFC 9162, section 2.1.3; FORMAT.md, "Merkle" and "Proofs".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
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
        level = _above(level)
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


def audit_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The hashes that lead from leaf `index` to the root over leaf contents, the lowest first.

    This is PATH of RFC 6962, section 2.1.1: at most 64 hashes for any list.
    """
    assert 0 <= index < len(leaves), "the leaf is one of the list"
    level = [leaf_hash(content) for content in leaves]
    path = []
    while len(level) > 1:
        beside = index ^ 1
        if beside < len(level):
            path.append(level[beside])
        level, index = _above(level), index >> 1
    return path


def root_behind_path(count: int, index: int, content: bytes, path: Sequence[bytes]) -> bytes | None:
    """The root over `count` leaves of which number `index` has this content, given its audit path.

    None if the path is not as long as one for this place must be.
    """
    assert 0 <= index < count, "the leaf is one of the list"
    node, last, left = leaf_hash(content), count - 1, list(path)[::-1]
    while last:
        if index & 1 or index < last:
            if not left:
                return None
            beside = left.pop()
            node = node_hash(beside, node) if index & 1 else node_hash(node, beside)
        index, last = index >> 1, last >> 1
    return None if left else node


def range_path(leaves: Sequence[bytes], first: int, stop: int) -> list[bytes]:
    """The hashes that lead from leaves `first` to `stop` (not included) to the root over leaf contents.

    They are the roots of the largest subtrees without any of these leaves, from left to right: at most
    two for each level of the tree, none if all leaves are in the range.
    """
    assert 0 <= first < stop <= len(leaves), "the range is not empty and lies in the list"
    level = [leaf_hash(content) for content in leaves]

    def outside(start: int, end: int) -> Iterator[bytes]:
        if end <= first or start >= stop:
            yield _reduced(level[start:end])
        elif start < first or end > stop:
            middle = start + _split(end - start)
            yield from outside(start, middle)
            yield from outside(middle, end)

    return list(outside(0, len(level)))


def root_behind_range(
    count: int, first: int, contents: Sequence[bytes], path: Sequence[bytes]
) -> bytes | None:
    """The root over `count` leaves of which those from number `first` on have these contents, given the
    path of that range. None if the path is not as long as one for this range must be.
    """
    stop = first + len(contents)
    assert 0 <= first < stop <= count, "the range is not empty and lies in the list"
    level = [leaf_hash(content) for content in contents]
    left = list(path)[::-1]

    def node(start: int, end: int) -> bytes | None:
        if end <= first or start >= stop:
            return left.pop() if left else None
        if first <= start and end <= stop:
            return _reduced(level[start - first : end - first])
        middle = start + _split(end - start)
        before, behind = node(start, middle), node(middle, end)
        return None if before is None or behind is None else node_hash(before, behind)

    root = node(0, count)
    return None if left else root


def _above(level: list[bytes]) -> list[bytes]:
    """The hashes of the level above; an odd last node is promoted as it is."""
    paired = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return [*paired, level[-1]] if len(level) % 2 else paired


def _split(count: int) -> int:
    """The largest power of two below `count`, which is at least 2."""
    return 1 << (count - 1).bit_length() - 1
