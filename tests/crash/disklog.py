"""The log of what happened to a disk: one entry a call, in the order in which the calls took effect.

One rule: entries are values; files and folders have numbers of the log, never of a real disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

ROOT = 0


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes were written to a file."""

    file: int
    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file was given a length."""

    file: int
    size: int


@dataclass(frozen=True, slots=True)
class Punch:
    """A range of a file was given back."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Synced:
    """fdatasync of a file returned."""

    file: int


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """fdatasync of a file failed: its pages are dropped or kept, and the next one reports success."""

    file: int


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a folder and what it leads to from now on; None: to nothing."""

    folder: int
    name: str
    node: int | None
    is_folder: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """Names that changed together: made, removed, renamed."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class FolderSynced:
    """fsync of a folder returned."""

    folder: int


@dataclass(frozen=True, slots=True)
class Committed:
    """LMDB committed: one step, durable. `blocks` are those that changed."""

    file: int
    size: int
    blocks: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class AllSynced:
    """syncfs returned."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the log that means something to who made it; nothing happened to the disk."""

    name: str


DataEvent: TypeAlias = Write | Resize | Punch
Event: TypeAlias = DataEvent | Synced | SyncFailed | Names | FolderSynced | AllSynced | Committed | Mark
