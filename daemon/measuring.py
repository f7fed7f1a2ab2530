"""Taking the daemon's figures, and handing them to whoever watches it.

One rule: the figures belong to the trio thread and are taken there, in steps; the thread that was asked
waits. A scrape that comes when the mount ends, or does not answer, is refused, not kept waiting for ever.

Listens only where `metrics` in the configuration says, by default nowhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol
from wsgiref.simple_server import WSGIServer

import trio
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ckptfs.daemon.config import is_metrics_file, metrics_address
from ckptfs.daemon.drill_notes import DrillNotes
from ckptfs.daemon.messages import Json
from ckptfs.daemon.metrics import Figures, RemoteFigures, UnitFigures, families
from ckptfs.daemon.queries import Facts, program_version
from ckptfs.fusefs.face import Face
from ckptfs.store.disk import Disk
from ckptfs.store.health_log import HealthLog
from ckptfs.store.histories import Histories
from ckptfs.store.segments import Segments

log = logging.getLogger(__name__)
_FILE_EVERY_S = 15.0
_SLOWEST_S = 10.0
_SLICE = 64
_AGAIN_S = 30.0


class Space(Protocol):
    """Knows how much room is to be kept."""

    def min_free_bytes(self) -> int:
        """The room that is kept free now."""


class Measuring:
    """Takes figures. Belongs to the trio thread."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        histories: Histories,
        health: HealthLog,
        face: Face,
        space: Space,
        facts: Callable[[], Awaitable[Facts]],
        remotes: Callable[[], tuple[RemoteFigures, ...]],
        drills: DrillNotes,
        *,
        names: bool,
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._histories = histories
        self._health = health
        self._face = face
        self._space = space
        self._facts = facts
        self._remotes = remotes
        self._drills = drills
        self._names = names

    async def figures(self) -> Figures:
        """What is true now."""
        facts, room, face = await self._facts(), self._disk.space(), self._face
        return Figures(
            release=program_version(),
            write_path=str(facts.write_path),
            units=await self._units(),
            times=face.operations.times,
            stored=self._segments.stored(),
            free_bytes=room.available,
            min_free_bytes=self._space.min_free_bytes(),
            total_bytes=room.total,
            ingest_pending_bytes=facts.ingest_pending_bytes,
            digest_pending_bytes=facts.digest_pending_bytes or 0,
            ingested_bytes=face.storing.stored_bytes,
            ingested_files=face.storing.stored_files,
            versions_made=face.recorder.versions_made,
            open_files=len(face.files.open_files),
            kernel_reads=facts.kernel_reads,
            kept=facts.kept,
            corruptions=self._segments.corruption_count,
            scrub_damage=int(_of_scrub(facts.scrub, "corrupt") or 0),
            scrub_age_s=_of_scrub(facts.scrub, "age_s"),
            publish_waiting_s=face.quiet.waiting_s(time.monotonic()),
            remotes=self._remotes(),
        )

    async def _units(self) -> tuple[UnitFigures, ...]:
        found = []
        for at, unit in enumerate(self._histories.shown_names().values()):
            newest, complete = self._histories.newest(unit.unit), self._histories.newest_complete(unit.unit)
            looked_at = self._health.newest(unit.unit)
            drill = self._drills.of(unit.unit)
            found.append(
                UnitFigures(
                    name=unit.text if self._names else unit.unit.hex(),
                    live=unit.ino != 0,
                    versions=len(self._histories.numbers(unit.unit)),
                    newest_age_s=None if newest is None else _age_s(newest.time_ns),
                    complete_age_s=None if complete is None else _age_s(complete.time_ns),
                    bad_tensors=None if looked_at is None else looked_at[1].total.bad,
                    drill_age_s=None if drill is None else drill.age_s,
                    drill_good=None if drill is None else drill.outcome == "good",
                )
            )
            if at % _SLICE == 0:
                await trio.lowlevel.checkpoint()
        return tuple(found)


class MetricsServer:
    """Serves figures at an address, or writes them to a file. Belongs to the trio thread."""

    def __init__(self, figures: Callable[[], Awaitable[Figures]], where: str) -> None:
        self._figures = figures
        self._where = where

    async def run(self) -> None:
        """Serve for ever; cancelled at shutdown. An address that is taken is tried again and again."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Taken(self._figures, trio.lowlevel.current_trio_token()))
        if is_metrics_file(self._where):
            await self._write_regularly(registry)
        host, port = metrics_address(self._where)
        while True:
            try:
                server, thread = start_http_server(port, host, registry)
                break
            except OSError as e:
                reason = e.strerror or e
                log.error("metrics cannot be served at %s: %s; it is tried again", self._where, reason)
                await trio.sleep(_AGAIN_S)
        log.info("metrics at http://%s/metrics", self._where)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_end, server, thread)

    async def _write_regularly(self, registry: CollectorRegistry) -> None:
        while True:
            try:
                await trio.to_thread.run_sync(
                    write_to_textfile, self._where, registry, abandon_on_cancel=True
                )
            except OSError as e:
                log.warning("metrics cannot be written to %s: %s", self._where, e.strerror or e)
            await trio.sleep(_FILE_EVERY_S)


class _Taken(Collector):
    """What a registry asks, in its thread."""

    def __init__(self, figures: Callable[[], Awaitable[Figures]], token: trio.lowlevel.TrioToken) -> None:
        self._figures = figures
        self._token = token

    def collect(self) -> Iterable[Metric]:
        """The metrics of now. TooSlowError if the mount takes more than 10 s to say them."""

        async def taken() -> Figures:
            with trio.fail_after(_SLOWEST_S):
                return await self._figures()

        return list(families(trio.from_thread.run(taken, trio_token=self._token)))


def _end(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join(_SLOWEST_S)


def _age_s(time_ns: int) -> float:
    return max(0.0, (time.time_ns() - time_ns) / 1e9)


def _of_scrub(scrub: Json, key: str) -> float | None:
    value = scrub.get(key) if isinstance(scrub, dict) else None
    return float(value) if isinstance(value, int | float) else None
