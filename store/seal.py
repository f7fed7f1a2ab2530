"""Seals: what makes the records of a history provable with a public key.

One rule: a seal speaks for the records right in front of it and, through `before`, for the chain that
they continue; so it can be checked by itself, and what was taken out between two seals shows.

Source: FORMAT.md, "Seals".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from ckptfs.store.dagcbor import encode_node
from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.frames import MAGIC, Frame, decode_frames
from ckptfs.store.hashing import crc64, sha3
from ckptfs.store.history import GENESIS, RecordKind, checked_map
from ckptfs.store.ids import UnitId
from ckptfs.store.signing import KEY_BYTES, SIGNATURE_BYTES, PublicKey, SigningKey

_SEAL = struct.Struct(f"<Q{SIGNATURE_BYTES}s8s")
SEAL_BYTES = _SEAL.size
# A SEAL frame is shorter than this.
SEAL_FRAME_BYTES = 512
_RESERVED = bytes(8)
_CONTEXT = b"ckptfs history seal 1\0"
_FIELDS: dict[str, tuple[type, ...]] = {
    "key": (bytes,),
    "head": (bytes,),
    "seal": (bytes,),
    "before": (bytes,),
    "records": (int,),
}
_LENGTHS = {"key": KEY_BYTES, "head": 32, "seal": SEAL_BYTES, "before": 32}
_MOST_RECORDS = 1 << 31


def chained(before: bytes, kind: int, payload: bytes) -> bytes:
    """The chain value behind one more record."""
    return sha3(b"\x02" + before + bytes([kind]) + payload)


def chained_all(before: bytes, records: Iterable[Frame]) -> bytes:
    """The chain value behind several records."""
    for frame in records:
        before = chained(before, frame.kind, frame.payload)
    return before


@dataclass(frozen=True, slots=True)
class SealRecord:
    """The payload of a SEAL frame.

    It seals the last `records` records in front of it: `before` is the chain value before them, `head`
    behind them. `key` is the raw public key; `seal` the 80 bytes: CRC, signature, reserved.
    """

    key: bytes
    before: bytes
    records: int
    head: bytes
    seal: bytes

    def encode(self) -> bytes:
        """Canonical bytes."""
        return encode_node(
            {
                "key": self.key,
                "head": self.head,
                "seal": self.seal,
                "before": self.before,
                "records": self.records,
            }
        )

    def is_whole(self, unit: UnitId) -> bool:
        """Whether the CRC is that of what was signed: damage shows here, forgery does not."""
        crc, _, reserved = _SEAL.unpack(self.seal)
        return bool(crc == crc64(_signed(unit, self.head)) and reserved == _RESERVED)

    def is_signed_by(self, key: PublicKey, unit: UnitId) -> bool:
        """Whether `key` has signed that `head` is in the chain of `unit`."""
        _, signature, _ = _SEAL.unpack(self.seal)
        return key.has_signed(_signed(unit, self.head), signature)


def make_seal(key: SigningKey, unit: UnitId, before: bytes, records: int, head: bytes) -> SealRecord:
    """The seal of the last `records` records, which lead from the chain value `before` to `head`."""
    message = _signed(unit, head)
    seal = _SEAL.pack(crc64(message), key.sign(message), _RESERVED)
    return SealRecord(key.public.raw, before, records, head, seal)


def decode_seal(encoded: bytes) -> SealRecord:
    """The record in `encoded`, or Corrupt. Nothing is verified yet."""
    node = checked_map(encoded, _FIELDS, "seal")
    if any(len(cast(bytes, node[field])) != length for field, length in _LENGTHS.items()):
        raise Corrupt("a seal has a field of the wrong length")
    key, before, head, seal = (cast(bytes, node[field]) for field in ("key", "before", "head", "seal"))
    records = cast(int, node["records"])
    if not 0 < records < _MOST_RECORDS:
        raise Corrupt("a seal says how many records it is for, and that is out of range")
    return SealRecord(key, before, records, head, seal)


def chain_behind(frames: Iterable[Frame], chain: bytes = GENESIS) -> bytes:
    """The chain value behind `frames`, as the next seal continues it.

    A seal's own word is taken for it: so what was lost to damage stops nobody from going on.
    """
    for frame in frames:
        if frame.kind != RecordKind.SEAL:
            chain = chained(chain, frame.kind, frame.payload)
            continue
        try:
            chain = decode_seal(frame.payload).head
        except Corrupt:
            pass
    return chain


def last_key(tail: bytes) -> PublicKey | None:
    """The key named in the seal that ends a history, of which `tail` is the end; None if none does."""
    frames = list(decode_frames(tail[max(0, tail.rfind(MAGIC)) :]))
    try:
        return PublicKey(decode_seal(frames[-1].payload).key) if frames else None
    except (Corrupt, InvalidRequest):
        return None


@dataclass(frozen=True, slots=True)
class Head:
    """What somebody keeps elsewhere: the chain value and the version that was the newest (None: not told)."""

    chain: bytes
    number: int | None = None

    def __str__(self) -> str:
        return self.chain.hex() if self.number is None else f"{self.number}:{self.chain.hex()}"


def head_of(text: str) -> Head:
    """The head in "NUMBER:HEX" or "HEX"; InvalidRequest if it is neither."""
    number, colon, digits = text.strip().rpartition(":")
    try:
        chain = bytes.fromhex(digits)
    except ValueError:
        chain = b""
    if len(chain) != len(GENESIS) or (colon and not (number.isascii() and number.isdigit())):
        raise InvalidRequest(
            f"{text!r} is not a head such as 12:5e1f… (64 hex digits); `ckptfs head` prints it"
        )
    return Head(chain, int(number[:18]) if colon else None)


def _signed(unit: UnitId, head: bytes) -> bytes:
    return _CONTEXT + unit + head
