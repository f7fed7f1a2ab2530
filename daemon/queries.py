"""What can be asked without changing anything: log, status, head, keys, verify, diff, du.

One rule: the same code answers for a running mount and for a bare store; what only a running mount
knows (what waits for ingest, the write path) is handed in.

All of it belongs to the index thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import islice

import trio

from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.diffing import Differ
from ckptfs.daemon.drill_notes import DrillNotes
from ckptfs.daemon.messages import Json
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.daemon.usage import UsageCount, nothing_there
from ckptfs.daemon.verifying import Report, Verifier, worker_limiter
from ckptfs.daemon.version_notes import health_json, merge_json, writers_json
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.bad_chunks import NO_HASHERS, Hashers
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Corrupt, InvalidRequest, NotFound
from ckptfs.store.health_log import HealthLog
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_check import Fault, Finding, HistoryReport
from ckptfs.store.history_proof import prove
from ckptfs.store.ids import CidCodec, RecipeId, TreeId, cid_text
from ckptfs.store.keyring import Keyring
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.seal import Head, head_of
from ckptfs.store.segments import Segments
from ckptfs.store.signing import PublicKey
from ckptfs.store.tree import Entry
from ckptfs.store.units import Unit
from ckptfs.store.writer_log import WriterLog

_SLICE_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `status` says of the mount itself; `write_path` is None where nothing is mounted, `kernel_reads`
    counts the stored files that are open and read by the kernel itself. `kept`: whether the mount outlives
    its daemon; None: nobody is there who could keep it, or nothing is mounted. `config`: the configuration
    that was read, None if none was given."""

    write_path: str | None
    why: str
    mountpoint: str | None
    ingest_pending_bytes: int
    digest_pending_bytes: int | None = None
    kernel_reads: int = 0
    scrub: Json = None
    remotes: Json = None
    copies: Json = None
    encoding: Json = None
    kept: bool | None = None
    kept_why: str = "nothing is mounted"
    config: str | None = None


