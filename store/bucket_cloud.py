"""Buckets of S3 and what speaks it, Azure Blob and Google Cloud Storage: the one door to obstore.

One rule: every answer is one of the errors that Bucket promises, in one line that names the object and
holds no secret. Nothing is tried twice here: who asks knows what may be repeated.

The calls block (obstore's own event loop is not trio's), so they run in worker threads, which a cancelled
caller leaves behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import obstore
import trio
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from ckptfs.store.bucket import ObjectMeta, Payload, Unfinished, check_key, same_bytes
from ckptfs.store.errors import (
    CkptfsError,
    Conflict,
    Corrupt,
    InvalidRequest,
    NotFound,
    NotPermitted,
    Unavailable,
)

T = TypeVar("T")
SCHEMES = ("s3", "az", "gs")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_THREADS = 16
_TIMEOUT = "120s"
_CONNECT_TIMEOUT = "10s"
_MOST_SAID = 160
_PIECE_BYTES = 1 << 20
# How S3, Azure and Google write what is wrong, and how the library begins to: it names the address, not
# what it was asked for.
_ANSWER = re.compile(r"<Code>(?P<code>[^<]+)</Code>.*?<Message>(?P<message>[^<]+)</Message>", re.DOTALL)
_REQUEST = re.compile(r"^.*?Error performing [A-Z]+ \S+ in [^-]* - ")
_OF_AMAZON = (".amazonaws.com", ".amazonaws.com.cn")


class CloudBucket:
    """A prefix of a bucket in the cloud. Any task of the thread that made it may call."""

    def __init__(self, store: ObjectStore, url: str, *, checks_uploads: bool) -> None:
        self._store = store
        self._url = url
        self._checks_uploads = checks_uploads
        self._limiter = trio.CapacityLimiter(_THREADS)

    @property
    def url(self) -> str:
        """The URL that it was opened with."""
        return self._url

    @property
    def checks_uploads(self) -> bool:
        """Amazon refuses an upload whose SHA-256 is another; of others nothing is known."""
        return self._checks_uploads

    async def create(self, key: str, payload: Payload) -> None:
        """As Bucket.create."""
        try:
            await self._do(key, lambda: self._put(key, payload, "create"))
        except Conflict:
            raise Conflict(f"{self._url}/{key} is there already") from None

    async def overwrite(self, key: str, payload: Payload) -> None:
        """As Bucket.overwrite."""
        await self._do(key, lambda: self._put(key, payload, "overwrite"))

    def _put(self, key: str, payload: Payload, mode: obstore.PutMode) -> None:
        # In several parts the condition would hold for none of them.
        obstore.put(self._store, check_key(key), payload, mode=mode, use_multipart=False)

    async def read(self, key: str) -> bytes:
        """As Bucket.read."""
        return await self._do(key, lambda: obstore.get(self._store, check_key(key)).bytes().to_bytes())

    async def read_range(self, key: str, offset: int, length: int) -> Payload:
        """As Bucket.read_range. The library's own memory, which is not copied."""

        def get() -> Payload:
            return memoryview(obstore.get_range(self._store, check_key(key), start=offset, length=length))

        try:
            found = await self._do(key, get)
        except Unavailable:
            # Beyond the end is an error like any other here.
            if (await self.stat(key)).size >= offset + length:
                raise
            found = b""
        if len(found) != length:
            raise Corrupt(f"{self._url}/{key} ends before byte {offset + length}")
        return found

    async def holds(self, key: str, payload: Payload) -> bool:
        """As Bucket.holds. What was compared is let go: an object as one piece would be fresh memory."""

        def compare() -> bool:
            expected, at = memoryview(payload), 0
            for piece in obstore.get(self._store, check_key(key)).stream(min_chunk_size=_PIECE_BYTES):
                if not same_bytes(piece, expected[at : at + len(piece)]):
                    return False
                at += len(piece)
            return at == len(expected)

        return await self._do(key, compare)

    async def stat(self, key: str) -> ObjectMeta:
        """As Bucket.stat."""
        return await self._do(key, lambda: _meta(obstore.head(self._store, check_key(key))))

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        """As Bucket.list_objects."""

        def walk() -> list[ObjectMeta]:
            pages = obstore.list(self._store, prefix or None, chunk_size=1000)
            return sorted((_meta(one) for page in pages for one in page), key=lambda meta: meta.key)

        return await self._do(prefix, walk)

    async def remove(self, key: str) -> None:
        """As Bucket.remove."""
        try:
            await self._do(key, lambda: obstore.delete(self._store, check_key(key)))
        except NotFound:
            pass

    async def sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        """As Bucket.sweep: nothing. Uploads are one request each, which a storage keeps whole or drops."""
        return Unfinished()

    async def _do(self, key: str, call: Callable[[], T]) -> T:
        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        except CkptfsError:
            raise
        except (BaseError, OSError) as e:
            raise _translated(e, f"{self._url}/{key}") from None


