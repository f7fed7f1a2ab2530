"""seal: one byte string for one seal, and it speaks for nothing but the records it was made for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from golden import broken, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.frames import Frame, decode_frames
from ckptfs.store.hashing import crc64
from ckptfs.store.history import GENESIS
from ckptfs.store.history_check import Fault, check_history
from ckptfs.store.history_scan import scan_history, whole_batches
from ckptfs.store.ids import UnitId
from ckptfs.store.seal import (
    SEAL_BYTES,
    Head,
    SealRecord,
    chain_behind,
    chained,
    decode_seal,
    head_of,
    make_seal,
)
from ckptfs.store.signing import PublicKey, SigningKey

KEY = SigningKey(bytes(range(32)))
UNIT = UnitId(b"u" * 16)
SEALS = st.builds(
    SealRecord,
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.integers(1, 5),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=SEAL_BYTES, max_size=SEAL_BYTES),
)


@pytest.mark.parametrize("vector", vectors("seal"), ids=lambda v: v["name"])
def test_golden_histories(vector: dict[str, Any]) -> None:
    """A whole history file, as FORMAT.md describes it and some version of ckptfs wrote it."""
    encoded, unit = bytes.fromhex(vector["history"]), UnitId(bytes.fromhex(vector["unit"]))
    key = PublicKey(bytes.fromhex(vector["key"]))
    frames = list(decode_frames(encoded))
    assert [frame.kind for frame in frames] == vector["kinds"]
    chain = GENESIS
    for frame in frames:
        if frame.kind != 9:
            chain = chained(chain, frame.kind, frame.payload)
            continue
        seal = decode_seal(frame.payload)
        assert seal.encode() == frame.payload
        assert seal.head == chain and seal.key == key.raw
        message = b"ckptfs history seal 1\0" + unit + chain
        assert key.has_signed(message, seal.seal[8:72]) and seal.seal[72:] == bytes(8)
        assert int.from_bytes(seal.seal[:8], "little") == crc64(message)
    report = check_history(unit, scan_history(encoded, 0), [key])
    assert report.findings == [] and str(report.head) == vector["head"]


@settings(deadline=None)
@given(SEALS)
def test_what_is_encoded_is_decoded(seal: SealRecord) -> None:
    assert decode_seal(seal.encode()) == seal


@settings(deadline=None, max_examples=300)
@given(broken(SEALS.map(lambda seal: seal.encode())))
def test_any_bytes_are_a_seal_or_corrupt(encoded: bytes) -> None:
    try:
        seal = decode_seal(encoded)
    except Corrupt:
        return
    assert seal.encode() == encoded


def test_a_seal_is_for_one_unit_one_key_and_one_head() -> None:
    head = chained(GENESIS, 2, b"record")
    seal = make_seal(KEY, UNIT, GENESIS, 1, head)
    assert len(seal.seal) == SEAL_BYTES == 80
    assert seal.is_whole(UNIT) and seal.is_signed_by(KEY.public, UNIT)
    stranger = UnitId(b"v" * 16)
    assert not seal.is_whole(stranger) and not seal.is_signed_by(KEY.public, stranger)
    assert not seal.is_signed_by(SigningKey(b"x" * 32).public, UNIT)
    assert not replace(seal, head=GENESIS).is_signed_by(KEY.public, UNIT)
    torn = replace(seal, seal=bytes([seal.seal[0] ^ 1]) + seal.seal[1:])
    assert not torn.is_whole(UNIT) and torn.is_signed_by(KEY.public, UNIT)
    used = replace(seal, seal=seal.seal[:-1] + b"\1")  # What is reserved is zero.
    assert not used.is_whole(UNIT)


def test_a_chain_tells_kinds_and_borders_apart() -> None:
    ends = {
        chain_behind([Frame(3, 1, b"ab"), Frame(3, 2, b"c")]),
        chain_behind([Frame(3, 1, b"a"), Frame(3, 2, b"bc")]),
        chain_behind([Frame(3, 1, b"abc")]),
        chain_behind([Frame(4, 1, b"abc")]),
        chain_behind([Frame(3, 2, b"c"), Frame(3, 1, b"ab")]),
        chain_behind([]),
    }
    assert len(ends) == 6


def test_a_chain_goes_on_from_what_a_seal_says() -> None:
    seal = make_seal(KEY, UNIT, GENESIS, 1, b"h" * 32)
    behind = chained(b"h" * 32, 2, b"x")
    assert chain_behind([Frame(2, 1, b"lost"), Frame(9, 2, seal.encode()), Frame(2, 3, b"x")]) == behind


@pytest.mark.parametrize(
    "text", ["", "12", "12:", "x:" + "0" * 64, "0" * 63, "12:" + "g" * 64, "-1:" + "0" * 64]
)
def test_what_is_no_head_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        head_of(text)


def test_heads_are_read_as_they_are_printed() -> None:
    for head in (Head(b"h" * 32), Head(b"h" * 32, 12)):
        assert head_of(f" {head}\n") == head


def test_an_empty_history_is_a_finding() -> None:
    report = check_history(UNIT, scan_history(b"", 0), [KEY.public])
    assert [finding.fault for finding in report.findings] == [Fault.DAMAGED]


@settings(deadline=None, max_examples=100)
@given(broken(st.just(bytes.fromhex(vectors("seal")[0]["history"]))))
def test_any_bytes_are_a_history_with_or_without_findings(encoded: bytes) -> None:
    unit = UnitId(bytes.fromhex(vectors("seal")[0]["unit"]))
    scan = scan_history(encoded, 0)
    check_history(unit, scan, [KEY.public], Head(b"h" * 32, 3))
    assert whole_batches(scan).end <= scan.end
