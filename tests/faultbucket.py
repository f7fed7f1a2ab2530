"""A bucket in memory, and one that fails as networks and servers do.

The one rule: which fault comes when follows from the seed and the number of the call, so a run that failed
can be run again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from ckptfs.store.bucket import Bucket, ObjectMeta, Payload, Unfinished, check_key
from ckptfs.store.errors import Conflict, Corrupt, NotFound, Unavailable

T = TypeVar("T")
START_NS = 1_790_000_000 * 10**9


@dataclass(frozen=True, slots=True)
class Stored:
    payload: bytes
    modified_ns: int


class MemoryBucket:
    """Objects in a dict; the clock is the number of changes. `calls` counts what was asked, by method;
    `half_made` is what a test leaves there of writers that died."""

    url = "memory://test"

    def __init__(self, *, checks_uploads: bool = False) -> None:
        self.checks_uploads = checks_uploads
        self.objects: dict[str, Stored] = {}
        self.half_made: list[Stored] = []
        self.calls: dict[str, int] = {}
        self.sent_bytes = 0
        self._changes = 0

    async def create(self, key: str, payload: Payload) -> None:
        await self._called("create")
        if check_key(key) in self.objects:
            raise Conflict(f"{key} is there already")
        self.store(key, payload)

    async def overwrite(self, key: str, payload: Payload) -> None:
        await self._called("overwrite")
        self.store(check_key(key), payload)

    async def read(self, key: str) -> bytes:
        await self._called("read")
        return self._found(key).payload

    async def read_range(self, key: str, offset: int, length: int) -> bytes:
        await self._called("read_range")
        found = self._found(key).payload[offset : offset + length]
        if len(found) != length:
            raise Corrupt(f"{key} ends before byte {offset + length}")
        return found

    async def holds(self, key: str, payload: Payload) -> bool:
        await self._called("holds")
        return self._found(key).payload == payload

    async def stat(self, key: str) -> ObjectMeta:
        await self._called("stat")
        return self._meta(key)

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        await self._called("list_objects")
        return [self._meta(key) for key in self.keys(prefix)]

    async def remove(self, key: str) -> None:
        await self._called("remove")
        self.objects.pop(check_key(key), None)

    async def sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        await self._called("sweep")
        old = [one for one in self.half_made if one.modified_ns < before_ns]
        if not dry_run:
            self.half_made = [one for one in self.half_made if one not in old]
        return Unfinished(len(old), sum(len(one.payload) for one in old))

    def keys(self, prefix: str = "") -> list[str]:
        """The keys below a folder, sorted."""
        return sorted(key for key in self.objects if not prefix or key.startswith(prefix + "/"))

    def store(self, key: str, payload: Payload) -> None:
        """Have an object, whatever was there."""
        self._changes += 1
        self.sent_bytes += len(payload)
        self.objects[key] = Stored(bytes(payload), START_NS + self._changes * 10**9)

    def flip(self, key: str, bit: int) -> None:
        """Flip a bit of an object (counted from its end if negative)."""
        changed = bytearray(self.objects[key].payload)
        changed[bit // 8] ^= 1 << bit % 8
        self.store(key, changed)

    async def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        await trio.lowlevel.checkpoint()

    def _found(self, key: str) -> Stored:
        found = self.objects.get(check_key(key))
        if found is None:
            raise NotFound(f"{key} is not there")
        return found

    def _meta(self, key: str) -> ObjectMeta:
        found = self._found(key)
        return ObjectMeta(key, len(found.payload), found.modified_ns)


class Killed(BaseException):
    """The process died here; nothing that catches errors may catch it."""


@dataclass(slots=True)
class Faults:
    """What goes wrong, and how often: the chance of each in a call. `die_at`: the call (from 0) in which
    the process dies, before or after the storage has done it."""

    seed: int
    refused: float = 0.0
    """Answered 503 or not at all; nothing was done."""
    lost: float = 0.0
    """Done, and the answer was lost (a time-out)."""
    in_flight: float = 0.0
    """409: refused because of another call that is not done yet, though nothing is there."""
    stale: float = 0.0
    """A list leaves out what was made lately."""
    torn: float = 0.0
    """An upload of which only a part is kept; the answer is good."""
    die_at: int | None = None
    died: bool = False
    calls: int = 0
    seen: set[str] = field(default_factory=set)


class FaultBucket:
    """Another bucket, seen through a network with `faults`. Used by one simulated process."""

    def __init__(self, bucket: Bucket, faults: Faults) -> None:
        self._bucket = bucket
        self._faults = faults
        self._random = random.Random(faults.seed)
        self.url = bucket.url
        self.checks_uploads = bucket.checks_uploads

    async def create(self, key: str, payload: Payload) -> None:
        if self._happens(self._faults.in_flight, "in_flight"):
            raise Conflict(f"{key}: 409, another call is in flight")
        if self._happens(self._faults.torn, "torn"):
            payload = bytes(payload)[: self._random.randrange(len(payload) + 1)]
        await self._through(lambda: self._bucket.create(key, payload))

    async def overwrite(self, key: str, payload: Payload) -> None:
        await self._through(lambda: self._bucket.overwrite(key, payload))

    async def read(self, key: str) -> bytes:
        return await self._through(lambda: self._bucket.read(key))

    async def read_range(self, key: str, offset: int, length: int) -> bytes:
        return await self._through(lambda: self._bucket.read_range(key, offset, length))

    async def holds(self, key: str, payload: Payload) -> bool:
        return await self._through(lambda: self._bucket.holds(key, payload))

    async def stat(self, key: str) -> ObjectMeta:
        return await self._through(lambda: self._bucket.stat(key))

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        found = await self._through(lambda: self._bucket.list_objects(prefix))
        if found and self._happens(self._faults.stale, "stale"):
            by_age = sorted(found, key=lambda meta: meta.modified_ns)
            kept = {meta.key for meta in by_age[: self._random.randrange(len(found))]}
            found = [meta for meta in found if meta.key in kept]
        return found

    async def remove(self, key: str) -> None:
        await self._through(lambda: self._bucket.remove(key))

    async def sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        return await self._through(lambda: self._bucket.sweep(before_ns, dry_run=dry_run))

    async def _through(self, call: Callable[[], Awaitable[T]]) -> T:
        faults = self._faults
        if faults.died:
            raise Killed
        number, faults.calls = faults.calls, faults.calls + 1
        is_last, is_before = number == faults.die_at, self._random.random() < 0.5
        if is_last and is_before:
            faults.died = True
            raise Killed
        if self._happens(faults.refused, "refused"):
            raise Unavailable("503: slow down")
        try:
            answer = await call()
        finally:
            if is_last:  # whatever the answer was
                faults.died = True
                raise Killed
        if self._happens(faults.lost, "lost"):
            raise Unavailable("timed out: the answer was lost")
        return answer

    def _happens(self, chance: float, name: str) -> bool:
        happens = self._random.random() < chance
        if happens:
            self._faults.seen.add(name)
        return happens
