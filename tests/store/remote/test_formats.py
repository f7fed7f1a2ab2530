"""The objects of a remote: golden bytes, round trips, and what no decoder may let pass."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from golden import plain, vectors
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.errors import Corrupt, InvalidRequest, Unsupported
from ckptfs.store.hashing import chunk_id, crc64
from ckptfs.store.ids import ChunkId, UnitId
from ckptfs.store.remote.box import (
    BLOCK_BYTES,
    HEADER_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    RemoteKey,
    enclosed_size,
    plain_name,
    remote_key_of,
)
from ckptfs.store.remote.head import Piece, RemoteHead, decode_head, merged_pieces
from ckptfs.store.remote.kept import EVERYTHING, Kept, decode_kept
from ckptfs.store.remote.log_entry import Claim, Decision, Extension, Join, decode_entry, encode_entry
from ckptfs.store.remote.names import (
    decode_remote_format,
    encode_remote_format,
    head_key,
    new_format,
    parse_head_key,
    parse_shard_key,
    shard_key,
)
from ckptfs.store.remote.pack import encode_pack, pack_chunks, pack_rows
from ckptfs.store.remote.shard import PackFacts, Shard, decode_shard, encode_shard, find_rows, keys_of

PAYLOADS = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=20, unique=True)
KEY = RemoteKey(bytes(range(32)))
GENERATION_AT = range(12, 16)


def chunks_of(payloads: list[bytes]) -> list[tuple[ChunkId, bytes]]:
    return [(chunk_id(payload), payload) for payload in payloads]


@pytest.mark.parametrize("vector", vectors("remote"), ids=lambda v: v["name"])
def test_golden_objects(vector: dict[str, object]) -> None:
    encoded, said = bytes.fromhex(str(vector["hex"])), vector["said"]
    match vector["kind"]:
        case "pack":
            assert plain(pack_rows(encoded)) == said
            assert (
                encode_pack(list(pack_chunks(encoded)), int.from_bytes(encoded[12:16], "little")) == encoded
            )
        case "shard":
            shard = decode_shard(encoded)
            # Older vectors do not say that the generation is 0.
            packs = [{**{"generation": 0}, **pack} for pack in cast("list[list[dict[str, Any]]]", said)[0]]
            rows = cast("list[list[Any]]", said)[1]
            assert plain([shard.packs, [list(row.item()) for row in shard.rows]]) == [packs, rows]
            assert _encoded_again(shard) == encoded
        case "entry":
            assert plain(decode_entry(encoded, 300)) == said
            assert encode_entry(300, decode_entry(encoded, 300)) == encoded
        case "kept":
            kept = decode_kept(encoded)
            parts = [kept.claim, sorted(kept.units), sorted(kept.shards), sorted(kept.dropped)]
            assert plain(parts) == said and kept.encode() == encoded
        case "head":
            head = decode_head(encoded)
            # Older vectors do not say that nothing was let go.
            assert plain(head) == {**{"let_go": []}, **cast("dict[str, Any]", said)}
            assert head.encode() == encoded
        case "format":
            form = decode_remote_format(encoded)
            assert plain(form) == said and encode_remote_format(form) == encoded
        case "box":
            content = RemoteKey(bytes(32)).disclose("packs/ab", encoded)
            assert plain([content, RemoteKey(bytes(32)).name(content), RemoteKey(bytes(32)).check]) == said
            salt = encoded[HEADER_BYTES - SALT_BYTES : HEADER_BYTES]
            assert RemoteKey(bytes(32)).enclose("packs/ab", content, salt) == encoded
        case kind:
            raise AssertionError(kind)


def _encoded_again(shard: Shard) -> bytes:
    listed: list[list[tuple[ChunkId, int, int]]] = [[] for _ in shard.packs]
    for row in shard.rows:
        chunk, offset = ChunkId(row["chunk"].tobytes()), int(row["offset"])
        listed[int(row["pack"])].append((chunk, offset, int(row["length"])))
    return encode_shard(list(zip(shard.packs, listed, strict=True)))


@given(PAYLOADS)
def test_a_pack_holds_its_chunks(payloads: list[bytes]) -> None:
    encoded = encode_pack(chunks_of(payloads))
    assert list(pack_chunks(encoded)) == chunks_of(payloads)
    for (chunk, payload), (listed, offset, length) in zip(
        chunks_of(payloads), pack_rows(encoded), strict=True
    ):
        assert chunk == listed and encoded[offset : offset + length] == payload


@given(PAYLOADS, st.data())
def test_a_flipped_bit_of_a_pack_is_found(payloads: list[bytes], data: st.DataObject) -> None:
    encoded = bytearray(encode_pack(chunks_of(payloads)))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    name = plain_name(encoded)
    encoded[bit // 8] ^= 1 << bit % 8
    assert plain_name(encoded) != name
    if bit // 8 not in GENERATION_AT:
        with pytest.raises((Corrupt, Unsupported)):
            list(pack_chunks(encoded))


@given(st.lists(PAYLOADS, min_size=1, max_size=4))
def test_a_shard_finds_every_chunk(packs: list[list[bytes]]) -> None:
    encoded_packs = [encode_pack(chunks_of(payloads)) for payloads in packs]
    facts = [(PackFacts(plain_name(pack), len(pack)), pack_rows(pack)) for pack in encoded_packs]
    shard = decode_shard(encode_shard(facts))
    assert shard.packs == tuple(pack for pack, _ in facts)
    every = {chunk: payload for payloads in packs for chunk, payload in chunks_of(payloads)}
    assert len(shard.rows) == len(every)
    wanted = [*every, ChunkId(bytes(32)), ChunkId(b"\xff" * 32)]
    numbers = find_rows(shard.rows, keys_of(wanted)).tolist()
    assert numbers[-2:] == [-1, -1]
    for chunk, number in zip(every, numbers, strict=False):
        row = shard.rows[number]
        pack = encoded_packs[int(row["pack"])]
        start = int(row["offset"])
        assert pack[start : start + int(row["length"])] == every[chunk]


def test_ids_that_end_in_zeros_are_told_apart() -> None:
    """numpy takes no notice of zeros at the end of a byte string."""
    ids = [
        ChunkId(bytes(32)),
        ChunkId(bytes(31) + b"\1"),
        ChunkId(b"\1" + bytes(31)),
        ChunkId(b"\1\1" + bytes(30)),
    ]
    listed = [(chunk, 10 * number, 10) for number, chunk in enumerate(ids)]
    shard = decode_shard(encode_shard([(PackFacts(bytes(32), 1000), listed)]))
    assert find_rows(shard.rows, keys_of(ids)).tolist() == [0, 1, 2, 3]
    assert find_rows(shard.rows, keys_of([ChunkId(b"\1\0\1" + bytes(29))])).tolist() == [-1]
    assert find_rows(shard.rows[:0], keys_of(ids)).tolist() == [-1] * 4
    assert find_rows(shard.rows, keys_of([])).tolist() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("pack", 1), ("offset", 991), ("stored", 11), ("length", 9), ("reserved", np.void(b"\1\0\0"))],
)
def test_a_shard_that_makes_no_sense_is_corrupt(field: str, value: object) -> None:
    encoded = bytearray(encode_shard([(PackFacts(bytes(32), 1000), [(ChunkId(b"a" * 32), 0, 10)])]))
    shard = decode_shard(encoded)
    shard.rows[field] = value
    encoded[-8 - shard.rows.nbytes : -8] = shard.rows.tobytes()
    encoded[-8:] = crc64(encoded[:-8]).to_bytes(8, "little")
    with pytest.raises(Corrupt):
        decode_shard(encoded)


def test_a_codec_of_a_later_program_is_named() -> None:
    encoded = bytearray(encode_shard([(PackFacts(bytes(32), 1000), [(ChunkId(b"a" * 32), 0, 10)])]))
    encoded[-8 - 4] = 9
    encoded[-8:] = crc64(encoded[:-8]).to_bytes(8, "little")
    with pytest.raises(Unsupported, match="codec 9"):
        decode_shard(encoded)
    pack = bytearray(encode_pack(chunks_of([b"abc"])))
    pack[16 + 40] = 9
    with pytest.raises(Unsupported, match="codec 9"):
        pack_rows(pack)


HEADS = st.builds(
    RemoteHead,
    unit=st.binary(min_size=16, max_size=16).map(UnitId),
    sequence=st.integers(1, (1 << 63) - 1),
    name=st.binary(min_size=1, max_size=30).filter(lambda name: b"\0" not in name),
    node=st.text(max_size=20),
    generation=st.integers(0, 1 << 40),
    pieces=st.lists(
        st.builds(Piece, st.binary(min_size=32, max_size=32), st.integers(1, 1 << 40)), max_size=5
    ).map(tuple),
    chain=st.binary(min_size=32, max_size=32),
    versions=st.sets(st.integers(1, 1 << 40), max_size=20).map(lambda numbers: tuple(sorted(numbers))),
    let_go=st.sets(st.integers(1 << 41, 1 << 42), max_size=5).map(lambda numbers: tuple(sorted(numbers))),
)


@given(HEADS, st.data())
def test_a_head_is_what_it_was_or_corrupt(head: RemoteHead, data: st.DataObject) -> None:
    encoded = bytearray(head.encode())
    assert decode_head(encoded) == head
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        decode_head(encoded)
    with pytest.raises(Corrupt):
        decode_head(head.encode() + b"\0")


def test_a_head_that_makes_no_sense_is_corrupt() -> None:
    good = RemoteHead(unit=UnitId(b"u" * 16), sequence=1, name=b"run", node="n")
    assert decode_head(good.encode()) == good
    changes: list[dict[str, Any]] = [
        {"unit": UnitId(b"u")},
        {"name": b""},
        {"name": b"a\0"},
        {"sequence": 0},
        {"generation": -1},
        {"chain": b"c"},
        {"versions": (2, 1)},
        {"versions": (1, 1)},
        {"versions": (0,)},
        {"versions": (2,), "let_go": (2,)},
        {"let_go": (2, 1)},
        {"pieces": (Piece(b"n", 1),)},
        {"pieces": (Piece(bytes(32), 0),)},
    ]
    for change in changes:
        bad = dataclasses.replace(good, **change)
        with pytest.raises(Corrupt):
            decode_head(bad.encode())


@given(st.lists(st.integers(1, 1000), max_size=300))
def test_pieces_stay_few(added: list[int]) -> None:
    """As many as a number has digits; and each is longer than the one behind it."""
    pieces: tuple[Piece, ...] = ()
    sent = 0
    for size in added:
        kept = merged_pieces(pieces, size)
        new = size + sum(piece.size for piece in pieces[kept:])
        sent += new
        pieces = (*pieces[:kept], Piece(bytes(32), new))
    sizes = [piece.size for piece in pieces]
    assert sum(sizes) == sum(added) and sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    assert sent <= sum(added) * (1 + len(added).bit_length() + 10)


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5])
def test_what_is_enclosed_is_disclosed(size: int) -> None:
    content, salt = os.urandom(size), os.urandom(SALT_BYTES)
    enclosed = KEY.enclose("packs/a", content, salt)
    assert len(enclosed) == enclosed_size(size)
    assert KEY.disclose("packs/a", enclosed) == content
    step = BLOCK_BYTES + TAG_BYTES
    last = max(0, size - 1) // BLOCK_BYTES
    for number in range(last + 1):
        block = enclosed[HEADER_BYTES + number * step : HEADER_BYTES + (number + 1) * step]
        part = KEY.disclose_blocks("packs/a", enclosed[:HEADER_BYTES], block, number, last)
        assert part == content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def test_nothing_of_an_enclosed_object_can_be_changed() -> None:
    content = os.urandom(2 * BLOCK_BYTES + 100)
    enclosed = KEY.enclose("packs/a", content, bytes(SALT_BYTES))
    step = BLOCK_BYTES + TAG_BYTES
    body = enclosed[HEADER_BYTES:]
    blocks = [body[at : at + step] for at in range(0, len(body), step)]
    cut = enclosed[:HEADER_BYTES] + b"".join(blocks[:2])
    swapped = enclosed[:HEADER_BYTES] + blocks[1] + blocks[0] + blocks[2]
    flipped = [
        enclosed[:at] + bytes([enclosed[at] ^ 1]) + enclosed[at + 1 :]
        for at in (0, 5, 6, 8, 20, HEADER_BYTES, HEADER_BYTES + step - 1, len(enclosed) - 1)
    ]
    for wrong in (cut, swapped, *flipped, enclosed[:-1], enclosed[:HEADER_BYTES], enclosed[:10], b""):
        with pytest.raises(Corrupt):
            KEY.disclose("packs/a", wrong)
    for key, name in ((KEY, "packs/b"), (RemoteKey(bytes(32)), "packs/a")):
        with pytest.raises(Corrupt, match="another key"):
            key.disclose(name, enclosed)


def test_nothing_of_content_shows() -> None:
    content = b"\0" * 1000
    first, second = (KEY.enclose("a", content, os.urandom(SALT_BYTES)) for _ in "ab")
    assert first[HEADER_BYTES:] != second[HEADER_BYTES:] and content[:16] not in first
    names = {KEY.name(content), RemoteKey(bytes(32)).name(content), plain_name(content)}
    assert len(names) == 3 and KEY.name(content) == KEY.name(content)


def test_key_files() -> None:
    assert remote_key_of("5e" * 32 + "\n").check == RemoteKey(b"\x5e" * 32).check
    for text in ("", "5e" * 31, "5e" * 33, "xy" * 32, "é" * 64):
        with pytest.raises(InvalidRequest, match="not the key of a remote"):
            remote_key_of(text)


def test_what_says_what_a_remote_is() -> None:
    form = new_format("ab" * 16)
    assert decode_remote_format(encode_remote_format(form)) == form
    with pytest.raises(Unsupported, match="sharded-heads"):
        decode_remote_format(encode_remote_format(msgspec.structs.replace(form, incompat=("sharded-heads",))))
    with pytest.raises(Unsupported, match="format 2"):
        decode_remote_format(encode_remote_format(msgspec.structs.replace(form, version=2)))
    for wrong in (
        b"",
        b"{}",
        b"{}x",
        b"[]",
        b'{"kind": "another"}',
        b'{"kind": 3}',
        b"[" * 10_000,
        b" " * (1 << 17),
    ):
        with pytest.raises(Corrupt):
            decode_remote_format(wrong)


def test_keys_of_objects() -> None:
    unit = UnitId(bytes(range(16)))
    assert head_key(unit, 255) == "heads/000102030405060708090a0b0c0d0e0f/00000000000000ff"
    assert parse_head_key(head_key(unit, 255)) == (unit, 255)
    assert parse_shard_key(shard_key(bytes(32))) == bytes(32)
    for wrong in (
        "heads/00/0000000000000001",
        head_key(unit, 0),
        head_key(unit, 1).upper(),
        "heads/x/y",
        "a",
    ):
        assert parse_head_key(wrong) is None
    for wrong in ("shards/00", "shards/" + "0" * 63, "shards/" + "A" * 64, "packs/" + "0" * 64, ""):
        assert parse_shard_key(wrong) is None


ENTRIES = st.one_of(
    st.builds(
        Join,
        st.binary(min_size=16, max_size=16).map(UnitId),
        st.binary(min_size=1, max_size=20).filter(lambda name: b"\0" not in name),
        st.text(max_size=20),
    ),
    st.builds(Claim, st.text(max_size=20), st.binary(min_size=16, max_size=16)),
    st.builds(Extension, st.integers(1, 99), st.binary(min_size=16, max_size=16)),
    st.builds(Decision, st.integers(1, 99), st.sampled_from([b"", b"k" * 32])),
)
NAMES = st.frozensets(st.binary(min_size=32, max_size=32), max_size=5)
KEPTS = st.builds(
    Kept,
    st.integers(1, 1 << 32),
    st.frozensets(st.binary(min_size=16, max_size=16).map(UnitId), max_size=5),
    NAMES,
    NAMES,
)


@given(ENTRIES, st.data())
def test_an_entry_of_the_log_is_what_it_was_or_corrupt(
    entry: Join | Claim | Decision | Extension, data: st.DataObject
) -> None:
    encoded = bytearray(encode_entry(100, entry))
    assert decode_entry(encoded, 100) == entry
    with pytest.raises(Corrupt):
        decode_entry(encoded, 101)
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        decode_entry(encoded, 100)


def test_an_entry_that_makes_no_sense_is_corrupt() -> None:
    for entry in (
        Join(UnitId(b"u"), b"run", "n"),
        Join(UnitId(bytes(16)), b"", "n"),
        Join(UnitId(bytes(16)), b"a\0", "n"),
        Claim("n", b"short"),
        Decision(0),
        Decision(100),
        Decision(1, b"short"),
        Extension(100, bytes(16)),
        Extension(1, b"short"),
    ):
        with pytest.raises(Corrupt):
            decode_entry(encode_entry(100, entry), 100)


@given(KEPTS, st.data())
def test_what_is_kept_is_what_it_was_or_corrupt(kept: Kept, data: st.DataObject) -> None:
    encoded = bytearray(kept.encode())
    assert decode_kept(encoded) == kept
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        decode_kept(encoded)


def test_what_counts() -> None:
    kept = Kept(7, shards=frozenset({b"s" * 32}), dropped=frozenset({b"d" * 32}))
    good, gone, new = PackFacts(b"p" * 32, 1, 6), PackFacts(b"d" * 32, 1, 6), PackFacts(b"n" * 32, 1, 7)
    assert [kept.counts(b"s" * 32, pack) for pack in (good, gone, new)] == [True, False, True]
    assert [kept.counts(b"t" * 32, pack) for pack in (good, gone, new)] == [False, False, True]
    assert EVERYTHING.counts(b"t" * 32, PackFacts(b"p" * 32, 1))
