"""What a collector left on a remote, and what counts since. Pure.

One rule: whoever relies on a chunk relies on a pack that counts; what does not count may be gone.

Source: FORMAT.md, "Remotes", "Collecting" ("What is left", "What counts").
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ckptfs.store.bucket import Payload
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import crc64
from ckptfs.store.ids import UNIT_ID_BYTES, UnitId
from ckptfs.store.remote.box import NAME_BYTES
from ckptfs.store.remote.shard import PackFacts

_HEADER = struct.Struct("<4sHHQIIII")
_TRAILER = struct.Struct("<Q")
_MAGIC = b"CKRG"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Kept:
    """What the collector of claim `claim` left: the `units` that it knew of, the `shards` that count (by
    name), and the packs in them that are gone (`dropped`)."""

    claim: int
    units: frozenset[UnitId] = frozenset()
    shards: frozenset[bytes] = frozenset()
    dropped: frozenset[bytes] = frozenset()

    def counts(self, shard: bytes, pack: PackFacts) -> bool:
        """Whether a pack that this shard lists may be relied on."""
        if pack.generation >= self.claim:
            return True
        return shard in self.shards and pack.name not in self.dropped

    def encode(self) -> bytes:
        """Canonical bytes."""
        counts = len(self.units), len(self.shards), len(self.dropped)
        body = _HEADER.pack(_MAGIC, _VERSION, 0, self.claim, *counts, 0)
        body += b"".join([*sorted(self.units), *sorted(self.shards), *sorted(self.dropped)])
        return body + _TRAILER.pack(crc64(body))


EVERYTHING = Kept(0)
"""Before the first collector."""


def decode_kept(encoded: Payload) -> Kept:
    """What is in `encoded`; Corrupt unless it is whole and canonical."""
    view = memoryview(encoded)
    if len(view) < _HEADER.size + _TRAILER.size:
        raise Corrupt("a list of what is kept is shorter than its header")
    magic, version, reserved, claim, units, shards, dropped, more = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION or reserved or more or not claim:
        raise Corrupt(f"not a list of what is kept of version {_VERSION}")
    end = _HEADER.size + units * UNIT_ID_BYTES + (shards + dropped) * NAME_BYTES
    if len(view) != end + _TRAILER.size or crc64(view[:end]) != _TRAILER.unpack_from(view, end)[0]:
        raise Corrupt("a list of what is kept does not match its length or its CRC-64")
    reader = _Reader(view[_HEADER.size : end])
    found_units = frozenset(map(UnitId, reader.take(units, UNIT_ID_BYTES)))
    found_shards = frozenset(reader.take(shards, NAME_BYTES))
    return Kept(claim, found_units, found_shards, frozenset(reader.take(dropped, NAME_BYTES)))


@dataclass(slots=True)
class _Reader:
    view: memoryview
    at: int = field(default=0)

    def take(self, count: int, size: int) -> Sequence[bytes]:
        end = self.at + count * size
        found = [bytes(self.view[at : at + size]) for at in range(self.at, end, size)]
        self.at = end
        if any(a >= b for a, b in pairwise(found)):
            raise Corrupt("a list of what is kept is not in order")
        return found