def open_cloud(url: str, options: Mapping[str, str]) -> CloudBucket:
    """The bucket at `url` (`s3://BUCKET/PREFIX`, `az://ACCOUNT/CONTAINER/PREFIX`, `gs://BUCKET/PREFIX`).

    `options` are obstore's for that kind (`endpoint`, `region`, …); what they leave out, credentials above
    all, the library takes from the environment. InvalidRequest says what is wrong with them.
    """
    split = urlsplit(url)
    client: obstore.store.ClientConfig = {"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}
    if options.get("endpoint", "").startswith("http://"):
        client["allow_http"] = True
    retry: obstore.store.RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=120)}
    try:
        store: ObjectStore
        if split.scheme == "s3":
            config = {"checksum_algorithm": "sha256", **options}
            store = S3Store.from_url(url, config=config, client_options=client, retry_config=retry)  # type: ignore[arg-type]
        elif split.scheme == "az":
            store = AzureStore.from_url(url, config=dict(options), client_options=client, retry_config=retry)  # type: ignore[arg-type]
        else:
            store = GCSStore.from_url(url, config=dict(options), client_options=client, retry_config=retry)  # type: ignore[arg-type]
    except UnknownConfigurationKeyError as e:
        raise InvalidRequest(f"{url}: an option that is not known: {_said(e)}") from None
    except (BaseError, OSError, ValueError) as e:
        raise InvalidRequest(f"{url} cannot be opened: {_said(e)}") from None
    return CloudBucket(store, url.rstrip("/"), checks_uploads=split.scheme == "s3" and _is_amazon(store))


def _is_amazon(store: ObjectStore) -> bool:
    config = store.config if isinstance(store, S3Store) else {}
    endpoint = config.get("endpoint")
    return endpoint is None or (urlsplit(str(endpoint)).hostname or "").endswith(_OF_AMAZON)


def _meta(found: obstore.ObjectMeta) -> ObjectMeta:
    return ObjectMeta(
        found["path"], found["size"], (found["last_modified"] - _EPOCH) // timedelta(microseconds=1) * 1000
    )


def _translated(error: Exception, what: str) -> CkptfsError:
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{what} is not there")
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return Conflict(f"{what} is there already")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return NotPermitted(f"{what}: the storage refuses: {_said(error)}")
    return Unavailable(f"{what}: {_said(error)}")


def _said(error: Exception) -> str:
    """What the server said, or the library's first line, without what its debugging adds."""
    text = str(error).strip().split("\n\nDebug source:", 1)[0]
    if answer := _ANSWER.search(text):
        line = " ".join(f"{answer['message']} ({answer['code']})".split())
    else:
        line = _REQUEST.sub("", text.split("\n", 1)[0], count=1)
    return line if len(line) <= _MOST_SAID else line[: _MOST_SAID - 1] + "…"
