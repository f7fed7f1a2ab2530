"""What can be asked without changing anything: log, status, verify, du.

One rule: the same code answers for a running mount and for a bare store; what only a running mount
knows (what waits for ingest, the write path) is handed in.

All of it belongs to the index thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.messages import Json
from ckptfs.daemon.saved_files import Saved, way_into
from ckptfs.daemon.usage import UsageCount, nothing_there
from ckptfs.daemon.verifying import Report, Verifier, worker_limiter
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import CidCodec, cid_text
from ckptfs.store.segments import Segments
from ckptfs.store.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `status` says of the mount itself; `write_path` is None where nothing is mounted."""

    write_path: str | None
    why: str
    mountpoint: str | None
    ingest_pending_bytes: int


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
    ) -> None:
        self._disk = disk
        self._namespace = namespace
        self._segments = segments
        self._histories = histories
        self._addresses = addresses
        self._is_unit_top = is_unit_top
        self._facts = facts
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

    def row(self, unit: Unit, record: VersionRecord) -> Json:
        """One version as `log` lists it."""
        return next(iter(self._rows(unit, [record])))

    async def status(self, units: Iterable[Unit]) -> Json:
        """How things are; `units` are those to be listed."""
        facts = await self._facts()
        return {
            "version": _program_version(),
            "mountpoint": facts.mountpoint,
            "store": self._disk.root,
            "write_path": facts.write_path,
            "why": facts.why,
            "units": [self._unit_row(unit) for unit in units],
            "stored_bytes": self._segments.payload_bytes(),
            "free_bytes": self._disk.space().available,
            "ingest_pending_bytes": facts.ingest_pending_bytes,
        }

    async def verify(self, address: Address, report: Report) -> Json:
        """Hash every chunk of a version (the latest, if none is named) again."""
        record = self._addresses.record(address)
        verifier = Verifier(self._disk, self._segments, self._limiter, report)
        verdict = await verifier.check(record.top, address.inner)
        return {
            "number": record.number,
            "name": record.name,
            "checked_bytes": verdict.checked_bytes,
            "chunks": verdict.chunks,
            "corrupt": verdict.corrupt,
        }

    async def usage(self, address: Address) -> Json:
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
        return {
            "logical_bytes": usage.logical_bytes,
            "unique_bytes": usage.unique_bytes,
            "stored_bytes": usage.stored_bytes,
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
            }

    def _unit_row(self, unit: Unit) -> Json:
        complete = self._histories.newest_complete(unit.unit)
        return {
            "name": os.fsdecode(unit.name),
            "live": unit.ino != 0,
            "versions": len(self._histories.numbers(unit.unit)),
            "newest_complete": complete.name if complete is not None else None,
            "newest_complete_age_s": (time.time_ns() - complete.time_ns) / 1e9
            if complete is not None
            else None,
        }


def iso_time(time_ns: int) -> str:
    """A time as scripts read it: 2026-11-29T16:02:11.123456Z."""
    seconds, rest_ns = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 1000:06d}Z"


def _program_version() -> str:
    try:
        return metadata.version("ckptfs")
    except metadata.PackageNotFoundError:
        return "unknown"
