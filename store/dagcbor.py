"""DAG-CBOR over cbor2: the one deterministic encoding of trees and version records.

One rule: what decodes also encodes to the same bytes, or it is Corrupt. That single check
stands for the whole list of the specification (shortest integers, sorted string keys, definite
lengths, nothing behind the item). Two things are refused earlier: every tag but 42, because
cbor2 would act on it (shared references make a few bytes grow without bound, tag 2 is a big
integer), and nesting deeper than 64. Floats are left out: none of our records needs one, and
the canonical mode of cbor2 shortens them where DAG-CBOR wants 64 bits.

Source: the IPLD DAG-CBOR specification. The independent `dag-cbor` package is the referee in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from types import NoneType
from typing import TypeAlias, cast

import cbor2

from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.ids import CidCodec, cid_bytes, parse_cid_bytes

Node: TypeAlias = "bool | int | str | bytes | Link | list[Node] | dict[str, Node] | None"
_CID_TAG = 42
_MAX_DEPTH = 64


class Link:
    """A CID inside a DAG-CBOR item."""

    __slots__ = ("codec", "digest")

    def __init__(self, digest: bytes, codec: CidCodec) -> None:
        self.digest = digest
        self.codec = codec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Link) and (self.digest, self.codec) == (other.digest, other.codec)

    def __hash__(self) -> int:
        return hash((self.digest, self.codec))

    def __repr__(self) -> str:
        return f"Link({self.digest.hex()[:16]}…, {self.codec.name})"


def prepare() -> None:
    """Have cbor2 import what it knows of others' types, which it does at the first link that it encodes: it
    takes 10 ms, for which nobody should have to wait later."""
    encode_node(Link(bytes(32), CidCodec.DAG_CBOR))


def encode_node(node: Node) -> bytes:
    """Canonical bytes of `node`. It is a bug of the caller if `node` holds anything but a Node."""
    _check(node, 0)
    return _encode(node)


def decode_node(encoded: bytes) -> Node:
    """The item in `encoded`; Corrupt unless these are its canonical bytes and nothing else."""
    [(node, stop)] = decode_run(encoded, 0, 1)
    if stop != len(encoded):
        raise Corrupt("not canonical DAG-CBOR")
    return node


def decode_run(encoded: bytes, start: int, count: int) -> Iterator[tuple[Node, int]]:
    """`count` items that lie one behind the other from byte `start`, each with the byte behind it.

    One item is in memory at a time. Corrupt at the first that is cut or not canonical.
    """
    stream = BytesIO(encoded)
    stream.seek(start)
    decoder = cbor2.CBORDecoder(
        stream,
        semantic_decoders=_ONLY_CIDS,
        max_depth=_MAX_DEPTH,
        allow_indefinite=False,
        allow_duplicate_keys=False,
        strict_hashable_types=True,
    )
    for _ in range(count):
        try:
            raw = decoder.decode()
            _check(raw, 0)
        except (cbor2.CBORError, ValueError, TypeError, RecursionError, OverflowError, MemoryError) as e:
            raise Corrupt(f"not DAG-CBOR: {e}") from None
        node = cast(Node, raw)
        again = _encode(node)
        stop = start + len(again)
        if encoded[start:stop] != again:
            raise Corrupt("not canonical DAG-CBOR")
        yield node, stop
        start = stop


def encode_array_head(count: int) -> bytes:
    """What stands before the `count` items of an array."""
    if count < 24:
        return bytes((0x80 | count,))
    log = next(log for log in range(4) if count < 1 << (8 << log))
    return bytes((0x80 | 24 + log,)) + count.to_bytes(1 << log, "big")


def decode_array_head(encoded: bytes, at: int) -> tuple[int, int]:
    """(items, byte behind the head) of the array that begins at byte `at`; Corrupt if none does."""
    first = encoded[at] if at < len(encoded) else 0
    extra = 0 if first & 0x1F < 24 else 1 << min((first & 0x1F) - 24, 4)
    stop = at + 1 + extra
    count = int.from_bytes(encoded[at + 1 : stop], "big") if extra else first & 0x1F
    if extra > 8 or encoded[at:stop] != encode_array_head(count):
        raise Corrupt("not the head of an array")
    return count, stop


def _encode(node: Node) -> bytes:
    return cbor2.dumps(node, canonical=True, default=_encode_link)


def _encode_link(encoder: cbor2.CBOREncoder, link: object) -> None:
    assert isinstance(link, Link)
    encoder.encode(cbor2.CBORTag(_CID_TAG, b"\x00" + cid_bytes(link.digest, link.codec)))


_LEAVES = frozenset((NoneType, bool, str, bytes, Link))


def _check(raw: object, depth: int) -> None:
    """ValueError unless `raw` is a Node. Exact types, so that none can encode in a way of its own."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    kind = type(raw)
    if kind is dict:
        for key, value in cast("dict[object, object]", raw).items():
            if type(key) is not str:
                raise ValueError("a map key is not a string")
            if type(value) not in _LEAVES:
                _check(value, depth + 1)
    elif kind is list:
        for value in cast("list[object]", raw):
            if type(value) not in _LEAVES:
                _check(value, depth + 1)
    elif kind is int:
        if not -(1 << 64) <= cast(int, raw) < 1 << 64:
            raise ValueError("an integer has more than 64 bits")
    elif kind not in _LEAVES:
        raise ValueError(f"a {kind.__name__} is not part of DAG-CBOR")


def _decode_cid(value: object, _immutable: bool) -> Link:
    if not isinstance(value, bytes) or value[:1] != b"\x00":
        raise ValueError("tag 42 does not hold a CID")
    try:
        codec, digest = parse_cid_bytes(value[1:])
    except InvalidRequest as e:
        raise ValueError(str(e)) from None
    return Link(digest, codec)


def _refuse_tag(_value: object, _immutable: bool) -> None:
    raise ValueError("a tag that is not a CID")


class _OnlyCids(Mapping[int, Callable[[object, bool], object]]):
    """What cbor2 does with a tag: all of them are claimed, so that none of its own decoders runs."""

    def __getitem__(self, tag: int) -> Callable[[object, bool], object]:
        return _decode_cid if tag == _CID_TAG else _refuse_tag

    def __iter__(self) -> Iterator[int]:
        return iter((_CID_TAG,))

    def __len__(self) -> int:
        return 1


_ONLY_CIDS = _OnlyCids()
