"""Proofs: complete by themselves, one byte string for one proof, and nothing in one can be changed."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import blake3
import pytest
import sample_proofs as sample
from golden import broken, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_proofs import (
    CONTENT,
    KEY,
    OTHER_KEY,
    PATH,
    SECOND_KEY,
    TENSOR_A,
    TENSOR_B,
    TENSOR_C,
    THIRD_KEY,
)

from ckptfs.store.dagcbor import decode_node, encode_node
from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.formats import Tensor
from ckptfs.store.formats.bounded_json import MAX_JSON_BYTES
from ckptfs.store.hashing import chunk_id
from ckptfs.store.history import decode_version
from ckptfs.store.keyring import make_rotation
from ckptfs.store.merkle import file_root, root_behind_range
from ckptfs.store.proof import (
    MAX_PIECES,
    Proof,
    ProvenPieces,
    decode_proof,
    encode_proof,
    make_statement,
    proof_json,
)
from ckptfs.store.proof_check import check_proof
from ckptfs.store.proof_making import proven_pieces
from ckptfs.store.recipe import HOLE, Piece, Recipe
from ckptfs.store.seal import Head
from ckptfs.store.signing import PublicKey, SigningKey

TENSORS = (None, TENSOR_A, TENSOR_B, TENSOR_C)


def again(proof: Proof) -> Proof:
    return decode_proof(encode_proof(proof_json(proof)))


# ---- the format, as FORMAT.md has it -----------------------------------------------------------------


def leaf(content: bytes) -> bytes:
    return hashlib.sha3_256(b"\0" + content).digest()


def node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha3_256(b"\1" + left + right).digest()


def walked(start: int, end: int, known: dict[int, bytes], given: list[bytes]) -> bytes:
    """The root of leaves `start` to `end`: what holds no known leaf is the next hash that is given."""
    if not any(start <= at < end for at in known):
        return given.pop(0)
    if end - start == 1:
        return leaf(known[start])
    half = 1
    while half * 2 < end - start:
        half *= 2
    left = walked(start, start + half, known, given)
    return node(left, walked(start + half, end, known, given))


@pytest.mark.parametrize("vector", vectors("proof"), ids=lambda v: v["name"])
def test_golden_proofs(vector: dict[str, Any]) -> None:
    """Verified step by step by what FORMAT.md says, with none of the functions that make or check one."""
    proof, content = vector["proof"], bytes.fromhex(vector["content"])
    history, file, part = proof["history"], proof["file"], proof["pieces"]
    unit, path = bytes.fromhex(history["unit"]), file["path"].encode("utf-8", "surrogateescape")
    chain = bytes.fromhex(history["before"])
    for row in history["records"]:
        payload = bytes([row["kind"]]) + bytes.fromhex(row["payload"])
        chain = hashlib.sha3_256(b"\2" + chain + payload).digest()
    assert chain.hex() == history["head"] and vector["head"].endswith(chain.hex())
    record: Any = decode_node(bytes.fromhex(history["records"][-1]["payload"]))
    if history["seal"] is not None:
        seal = bytes.fromhex(history["seal"]["seal"])
        key = PublicKey(bytes.fromhex(history["seal"]["key"]))
        assert key.has_signed(b"ckptfs history seal 1\0" + unit + chain, seal[8:72])

    root = leaf(len(path).to_bytes(4, "little") + path + bytes.fromhex(file["root"]))
    at, last = file["leaf"], file["leaves"] - 1
    for one in map(bytes.fromhex, file["inclusion"]):
        while not at & 1 and at == last:
            at, last = at >> 1, last >> 1
        root = node(one, root) if at & 1 else node(root, one)
        at, last = at >> 1, last >> 1
    assert root == record["root"]

    known, offset, lengths = {}, part["offset"], []
    for number, row in enumerate(part["rows"], part["first"]):
        length, identity = int(row.split()[0]), row.split()[1]
        taken = content[offset : offset + length]
        assert taken == bytes(length) if identity == "-" else blake3.blake3(taken).hexdigest() == identity
        known[number] = bytes(32) if identity == "-" else bytes.fromhex(identity)
        offset, lengths = offset + length, [*lengths, length]
    given = [bytes.fromhex(one) for one in part["inclusion"]]
    assert walked(0, part["count"], known, given).hex() == file["root"] and not given
    rotations = [bytes.fromhex(one) for one in proof.get("rotations", [])]
    assert proof["version"] == (2 if rotations else 1)
    signer = history["seal"] and history["seal"]["key"]
    for encoded in rotations:
        one: Any = decode_node(encoded)
        message = b"ckptfs key rotation 1\0" + one["old"] + one["new"] + one["time"].to_bytes(8, "little")
        assert one["old"].hex() == signer and PublicKey(one["old"]).has_signed(message, one["signature"])
        signer = one["new"].hex()
    if proof["statement"] is not None:
        assert proof["statement"]["key"] == signer
        added = {"rotations": rotations} if rotations else {}
        stated = encode_node(
            added
            | {
                "name": proof["statement"]["name"].encode("utf-8", "surrogateescape"),
                "head": chain,
                "path": path,
                "size": file["size"],
                "root": bytes.fromhex(file["root"]),
                "first": part["first"],
                "count": part["count"],
                "offset": part["offset"],
                "lengths": lengths,
                "tensor": proof["tensor"],
            }
        )
        message = b"ckptfs proof %d\0" % proof["version"] + unit + hashlib.sha3_256(stated).digest()
        key = PublicKey(bytes.fromhex(proof["statement"]["key"]))
        assert key.has_signed(message, bytes.fromhex(proof["statement"]["signature"]))


@pytest.mark.parametrize("vector", vectors("proof"), ids=lambda v: v["name"])
def test_golden_proofs_are_read_and_written_the_same(vector: dict[str, Any]) -> None:
    proof = decode_proof(json.dumps(vector["proof"]).encode())
    shown = check_proof(proof, [PublicKey(bytes.fromhex(vector["key"]))] if vector["key"] else ())
    assert str(shown.head) == vector["head"] and list(shown.gaps) == vector["gaps"]
    assert json.loads(encode_proof(proof_json(proof))) == vector["proof"]


# ---- what a proof shows ------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: t and t.name)
def test_what_is_signed_has_no_gap(tensor: Tensor | None) -> None:
    proof = again(sample.proof(tensor))
    for keys in ((), [KEY.public], [OTHER_KEY.public, KEY.public]):
        shown = check_proof(proof, keys)
        assert shown.gaps == () and shown.name == sample.NAME
        assert shown.sealed_by == shown.stated_by == KEY.public and shown.record.number == 1
    for expected in (shown.head, Head(shown.head.chain)):
        assert check_proof(proof, (), expected).gaps == ()


def test_what_nobody_has_signed_is_a_gap() -> None:
    unsealed, unstated = sample.proof(key=None), sample.proof(stated=False)
    assert len(check_proof(again(unsealed)).gaps) == 2  # who, and the length of the hole
    assert len(check_proof(again(unstated)).gaps) == 1
    assert len(check_proof(again(sample.proof(TENSOR_A, stated=False))).gaps) == 1
    head = check_proof(unsealed).head
    assert len(check_proof(again(unsealed), (), head).gaps) == 1


def test_other_keys_and_heads_are_refused() -> None:
    proof = sample.proof()
    head = check_proof(proof).head
    for keys, expected in (
        ([OTHER_KEY.public], None),
        ((), Head(bytes(32), 1)),
        ((), Head(head.chain, 2)),
        ([OTHER_KEY.public], head),
    ):
        with pytest.raises(Corrupt):
            check_proof(proof, keys, expected)
    with pytest.raises(Corrupt, match="nobody has signed"):
        check_proof(sample.proof(key=None), [KEY.public])


def test_a_statement_by_another_key_counts_only_if_both_are_given() -> None:
    plain = sample.proof(TENSOR_A, stated=False)
    proof = replace(plain, statement=make_statement(OTHER_KEY, plain, sample.NAME))
    for keys in ((), [KEY.public], [OTHER_KEY.public]):
        with pytest.raises(Corrupt):
            check_proof(proof, keys)
    assert check_proof(proof, [KEY.public, OTHER_KEY.public]).gaps == ()
    bare = sample.proof(TENSOR_A, key=None)
    with pytest.raises(Corrupt, match="nobody has signed"):
        check_proof(replace(bare, statement=make_statement(KEY, bare, sample.NAME)))


def test_whoever_has_no_key_cannot_say_that_a_tensor_is_another() -> None:
    """The pieces of c are in the file and lead to its root; that they are tensor a is signed by nobody."""
    proof = sample.proof(TENSOR_C)
    pieces = replace(proof.pieces, offset=TENSOR_A.offset)
    moved = replace(TENSOR_C, name="a", offset=TENSOR_A.offset)
    forged = replace(proof, pieces=pieces, tensor=moved)
    with pytest.raises(Corrupt, match="statement"):
        check_proof(forged)
    assert check_proof(replace(forged, statement=None)).gaps != ()
    longer = [replace(p, length=p.length + 1) if p.chunk is None else p for p in sample.proof().pieces.pieces]
    whole = sample.proof()
    stretched = replace(
        whole,
        file=replace(whole.file, size=whole.file.size + 1),
        pieces=replace(whole.pieces, pieces=tuple(longer)),
    )
    with pytest.raises(Corrupt, match="statement"):
        check_proof(stretched)
    assert check_proof(replace(stretched, statement=None)).gaps != ()


def test_a_list_is_no_object_and_an_object_no_list() -> None:
    """JSON that means the same to a careless reader is two texts for one proof."""
    whole = proof_json(sample.proof())
    scalar = proof_json(sample.proof(replace(TENSOR_A, shape=(), length=4, dtype="F32")))
    lists = [("file", "inclusion"), ("pieces", "inclusion"), ("pieces", "rows"), ("history", "records")]
    for top, way in [*((whole, way) for way in lists), (scalar, ("tensor", "shape"))]:
        assert put(top, way, []) != put(top, way, {})
        with pytest.raises(Corrupt, match=f"bad field {'.'.join(way)}"):
            decode_proof(encode_proof(put(top, way, {})))
    assert whole["pieces"]["inclusion"] == [], "and it was empty before"  # type: ignore[index, call-overload]
    for way in (("file",), ("history", "seal"), ("statement",)):
        with pytest.raises(Corrupt):
            decode_proof(encode_proof(put(whole, way, [])))


# ---- rotations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: t and t.name)
def test_any_one_key_of_those_that_followed_each_other_is_enough(tensor: Tensor | None) -> None:
    proof = again(sample.rotated(tensor))
    line = (KEY, SECOND_KEY, THIRD_KEY)
    for keys in ((), *([key.public] for key in line), [KEY.public, THIRD_KEY.public]):
        shown = check_proof(proof, keys)
        assert shown.gaps == () and shown.sealed_by == KEY.public and shown.stated_by == THIRD_KEY.public
    for others in ([OTHER_KEY], [KEY, OTHER_KEY], [THIRD_KEY, OTHER_KEY], [KEY, SECOND_KEY]):
        with pytest.raises(Corrupt):
            check_proof(proof, [key.public for key in others])


def test_a_rotation_alone_is_the_word_of_the_old_key_only() -> None:
    """Whoever has some key can sign that a known one follows it; and can sign with his own what he likes."""
    forged = sample.proof(TENSOR_A, key=OTHER_KEY, stated=False)
    own = make_rotation(OTHER_KEY, KEY.public, 1)
    true = sample.proof(TENSOR_A).statement
    assert true is not None
    whole = replace(forged, rotations=(own,))
    for statement in (
        None,
        true,
        make_statement(OTHER_KEY, forged, b"x"),
        make_statement(OTHER_KEY, whole, b"x"),
    ):
        with pytest.raises(Corrupt):
            check_proof(replace(whole, statement=statement), [KEY.public])
    # What the owner of KEY states of a version that a stranger has sealed is no word about the stranger.
    stated = replace(forged, statement=make_statement(KEY, forged, b"x"))
    for proof in (stated, replace(stated, rotations=(own,))):
        with pytest.raises(Corrupt):
            check_proof(proof, [KEY.public])


def test_rotations_that_do_not_lead_from_the_seal_to_the_statement_are_refused() -> None:
    proof = sample.rotated()
    first, second = proof.rotations
    stray = make_rotation(OTHER_KEY, KEY.public, 1)
    back = make_rotation(SECOND_KEY, KEY.public, 3)
    unsigned = replace(first, time_ns=first.time_ns + 1)
    for rotations in (
        (first,), (second,), (second, first), (stray, first, second), (first, second, second),
        (unsigned, second), (first, back, first, second),
    ):  # fmt: skip
        made = replace(proof, rotations=rotations)
        for changed in (made, replace(made, statement=make_statement(THIRD_KEY, made, sample.NAME))):
            for keys in ((), [KEY.public], [THIRD_KEY.public]):
                with pytest.raises(Corrupt):
                    check_proof(again(changed), keys)
    with pytest.raises(Corrupt, match="rotations"):
        check_proof(replace(proof, statement=None))
    bare = sample.proof(key=None)
    with pytest.raises(Corrupt, match="rotations"):
        check_proof(replace(bare, rotations=proof.rotations, statement=proof.statement))


def test_the_version_of_the_format_says_whether_there_are_rotations() -> None:
    plain, rotated = proof_json(sample.proof()), proof_json(sample.rotated())
    assert (plain["version"], rotated["version"]) == (1, 2)
    for wrong in (
        plain | {"version": 2}, plain | {"rotations": []}, plain | {"version": 2, "rotations": []},
        rotated | {"version": 1}, rotated | {"version": 3}, rotated | {"rotations": {}},
        rotated | {"rotations": rotated["rotations"] * 501},  # type: ignore[operator]
    ):  # fmt: skip
        with pytest.raises(Corrupt):
            decode_proof(encode_proof(wrong))


# ---- tampering ---------------------------------------------------------------------------------------


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value that holds no other."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    inner = [place for key, child in children for place in places(child, (*way, key))]
    yield from inner or [way]


def changed(value: Any) -> Iterator[Any]:
    """Other values of the same kind, and of another."""
    match value:
        case int():
            yield from (value + 1, value - 1, 1 << 62, 1 << 63, str(value), None)
        case str() if value and set(value) <= set("0123456789abcdef"):
            flipped = [("1" if value[0] != "1" else "2") + value[1:]]
            flipped += [value[:-1] + ("1" if value[-1] != "1" else "2")]
            yield from (*flipped, value[:-2], value + "00", "", value.upper() + "A")
        case str():
            yield from (value + "x", value[1:], "", 7)
        case None:
            yield from (0, {}, [])
        case _:
            yield from (None, 7)


def put(top: Any, way: tuple[Any, ...], value: Any) -> Any:
    edited = copy.deepcopy(top)
    inner = edited
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = value
    return edited


@pytest.mark.parametrize(
    ("proof", "known"),
    [
        (sample.proof(), KEY),
        (sample.proof(TENSOR_B), KEY),
        (sample.rotated(TENSOR_B), KEY),
        (sample.rotated(TENSOR_B), THIRD_KEY),
    ],
    ids=["file", "tensor", "rotated, old key", "rotated, new key"],
)
def test_every_field_that_is_changed_is_noticed(proof: Proof, known: SigningKey) -> None:
    whole = proof_json(proof)
    tried = 0
    for way in places(whole):
        value: Any = whole
        for key in way:
            value = value[key]
        for other in changed(value):
            if other == value:
                continue
            tried += 1
            with pytest.raises(Corrupt):
                check_proof(decode_proof(json.dumps(put(whole, way, other)).encode()), [known.public])
    assert tried > 150


@pytest.mark.parametrize("tensor", [None, TENSOR_B], ids=["file", "tensor"])
def test_lists_that_are_cut_turned_or_longer_are_noticed(tensor: Tensor | None) -> None:
    whole: Any = proof_json(sample.proof(tensor))
    for way in (("history", "records"), ("file", "inclusion"), ("pieces", "rows"), ("pieces", "inclusion")):
        items = whole[way[0]][way[1]]
        for other in (
            items[1:],
            items[:-1],
            items[::-1],
            [*items, *items[-1:]],
            [*items, "00" * 32],
            {"a": 1},
            None,
        ):
            if other != items:
                with pytest.raises(Corrupt):
                    check_proof(decode_proof(json.dumps(put(whole, way, other)).encode()), [KEY.public])


def test_fields_that_are_missing_twice_there_or_unknown_are_refused() -> None:
    whole: Any = proof_json(sample.proof(TENSOR_A))
    encoded = encode_proof(whole).decode()
    for place in (whole, *(whole[name] for name in ("history", "file", "pieces", "tensor", "statement"))):
        for name in list(place):
            kept = place.pop(name)
            with pytest.raises(Corrupt):
                decode_proof(encode_proof(whole))
            place[name] = kept
            twice = encoded.replace(f'"{name}":', f'"{name}":0,"{name}":', 1)
            with pytest.raises(Corrupt):
                decode_proof(twice.encode())
        place["more"] = 1
        with pytest.raises(Corrupt):
            decode_proof(encode_proof(whole))
        del place["more"]
    assert again(sample.proof(TENSOR_A)) == decode_proof(encode_proof(whole))


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"kind":' + b"9" * 100_000 + b"}",
        b'{"kind":NaN}',
        b'{"kind":1e999}',
        b"{" + b'"a":1,' * 100_000 + b'"b":2}',
        b"[" + b"0," * (MAX_JSON_BYTES // 2),
    ],
    ids=lambda b: repr(b[:12]),
)
def test_what_is_no_proof_is_refused_with_one_line(hostile: bytes) -> None:
    with pytest.raises(Corrupt) as caught:
        decode_proof(hostile)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("path", ["", "a\0b", "/a", "a/", "a//b", "../a", "a/.", "\ud800"])
def test_paths_that_no_file_has_are_refused(path: str) -> None:
    whole = proof_json(sample.proof())
    with pytest.raises(Corrupt, match=r"file\.path"):
        decode_proof(encode_proof(put(whole, ("file", "path"), path)))


def test_a_proof_has_so_many_pieces_and_no_more() -> None:
    proof = sample.proof(stated=False)
    piece = proof.pieces.pieces[1]

    def with_pieces(count: int) -> Proof:
        many = ProvenPieces(first=0, count=count, offset=0, pieces=(piece,) * count, inclusion=())
        return replace(proof, pieces=many)

    assert len(encode_proof(proof_json(with_pieces(MAX_PIECES)))) < MAX_JSON_BYTES
    with pytest.raises(InvalidRequest, match="one by one"):
        proof_json(with_pieces(MAX_PIECES + 1))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.data())
def test_any_range_of_any_file_is_proven(lengths: list[int], data: st.DataObject) -> None:
    """Whatever the cut and wherever a tensor lies: its pieces cover it, and lead to the file's root."""
    holes = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    pieces = [Piece(n, None if at in holes else chunk_id(bytes([at] * n))) for at, n in enumerate(lengths)]
    recipe = Recipe(pieces)
    start = data.draw(st.integers(0, recipe.size - 1))
    stop = data.draw(st.integers(start + 1, recipe.size))
    part = proven_pieces(recipe, Tensor("w", start, stop - start, "U8", (stop - start,)))
    assert part.offset <= start < part.offset + part.pieces[0].length
    assert part.end - part.pieces[-1].length < stop <= part.end
    leaves = [piece.chunk or HOLE for piece in part.pieces]
    assert root_behind_range(part.count, part.first, leaves, part.inclusion) == file_root(
        recipe.root_leaves()
    )


WHOLE = {tensor: sample.proof(tensor) for tensor in TENSORS}


@settings(deadline=None, max_examples=500)
@given(st.sampled_from(TENSORS), st.data())
def test_any_bytes_are_a_proof_of_the_same_or_corrupt(tensor: Tensor | None, data: st.DataObject) -> None:
    encoded = data.draw(broken(st.just(encode_proof(proof_json(WHOLE[tensor])))))
    try:
        proof = decode_proof(encoded)
        check_proof(proof, [KEY.public])
    except Corrupt:
        return
    assert proof in (WHOLE[tensor], replace(WHOLE[tensor], statement=None))


def test_the_sample_is_what_it_says() -> None:
    assert len(CONTENT) == sum(sample.LENGTHS) and sample.recipe().size == len(CONTENT)
    record = decode_version(sample.proof().batch.records[-1].payload)
    assert record.files == 5 and sample.proof().file.path == PATH
