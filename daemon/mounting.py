"""One mount from beginning to end: the parts are made, joined, run, and let go.

One rule: wiring happens here, and that of the commands in command_parts.py. Everything but worker threads
lives in one trio nursery in the main thread, which is also the index's thread.

Order of the end (a stop is bounded, and durable before it is complete): no new requests (unmount, lazily
if it is busy); the session drains; staging is synced where it lies; the index is committed and
closed; the lock is released. At a hand-over, which is no stop, nothing is synced: jobs wait for its end.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable

import trio

from ckptfs.daemon.cli_output import human_bytes
from ckptfs.daemon.command_parts import CommandParts, make_service
from ckptfs.daemon.config import Config
from ckptfs.daemon.control import ControlServer
from ckptfs.daemon.copying import Copying
from ckptfs.daemon.digesting import Digesting
from ckptfs.daemon.drill_notes import DrillNotes
from ckptfs.daemon.encoding import encoding_of
from ckptfs.daemon.health_making import HealthMaking
from ckptfs.daemon.held_signals import SIGNALS, hold
from ckptfs.daemon.idling import may_be_hurried
from ckptfs.daemon.kept_session import KeptSession, Names
from ckptfs.daemon.key_exchange import exchange_key
from ckptfs.daemon.last_sync import sync_staging
from ckptfs.daemon.lifetime import Stop, Switched, keep_running
from ckptfs.daemon.measuring import Measuring, MetricsServer
from ckptfs.daemon.mount_probe import MountProbe
from ckptfs.daemon.mountpoints import (
    may_allow_other,
)
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.pending import pending_bytes
from ckptfs.daemon.queries import Facts
from ckptfs.daemon.reloading import Reloader, Reread
from ckptfs.daemon.remotes import default_node_name, open_remote
from ckptfs.daemon.retaining import Policies, Retainer
from ckptfs.daemon.scrubbing import References, Scrubbing
from ckptfs.daemon.service import Service
from ckptfs.daemon.service_manager import ServiceManager
from ckptfs.daemon.space import SpaceKeeper
from ckptfs.daemon.upkeep import Upkeep, commit_or_warn
from ckptfs.fusefs.face import Face, FaceSettings, StoreParts
from ckptfs.fusefs.session import Session
from ckptfs.store import dagcbor
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.disk import Space
from ckptfs.store.errors import Unavailable
from ckptfs.store.health_log import HealthLog
from ckptfs.store.quarantine import Quarantine
from ckptfs.store.scrub import Scrubber
from ckptfs.store.sweep import Sweeper
from ckptfs.store.whole_files import WholeFiles

log = logging.getLogger(__name__)


class Mount:
    """The parts of one mount that is being served. Belongs to the trio thread."""

    def __init__(
        self,
        parts: OpenStore,
        path: str,
        socket: str,
        config: Config,
        config_path: str | None,
        kept: KeptSession | None,
    ) -> None:
        self._kept = kept
        self._session: Session | None = None
        self._names = kept.names if kept is not None else Names.new()
        self._parts = parts
        self._path = path
        self._config = config
        self._config_path = None if config_path is None else os.path.abspath(config_path)
        self._allow_other = may_allow_other()
        self._policies = Policies(config.policy)
        self.face = Face(
            StoreParts(
                parts.disk,
                parts.index,
                parts.staging,
                parts.segments,
                parts.ingest,
                parts.histories,
                parts.processes,
                parts.cuts_ahead,
            ),
            self._face_settings(),
            self,
            kept.state if kept is not None else None,
        )
        self._sweeper = Sweeper(
            parts.disk,
            parts.index,
            parts.segments,
            parts.histories,
            parts.ingest.reclaim,
            self.face.open_recipes,
        )
        self._keeper = SpaceKeeper(
            parts.disk,
            parts.index,
            parts.histories,
            self._sweeper,
            config,
            lambda: self.face.preimages.give_up(lambda top: self.face.recorder.newest(top) is not None),
            lambda: self.face.recorder.last_save_bytes,
            lambda: self.face.scheduler.is_publishing,
            self.face.scheduler.publish_soon,
        )
        self._retainer = Retainer(parts.histories, self._sweeper, self._policies)
        self._scrubbing = self._make_scrubbing()
        self._encoding = encoding_of(
            parts, lambda: self._config, self._policies, self._keeper.min_free_bytes, self._is_quiet
        )
        self._drills = DrillNotes(parts.index)
        self._digests = DigestLog(parts.disk, parts.index, parts.histories)
        self._health = HealthLog(parts.disk, parts.index, parts.histories)
        self._digesting = self._make_digesting()
        self._copying = Copying(
            parts,
            config.remote,
            lambda one: open_remote(one, os.environ),
            default_node_name(),
            config.copies,
        )
        self._quarantine = Quarantine(parts.disk, parts.index, parts.segments, self._keeper.min_free_bytes)
        self._manager = ServiceManager(os.environ)
        self._reloader = Reloader(config_path, config, self._reconfigure, self._manager)
        self._metrics = Switched("metrics", self._make_metrics)
        self._digests_task = Switched(
            "making digests", lambda: self._digesting.run if self._config.digests else None
        )
        self._control = ControlServer(socket, self._make_service().answer, everybody=self._allow_other)

    async def serve(self, as_json: bool) -> None:
        """Mount, serve, and leave everything durable."""
        hold(SIGNALS)
        session = self._session = self._mounted()
        # Of a terminal that goes away SIGHUP says just that.
        stop = Stop(session, self._path, None if os.isatty(0) else self._reloader.reload)
        leaves_mounted = True  # what fails by a bug of ours is left to the next daemon
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._control.serve)
                nursery.start_soon(self._parts.processes.prepare)
                nursery.start_soon(trio.to_thread.run_sync, dagcbor.prepare)
                nursery.start_soon(keep_running, "reading ahead", self.face.reading_ahead.run)
                if may_be_hurried():
                    nursery.start_soon(keep_running, "cutting ahead", self.face.cutting_ahead.run)
                nursery.start_soon(keep_running, "reading facts of writers", self.face.provenance.run)
                upkeep = Upkeep(self._parts)
                nursery.start_soon(keep_running, "committing", upkeep.commit)
                nursery.start_soon(keep_running, "reclaiming", upkeep.reclaim)
                nursery.start_soon(keep_running, "publishing", self.face.scheduler.run)
                nursery.start_soon(keep_running, "watching logs", self.face.scheduler.sample)
                nursery.start_soon(keep_running, "flushing", self.face.flusher.run)
                nursery.start_soon(keep_running, "finding whole files", self.face.whole_segments.run)
                nursery.start_soon(keep_running, "space keeping", self._keeper.run)
                nursery.start_soon(keep_running, "retention", self._retainer.run)
                nursery.start_soon(keep_running, "quarantine", self._quarantine.run)
                nursery.start_soon(keep_running, "scrubbing", self._scrubbing.run)
                nursery.start_soon(keep_running, "encoding", self._encoding.run)
                if any(one.push for one in self._config.remote):
                    nursery.start_soon(keep_running, "copying", self._copying.run)
                nursery.start_soon(self._metrics.run)
                nursery.start_soon(self._digests_task.run)
                nursery.start_soon(self._watch_signals, session, stop)
                nursery.start_soon(self._say_ready, session, as_json)
                nursery.start_soon(keep_running, "telling the service manager", self._tell_manager)
                await session.run()
                log.info("stopping" if stop.is_asked or stop.hands_over else "unmounted")
                nursery.cancel_scope.cancel()
            leaves_mounted = stop.hands_over
        finally:
            self._leave(session, mounted=leaves_mounted and session.is_kept)
        if stop.hands_over:
            # Jobs wait until the next daemon answers, so nothing is synced that may be tens of gigabytes: as
            # after a kill, what was answered is there, and it is synced when somebody asks for it.
            log.info("handed over")
            return
        with trio.CancelScope(shield=True):
            parts, changed = self._parts, list(self.face.drafts.changed_dirs)
            synced = await sync_staging(parts.disk, parts.index, self.face.namespace, parts.staging, changed)
        commit_or_warn(self._parts.index)
        log.info("stopped; %d files wait for ingest, durable in staging", synced)

    async def _watch_signals(self, session: Session, stop: Stop) -> None:
        """A session that does not serve yet cannot be told to stop; until then signals are held."""
        await session.serving.wait()
        await stop.watch_signals()

    def _face_settings(self) -> FaceSettings:
        config = self._config
        is_off = self._policies.is_off if config.policy else None
        owner = os.geteuid(), os.getegid()
        return FaceSettings(
            config.settle_s, config.settle_max_s, config.units, owner, is_off, config.provenance
        )

    def _reconfigure(self, reread: Reread) -> None:
        """Put into force what has changed in the configuration."""
        config = self._config = reread.config
        logging.getLogger().setLevel(config.log_level.upper())
        self._policies.configure(config.policy)
        self.face.configure(self._face_settings())
        self._keeper.configure(config)
        self._scrubbing.configure(config)
        if not {"metrics", "metrics_names"}.isdisjoint(reread.changed):
            self._metrics.changed()
        if "digests" in reread.changed:
            self._digests_task.changed()

    def _mounted(self) -> Session:
        try:
            return Session(
                self.face.operations,
                self.face.passthrough,
                self.face.state,
                self._path,
                self._parts.disk.root,
                allow_other=self._allow_other,
                write_path=self._config.write_path,
                taken_over=None if self._kept is None else self._kept.fuse_fd,
                keep=self._keep if self._manager.is_there else None,
            )
        except RuntimeError as e:
            raise Unavailable(f"{self._path} cannot be mounted: {e}") from None

    def _keep(self, fuse_fd: int, state_fd: int) -> str:
        """Have the mount outlive us. Returns why it does not."""
        return self._manager.keep({self._names.state: state_fd, self._names.session: fuse_fd})

    def _leave(self, session: Session, *, mounted: bool) -> None:
        """Unmount, or leave the mount to the next daemon."""
        if session.is_kept and not mounted:
            self._manager.let_go(self._names.session)
            self._manager.let_go(self._names.state)
        self._manager.tell(STOPPING="1")
        session.close(leave_mounted=mounted)

    async def _say_ready(self, session: Session, as_json: bool) -> None:
        """The one line on stdout. The session answers as soon as this task lets it."""
        await session.serving.wait()
        facts = await self._facts()
        if as_json:
            fields = {"ready": True, "mountpoint": self._path, "store": self._parts.disk.root}
            print(json.dumps({**fields, "write_path": facts.write_path}), flush=True)
        else:
            where = f"{self._path} on {self._parts.disk.root}"
            print(f"ready: {where}, {facts.write_path} writes ({facts.why})", flush=True)

    async def _tell_manager(self) -> None:
        probe = MountProbe(self._path)
        try:
            await self._manager.run(probe.look, self._state)
        finally:
            await probe.close()

    async def _state(self) -> str:
        """One line for `systemctl status`."""
        facts = await self._facts()
        waits = f"{human_bytes(facts.ingest_pending_bytes)} wait" if facts.ingest_pending_bytes else "idle"
        units = len(self._parts.histories.shown_names())
        refused = f"; NEW CONFIGURATION REFUSED: {refusal}" if (refusal := self._reloader.refusal) else ""
        return f"{self._path}: {units} units, {facts.write_path} writes, {waits}{refused}"

    async def make_room(self, wanted_bytes: int) -> bool:
        """The disk is full for a writer: True if a second try makes sense."""
        with self._parts.processes.hurried():
            return await self._keeper.make_room(wanted_bytes)

    async def before_writing(self) -> None:
        """A file is about to be opened for writing."""
        if self._keeper.lacks_room_for_a_save():
            with self._parts.processes.hurried():
                await self._keeper.make_room_for_a_save()

    def space(self) -> Space:
        """What statfs shows."""
        return self._keeper.space()

    def _make_scrubbing(self) -> Scrubbing:
        parts = self._parts
        references = References(parts.index, parts.segments, parts.histories, self.face.namespace)
        scrubber = Scrubber(
            parts.disk, parts.index, parts.segments, parts.ingest.reclaim, parts.histories, references.find
        )
        return Scrubbing(scrubber, parts.index, self._config)

    def _is_quiet(self) -> bool:
        """Whether nothing goes on that is more urgent than what is done in the background."""
        return (
            not self.face.scheduler.is_publishing
            and not self.face.reading_ahead.is_busy
            and self._parts.disk.space().available >= self._keeper.min_free_bytes()
        )

    def _make_digesting(self) -> Digesting:
        parts = self._parts
        limiter = trio.CapacityLimiter(1)
        health = HealthMaking(parts.segments, self._health, limiter, lambda: self._config.health)
        return Digesting(
            parts.index,
            parts.segments,
            parts.histories,
            self._digests,
            WholeFiles(parts.disk, parts.segments, limiter),
            self._is_quiet,
            health,
        )

    def _make_metrics(self) -> Callable[[], Awaitable[None]] | None:
        parts, config = self._parts, self._config
        if not config.metrics:
            return None
        names = config.metrics_names
        measuring = Measuring(
            parts.disk,
            parts.segments,
            parts.histories,
            self._health,
            self.face,
            self._keeper,
            self._facts,
            self._copying.figures,
            self._drills,
            names=names,
        )
        return MetricsServer(measuring.figures, config.metrics).run

    def _make_service(self) -> Service:
        return make_service(
            CommandParts(
                parts=self._parts,
                face=self.face,
                mountpoint=self._path,
                digests=self._digests,
                health=self._health,
                drills=self._drills,
                copying=self._copying,
                policies=self._policies,
                facts=self._facts,
                collect=self._retainer.collect,
                scrub=self._scrubbing.now,
                encode=self._encoding.now,
                exchange_key=lambda: exchange_key(self._parts, self._config.key),
                everybody=self._allow_other,
            )
        )

    async def _facts(self) -> Facts:
        session = self._session
        return Facts(
            kept=None if session is None else session.kept,
            kept_why="it is not mounted yet" if session is None else session.kept_why,
            write_path="passthrough" if self.face.passthrough.enabled else "plain",
            why=self.face.passthrough.why,
            mountpoint=self._path,
            ingest_pending_bytes=await pending_bytes(self.face),
            kernel_reads=self.face.passthrough.stored_nodes,
            digest_pending_bytes=await self._digesting.waiting_bytes() if self._config.digests else None,
            config=self._config_path,
            scrub=self._scrubbing.status(),
            remotes=self._copying.status(),
            copies=self._copying.copies(),
            encoding=self._encoding.status(),
        )
