"""Inode records: what is encoded is decoded, any other bytes are Corrupt."""

from __future__ import annotations

import stat

import pytest
from golden import broken, plain, vectors
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.inode import Content, Inode, decode_inode, encode_inode

U32 = st.integers(0, (1 << 32) - 1)
U63 = st.integers(0, (1 << 63) - 1)
TIMES = st.integers(-(1 << 63), (1 << 64) - 1)
DIGESTS = st.binary(min_size=32, max_size=32)
RECIPES = st.one_of(st.none(), DIGESTS.map(lambda b: RecipeId(ChunkId(b))))
LINKS = st.lists(st.tuples(U63, st.binary(max_size=20)), max_size=3).map(tuple)
CONTENTS = st.builds(Content, U63, RECIPES, U63, st.booleans(), RECIPES)
INODES = st.builds(
    Inode,
    mode=U32,
    uid=U32,
    gid=U32,
    links=LINKS,
    atime_ns=TIMES,
    mtime_ns=TIMES,
    ctime_ns=TIMES,
    size=U63,
    blocks=U63,
    rdev=U63,
    subdirs=U32,
    content=CONTENTS,
    root=st.one_of(st.none(), DIGESTS),
    target=st.one_of(st.none(), st.binary(max_size=20)),
    versions_off=st.booleans(),
)


@pytest.mark.parametrize("vector", vectors("inode"), ids=lambda v: v["name"])
def test_golden_inodes(vector: dict[str, object]) -> None:
    assert plain(decode_inode(bytes.fromhex(str(vector["hex"])))) == vector["inode"]


@given(INODES)
def test_what_is_encoded_is_decoded(inode: Inode) -> None:
    assert decode_inode(encode_inode(inode)) == inode


@given(broken(INODES.map(encode_inode)))
def test_any_bytes_are_an_inode_or_corrupt(encoded: bytes) -> None:
    try:
        inode = decode_inode(encoded)
    except Corrupt:
        return
    assert decode_inode(encode_inode(inode)) == inode


@pytest.mark.parametrize(
    ("mode", "links", "subdirs", "nlink"),
    [
        (stat.S_IFREG, (), 0, 0),
        (stat.S_IFREG, ((1, b"a"), (1, b"b")), 0, 2),
        (stat.S_IFDIR, ((1, b"a"),), 3, 5),
        (stat.S_IFDIR, (), 0, 0),
    ],
)
def test_link_counts(mode: int, links: tuple[tuple[int, bytes], ...], subdirs: int, nlink: int) -> None:
    inode = Inode(mode, 0, 0, links, 0, 0, 0, subdirs=subdirs)
    assert inode.nlink == nlink
    assert (inode.is_dir, inode.is_file) == (mode == stat.S_IFDIR, mode == stat.S_IFREG)
