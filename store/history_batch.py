"""One append to a history: its frames with their seal, and the unit's row behind them. Pure.

Source: FORMAT.md, "History" and "Seals".
"""

from __future__ import annotations

from msgspec.structs import replace

from ckptfs.store.frames import encode_frame
from ckptfs.store.history import RecordKind
from ckptfs.store.seal import chained, make_seal
from ckptfs.store.signing import SigningKey
from ckptfs.store.units import Unit


def batch_of(
    unit: Unit, chain: bytes, key: SigningKey | None, records: tuple[tuple[RecordKind, bytes], ...]
) -> tuple[bytes, Unit]:
    """The frames of `records` behind the chain value `chain`, with a seal if there is a key; and the
    unit behind them, but for the file's length and name."""
    head = chain
    for kind, payload in records:
        head = chained(head, kind, payload)
    if key is not None:
        seal = make_seal(key, unit.unit, chain, len(records), head)
        records = (*records, (RecordKind.SEAL, seal.encode()))
    frames = b"".join(encode_frame(k, unit.frames + i, r) for i, (k, r) in enumerate(records, 1))
    return frames, replace(unit, frames=unit.frames + len(records), chain=head, sealed=key is not None)
