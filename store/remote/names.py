"""What the objects of a remote are called, and the object that says what the place is. Pure.

Source: FORMAT.md, "Remotes".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import msgspec

from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.remote.box import CHECK_BYTES

FORMAT_KEY = "ckptfs-remote"
PACKS = "packs"
SHARDS = "shards"
HEADS = "heads"
KEPT = "kept"
HISTORIES = "histories"
COPY = ".copy"
MOST_FORMAT_BYTES = 1 << 16
_KIND = "ckptfs remote"
_VERSION = 1
_SEQUENCE_DIGITS = 16


class RemoteFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What `ckptfs-remote` says; `key` is the check of the key, "" without encryption."""

    kind: str
    version: int
    incompat: tuple[str, ...] = ()
    key: Annotated[str, msgspec.Meta(max_length=2 * CHECK_BYTES)] = ""


def new_format(key: str = "") -> RemoteFormat:
    """What a new remote says."""
    return RemoteFormat(kind=_KIND, version=_VERSION, key=key)


def encode_remote_format(form: RemoteFormat) -> bytes:
    """The bytes of `ckptfs-remote`."""
    return json.dumps(msgspec.to_builtins(form), separators=(",", ":")).encode() + b"\n"


def decode_remote_format(encoded: bytes) -> RemoteFormat:
    """What it says; Corrupt if it is something else, Unsupported if it is of a later program."""
    try:
        if len(encoded) > MOST_FORMAT_BYTES:
            raise ValueError("too long")
        form = msgspec.convert(json.loads(encoded), RemoteFormat)
    except (ValueError, RecursionError):
        raise Corrupt(
            f"{FORMAT_KEY} is not what ckptfs writes there: this is not a remote of ckptfs"
        ) from None
    if form.kind != _KIND:
        raise Corrupt(f"{FORMAT_KEY} says that this is a {form.kind[:40]!r}")
    if form.version != _VERSION or form.incompat:
        wanted = ", ".join(form.incompat)[:80] or f"format {form.version}"
        raise Unsupported(f"this remote needs a newer ckptfs: {wanted}")
    return form


def pack_key(name: bytes) -> str:
    """The key of a pack."""
    return f"{PACKS}/{name.hex()[:2]}/{name.hex()}"


def shard_key(name: bytes) -> str:
    """The key of a shard."""
    return f"{SHARDS}/{name.hex()}"


def piece_key(unit: UnitId, name: bytes) -> str:
    """The key of a piece of a unit's history."""
    return f"{pieces_of(unit)}/{name.hex()}"


def pieces_of(unit: UnitId) -> str:
    """The folder of the pieces of a unit's history."""
    return f"{HISTORIES}/{unit.hex()}"


def kept_key(name: bytes) -> str:
    """The key of what a collector left; its copy has COPY behind it."""
    return f"{KEPT}/{name.hex()}"


def log_key(number: int) -> str:
    """The key of an entry of the log; its copy has COPY behind it."""
    return f"log/{number:0{_SEQUENCE_DIGITS}x}"


def probe_key(token: str) -> str:
    """The key of an object that is removed again; `token` is random hex digits."""
    return f"probe/{token}"


def heads_of(unit: UnitId) -> str:
    """The folder of a unit's heads."""
    return f"{HEADS}/{unit.hex()}"


def head_key(unit: UnitId, sequence: int) -> str:
    """The key of a head."""
    return f"{heads_of(unit)}/{sequence:0{_SEQUENCE_DIGITS}x}"


def parse_head_key(key: str) -> tuple[UnitId, int] | None:
    """(unit, sequence) of a head's key; None for any other."""
    parts = key.split("/")
    if len(parts) != 3 or parts[0] != HEADS or len(parts[2]) != _SEQUENCE_DIGITS:
        return None
    try:
        unit, sequence = bytes.fromhex(parts[1]), int(parts[2], 16)
    except ValueError:
        return None
    is_ours = len(unit) == UNIT_ID_BYTES and sequence and head_key(UnitId(unit), sequence) == key
    return (UnitId(unit), sequence) if is_ours else None


def parse_shard_key(key: str) -> bytes | None:
    """The name of the shard with this key; None for any other key."""
    return _parsed(key, shard_key)


def parse_pack_key(key: str) -> bytes | None:
    """The name of the pack with this key; None for any other key."""
    return _parsed(key, pack_key)


def _parsed(key: str, key_of: Callable[[bytes], str]) -> bytes | None:
    try:
        name = bytes.fromhex(key.rpartition("/")[2])
    except ValueError:
        return None
    return name if len(name) == 32 and key_of(name) == key else None
