"""file_seal: with the file, the seal and the public key, a stranger tells the file from any other."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from golden import broken, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store.digests import FileDigests, digests_of
from ckptfs.store.errors import InvalidRequest
from ckptfs.store.file_seal import Judgement, decode_file_seal, judge_file, seal_file
from ckptfs.store.hashing import WholeHash, crc64
from ckptfs.store.signing import PublicKey, SigningKey

KEY, OTHER = SigningKey(b"k" * 32), SigningKey(b"o" * 32)


def digests(content: bytes) -> FileDigests:
    whole = WholeHash()
    whole.update(content)
    return digests_of(whole)


FILE = digests(b"the file")


@pytest.mark.parametrize("vector", vectors("file_seal"), ids=lambda v: v["name"])
def test_golden_seals(vector: dict[str, Any]) -> None:
    """As FORMAT.md describes it, step by step, and with nothing of ours but the signature and the CRC."""
    content, key = bytes.fromhex(vector["file"]), PublicKey(bytes.fromhex(vector["key"]))
    seal = bytes.fromhex(vector["seal"])
    message = b"ckptfs file seal 1\0" + len(content).to_bytes(8, "little")
    message += hashlib.sha256(content).digest() + blake3(content).digest()
    assert len(seal) == 80 and seal[72:] == bytes(8)
    assert int.from_bytes(seal[:8], "little") == crc64(message)
    assert key.has_signed(message, seal[8:72])
    assert judge_file(seal, digests(content), [key]) is Judgement.GOOD


def test_a_seal_is_for_one_file_and_one_key() -> None:
    seal = seal_file(KEY, FILE)
    assert judge_file(seal, FILE, [OTHER.public, KEY.public]) is Judgement.GOOD
    assert judge_file(seal, FILE, [OTHER.public]) is Judgement.OTHER_KEY
    assert judge_file(seal, FILE, []) is Judgement.OTHER_KEY
    assert judge_file(seal, digests(b"the filf"), [KEY.public]) is Judgement.OTHER_FILE


@pytest.mark.parametrize("field", ["size", "sha256", "blake3"])
def test_every_digest_counts(field: str) -> None:
    """So somebody who finds two files of one SHA-256 has found nothing yet."""
    other = replace(FILE, **{field: 9 if field == "size" else b"x" * 32})
    assert judge_file(seal_file(KEY, FILE), other, [KEY.public]) is Judgement.OTHER_FILE
    assert judge_file(seal_file(KEY, FILE), replace(FILE, crc64=1), [KEY.public]) is Judgement.GOOD


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 8 * 80 - 1))
def test_no_bit_of_a_seal_may_flip(bit: int) -> None:
    seal = bytearray(seal_file(KEY, FILE))
    seal[bit >> 3] ^= 1 << (bit & 7)
    found = judge_file(bytes(seal), FILE, [KEY.public])
    in_signature = 8 <= bit >> 3 < 72
    assert found is (Judgement.OTHER_KEY if in_signature else Judgement.DAMAGED)


def test_a_seal_of_a_history_is_none_of_a_file() -> None:
    """The messages begin differently, so a signature for one purpose is none for another."""
    message = b"ckptfs history seal 1\0" + FILE.size.to_bytes(8, "little") + FILE.sha256 + FILE.blake3
    seal = crc64(message).to_bytes(8, "little") + KEY.sign(message) + bytes(8)
    assert judge_file(seal, FILE, [KEY.public]) is Judgement.OTHER_FILE


def test_a_seal_is_read_as_bytes_and_as_digits() -> None:
    seal = seal_file(KEY, FILE)
    for encoded in (seal, seal.hex().encode(), seal.hex().upper().encode() + b"\n"):
        assert decode_file_seal(encoded) == seal


@settings(deadline=None, max_examples=200)
@given(broken(st.sampled_from([seal_file(KEY, FILE), seal_file(KEY, FILE).hex().encode()])))
def test_any_bytes_are_a_seal_or_refused(encoded: bytes) -> None:
    try:
        seal = decode_file_seal(encoded)
    except InvalidRequest:
        return
    assert seal in (encoded, bytes.fromhex(encoded.decode()) if len(encoded) > 80 else encoded)
    assert len(seal) == 80
