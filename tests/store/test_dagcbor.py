"""DAG-CBOR against the independent `dag-cbor` package; for any bytes a value or Corrupt, soon and small."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from typing import Any

import dag_cbor
import pytest
from golden import broken, plain, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from multiformats import CID

from ckptfs.store.dagcbor import Link, Node, decode_array_head, decode_node, encode_array_head, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import CidCodec

NAMES = {CidCodec.RAW: "raw", CidCodec.DAG_CBOR: "dag-cbor"}
LINKS = st.builds(Link, st.binary(min_size=32, max_size=32), st.sampled_from(CidCodec))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 64), (1 << 64) - 1),
    st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, (1 << 32) - 1, 1 << 32, -1, -24, -25, -(1 << 63)]),
    st.text(max_size=30),
    st.binary(max_size=30),
    LINKS,
)
NODES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=20,
)


def for_referee(node: Node) -> Any:
    if isinstance(node, Link):
        return CID("base32", 1, NAMES[node.codec], ("blake3", node.digest))
    if isinstance(node, list):
        return [for_referee(item) for item in node]
    if isinstance(node, dict):
        return {key: for_referee(item) for key, item in node.items()}
    return node


@pytest.mark.parametrize("vector", vectors("dagcbor"), ids=lambda v: v["name"])
def test_golden_nodes(vector: dict[str, object]) -> None:
    encoded = bytes.fromhex(str(vector["hex"]))
    node = decode_node(encoded)
    assert plain(node) == vector["node"]
    assert encode_node(node) == encoded == dag_cbor.encode(for_referee(node))


@settings(deadline=None)
@given(NODES)
def test_the_referee_agrees(node: Node) -> None:
    encoded = encode_node(node)
    assert encoded == dag_cbor.encode(for_referee(node))
    assert decode_node(encoded) == node
    assert dag_cbor.decode(encoded) == for_referee(node)


@pytest.mark.parametrize("count", [0, 1, 23, 24, 255, 256, 65535, 65536])
def test_the_head_of_an_array_is_the_referees(count: int) -> None:
    head = encode_array_head(count)
    assert dag_cbor.encode([None] * count) == head + b"\xf6" * count
    assert decode_array_head(b"x" + head + b"y", 1) == (count, 1 + len(head))


@given(st.binary(max_size=10))
def test_any_bytes_are_the_head_of_an_array_or_corrupt(encoded: bytes) -> None:
    try:
        count, stop = decode_array_head(encoded, 0)
    except Corrupt:
        return
    assert encode_array_head(count) == encoded[:stop]


@settings(deadline=None, max_examples=300)
@given(broken(NODES.map(encode_node)))
def test_any_bytes_are_a_node_or_corrupt(encoded: bytes) -> None:
    try:
        node = decode_node(encoded)
    except Corrupt:
        return
    assert encode_node(node) == encoded == dag_cbor.encode(for_referee(node))


@pytest.mark.parametrize(
    "hexed",
    [
        "",
        "1800",  # 0 in two bytes
        "190001",
        "1b0000000000000001",
        "5f40ff",  # indefinite lengths
        "7f60ff",
        "9fff",
        "bfff",
        "ff",
        "a2616200616100",  # keys out of order
        "a262616100616200",
        "a2616100616101",  # a key twice
        "a10000",  # keys that are no strings
        "a1410000",
        "f90000",  # floats
        "fa00000000",
        "fb0000000000000000",
        "f97e00",
        "f7",  # undefined, other simple values
        "e0",
        "f820",
        "61ff",  # not UTF-8
        "0000",  # something behind it
        "c000",  # tags other than 42
        "c100",
        "c24101",
        "c249010000000000000000",  # 2^64
        "c349010000000000000000",
        "d81c80",
        "d81d00",
        "d9010080",
        "d90102820101",
        "d9d9f700",
        "d82a00",  # tag 42 without a CID
        "d82a40",
        "d82a4100",
        "d82a5825" + "01" + "01551e20" + "00" * 32,  # another multibase prefix
        "d82a5825" + "00" + "01701e20" + "00" * 32,  # another codec
        "d82a5824" + "00" + "01551e1f" + "00" * 31,
        "d8" + "2a" + "7824" + "00" * 36,
        "9bffffffffffffffff",
        "bb7fffffffffffffff",
        "5b7fffffffffffffff",
        "7a7fffffff",
        "81" * 70 + "00",
    ],
)
def test_what_is_no_dag_cbor_of_ours(hexed: str) -> None:
    with pytest.raises(Corrupt):
        decode_node(bytes.fromhex(hexed))


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x81" * 1_000_000,
        b"\xd8\x2a" * 100_000 + b"\x00",
        b"\x9b\x00\x00\x00\x7f\xff\xff\xff\xff" * 1000,
        # Lists of a shared list twice, 40 deep: 2^40 items if a reader follows the references.
        b"".join(b"\x82\xd8\x1c" for _ in range(40))
        + b"\x80"
        + b"".join(b"\xd8\x1d\x18" + bytes([n]) for n in range(40)),
        b"\x82\xd8\x1c\x81\xd8\x1d\x00\x00",  # a list that holds itself
        b"\xc2\x5a\x00\x0f\xff\xff" + b"\xff" * 0xFFFFF,  # an integer of a megabyte
    ],
)
def test_hostile_bytes_cost_little(hostile: bytes) -> None:
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(Corrupt):
            decode_node(hostile)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(hostile) + (1 << 20)
        assert time.process_time() - start < 1
    finally:
        tracemalloc.stop()


def test_nesting_has_one_limit_both_ways() -> None:
    node: Node = []
    for _ in range(62):
        node = [node]
    assert decode_node(encode_node(node)) == node
    for _ in range(10):
        node = [node]
    with pytest.raises(ValueError, match="deep"):
        encode_node(node)


@pytest.mark.parametrize(
    "wrong", [1.5, {1: 2}, (1, 2), bytearray(b"x"), 1 << 64, -(1 << 64) - 1, {"a": {3}}, object()]
)
def test_what_is_no_node_is_not_encoded(wrong: Any) -> None:
    with pytest.raises(ValueError):
        encode_node(wrong)


PREPARED = """
import sys
from ckptfs.store import dagcbor
from ckptfs.store.ids import CidCodec
dagcbor.prepare()
before = set(sys.modules)
dagcbor.encode_node([dagcbor.Link(bytes(32), CidCodec.RAW), {"a": b"x"}, 1 << 40, None])
print(*set(sys.modules) - before)
"""


def test_nothing_is_imported_once_it_is_prepared() -> None:
    done = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"\n"
