"""What answers the commands of one mount, joined: its Service.

One rule: the parts are made elsewhere (mounting.py); here they only meet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ckptfs.daemon.access import Rights
from ckptfs.daemon.addresses import Addresses
from ckptfs.daemon.command_publishing import CommandPublishing
from ckptfs.daemon.control import Report
from ckptfs.daemon.copying import Copying
from ckptfs.daemon.drill_notes import DrillNotes
from ckptfs.daemon.fetching import Fetching
from ckptfs.daemon.file_queries import FileQueries
from ckptfs.daemon.import_service import ImportService
from ckptfs.daemon.merging import Merging
from ckptfs.daemon.messages import Json
from ckptfs.daemon.mountpoints import modes_above
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.proving import Prover
from ckptfs.daemon.queries import Facts, Queries
from ckptfs.daemon.remote_collecting import RemoteCollecting
from ckptfs.daemon.remote_service import RemoteService
from ckptfs.daemon.remotes import default_node_name
from ckptfs.daemon.retaining import Policies
from ckptfs.daemon.service import Service
from ckptfs.daemon.verifying import worker_limiter
from ckptfs.fusefs.face import Face
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.encoding_level import Level
from ckptfs.store.health_log import HealthLog
from ckptfs.store.ids import RecipeId
from ckptfs.store.index import Change
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.units import Unit
from ckptfs.store.writer_log import WriterLog


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandParts:
    """What a mount has that commands need. `collect`, `scrub`, `encode` and `exchange_key` are as Service has
    them; `everybody`: other users than the store's owner may ask."""

    parts: OpenStore
    face: Face
    mountpoint: str
    digests: DigestLog
    health: HealthLog
    drills: DrillNotes
    copying: Copying
    policies: Policies
    facts: Callable[[], Awaitable[Facts]]
    collect: Callable[[bool], Awaitable[Json]]
    scrub: Callable[[Report], Awaitable[Json]]
    encode: Callable[[Unit, set[RecipeId] | None, Report, bool, Level | None], Awaitable[Json]]
    exchange_key: Callable[[], Awaitable[None]]
    everybody: bool


def make_service(of: CommandParts) -> Service:
    """The one that answers."""
    parts, face = of.parts, of.face
    addresses = Addresses(face.namespace, parts.histories, face.units.top_of)
    return Service(
        addresses,
        _queries(of, addresses),
        Prover(parts.segments, parts.histories, addresses, parts.keyring),
        _rights(of, addresses),
        parts.histories,
        CommandPublishing(face, parts),
        face.rollback,
        lambda directory: _make_unit(of, directory),
        FileQueries(
            parts.disk,
            parts.segments,
            addresses,
            parts.histories,
            of.digests,
            of.health,
            parts.keyring,
            worker_limiter(),
        ),
        of.collect,
        of.scrub,
        of.exchange_key,
        RemoteService(
            addresses,
            parts.histories,
            of.copying,
            Fetching(parts, of.copying),
            Merging(parts, of.copying),
            RemoteCollecting(of.copying, parts.histories, of.policies, default_node_name()),
            face.rollback,
        ),
        ImportService(parts, face.rollback),
        of.drills,
        of.encode,
    )


def _queries(of: CommandParts, addresses: Addresses) -> Queries:
    parts, face = of.parts, of.face
    return Queries(
        parts.disk,
        face.namespace,
        parts.segments,
        parts.histories,
        addresses,
        face.units.is_top,
        of.facts,
        parts.keyring,
        WriterLog(parts.disk, parts.index, parts.histories),
        MergeLog(parts.disk, parts.index, parts.histories),
        of.health,
        parts.processes,
        of.drills,
    )


def _rights(of: CommandParts, addresses: Addresses) -> Rights:
    parts = of.parts
    return Rights(
        of.face.namespace,
        parts.segments,
        parts.histories,
        addresses,
        lambda: modes_above(of.mountpoint),
        owner_uid=parts.disk.stat("").st_uid,
        only_owner=not of.everybody,
    )


def _make_unit(of: CommandParts, directory: int) -> None:
    change = Change()
    of.face.units.name_unit(directory, change)
    of.parts.index.apply(change, sync=True)
