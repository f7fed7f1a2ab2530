"""Merkle roots against the recursive definition of RFC 6962, section 2.1."""

from __future__ import annotations

import hashlib

import pytest
from golden import vectors
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.ids import ChunkId
from ckptfs.store.merkle import (
    audit_path,
    file_root,
    leaf_hash,
    node_hash,
    range_path,
    root_behind_path,
    root_behind_range,
    root_of,
    version_leaf,
    version_root,
)


def naive_root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962, with SHA3-256."""
    if not leaves:
        return hashlib.sha3_256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha3_256(b"\x00" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    parts = naive_root(leaves[:split]) + naive_root(leaves[split:])
    return hashlib.sha3_256(b"\x01" + parts).digest()


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(4, "little") for number in range(count)]


@pytest.mark.parametrize("vector", vectors("merkle"), ids=lambda v: v["name"])
def test_golden_roots(vector: dict[str, object]) -> None:
    if "leaves" in vector:
        assert isinstance(vector["leaves"], int)
        assert root_of(numbered(vector["leaves"])).hex() == vector["root"]
    else:
        assert isinstance(vector["files"], list)
        files = [(bytes.fromhex(path), bytes.fromhex(root)) for path, root in vector["files"]]
        assert version_root(files).hex() == vector["root"]


@pytest.mark.parametrize("count", [*range(70), 127, 128, 129, 1000])
def test_every_size_is_as_the_recursion_has_it(count: int) -> None:
    leaves = numbered(count)
    assert root_of(iter(leaves)) == naive_root(leaves)


@given(st.lists(st.binary(max_size=80), max_size=40))
def test_the_referee_agrees(leaves: list[bytes]) -> None:
    assert root_of(leaves) == naive_root(leaves)


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20), st.data())
def test_a_change_of_any_leaf_changes_the_root(leaves: list[bytes], data: st.DataObject) -> None:
    chunks = [ChunkId(leaf) for leaf in leaves]
    at = data.draw(st.integers(0, len(chunks) - 1))
    changed = [*chunks[:at], ChunkId(data.draw(st.binary(min_size=32, max_size=32))), *chunks[at + 1 :]]
    assert (file_root(changed) == file_root(chunks)) == (changed == chunks)
    assert file_root([*chunks, chunks[-1]]) != file_root(chunks) != file_root(chunks[:-1])


def test_a_leaf_cannot_pose_as_a_node() -> None:
    left, right = leaf_hash(b"a"), leaf_hash(b"b")
    assert root_of([left + right]) != node_hash(left, right) == root_of([b"a", b"b"])


ROOTS = st.binary(min_size=32, max_size=32)


@given(st.dictionaries(st.binary(min_size=1, max_size=40), ROOTS, max_size=10), st.randoms())
def test_a_version_root_does_not_depend_on_the_order(files: dict[bytes, bytes], random) -> None:  # type: ignore[no-untyped-def]
    pairs = list(files.items())
    shuffled = random.sample(pairs, len(pairs))
    leaves = [version_leaf(path, root) for path, root in sorted(pairs)]
    assert version_root(shuffled) == naive_root(leaves)


@given(st.integers(0, 300), st.integers(0, 299))
def test_a_version_of_many_files_has_the_root_of_the_definition(count: int, changed: int) -> None:
    files = {b"%04d" % number: bytes([number % 251]) * 32 for number in range(count)}
    for _ in range(2):
        leaves = [version_leaf(path, root) for path, root in sorted(files.items())]
        assert version_root(files.items()) == naive_root(leaves)
        files[b"%04d" % changed] = bytes(32)


@given(st.tuples(st.binary(max_size=70), ROOTS), st.tuples(st.binary(max_size=70), ROOTS))
def test_no_two_pairs_have_one_leaf(first: tuple[bytes, bytes], second: tuple[bytes, bytes]) -> None:
    assert (version_leaf(*first) == version_leaf(*second)) == (first == second)


def naive_path(leaves: list[bytes], index: int) -> list[bytes]:
    """PATH of RFC 6962, section 2.1.1, with SHA3-256."""
    if len(leaves) == 1:
        return []
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    if index < split:
        return [*naive_path(leaves[:split], index), naive_root(leaves[split:])]
    return [*naive_path(leaves[split:], index - split), naive_root(leaves[:split])]


@pytest.mark.parametrize("count", range(1, 71))
def test_audit_paths_are_those_of_the_definition_and_lead_to_the_root(count: int) -> None:
    leaves = numbered(count)
    root = naive_root(leaves)
    for index, leaf in enumerate(leaves):
        path = audit_path(leaves, index)
        assert path == naive_path(leaves, index)
        assert root_behind_path(count, index, leaf, path) == root
        assert root_behind_path(count, index, b"other", path) != root
        assert root_behind_path(count, index, leaf, [*path, root]) is None
        assert not path or root_behind_path(count, index, leaf, path[:-1]) is None
        beside = index ^ 1
        if beside < count:
            assert root_behind_path(count, beside, leaf, path) != root


@pytest.mark.parametrize("count", range(1, 71))
def test_every_range_leads_to_the_root(count: int) -> None:
    leaves = numbered(count)
    root = naive_root(leaves)
    for first in range(count):
        for stop in range(first + 1, count + 1):
            path = range_path(leaves, first, stop)
            assert len(path) <= 2 * count.bit_length()
            assert root_behind_range(count, first, leaves[first:stop], path) == root


@given(st.integers(2, 70), st.data())
def test_a_range_speaks_for_its_leaves_only(count: int, data: st.DataObject) -> None:
    leaves = numbered(count)
    root = root_of(leaves)
    first = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(first + 1, count))
    path = range_path(leaves, first, stop)
    inside = leaves[first:stop]
    assert root_behind_range(count, first, inside, [*path, root]) is None
    assert not path or root_behind_range(count, first, inside, path[:-1]) is None
    at = data.draw(st.integers(0, len(inside) - 1))
    assert root_behind_range(count, first, [*inside[:at], b"other", *inside[at + 1 :]], path) != root
    if path:
        at = data.draw(st.integers(0, len(path) - 1))
        changed = [*path[:at], bytes([path[at][0] ^ 1]) + path[at][1:], *path[at + 1 :]]
        assert root_behind_range(count, first, inside, changed) != root
    moved = data.draw(st.integers(0, count - len(inside)))
    assert (root_behind_range(count, moved, inside, path) == root) == (moved == first)


def test_paths_in_a_list_of_any_size_are_short_and_end() -> None:
    most = (1 << 63) - 1
    assert root_behind_path(most, most - 1, b"x", [bytes(32)] * 200) is None
    assert root_behind_range(most, most - 1, [b"x"], [bytes(32)] * 200) is None
    assert root_behind_range(most, 1 << 62, [b"x"], [bytes(32)] * 63) is not None
