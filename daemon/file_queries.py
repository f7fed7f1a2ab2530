"""What can be asked of whole files in a version: digests, health, which tensors they hold, and a seal.

One rule: digests are those of a sealed record of a history, whatever the index has; what only the index has
is answered as that, and of a content without any they are made now, from chunks that are checked on the way.
A seal goes by nothing that the signed history does not say. Nothing is changed.

All of it belongs to the index thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import trio

from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.expecting import Expecting
from ckptfs.daemon.health_queries import HealthQueries
from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.daemon.usage import nothing_there
from ckptfs.daemon.verifying import Report
from ckptfs.gpu.expected import MOST_WAYS, encode_expectation
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.digests import FileDigests
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Conflict, Corrupt, InvalidRequest, NotPermitted, Unavailable
from ckptfs.store.file_seal import seal_file
from ckptfs.store.health_log import HealthLog
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_proof import doubt_of, prove
from ckptfs.store.ids import RecipeId, TreeId, UnitId
from ckptfs.store.keyring import Keyring
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry
from ckptfs.store.whole_files import WholeFiles

_SLICE = 256
MayRead = Callable[[Entry], bool]


@dataclass(frozen=True, slots=True)
class DigestedFile:
    """A regular file and what it is; `path` counts from the place that was asked for. `source` tells who
    says so: a sealed record of a history, the chunks (hashed just now), or nobody but the index."""

    path: bytes
    digests: FileDigests
    source: Literal["history", "chunks", "index"]


class FileQueries:
    """Answers for one store."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        addresses: Addresses,
        histories: Histories,
        digests: DigestLog,
        health: HealthLog,
        keyring: Keyring,
        limiter: trio.CapacityLimiter,
    ) -> None:
        """`limiter` bounds the worker threads of all requests together."""
        self._histories = histories
        self._keyring = keyring
        self._limiter = limiter
        self._segments = segments
        self._addresses = addresses
        self._digests = digests
        self._files = WholeFiles(disk, segments, limiter)
        self._health = HealthQueries(segments, self._files, health, limiter)
        self._expecting = Expecting(segments, addresses, limiter)

    async def digest(self, address: Address, report: Report, may_read: MayRead) -> Json:
        """The digests of every regular file at and below a place of a version (the latest, if none is
        named), in the order of their paths, and the paths of what else is there but directories.

        `may_read` tells whether the caller may read a saved file, or list and enter a saved directory;
        NotPermitted if not. NotFound if there is nothing. Corrupt if something cannot be read.
        """
        record = self._addresses.record(address)
        way = way_into(self._segments, record.top, address.inner)
        if len(way) <= len(address.inner):
            raise nothing_there(address.text)
        found = await self._walk(way[-1], address, may_read)
        others: list[Json] = [os.fsdecode(path) for path, entry in found if entry.recipe is None]
        files = [(path, entry.recipe, entry.size) for path, entry in found if entry.recipe is not None]
        rows = await self._digested(record, files, report)
        return {
            "number": record.number,
            "name": record.name,
            "is_directory": way[-1].is_dir,
            "files": [_row(one) | {"source": one.source} for one in rows],
            "others": others,
        }

    async def health(self, address: Address, report: Report, may_read: MayRead) -> Json:
        """What was found in the float tensors of every file at and below a place of a version, and the paths
        of what has none; errors as for `digest`."""
        record = self._addresses.record(address)
        way = way_into(self._segments, record.top, address.inner)
        if len(way) <= len(address.inner):
            raise nothing_there(address.text)
        place, found = b"/".join(address.inner), await self._walk(way[-1], address, may_read)
        if way[-1].is_dir:
            prefix = place + b"/" if place else b""
            saved = [(path, Saved(prefix + path, entry)) for path, entry in found]
        else:
            saved = [(path, Saved(place, entry)) for path, entry in found]
        rows, others = await self._health.rows(record, saved, report)
        return {"number": record.number, "name": record.name, "files": rows, "others": others}

    async def expect(self, address: Address, ways: int, report: Report, may_read: MayRead) -> Json:
        """What the tensors at and below a place of a version are, as Expecting says it. InvalidRequest if
        `ways` is no number of ranks."""
        if not 1 <= ways <= MOST_WAYS:
            raise InvalidRequest(f"rows are divided among 1 to {MOST_WAYS} ranks, not {ways}")
        expectation = await self._expecting.expectation(address, ways, report, may_read)
        encoded = await trio.to_thread.run_sync(encode_expectation, expectation, limiter=self._limiter)
        return cast("Json", encoded)

    async def seal(self, address: Address, report: Report) -> Json:
        """The seal of one file of a version, which a key of ours must have signed.

        InvalidRequest if the place is no regular file, Unavailable without a key to sign with, Conflict if
        the history is not what was signed. Corrupt if the file cannot be read.
        """
        record = self._addresses.record(address)
        key = self._keyring.signing
        if key is None:
            raise Unavailable("there is no key to seal with; see `key` in the configuration")
        way = way_into(self._segments, record.top, address.inner)
        if len(way) <= len(address.inner):
            raise nothing_there(address.text)
        recipe = way[-1].recipe
        if recipe is None:
            raise InvalidRequest(f"{address.text} is no regular file; name one file of a version")
        digests = (await self._proven(record)).get(recipe)
        if digests is None:
            digests = await self._files.digests(recipe, _Progress(report, way[-1].size).add)
        seal = seal_file(key, digests)
        row = _row(DigestedFile(way[-1].name, digests, "history"))
        facts: dict[str, Json] = {"number": record.number, "name": record.name}
        return row | facts | {"key": key.public.fingerprint, "seal": seal.hex()}

    async def _proven(self, record: VersionRecord) -> dict[RecipeId, FileDigests]:
        """The digests that the signed history has, once it is sure that the version is in there."""
        evidence = self._histories.evidence(record.unit)
        trusted = self._keyring.trusted
        found = await trio.to_thread.run_sync(prove, evidence, trusted, limiter=self._limiter)
        wrong = doubt_of(found, record)
        if self._histories.version(record.unit, record.number) != record:
            wrong = wrong or "the index has it in another version's place"
        if wrong is not None:
            raise Conflict(f"nothing of this version is sealed: {wrong} (see `ckptfs log --verify`)")
        return found.sealed_digests

    async def _digested(
        self, record: VersionRecord, files: list[tuple[bytes, RecipeId, int]], report: Report
    ) -> list[DigestedFile]:
        progress = _Progress(report, sum(size for _, _, size in files))
        sealed = await self._sealed(record.unit, {recipe for _, recipe, _ in files})
        made: dict[RecipeId, FileDigests] = {}
        rows = []
        for path, recipe, size in files:
            if recipe in sealed:
                rows.append(DigestedFile(path, sealed[recipe], "history"))
            elif recipe not in made and (said := self._digests.of(recipe)) is not None:
                rows.append(DigestedFile(path, said, "index"))
            else:
                if recipe not in made:
                    made[recipe] = await self._files.digests(recipe, progress.add)
                    size = 0
                rows.append(DigestedFile(path, made[recipe], "chunks"))
            await progress.add(size)
        return rows

    async def _sealed(self, unit: UnitId, wanted: set[RecipeId]) -> dict[RecipeId, FileDigests]:
        """What sealed records say of contents: those of a unit, and, since a content that several units hold
        is recorded in one of them, those of the others for what the index has and this one lacks."""
        found: dict[RecipeId, FileDigests] = {}
        has_row = {recipe for recipe in wanted if self._digests.has(recipe)}
        others = (one.unit for one in self._histories.units() if one.unit != unit)
        for at, other in enumerate((unit, *others)):
            if at and not has_row - found.keys():
                break
            evidence = self._histories.evidence(other)
            checked = await trio.to_thread.run_sync(
                prove, evidence, self._keyring.trusted, limiter=self._limiter
            )
            said = checked.sealed_digests
            found |= {recipe: said[recipe] for recipe in wanted & said.keys() if recipe not in found}
        return found

    async def _walk(self, start: Entry, address: Address, may_read: MayRead) -> list[tuple[bytes, Entry]]:
        """All that is no directory; the place itself goes by its name."""
        if not start.is_dir:
            return [(start.name, start)]
        found = []
        for step, saved in enumerate(walk(self._segments, Saved(b"", start), _refuse)):
            if not may_read(saved.entry):
                raise NotPermitted(f"you may not read {os.fsdecode(saved.path)} in {address.text}")
            if not saved.entry.is_dir:
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


def _row(one: DigestedFile) -> dict[str, Json]:
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
