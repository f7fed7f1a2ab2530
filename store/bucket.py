"""Where a remote's objects lie: the few things that are asked of a storage, whichever it is.

One rule: an object is there whole or not at all, and `create` makes one only where none is. Everything else
(retries, names, checks of content) is made of that, in store/remote.

Source: FORMAT.md, "Remotes", "What is assumed of the storage".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from ckptfs.store.errors import InvalidRequest

Payload = bytes | bytearray | memoryview
MOST_KEY_BYTES = 512
# What every storage takes as it is, without escaping.
_KEY = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """An object as a list shows it; `modified_ns` is the storage's time, in ns since the epoch."""

    key: str
    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What writers that died have left half-made of objects: how many, and their bytes."""

    count: int = 0
    size_bytes: int = 0


class Bucket(Protocol):
    """A place for objects. The keys of one are below a prefix of its own; `/` separates their parts.

    Every method raises Unavailable where trying again may help, which says nothing about whether the
    thing was done; NotPermitted if the storage refuses; and what it says itself. Any task may call.
    """

    @property
    def url(self) -> str:
        """What messages call it; without secrets."""

    @property
    def checks_uploads(self) -> bool:
        """Whether the storage compares what it got with a SHA-256 of what was sent."""

    async def create(self, key: str, payload: Payload) -> None:
        """Make an object; Conflict if there is one of this key. Durable when: this returned."""

    async def overwrite(self, key: str, payload: Payload) -> None:
        """Make an object or replace it whole. Durable when: this returned."""

    async def read(self, key: str) -> bytes:
        """All of an object; NotFound if it is not there."""

    async def read_range(self, key: str, offset: int, length: int) -> Payload:
        """Exactly these bytes (`length` ≥ 1); Corrupt if the object ends before; NotFound."""

    async def holds(self, key: str, payload: Payload) -> bool:
        """Whether an object has exactly these bytes; NotFound if it is not there. It is read, in pieces."""

    async def stat(self, key: str) -> ObjectMeta:
        """What a list would say; NotFound if it is not there."""

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        """The objects below the folder `prefix` ("" is all), sorted by key; may be out of date."""

    async def remove(self, key: str) -> None:
        """Remove an object; none of this key is no error."""

    async def sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        """Remove what is half-made of objects and was last written to before `before_ns` (the storage's
        time, ns since the epoch), or only say what that is. A writer that is at work on such a one after all
        gets Unavailable, and has to begin anew."""


def same_bytes(found: bytes, expected: Payload) -> bool:
    """Whether they are equal. (`==` compares views item by item, which takes 100 times as long.)"""
    return len(found) == len(expected) and found.startswith(expected)


def check_key(key: str) -> str:
    """The key itself; InvalidRequest if some storage would not take it as it is."""
    parts = key.split("/")
    if len(key) > MOST_KEY_BYTES or not _KEY.fullmatch(key) or {".", ".."} & {*parts}:
        raise InvalidRequest(f"{key[:80]!r} is not the key of an object")
    return key
