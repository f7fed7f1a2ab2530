"""What can be asked of whole files in a version: their digests.

One rule: digests that were recorded are answered as they are; of a content without, they are made now,
from chunks that are checked on the way. Nothing is changed.

All of it belongs to the index thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import trio

from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.daemon.usage import nothing_there
from ckptfs.daemon.verifying import Report
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.digests import FileDigests
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NotPermitted
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry
from ckptfs.store.whole_files import WholeFiles

_SLICE = 256
MayRead = Callable[[Entry], bool]


@dataclass(frozen=True, slots=True)
class DigestedFile:
    """A regular file and what it is; `path` counts from the place that was asked for."""

    path: bytes
    digests: FileDigests


class FileQueries:
    """Answers for one store."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        addresses: Addresses,
        digests: DigestLog,
        limiter: trio.CapacityLimiter,
    ) -> None:
        """`limiter` bounds the worker threads of all requests together."""
        self._segments = segments
        self._addresses = addresses
        self._digests = digests
        self._files = WholeFiles(disk, segments, limiter)

    async def digest(self, address: Address, report: Report, may_read: MayRead) -> Json:
        """The digests of every regular file at and below a place of a version (the latest, if none is
        named). Raises as `files`."""
        record = self._addresses.record(address)
        rows = await self.files(record, address, report, may_read)
        return {"number": record.number, "name": record.name, "files": [_row(one) for one in rows]}

    async def files(
        self, record: VersionRecord, address: Address, report: Report, may_read: MayRead
    ) -> list[DigestedFile]:
        """The same in order of their paths, byte by byte. `may_read` tells whether the caller may read a
        saved file, or list and enter a saved directory; NotPermitted if not. NotFound if there is nothing.
        Corrupt if something cannot be read."""
        found = await self._walk(record, address, may_read)
        progress = _Progress(report, sum(entry.size for _, entry in found))
        made: dict[RecipeId, FileDigests] = {}
        rows = []
        for path, entry in found:
            assert entry.recipe is not None, "a regular file has a recipe"
            digests = made.get(entry.recipe) or self._digests.of(entry.recipe)
            if digests is None:
                digests = await self._files.digests(entry.recipe, progress.add)
            else:
                await progress.add(entry.size)
            made[entry.recipe] = digests
            rows.append(DigestedFile(path, digests))
        return rows

    async def _walk(
        self, record: VersionRecord, address: Address, may_read: MayRead
    ) -> list[tuple[bytes, Entry]]:
        way = way_into(self._segments, record.top, address.inner)
        if len(way) <= len(address.inner):
            raise nothing_there(address.text)
        start = way[-1]
        if not start.is_dir:
            return [(start.name, start)] if start.recipe is not None else []
        found = []
        for step, saved in enumerate(walk(self._segments, Saved(b"", start), _refuse)):
            if not may_read(saved.entry):
                raise NotPermitted(f"you may not read {os.fsdecode(saved.path)} in {address.text}")
            if saved.entry.recipe is not None:
                found.append((saved.path, saved.entry))
            if step % _SLICE == 0:
                await trio.lowlevel.checkpoint()
        return sorted(found, key=lambda pair: pair[0])


class _Progress:
    """Counts bytes for whoever waits."""

    def __init__(self, report: Report, total_bytes: int) -> None:
        self._report = report
        self._total_bytes = total_bytes
        self._done_bytes = 0

    async def add(self, count: int) -> None:
        self._done_bytes += count
        self._report(Progress(done=self._done_bytes, total=self._total_bytes))
        await trio.lowlevel.checkpoint()


def _row(one: DigestedFile) -> Json:
    digests = one.digests
    return {
        "path": os.fsdecode(one.path),
        "size": digests.size,
        "sha256": digests.sha256.hex(),
        "blake3": digests.blake3.hex(),
        "crc64": f"{digests.crc64:016x}",
    }


def _refuse(path: bytes, tree: TreeId, error: Corrupt) -> None:
    raise error
