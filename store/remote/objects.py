"""A remote: its objects by what is in them, whether or not they are encrypted on the way.

One rule: what is read is checked against its name, or (a part of a pack) is checked by whoever asked for it,
chunk by chunk; what is written is there with the right bytes before anybody is told.

Source: FORMAT.md, "Remotes".
"""

from __future__ import annotations

import os
from collections.abc import Callable

import trio

from ckptfs.store.bucket import Bucket, ObjectMeta, Payload, Unfinished
from ckptfs.store.bucket_probe import probe
from ckptfs.store.errors import Conflict, Corrupt, InvalidRequest, NotFound
from ckptfs.store.remote.box import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAGIC,
    SALT_BYTES,
    TAG_BYTES,
    RemoteKey,
    enclosed_size,
    plain_name,
)
from ckptfs.store.remote.names import (
    COPY,
    FORMAT_KEY,
    HEADS,
    HISTORIES,
    KEPT,
    PACKS,
    SHARDS,
    decode_remote_format,
    encode_remote_format,
    log_key,
    new_format,
)

Random = Callable[[int], bytes]
# The check of another key differs in dozens.
_MOST_FLIPPED = 4
# Objects of each kind that are looked at, for what the key is.
_MOST_PROOFS = 8


class Remote:
    """The objects of one remote. Any task of one thread may call. `problems`: sentences on what `open` put
    right; whoever tells them empties it.

    Every method raises as the bucket does, besides what it says itself.
    """

    def __init__(self, bucket: Bucket, key: RemoteKey | None = None, random: Random = os.urandom) -> None:
        """`random(n)` gives n unpredictable bytes."""
        self._bucket = bucket
        self._key = key
        self._random = random
        self.problems: list[str] = []

    @property
    def url(self) -> str:
        """What messages call it."""
        return self._bucket.url

    async def open(self, *, create: bool = False) -> None:
        """Look at what the place is; with `create` make a remote of one without objects, after a probe.

        NotFound: there is no remote. InvalidRequest: another key is needed, or there is something else.
        Corrupt: what says so is damaged or gone, and nothing else there proves that this is the right key.
        Unsupported: a later program's, or a storage that does not keep its word.
        """
        own = new_format(self._key.check if self._key is not None else "")
        try:
            found = await self._bucket.read(FORMAT_KEY)
        except NotFound:
            if not create:
                raise NotFound(
                    f"{self.url} is not a remote of ckptfs; the first `ckptfs push` makes one"
                ) from None
            await self._prove_key("is gone")
            found = await self._make(encode_remote_format(own))
        whole = encode_remote_format(own)
        if (
            create
            and found != whole
            and (whole.startswith(found) or _flipped_bits(found, whole) <= _MOST_FLIPPED)
        ):
            # Torn when it was made, or rotten since: nobody else will ever put it right.
            await self._prove_key("is damaged")
            await self._bucket.overwrite(FORMAT_KEY, whole)
            self.problems.append(f"{self.url}/{FORMAT_KEY} was damaged; made anew")
            found = whole
        form = decode_remote_format(found)
        if form.key and self._key is None:
            raise InvalidRequest(f"{self.url} is encrypted: give its key (`key` in [[remote]])")
        if self._key is not None and form.key != self._key.check:
            what = "is encrypted with another key" if form.key else "is not encrypted, so take `key` out"
            raise InvalidRequest(f"{self.url} {what}")

    async def _prove_key(self, what: str) -> None:
        """Corrupt, unless what is there is read with this key (or without one), or there is nothing yet: else
        somebody with another key would take the remote over, and its owner could not use it any more."""
        is_empty = True
        for folder in ("log", HEADS, HISTORIES, SHARDS, KEPT, PACKS):
            named = [log_key(1), log_key(1) + COPY] if folder == "log" else []
            listed = [meta.key for meta in await self._bucket.list_objects(folder)]
            for key in (named + listed)[:_MOST_PROOFS]:
                try:
                    found = await self._bucket.read(key)
                except NotFound:
                    continue
                is_empty = False
                if await trio.to_thread.run_sync(self._is_read, key, found):
                    return
        if not is_empty:
            how = "without a key" if self._key is None else "with this key"
            raise Corrupt(
                f"{self.url}/{FORMAT_KEY} {what}, and nothing there can be read {how}: it is not made "
                "anew; check `key` in [[remote]], or push from a node that copied to it before"
            )

    def _is_read(self, key: str, found: bytes) -> bool:
        if self._key is None:
            return bool(found) and not found.startswith(MAGIC)
        try:
            self._key.disclose(key, found)
        except Corrupt:
            return False
        return True

    async def _make(self, form: bytes) -> bytes:
        """Try the storage, and say there what it is; what it says then."""
        await probe(self._bucket, self._random(16).hex())
        try:
            await self._bucket.create(FORMAT_KEY, form)
        except Conflict:
            pass  # somebody else was faster
        return await self._bucket.read(FORMAT_KEY)

    def name(self, content: Payload) -> bytes:
        """The name of an object with this content."""
        return self._key.name(content) if self._key is not None else plain_name(content)

    def stored_size(self, content_bytes: int) -> int:
        """The length of an object with so much content."""
        return content_bytes if self._key is None else enclosed_size(content_bytes)

    async def put(self, key: str, name: bytes, content: Payload, *, check_first: bool = False) -> bool:
        """Have an object `key`, whose name is that of its `content`, on the storage; False if it was there.

        Durable when: this returned. Corrupt: what was sent does not come back, even after another try.
        `check_first`: it may well be there, so it is not sent before that is known.
        """
        if check_first and await self._is_there(key, name, len(content)):
            return False
        enclosed = await self._enclose(key, content)
        try:
            await self._bucket.create(key, enclosed)
        except Conflict:
            if await self._is_right(key, name):
                return False
        else:
            if self._bucket.checks_uploads or await self._holds(key, enclosed):
                return True
        # Torn on the way, or rotten since: the one case in which an object is replaced.
        await self._bucket.overwrite(key, enclosed)
        if not await self._holds(key, enclosed):
            raise Corrupt(f"{self.url}/{key} comes back with other bytes than were sent")
        return True

    async def get(self, key: str, name: bytes) -> bytes:
        """The content of a whole object; NotFound; Corrupt if it is not what its name says."""
        content = await self.get_unnamed(key)
        if await trio.to_thread.run_sync(self.name, content) != name:
            raise Corrupt(f"{self.url}/{key} was changed, cut or exchanged")
        return content

    async def get_range(self, key: str, offset: int, length: int, size: int) -> Payload:
        """`length` bytes (at least 1) from `offset` of the content, which has `size` bytes.

        NotFound; Corrupt if the object ends before or, encrypted, was changed. Else nothing is checked.
        """
        if self._key is None:
            return await self._bucket.read_range(key, offset, length)
        header = bytes(await self._bucket.read_range(key, 0, HEADER_BYTES))
        first, stop = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        start = HEADER_BYTES + first * (BLOCK_BYTES + TAG_BYTES)
        end = min(HEADER_BYTES + stop * (BLOCK_BYTES + TAG_BYTES), enclosed_size(size))
        blocks = await self._bucket.read_range(key, start, end - start)
        last, key_of = max(0, size - 1) // BLOCK_BYTES, self._key
        content = await trio.to_thread.run_sync(key_of.disclose_blocks, key, header, blocks, first, last)
        skip = offset - first * BLOCK_BYTES
        return content[skip : skip + length]

    async def create_unnamed(self, key: str, content: Payload) -> None:
        """Make an object that is not named by its content; Conflict if there is one with another content.
        Durable when: this returned."""
        try:
            await self._bucket.create(key, await self._enclose(key, content))
        except Conflict:
            # Enclosed anew it has other bytes.
            if await self.get_unnamed(key) != content:
                raise

    async def replace_unnamed(self, key: str, content: Payload) -> None:
        """Have such an object whole again, whose content is known. Durable when: this returned."""
        await self._bucket.overwrite(key, await self._enclose(key, content))

    async def get_unnamed(self, key: str) -> bytes:
        """The content of such an object; NotFound; Corrupt if it was changed (as far as encryption tells)."""
        found = await self._bucket.read(key)
        if self._key is None:
            return found
        return await trio.to_thread.run_sync(self._key.disclose, key, found)

    async def list_objects(self, prefix: str) -> list[ObjectMeta]:
        """As Bucket.list_objects; the sizes are those of what is stored."""
        return await self._bucket.list_objects(prefix)

    async def stat(self, key: str) -> ObjectMeta:
        """As Bucket.stat."""
        return await self._bucket.stat(key)

    async def stat_or_none(self, key: str) -> ObjectMeta | None:
        """The same; None if it is not there."""
        try:
            return await self._bucket.stat(key)
        except NotFound:
            return None

    async def remove(self, key: str) -> None:
        """As Bucket.remove."""
        await self._bucket.remove(key)

    async def sweep(self, before_ns: int, *, dry_run: bool) -> Unfinished:
        """As Bucket.sweep."""
        return await self._bucket.sweep(before_ns, dry_run=dry_run)

    async def _enclose(self, key: str, content: Payload) -> Payload:
        if self._key is None:
            return content
        return await trio.to_thread.run_sync(self._key.enclose, key, content, self._random(SALT_BYTES))

    async def _is_there(self, key: str, name: bytes, size: int) -> bool:
        found = await self.stat_or_none(key)
        return found is not None and found.size == self.stored_size(size) and await self._is_right(key, name)

    async def _holds(self, key: str, enclosed: Payload) -> bool:
        try:
            return await self._bucket.holds(key, enclosed)
        except NotFound:
            return False

    async def _is_right(self, key: str, name: bytes) -> bool:
        try:
            await self.get(key, name)
        except (Corrupt, NotFound):
            return False
        return True


def _flipped_bits(found: bytes, whole: bytes) -> int:
    """In how many bits they differ; of other lengths in all."""
    if len(found) != len(whole):
        return 8 * len(whole)
    return (int.from_bytes(found, "big") ^ int.from_bytes(whole, "big")).bit_count()
