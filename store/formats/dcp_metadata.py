"""What the `.metadata` file of a torch distributed checkpoint says about its shards.

One rule: a shard is described by what `.metadata` names, never by what is present; `.metadata` is
renamed into place last and is the commit point of the save.

Source: torch/distributed/checkpoint/metadata.py (`Metadata`, `MetadataIndex`) and filesystem.py
(`_StorageInfo`: relative path, offset, length). A pickle, walked and never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from ckptfs.store.formats.layout import MAX_DIMENSIONS, Reader
from ckptfs.store.formats.pickle_values import Made, Pairs, Unwalkable
from ckptfs.store.formats.pickle_walk import StepBudget, Walker

FILE_NAME: Final = ".metadata"
MAX_WALKED_BYTES: Final = 8 * 1024 * 1024
"""An entry takes some 230 bytes and 60 opcodes: about as much as the bound on steps allows."""
_MODULE: Final = b"torch.distributed.checkpoint.metadata"
_MAX_FIELDS: Final = 64
_MAX_NAME: Final = 512
_MAX_SHARD_NAME: Final = 64
_BLOCK_BYTES: Final = 4 * 1024 * 1024
MAX_SHARDS: Final = 1_000_000
_COMMIT_NAME: Final = re.compile(r"(?:__\d{1,9})?\.metadata")
_SHARD_NAME: Final = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes from `offset` of a shard that hold the item `name`."""

    offset: int
    length: int
    name: str


@dataclass(frozen=True, slots=True)
class Shards:
    """Each shard's path relative to the checkpoint, and its extents sorted by offset.

    When the file was too large to walk, `exact` is False and the shards have no extents.
    """

    extents: Mapping[str, tuple[Extent, ...]]
    exact: bool


def is_commit_name(name: str) -> bool:
    """Tell whether a file of this name commits a save, or (`__3.metadata`) one rank's part of it."""
    return _COMMIT_NAME.fullmatch(name) is not None


def recognise(first_bytes: bytes) -> bool:
    """Tell whether a file that begins with `first_bytes` (about 64) is such a pickle."""
    return first_bytes.startswith(b"\x80") and _MODULE in first_bytes


def read_shards(reader: Reader) -> Shards | None:
    """Return what the file says, or None when it is truncated, broken or another file."""
    size = reader.size
    if size == 0 or not recognise(reader.pread(0, 64)) or reader.pread(size - 1, 1) != b".":
        return None
    if size <= MAX_WALKED_BYTES:
        return _walked(reader.pread(0, size))
    return _searched(reader)


def _searched(reader: Reader) -> Shards | None:
    """Return the shard names alone: too many entries to walk, but their paths are plain bytes."""
    names: set[str] = set()
    for at in range(0, reader.size, _BLOCK_BYTES):
        block = reader.pread(at, _BLOCK_BYTES + _MAX_SHARD_NAME)
        names.update(found.decode() for found in _SHARD_NAME.findall(block))
        if len(names) > MAX_SHARDS:
            break
    return Shards(MappingProxyType(dict.fromkeys(sorted(names), ())), exact=False) if names else None


# Every shard of a checkpoint is described by the same file: remembering the last one keeps a
# checkpoint of n shards from being walked n times. Keyed by the bytes themselves.
@lru_cache(maxsize=1)
def _walked(pickled: bytes) -> Shards | None:
    try:
        root = Walker(pickled, StepBudget()).next()
    except Unwalkable:
        return None
    entries = _field(root, "storage_data")
    if not isinstance(entries, Pairs):
        return None
    found: dict[str, list[Extent]] = {}
    for index, info in entries:
        path, offset, length = (_field(info, name) for name in ("relative_path", "offset", "length"))
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            return None
        if not isinstance(path, str):
            return None
        found.setdefault(path, []).append(Extent(offset, length, _item_name(index)))
    sorted_extents = {
        path: tuple(sorted(extents, key=lambda e: (e.offset, e.length))) for path, extents in found.items()
    }
    return Shards(MappingProxyType(sorted_extents), exact=True)


def _field(instance: object, name: str) -> object:
    """Return a field of a pickled dataclass instance, or None."""
    state = instance.state if isinstance(instance, Made) else None
    if isinstance(state, Pairs) and len(state) <= _MAX_FIELDS:
        for key, value in state:
            if isinstance(key, str) and key == name:
                return value
    return None


def _item_name(index: object) -> str:
    """Return the item's name; a chunk of a sharded tensor carries its offset in the tensor."""
    name = _field(index, "fqn")
    offset = _field(index, "offset")
    shown = name[:_MAX_NAME] if isinstance(name, str) else "?"
    if isinstance(offset, tuple) and 0 < len(offset) <= MAX_DIMENSIONS:
        numbers = [item for item in offset if type(item) is int]
        if len(numbers) == len(offset) and any(numbers):
            return f"{shown}[{','.join(map(str, numbers))}]"
    return shown
