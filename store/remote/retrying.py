"""A bucket behind a network that fails now and then.

One rule: whatever is asked may be asked again; so `create` of bytes that are there already, because an
answer was lost, is a success, and of other bytes a Conflict.

Source: FORMAT.md, "Remotes" ("An answer that was lost after success").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from ckptfs.store.bucket import Bucket, ObjectMeta, Payload, Unfinished
from ckptfs.store.errors import Conflict, NotFound, Unavailable

T = TypeVar("T")
PAUSES_S = (0.1, 0.5, 2.0, 8.0)


class RetryingBucket:
    """Tries again what is Unavailable, after each of `pauses_s`; then raises it. Any task may call."""

    def __init__(self, bucket: Bucket, pauses_s: tuple[float, ...] = PAUSES_S) -> None:
        self._bucket = bucket
        self._pauses_s = pauses_s

    @property
    def url(self) -> str:
        """As Bucket.url."""
        return self._bucket.url

    @property
    def checks_uploads(self) -> bool:
        """As Bucket.checks_uploads."""
        return self._bucket.checks_uploads

    async def create(self, key: str, payload: Payload) -> None:
        """As Bucket.create, but an object with these very bytes is no Conflict."""

        async def make() -> None:
            try:
                await self._bucket.create(key, payload)
            except Conflict:
                try:
                    is_mine = await self._bucket.holds(key, payload)
                except NotFound:
                    # S3 says so too while another create of the same key is under way.
                    raise Unavailable(f"{self.url}/{key} is being made by somebody else") from None
                if not is_mine:
                    raise

        await self._again(make)

    async def overwrite(self, key: str, payload: Payload) -> None:
        """As Bucket.overwrite."""
        await self._again(lambda: self._bucket.overwrite(key, payload))

    async def read(self, key: str) -> bytes:
        """As Bucket.read."""
        return await self._again(lambda: self._bucket.read(key))

    async def read_range(self, key: str, offset: int, length: int) -> Payload:
        """As Bucket.read_range."""
        return await self._again(lambda: self._bucket.read_range(key, offset, length))

    async def holds(self, key: str, payload: Payload) -> bool:
        """As Bucket.holds."""
        return await self._again(lambda: self._bucket.holds(key, payload))

    async def stat(self, key: str) -> ObjectMeta:
        """As Bucket.stat."""
        return await self._again(lambda: self._bucket.stat(key))

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        """As Bucket.list_objects."""
        return await self._again(lambda: self._bucket.list_objects(prefix))

    async def remove(self, key: str) -> None:
        """As Bucket.remove."""
        await self._again(lambda: self._bucket.remove(key))

    async def sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        """As Bucket.sweep."""
        return await self._again(lambda: self._bucket.sweep(before_ns, dry_run=dry_run))

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        for pause_s in self._pauses_s:
            try:
                return await call()
            except Unavailable:
                await trio.sleep(pause_s)
        return await call()
