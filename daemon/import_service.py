"""What the request `import` does: a directory outside becomes versions, and the newest the live directory.

One rule: it is the store owner's alone, because the daemon reads (and with `move` removes) what it may, and
not what the caller may.
"""

from __future__ import annotations

import os

from ckptfs.daemon import messages
from ckptfs.daemon.control import Report
from ckptfs.daemon.import_plan import Step
from ckptfs.daemon.importing import Imported, Importer, Wanted
from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.queries import iso_time
from ckptfs.daemon.remote_service import RollingBack
from ckptfs.fusefs import rollback
from ckptfs.store.errors import Conflict, InvalidRequest
from ckptfs.store.history import VersionRecord


class ImportService:
    """Carries it out, for whoever may. Belongs to the index thread."""

    def __init__(self, parts: OpenStore, rolling_back: RollingBack | None) -> None:
        """`rolling_back` makes a version the live directory; without a mount nobody does."""
        self._parts = parts
        self._importer = Importer(parts)
        self._rolling_back = rolling_back

    async def answer(self, request: messages.Import, report: Report) -> Json:
        """The result; a CkptfsError says why there is none. Durable when: this returned."""
        name = os.fsencode(request.path).strip(b"/")
        left = frozenset(tuple(_parts(path)) for path in request.left)
        wanted = Wanted(
            request.source,
            name,
            request.move,
            left,
            request.follows,
            request.looked_ns,
            request.device,
            request.inode,
        )
        if request.dry_run:
            planned = await self._importer.plan(wanted)
            would: list[Json] = [
                {**_step_row(one.step), "files": one.files, "bytes": one.bytes} for one in planned
            ]
            return {"unit": os.fsdecode(name), "dry_run": True, "versions": would}
        done = await self._importer.run(wanted, lambda at, total: report(Progress(done=at, total=total)))
        why = await self._made_live(done.newest, request)
        return {**_answer(name, done), "live": why is None, "why": why}

    async def _made_live(self, newest: VersionRecord | None, request: messages.Import) -> str | None:
        """Why it is not the live directory; None if it is."""
        if not request.live:
            return "it was not asked for"
        if newest is None:
            return "there is no version"
        unit = self._parts.histories.unit(newest.unit)
        if unit is not None and unit.ino:
            return None
        if self._rolling_back is None:
            return "the store is not mounted; `ckptfs rollback PATH --to latest` does it once it is"
        try:
            await self._rolling_back.roll_back([rollback.Wanted(0, newest)], None)
        except (InvalidRequest, Conflict) as e:
            return str(e)
        return None


def _parts(path: str) -> list[bytes]:
    return [part for part in os.fsencode(path).split(b"/") if part not in (b"", b".")]


def _step_row(step: Step) -> dict[str, Json]:
    names: list[Json] = [os.fsdecode(name) for name in step.names]
    return {"names": names, "time": iso_time(step.time_ns), "step": step.step}


def _answer(name: bytes, done: Imported) -> dict[str, Json]:
    versions: list[Json] = [
        {
            "number": record.number,
            "name": record.name,
            "time": iso_time(record.time_ns),
            "step": record.step,
            "state": record.state.value,
            "files": record.files,
            "bytes": record.logical_bytes,
        }
        for record in done.made
    ]
    problems: list[Json] = [*done.problems]
    return {
        "unit": os.fsdecode(name),
        "dry_run": False,
        "versions": versions,
        "newest": done.newest.name if done.newest is not None else None,
        "files": dict[str, Json](done.ways),
        "bytes": dict[str, Json](done.bytes_by_way),
        "removed_files": done.removed_files,
        "problems": problems,
    }