class Queries:
    """Answers questions about one store."""

    def __init__(
        self,
        disk: Disk,
        namespace: Namespace,
        segments: Segments,
        histories: Histories,
        addresses: Addresses,
        is_unit_top: Callable[[int], bool],
        facts: Callable[[], Awaitable[Facts]],
        keyring: Keyring,
        writer_log: WriterLog,
        merge_log: MergeLog,
        health_log: HealthLog,
        hashers: Hashers = NO_HASHERS,
        drills: DrillNotes | None = None,
    ) -> None:
        """`hashers` take part in verifying; `drills` are shown by status."""
        self._drills = drills
        self._disk = disk
        self._hashers = hashers
        self._namespace = namespace
        self._segments = segments
        self._histories = histories
        self._addresses = addresses
        self._is_unit_top = is_unit_top
        self._facts = facts
        self._keyring = keyring
        self._writer_log = writer_log
        self._merge_log = merge_log
        self._health_log = health_log
        self._limiter = worker_limiter()

    def log(self, address: Address) -> Json:
        """The versions of a unit, oldest first; below its top those in which the place is there."""
        records = self._addresses.versions(address)
        if address.version is not None:
            records = [self._addresses.record(address)]
        if not address.is_whole:
            records = [record for record in records if self._holds(record, address)]
            if not records and address.ino is None:
                raise nothing_there(address.text)
        return list(self._rows(address.unit, records))

    def row(self, unit: Unit, record: VersionRecord) -> dict[str, Json]:
        """One version as `log` lists it."""
        return next(iter(self._rows(unit, [record])))

    async def status(self, units: Iterable[Unit]) -> Json:
        """How things are; `units` are those to be listed."""
        facts = await self._facts()
        return {
            "version": program_version(),
            "mountpoint": facts.mountpoint,
            "store": self._disk.root,
            "write_path": facts.write_path,
            "why": facts.why,
            "kernel_reads": facts.kernel_reads,
            "kept": facts.kept,
            "kept_why": facts.kept_why,
            "config": facts.config,
            "units": [self._unit_row(unit) for unit in units],
            "stored_bytes": self._segments.payload_bytes(),
            "stored": asdict(self._segments.stored()),
            "free_bytes": self._disk.space().available,
            "ingest_pending_bytes": facts.ingest_pending_bytes,
            "digest_pending_bytes": facts.digest_pending_bytes,
            "scrub": facts.scrub,
            "remotes": facts.remotes,
            "copies": facts.copies,
            "encoding": facts.encoding,
            "key": None if (key := self._keyring.public) is None else key.fingerprint,
        }

    def heads(self, units: Iterable[Unit]) -> Json:
        """What to keep elsewhere of each unit: the newest link of its chain, and who signed it."""
        return [self._head_row(unit) for unit in units]

    def key(self) -> Json:
        """The public key; NotFound if none is known."""
        key = self._keyring.public
        if key is None:
            raise NotFound(
                "no signing key is known here; versions are not signed, or their key lies elsewhere"
            )
        retired: list[Json] = [
            {"fingerprint": one.fingerprint, "public": one.pem()} for one in self._keyring.retired
        ]
        return {"fingerprint": key.fingerprint, "public": key.pem(), "retired": retired}

    async def prove(self, address: Address, keys: Sequence[str], expect: str | None) -> Json:
        """Check a unit's history: every record, seal and link, and what the index makes of them.

        InvalidRequest for a VERSION (a history is checked as a whole), a bad key or a bad head.
        """
        if address.version is not None:
            raise InvalidRequest(f"a history is verified as a whole; leave out @{address.version}")
        expected = None if expect is None else head_of(expect)
        known = [public_key(text) for text in keys] or self._keyring.trusted
        (unit,) = units_of(address)
        evidence = self._histories.evidence(unit.unit)
        # A key that was rotated without a daemon is in no history yet.
        retired = self._keyring.retired if self._keyring.signing is not None and not keys else ()
        report = await trio.to_thread.run_sync(
            prove, evidence, known, expected, retired, limiter=self._limiter
        )
        await self._compare_digests(report)
        return {
            "unit": os.fsdecode(unit.name),
            "head": str(report.head),
            "keys": [*report.keys],
            "trusted": [key.fingerprint for key in known],
            "versions": [
                {"number": one.number, "name": one.name, "signed": one.key is not None, "key": one.key}
                for one in report.versions
            ],
            "findings": [
                {"fault": one.fault.value, "number": one.number, "message": one.message}
                for one in report.findings
            ],
        }

    async def _compare_digests(self, report: HistoryReport) -> None:
        said = iter(report.digests.items())
        while some := list(islice(said, _SLICE_ROWS)):
            for recipe in self._histories.differing_digests(some):
                message = f"the index has other digests of the content {cid_text(recipe)}"
                report.findings.append(Finding(Fault.INDEX, None, message))
            await trio.lowlevel.checkpoint()

    async def verify(self, address: Address, report: Report) -> Json:
        """Hash every chunk of a version (the latest, if none is named) again."""
        record = self._addresses.record(address)
        verifier = Verifier(self._disk, self._segments, self._limiter, report, self._hashers)
        total_bytes = record.logical_bytes if address.is_whole else 0
        verdict = await verifier.check(record.top, address.inner, total_bytes)
        return {
            "number": record.number,
            "name": record.name,
            "checked_bytes": verdict.checked_bytes,
            "chunks": verdict.chunks,
            "elapsed_s": verdict.elapsed_s,
            "corrupt": verdict.corrupt,
        }

    async def diff(
        self, before: Address, after: Address, report: Report, may_read: Callable[[Entry], bool]
    ) -> Json:
        """What is different in one version (the latest, if none is named) from another; `may_read` tells
        whether the caller may read a saved file, or list and enter a saved directory."""
        records = [self._addresses.record(address) for address in (before, after)]
        places = [self._place(*pair) for pair in zip((before, after), records, strict=True)]
        if places == [None, None]:
            raise nothing_there(before.text)
        rows = await Differ(self._segments, self._limiter, report, may_read).compare(*places)
        return {"before": records[0].name, "after": records[1].name, "files": [*rows]}

    def _place(self, address: Address, record: VersionRecord) -> Saved | None:
        """What a version has at an address; None: nothing."""
        way = way_into(self._segments, record.top, address.inner)
        return Saved(b"/".join(address.inner), way[-1]) if len(way) > len(address.inner) else None

    async def contents(self, record: VersionRecord) -> set[RecipeId]:
        """The contents of all files of a version; Corrupt if a directory cannot be read."""

        def refuse(path: bytes, tree: TreeId, error: Corrupt) -> None:
            raise error

        found: set[RecipeId] = set()
        for saved in walk(self._segments, Saved(b"", record.top), refuse):
            if saved.entry.recipe is not None:
                found.add(saved.entry.recipe)
            await trio.lowlevel.checkpoint()
        return found

    async def usage(self, address: Address, *, by_dtype: bool = False) -> Json:
        """What a version takes, or, if none is named, all versions and the live tree together."""
        count = UsageCount(self._disk, self._namespace, self._segments)
        path = b"/".join(address.inner)
        named = address.version is not None
        records = [self._addresses.record(address)] if named else self._addresses.versions(address)
        found = False
        for record in records:
            way = way_into(self._segments, record.top, address.inner)
            if len(way) > len(address.inner):
                found = True
                await count.add_saved(Saved(path, way[-1]))
        if address.version is None and address.ino is not None:
            found = True
            await count.add_live(address.ino, path, lambda ino: self._is_part(address, ino))
        if not found:
            raise nothing_there(address.text)
        usage = count.usage
        if by_dtype:
            await count.add_dtypes()
        return {
            "logical_bytes": usage.logical_bytes,
            "unique_bytes": usage.unique_bytes,
            "stored_bytes": usage.stored_bytes,
            "by_codec": _sums(usage.by_codec),
            **({"by_dtype": _sums(usage.by_dtype)} if by_dtype else {}),
            "versions": len(records),
        }

    def _is_part(self, address: Address, ino: int) -> bool:
        inode = self._namespace.find(ino)
        if inode is None or not inode.is_dir:
            return inode is not None
        return not self._is_unit_top(ino) or ino == address.top

    def _holds(self, record: VersionRecord, address: Address) -> bool:
        try:
            return len(way_into(self._segments, record.top, address.inner)) > len(address.inner)
        except CkptfsError:
            return True  # it is for verify to say what is wrong with it

    def _rows(self, unit: Unit | None, records: list[VersionRecord]) -> Iterable[dict[str, Json]]:
        if unit is None:
            return
        tags = self._histories.tags(unit.unit)
        pins = self._histories.pins(unit.unit)
        for record in records:
            yield {
                "number": record.number,
                "name": record.name,
                "time": iso_time(record.time_ns),
                "time_ns": record.time_ns,
                "step": record.step,
                "steps": list(record.steps),
                "tags": [*sorted(tag for tag, number in tags.items() if number == record.number)],
                "pinned": record.number in pins,
                "state": record.state.value,
                "missing": list(record.missing),
                "origin": record.origin,
                "files": record.files,
                "logical_bytes": record.logical_bytes,
                "root": record.root.hex(),
                "cid": cid_text(record.top.tree, CidCodec.DAG_CBOR) if record.top.tree is not None else None,
                "health": health_json(self._health_log.of_version(unit.unit, record.number)),
                "merged": merge_json(self._merge_log.of(record)),
                **writers_json(self._writer_log.of(record)),
            }

    def _head_row(self, unit: Unit) -> Json:
        chain, key = self._histories.head(unit)
        return {
            "unit": os.fsdecode(unit.name),
            "number": unit.next_number - 1,
            "head": str(Head(chain, unit.next_number - 1)),
            "link": unit.head.hex(),
            "key": None if key is None else key.fingerprint,
        }

    def _unit_row(self, unit: Unit) -> Json:
        complete, looked_at = self._histories.newest_complete(unit.unit), self._health_log.newest(unit.unit)
        drill = None if self._drills is None else self._drills.of(unit.unit)
        return {
            "name": os.fsdecode(unit.name),
            "live": unit.ino != 0,
            "versions": len(self._histories.numbers(unit.unit)),
            "newest_complete": complete.name if complete is not None else None,
            "newest_complete_age_s": (time.time_ns() - complete.time_ns) / 1e9
            if complete is not None
            else None,
            "bad_tensors": None if looked_at is None else looked_at[1].total.bad,
            "drill": None if drill is None else drill.as_json(),
        }


def units_of(address: Address) -> list[Unit]:
    """The one unit of an address; NotFound as long as it has no history."""
    if address.unit is None:
        raise NotFound(f"{address.text} has no version yet; `ckptfs publish` makes one")
    return [address.unit]


def _sums(by_name: Mapping[str, tuple[int, int]]) -> Json:
    return {
        name: {"unique_bytes": unique, "stored_bytes": stored}
        for name, (unique, stored) in sorted(by_name.items())
    }


def public_key(text: str) -> PublicKey:
    """The public key in 64 hex digits, or InvalidRequest."""
    try:
        return PublicKey(bytes.fromhex(text))
    except ValueError:
        raise InvalidRequest("a public key is 64 hex digits") from None


def iso_time(time_ns: int) -> str:
    """A time as scripts read it: 2026-11-29T16:02:11.123456Z."""
    seconds, rest_ns = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 1000:06d}Z"


def program_version() -> str:
    try:
        return metadata.version("ckptfs")
    except metadata.PackageNotFoundError:
        return "unknown"
