"""Content ids: raw 32-byte digests inside, CIDv1 text where people meet them.

One rule: an id is a type of its own and is never confused with other bytes; text is decoded
strictly (minimal varints, known codec, BLAKE3-256 of 32 bytes, lower-case base32, no padding).

Source: the CID and multibase specifications; FORMAT.md, "Ids". The independent
`multiformats` library is the referee in the tests; it is too slow (1.4 ms a CID) for use here.
"""

from __future__ import annotations

import base64
import binascii
from enum import IntEnum
from typing import NewType

from ckptfs.store.errors import InvalidRequest

ChunkId = NewType("ChunkId", bytes)
RecipeId = NewType("RecipeId", ChunkId)
TreeId = NewType("TreeId", ChunkId)
UnitId = NewType("UnitId", bytes)

DIGEST_BYTES = 32
UNIT_ID_BYTES = 16
CID_BYTES = 4 + DIGEST_BYTES
_VERSION = 0x01
_BLAKE3 = 0x1E


class CidCodec(IntEnum):
    """What the bytes behind a CID are (multicodec table)."""

    RAW = 0x55
    DAG_CBOR = 0x71


def cid_bytes(digest: bytes, codec: CidCodec) -> bytes:
    """The 36-byte binary CIDv1 of a BLAKE3-256 `digest`."""
    assert len(digest) == DIGEST_BYTES, "a digest is 32 bytes"
    return bytes((_VERSION, codec, _BLAKE3, DIGEST_BYTES)) + digest


def parse_cid_bytes(cid: bytes) -> tuple[CidCodec, bytes]:
    """(codec, digest) of a binary CIDv1; InvalidRequest if it is not one of ours."""
    if len(cid) != CID_BYTES or cid[0] != _VERSION or cid[2] != _BLAKE3 or cid[3] != DIGEST_BYTES:
        raise InvalidRequest(f"not a CIDv1 with a BLAKE3-256 digest: {cid[:8].hex()}…")
    try:
        codec = CidCodec(cid[1])
    except ValueError:
        raise InvalidRequest(f"a CID with an unknown codec 0x{cid[1]:02x}") from None
    return codec, cid[4:]


def cid_text(digest: bytes, codec: CidCodec = CidCodec.RAW) -> str:
    """The text form, `bafkr4i…` for raw bytes and `bafyr4i…` for dag-cbor."""
    encoded = base64.b32encode(cid_bytes(digest, codec)).decode("ascii")
    return "b" + encoded.lower().rstrip("=")


def parse_cid_text(text: str) -> tuple[CidCodec, bytes]:
    """(codec, digest) of the text form; InvalidRequest for anything but its one spelling."""
    if not text.startswith("b") or text != text.lower() or "=" in text:
        raise InvalidRequest(f"not a base32 CID: {text[:80]!r}")
    body = text[1:].upper()
    try:
        binary = base64.b32decode(body + "=" * (-len(body) % 8))
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"not a base32 CID: {text[:80]!r}") from None
    codec, digest = parse_cid_bytes(binary)
    if cid_text(digest, codec) != text:
        raise InvalidRequest(f"not the canonical spelling of a CID: {text[:80]!r}")
    return codec, digest
