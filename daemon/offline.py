"""A store without a daemon: questions as of its last commit, and the rebuild of its index.

One rule: questions change nothing in the store, not even to recover it; what can only be done by a
daemon is refused with the way to do it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import cast

import msgspec
import trio

from ckptfs.daemon import messages
from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.drill_notes import DrillNotes
from ckptfs.daemon.encode_orphan import end_orphan
from ckptfs.daemon.file_queries import FileQueries
from ckptfs.daemon.keys import readable_keyring
from ckptfs.daemon.messages import AnyRequest, Json, Progress, unreported
from ckptfs.daemon.open_store import boot_id
from ckptfs.daemon.proving import Prover
from ckptfs.daemon.queries import Facts, Queries, units_of
from ckptfs.daemon.scrubbing import noted_scrubs
from ckptfs.daemon.verifying import worker_limiter
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.disk import Disk
from ckptfs.store.errors import NotFound, Unavailable
from ckptfs.store.health_log import HealthLog
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.index import INDEX_PATH, Index
from ckptfs.store.layout import Holder, StoreLock, open_store
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.rebuild import rebuild
from ckptfs.store.segments import Segments
from ckptfs.store.staging import STAGING_PATH
from ckptfs.store.writer_log import WriterLog


class OfflineStore:
    """Answers the requests that only read, from the last commit of a store's index."""

    def __init__(self, disk: Disk, key: str = "") -> None:
        """`key` as in the configuration. NotFound if the store has no index; `rebuild` makes one."""
        if not disk.exists(f"{INDEX_PATH}/data.mdb"):
            raise NotFound(f"the store {disk.root} has no index; run `ckptfs rebuild --store {disk.root}`")
        self._disk = disk
        self._index = Index(disk, read_only=True)
        self._namespace = Namespace(self._index, disk)
        self._histories = Histories(disk, self._index, read_only=True)
        self._segments = Segments(disk, self._index)
        self._addresses = Addresses(self._namespace, self._histories, self._top_of)
        keyring = readable_keyring(key)
        health = HealthLog(disk, self._index, self._histories)
        self._queries = Queries(
            disk,
            self._namespace,
            self._segments,
            self._histories,
            self._addresses,
            self._is_top,
            self._facts,
            keyring,
            WriterLog(disk, self._index, self._histories),
            MergeLog(disk, self._index, self._histories),
            health,
            drills=DrillNotes(self._index),
        )
        # Whoever asks may have another key than the daemon, and nobody waits for his word.
        self._prover = Prover(self._segments, self._histories, self._addresses, keyring, for_strangers=False)
        digests = DigestLog(disk, self._index, self._histories)
        self._files = FileQueries(
            disk, self._segments, self._addresses, self._histories, digests, health, keyring, worker_limiter()
        )

    def __enter__(self) -> OfflineStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._segments.close()
        self._index.close()

    @property
    def segments(self) -> Segments:
        """What is stored; its methods belong to the thread that opened the store."""
        return self._segments

    def record(self, path: str) -> tuple[VersionRecord, tuple[bytes, ...]]:
        """The version that PATH@VERSION names, and the place in it. NotFound or InvalidRequest."""
        address = self._addresses.find(path)
        return self._addresses.record(address), address.inner

    def ask(self, request: AnyRequest, on_progress: Callable[[Progress], None] | None = None) -> object:
        """The result of a request that reads; Unavailable for any other."""
        if not request.is_reading:
            command = type(request).__name__.lower()
            raise Unavailable(
                f"`{command}` needs a daemon; first `ckptfs mount MNT --store {self._disk.root}`"
            )
        return trio.run(self._answer, request, on_progress or unreported)

    async def _answer(self, request: AnyRequest, report: Callable[[Progress], None]) -> Json:
        units = self._histories.shown_names().values
        match request:
            case messages.Status():
                return await self._queries.status(units())
            case messages.Keys():
                return self._queries.key()
            case messages.Head(path="/"):
                return self._queries.heads(units())
        return await self._of_address(self._addresses.find(request.path), request, report)

    async def _of_address(
        self, address: Address, request: AnyRequest, report: Callable[[Progress], None]
    ) -> Json:
        result: Json
        match request:
            case messages.Verify():
                result = await self._queries.verify(address, report)
            case messages.Diff():
                # Who reads the bare store can read all of it.
                other = self._addresses.find(request.other)
                result = await self._queries.diff(address, other, report, lambda entry: True)
            case messages.Prove():
                result = await self._prover.proof(address, request.tensor, lambda entry: True)
            case messages.Digest():
                result = await self._files.digest(address, report, lambda entry: True)
            case messages.Health():
                result = await self._files.health(address, report, lambda entry: True)
            case messages.Expect():
                result = await self._files.expect(address, request.ways, report, lambda entry: True)
            case messages.Du(by_dtype=by_dtype):
                result = await self._queries.usage(address, by_dtype=by_dtype)
            case messages.Head():
                result = self._queries.heads(units_of(address))
            case messages.Log(verify=True):
                result = await self._queries.prove(address, request.keys, request.expect)
            case _:
                result = self._queries.log(address)
        return result

    def _top_of(self, directory: int) -> int:
        """The unit's directory, as far as the histories know one: without a mount there are no globs."""
        chain = self._namespace.ancestors(directory)
        known = next((ino for ino in chain if self._is_top(ino)), None)
        return known if known is not None else chain[max(0, len(chain) - 2)]

    def _is_top(self, directory: int) -> bool:
        return self._histories.unit_of_ino(directory) is not None

    async def _facts(self) -> Facts:
        sizes = (self._disk.size(f"{STAGING_PATH}/{name}") for name in self._disk.list_dir(STAGING_PATH))
        return Facts(
            write_path=None,
            why="no daemon has this store; as of its last commit",
            mountpoint=None,
            ingest_pending_bytes=sum(sizes),
            scrub=noted_scrubs(self._index),
        )


def rebuild_store(path: str, on_progress: Callable[[Progress], None] | None) -> dict[str, Json]:
    """Make the index of the store at `path` anew; what was found. Conflict if a daemon has the store.

    Durable when: this returned. It may be killed at any moment and run again.
    """

    def tell(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(Progress(done=done, total=total))

    disk = open_store(path)
    lock = StoreLock(disk, Holder(os.getpid()))
    try:
        end_orphan(disk)
        found = rebuild(disk, boot_id=boot_id(), now_ns=time.time_ns(), progress=tell)
    finally:
        lock.release()
    return cast("dict[str, Json]", msgspec.to_builtins(found))
