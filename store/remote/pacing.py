"""A bucket to which no more than so many bytes a second are sent.

One rule: whoever sends waits before, for as long as what was sent before takes at that rate; so the mean
holds however large the objects are.
"""

from __future__ import annotations

import trio

from ckptfs.store.bucket import Bucket, ObjectMeta, Payload, Unfinished


class PacedBucket:
    """Another bucket, behind a limit on what is sent. Tasks of one thread may call; they share the rate."""

    def __init__(self, bucket: Bucket, bytes_per_s: float) -> None:
        assert bytes_per_s > 0
        self._bucket = bucket
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    @property
    def url(self) -> str:
        """As Bucket.url."""
        return self._bucket.url

    @property
    def checks_uploads(self) -> bool:
        """As Bucket.checks_uploads."""
        return self._bucket.checks_uploads

    async def create(self, key: str, payload: Payload) -> None:
        """As Bucket.create."""
        await self._turn(len(payload))
        await self._bucket.create(key, payload)

    async def overwrite(self, key: str, payload: Payload) -> None:
        """As Bucket.overwrite."""
        await self._turn(len(payload))
        await self._bucket.overwrite(key, payload)

    async def _turn(self, size: int) -> None:
        begin = max(self._free_at, trio.current_time())
        self._free_at = begin + size / self._bytes_per_s
        await trio.sleep_until(begin)

    async def read(self, key: str) -> bytes:
        """As Bucket.read."""
        return await self._bucket.read(key)

    async def read_range(self, key: str, offset: int, length: int) -> Payload:
        """As Bucket.read_range."""
        return await self._bucket.read_range(key, offset, length)

    async def holds(self, key: str, payload: Payload) -> bool:
        """As Bucket.holds."""
        return await self._bucket.holds(key, payload)

    async def stat(self, key: str) -> ObjectMeta:
        """As Bucket.stat."""
        return await self._bucket.stat(key)

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        """As Bucket.list_objects."""
        return await self._bucket.list_objects(prefix)

    async def remove(self, key: str) -> None:
        """As Bucket.remove."""
        await self._bucket.remove(key)

    async def sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        """As Bucket.sweep."""
        return await self._bucket.sweep(before_ns, dry_run=dry_run)
