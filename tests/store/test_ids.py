"""Content ids against the independent `multiformats` library, and the strictness of their text."""

from __future__ import annotations

import pytest
from golden import vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from multiformats import CID

from ckptfs.store.errors import InvalidRequest
from ckptfs.store.ids import CidCodec, cid_bytes, cid_text, parse_cid_bytes, parse_cid_text

DIGESTS = st.binary(min_size=32, max_size=32)
CODECS = st.sampled_from(CidCodec)
NAMES = {CidCodec.RAW: "raw", CidCodec.DAG_CBOR: "dag-cbor"}


@pytest.mark.parametrize("vector", vectors("ids"), ids=lambda v: v["text"][:12])
def test_golden_ids(vector: dict[str, str]) -> None:
    digest, codec = bytes.fromhex(vector["digest"]), CidCodec[vector["codec"]]
    assert cid_bytes(digest, codec).hex() == vector["binary"]
    assert cid_text(digest, codec) == vector["text"]
    assert parse_cid_text(vector["text"]) == (codec, digest)


@settings(max_examples=50, deadline=None)
@given(DIGESTS, CODECS)
def test_the_referee_agrees(digest: bytes, codec: CidCodec) -> None:
    referee = CID("base32", 1, NAMES[codec], ("blake3", digest))
    assert bytes(referee) == cid_bytes(digest, codec)
    assert str(referee) == cid_text(digest, codec)
    decoded = CID.decode(cid_text(digest, codec))
    assert (decoded.codec.name, decoded.raw_digest) == (NAMES[codec], digest)


@given(DIGESTS, CODECS)
def test_what_is_encoded_is_decoded(digest: bytes, codec: CidCodec) -> None:
    assert parse_cid_bytes(cid_bytes(digest, codec)) == (codec, digest)
    assert parse_cid_text(cid_text(digest, codec)) == (codec, digest)


@given(
    st.one_of(
        st.text(), st.text("abcdefghijklmnopqrstuvwxyz234567=", min_size=50, max_size=64).map("b".__add__)
    )
)
def test_any_text_is_the_one_spelling_of_an_id_or_refused(text: str) -> None:
    try:
        codec, digest = parse_cid_text(text)
    except InvalidRequest:
        return
    assert cid_text(digest, codec) == text


@given(DIGESTS, CODECS, st.integers(0, 58), st.sampled_from("ABCabc234=18 é"))
def test_a_changed_letter_is_another_id_or_refused(
    digest: bytes, codec: CidCodec, at: int, letter: str
) -> None:
    text = cid_text(digest, codec)
    changed = text[:at] + letter + text[at + 1 :]
    try:
        assert parse_cid_text(changed) != (codec, digest) or changed == text
    except InvalidRequest:
        assert changed != text


@pytest.mark.parametrize(
    "make",
    [
        lambda cid: cid[:-1],
        lambda cid: cid + b"\0",
        lambda cid: b"\x00" + cid[1:],
        lambda cid: b"\x81\x00" + cid[1:],  # a longer spelling of version 1
        lambda cid: cid[:1] + b"\x70" + cid[2:],  # dag-pb
        lambda cid: cid[:2] + b"\x12" + cid[3:],  # SHA2-256
        lambda cid: cid[:3] + b"\x10" + cid[4:20],  # truncated digest
        lambda cid: b"",
    ],
)
def test_other_cids_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest):
        parse_cid_bytes(make(cid_bytes(bytes(32), CidCodec.RAW)))


@pytest.mark.parametrize("text", ["", "b", "z" * 59, "B" + "a" * 58, "b" + "0" * 58, "bé" + "a" * 57, "b\0"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_cid_text(text)
