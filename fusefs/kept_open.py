"""The note of stored bytes that somebody has open although their file has others, or none. Pure."""

from __future__ import annotations

import msgspec

from ckptfs.fusefs.attributes import Attributes
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import DIGEST_BYTES, ChunkId, RecipeId


def encode_open(recipe: RecipeId, shown: Attributes) -> bytes:
    """What is read, and what stat(2) shows of it."""
    return msgspec.msgpack.encode((recipe, shown))


def decode_open(encoded: bytes) -> tuple[RecipeId, Attributes]:
    """The same again; Corrupt if it is none."""
    try:
        recipe, shown = msgspec.msgpack.decode(encoded, type=tuple[bytes, Attributes])
    except (msgspec.DecodeError, ValueError) as e:
        raise Corrupt(f"a note of what somebody has open cannot be read: {e}") from None
    if len(recipe) != DIGEST_BYTES:
        raise Corrupt(f"a note of what somebody has open names a recipe of {len(recipe)} bytes")
    return RecipeId(ChunkId(recipe)), shown
