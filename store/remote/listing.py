"""What lists of a remote show: its shards and packs.

One rule: a list may be out of date; whoever relies on something that it does not show asks by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.store.remote.names import PACKS, SHARDS, parse_pack_key, parse_shard_key
from ckptfs.store.remote.objects import Remote


@dataclass(slots=True)
class Listing:
    """Shards with their times (ns), packs with their lengths as stored; `newest_ns`: the newest of all."""

    shards: dict[bytes, int]
    packs: dict[bytes, int]
    newest_ns: int


async def list_contents(remote: Remote) -> Listing:
    """What lists show now. Raises as the remote does."""
    shards = await remote.list_objects(SHARDS)
    packs = await remote.list_objects(PACKS)
    return Listing(
        {name: meta.modified_ns for meta in shards if (name := parse_shard_key(meta.key)) is not None},
        {name: meta.size for meta in packs if (name := parse_pack_key(meta.key)) is not None},
        max((meta.modified_ns for meta in [*shards, *packs]), default=0),
    )
