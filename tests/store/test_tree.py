"""Trees: one byte string for one directory, a valid directory or Corrupt for any bytes."""

from __future__ import annotations

import stat
import tracemalloc
from dataclasses import replace

import pytest
from golden import broken, plain, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store.dagcbor import Link, Node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, CidCodec, RecipeId, TreeId
from ckptfs.store.tree import Entry, decode_tree, encode_tree, entry_node, iter_tree

DIGESTS = st.binary(min_size=32, max_size=32)
RECIPES = DIGESTS.map(lambda b: RecipeId(ChunkId(b)))
TREES = DIGESTS.map(lambda b: TreeId(ChunkId(b)))
TARGETS = st.binary(min_size=1, max_size=20)
FILE_NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b"..")
)
XATTRS = st.dictionaries(st.binary(min_size=1, max_size=9), st.binary(max_size=9), max_size=3)
TIMES = st.integers(-(1 << 63), (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    kind = draw(st.sampled_from([stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR]))
    is_file = kind == stat.S_IFREG
    return Entry(
        name=draw(FILE_NAMES),
        mode=kind | draw(st.integers(0, 0o7777)),
        uid=draw(U32),
        gid=draw(U32),
        mtime_ns=draw(TIMES),
        ctime_ns=draw(TIMES),
        size=draw(st.integers(0, (1 << 63) - 1)) if is_file else 0,
        recipe=draw(RECIPES) if is_file else None,
        root=draw(DIGESTS) if is_file else None,
        tree=draw(TREES) if kind == stat.S_IFDIR else None,
        target=draw(TARGETS) if kind == stat.S_IFLNK else None,
        rdev=draw(U32) if kind == stat.S_IFCHR else 0,
        link=draw(st.integers(0, 9)),
        xattrs=tuple(sorted(draw(XATTRS).items())),
    )


DIRECTORIES = st.lists(entries(), max_size=5, unique_by=lambda entry: entry.name)
FILE = Entry(
    name=b"f",
    mode=stat.S_IFREG | 0o644,
    uid=1,
    gid=2,
    mtime_ns=3,
    ctime_ns=4,
    size=5,
    recipe=RecipeId(ChunkId(bytes(32))),
    root=bytes(32),
)


def tree_of(*rows: Node) -> bytes:
    return encode_node({"version": 1, "entries": list(rows)})


def node_of(entry: Entry, **changes: Node) -> dict[str, Node]:
    """The item of an entry with some fields changed; None takes a field away."""
    node = entry_node(entry)
    assert isinstance(node, dict)
    return {key: value for key, value in {**node, **changes}.items() if value is not None}


@pytest.mark.parametrize("vector", vectors("tree"), ids=lambda v: v["name"])
def test_golden_trees(vector: dict[str, object]) -> None:
    encoded = bytes.fromhex(str(vector["hex"]))
    found = decode_tree(encoded)
    assert plain(found) == vector["entries"]
    assert encode_tree(found) == encoded
    assert chunk_id(encoded).hex() == vector["id"]


@settings(deadline=None)
@given(DIRECTORIES, st.randoms())
def test_what_is_encoded_is_decoded_whatever_the_order(rows: list[Entry], random) -> None:  # type: ignore[no-untyped-def]
    encoded = encode_tree(random.sample(rows, len(rows)))
    assert decode_tree(encoded) == tuple(sorted(rows, key=lambda entry: entry.name))


@settings(deadline=None, max_examples=300)
@given(broken(DIRECTORIES.map(encode_tree)))
def test_any_bytes_are_a_tree_or_corrupt(encoded: bytes) -> None:
    try:
        found = decode_tree(encoded)
    except Corrupt:
        return
    assert encode_tree(found) == encoded


CHANGES: list[dict[str, Node]] = [
    {"name": b""},
    {"name": b"."},
    {"name": b".."},
    {"name": b"a/b"},
    {"name": b"a\0"},
    {"name": "f"},
    {"mode": 0},
    {"mode": -1},
    {"mode": 1 << 32},
    {"mode": stat.S_IFDIR | 0o755},
    {"mode": stat.S_IFLNK | 0o777},
    {"mode": True},
    {"uid": -1},
    {"gid": 1 << 32},
    {"mtime": -(1 << 63) - 1},
    {"ctime": -(1 << 63) - 1},
    {"size": 0},
    {"size": -1},
    {"size": 1 << 63},
    {"size": b"5"},
    {"recipe": bytes(32)},
    {"recipe": Link(bytes(32), CidCodec.DAG_CBOR)},
    {"root": bytes(31)},
    {"tree": Link(bytes(32), CidCodec.DAG_CBOR)},
    {"target": b"x"},
    {"rdev": 0},
    {"link": 0},
    {"link": -1},
    {"xattrs": []},
    {"xattrs": [[b"a"]]},
    {"xattrs": [[b"a", "b"]]},
    {"xattrs": [[b"b", b""], [b"a", b""]]},
    {"xattrs": [[b"a", b""], [b"a", b""]]},
    {"more": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_tree_that_nobody_writes_is_corrupt(changes: dict[str, Node]) -> None:
    with pytest.raises(Corrupt):
        decode_tree(tree_of(node_of(FILE, **changes)))


@pytest.mark.parametrize("key", ["name", "mode", "uid", "gid", "mtime", "ctime", "recipe", "root"])
def test_what_every_file_has(key: str) -> None:
    node = node_of(FILE)
    del node[key]
    with pytest.raises(Corrupt):
        decode_tree(tree_of(node))


def test_order_and_frame_of_a_tree() -> None:
    a, b = node_of(replace(FILE, name=b"a")), node_of(replace(FILE, name=b"b"))
    assert len(decode_tree(tree_of(a, b))) == 2
    others: list[Node] = [
        {"version": 2, "entries": []},
        {"version": 1},
        {"version": 1, "entries": [], "x": 1},
        {"version": 1, "entries": {}},
        {"version": True, "entries": []},
        [],
        None,
    ]
    for encoded in (tree_of(b, a), tree_of(a, a), tree_of(1), *map(encode_node, others)):
        with pytest.raises(Corrupt):
            decode_tree(encoded)


def test_a_large_directory_is_read_with_little_memory() -> None:
    rows = [replace(FILE, name=b"%06d" % number) for number in range(20_000)]
    encoded = encode_tree(rows)
    assert encoded == encode_node({"version": 1, "entries": [entry_node(row) for row in rows]})
    tracemalloc.start()
    try:
        assert sum(1 for _ in iter_tree(encoded)) == len(rows)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 256 << 10
