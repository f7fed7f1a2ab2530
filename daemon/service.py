"""What each request does: look, ask whether the caller may, do it, answer.

One rule: rights are checked before anything is looked up that the caller may not see, and before
anything is changed. What changes history goes through Histories or the publisher, never around them.

All of it belongs to the trio thread, which is the index thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from ckptfs.daemon import messages
from ckptfs.daemon.access import Rights
from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.control import Report
from ckptfs.daemon.drill_notes import DrillNotes
from ckptfs.daemon.file_queries import FileQueries
from ckptfs.daemon.import_service import ImportService
from ckptfs.daemon.messages import AnyRequest, Json
from ckptfs.daemon.peer import Peer
from ckptfs.daemon.proving import Prover
from ckptfs.daemon.queries import Queries, units_of
from ckptfs.daemon.remote_service import RemoteService, RollingBack
from ckptfs.daemon.rights import Access, Caller
from ckptfs.fusefs.rollback import Wanted
from ckptfs.store.encoding_level import Level
from ckptfs.store.errors import Conflict, InvalidRequest, NotFound
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import RecipeId
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.units import Unit
from ckptfs.store.version_names import check_tag

log = logging.getLogger(__name__)
_Owners = (
    messages.Gc
    | messages.Keys
    | messages.RotateKey
    | messages.Scrub
    | messages.Push
    | messages.Pull
    | messages.Remotes
    | messages.RemoteGc
    | messages.Import
    | messages.Drilled
)
"""The requests that are the store owner's alone, whatever they are about."""
_CHANGE = Access.WRITE | Access.SEARCH


class Publishing(Protocol):
    """Makes versions."""

    async def publish_now(self, top: int, tag: str | None, step: int | None) -> VersionRecord:
        """Publish the unit whose directory is `top`, and tag the version. Durable when: this returned."""


class Service:
    """Carries out the requests of the control socket."""

    def __init__(
        self,
        addresses: Addresses,
        queries: Queries,
        prover: Prover,
        rights: Rights,
        histories: Histories,
        publishing: Publishing,
        rolling_back: RollingBack,
        make_unit: Callable[[int], None],
        files: FileQueries,
        collect: Callable[[bool], Awaitable[Json]],
        scrub: Callable[[Report], Awaitable[Json]],
        rotate_key: Callable[[], Awaitable[None]],
        remotes: RemoteService,
        imports: ImportService,
        drills: DrillNotes,
        encode: Callable[[Unit, set[RecipeId] | None, Report, bool, Level | None], Awaitable[Json]],
    ) -> None:
        """`make_unit(directory)` makes a directory a unit, `collect(dry run)` is the answer to `gc`,
        `scrub(report)` that to `scrub`, `encode(unit, contents, report, dry run, level)` that to `encode`;
        `rotate_key()` has all that follows signed with a new key."""
        self._addresses = addresses
        self._queries = queries
        self._prover = prover
        self._rights = rights
        self._histories = histories
        self._publishing = publishing
        self._rolling_back = rolling_back
        self._make_unit = make_unit
        self._files = files
        self._collect = collect
        self._scrub = scrub
        self._rotate_key = rotate_key
        self._remotes = remotes
        self._imports = imports
        self._drills = drills
        self._encode = encode

    async def answer(self, request: AnyRequest, peer: Peer, report: Report) -> Json:
        """The result of a request by `peer`; a CkptfsError says why there is none."""
        caller = peer.caller
        if isinstance(request, messages.Status):
            return await self._queries.status(self._visible_units(caller))
        if isinstance(request, _Owners):
            self._rights.require_owner(caller)
            return await self._for_owner(request, report)
        if isinstance(request, messages.Head) and request.path == "/":
            return self._queries.heads(self._visible_units(caller))
        if isinstance(request, messages.Rollback):
            return await self._roll_back(caller, request)
        address = self._rights.find(caller, request.path)
        result: Json
        match request:
            case messages.Log():
                self._rights.require_unit(caller, address, Access.READ)
                result = await self._log(address, request)
            case messages.Head():
                self._rights.require_unit(caller, address, Access.READ)
                result = self._queries.heads(units_of(address))
            case messages.Verify():
                self._rights.require_place(caller, address, self._addresses.record(address))
                result = await self._queries.verify(address, report)
            case messages.Diff():
                other = self._rights.find(caller, request.other)
                for one in (address, other):
                    self._rights.require_place(caller, one, self._addresses.record(one))
                result = await self._queries.diff(address, other, report, self._rights.reader(caller))
            case messages.Prove():
                # The version's record is in the proof, and tells what `log` tells.
                self._rights.require_place(caller, address, self._addresses.record(address))
                self._rights.require_unit(caller, address, Access.READ)
                result = await self._prover.proof(address, request.tensor, self._rights.reader(caller))
            case messages.Digest() | messages.Health() | messages.Expect():
                self._rights.require_place(caller, address, self._addresses.record(address))
                result = await self._of_files(caller, address, request, report)
            case messages.Seal():
                self._rights.require_owner(caller)
                result = await self._files.seal(address, report)
            case messages.Du(by_dtype=by_dtype):
                record = self._addresses.record(address) if address.version is not None else None
                self._rights.require_place(caller, address, record)
                result = await self._queries.usage(address, by_dtype=by_dtype)
            case messages.Encode():
                result = await self._encoded(caller, address, request, report)
            case messages.Unit():
                result = self._named_unit(caller, address)
            case messages.Publish():
                result = await self._publish(caller, address, request)
            case _:
                result = self._mark(caller, address, request)
        return result

    async def _of_files(
        self,
        caller: Caller,
        address: Address,
        request: messages.Digest | messages.Health | messages.Expect,
        report: Report,
    ) -> Json:
        may_read = self._rights.reader(caller)
        match request:
            case messages.Digest():
                return await self._files.digest(address, report, may_read)
            case messages.Health():
                return await self._files.health(address, report, may_read)
            case messages.Expect():
                return await self._files.expect(address, request.ways, report, may_read)

    async def _encoded(
        self, caller: Caller, address: Address, request: messages.Encode, report: Report
    ) -> Json:
        self._rights.require_owner(caller)
        if address.unit is None:
            raise NotFound(f"{address.text} has no version yet; only what is in a version is encoded")
        if not address.is_whole:
            raise InvalidRequest(f"{address.text} is a part of a unit; name the unit, or one of its versions")
        contents = None
        if address.version is not None:
            contents = await self._queries.contents(self._addresses.record(address))
        return await self._encode(address.unit, contents, report, request.dry_run, request.level)

    async def _for_owner(self, request: _Owners, report: Report) -> Json:
        match request:
            case messages.Gc():
                return await self._collect(request.dry_run)
            case messages.Scrub():
                return await self._scrub(report)
            case messages.Push() | messages.Pull() | messages.Remotes() | messages.RemoteGc():
                return await self._remotes.answer(request, report)
            case messages.Import():
                return await self._imports.answer(request, report)
            case messages.Drilled():
                return self._drilled(request)
            case messages.RotateKey():
                await self._rotate_key()
        return self._queries.key()

    def _drilled(self, request: messages.Drilled) -> Json:
        record = self._addresses.record(self._addresses.find(request.path))
        note = self._drills.note(
            record.unit, record.number, request.outcome, request.source, request.recovery_s
        )
        return note.as_json()

    def _visible_units(self, caller: Caller) -> list[Unit]:
        units = self._histories.shown_names().values()
        visible = [unit for unit in units if self._rights.may_unit(caller, unit, Access.READ)]
        return sorted(visible, key=lambda unit: unit.name)

    async def _log(self, address: Address, request: messages.Log) -> Json:
        if request.verify:
            return await self._queries.prove(address, request.keys, request.expect)
        return self._queries.log(address)

    async def _publish(self, caller: Caller, address: Address, request: messages.Publish) -> Json:
        self._rights.require_unit(caller, address, _CHANGE)
        if address.version is not None:
            raise InvalidRequest(f"{address.text} names a version; `publish` makes a new one of PATH")
        if not address.top:
            raise InvalidRequest(f"{address.text} was removed; there is nothing to publish")
        if request.tag is not None:
            self._check_free_tag(address, request.tag)
        if request.step is not None and request.step < 0:
            raise InvalidRequest("a step is not negative")
        record = await self._publishing.publish_now(address.top, request.tag, request.step)
        unit = self._histories.unit(record.unit)
        assert unit is not None, "a version has a unit"
        return self._queries.row(unit, record)

    async def _roll_back(self, caller: Caller, request: messages.Rollback) -> Json:
        addresses = [self._rights.find(caller, path) for path in (request.path, *request.more)]
        for address in addresses:
            self._rights.require_unit(caller, address, _CHANGE)
            if not address.top:
                self._rights.require_place_for(caller, address)
        targets = [self._target(address, request.to) for address in addresses]
        if len({one.record.unit for one in targets}) < len(targets):
            raise InvalidRequest("a unit is named twice; name each once")
        uid = None if self._rights.is_owner(caller) else caller.uid
        rolled = await self._rolling_back.roll_back(targets, uid)
        rows: list[Json] = []
        for target, done in zip(targets, rolled, strict=True):
            unit = self._histories.unit(done.now.unit)
            assert unit is not None, "a version has a unit"
            facts: dict[str, Json] = {
                "unit": os.fsdecode(unit.name),
                "to": target.record.name,
                "before": done.before.name,
            }
            rows.append(facts | self._queries.row(unit, done.now))
        return rows

    def _target(self, address: Address, to: str) -> Wanted:
        """The unit and the version that a rollback is about."""
        name = os.fsdecode(address.name)
        if address.version is not None:
            raise InvalidRequest(f"{address.text} names a version; write `rollback PATH --to VERSION`")
        if not address.is_whole:
            raise InvalidRequest(
                f"{address.text} is a part of the unit {name}, which is rolled back as a whole; "
                "copy single files from `.versions`"
            )
        # A directory that was made again goes on with the history of its name.
        unit = address.unit or self._histories.unit_named(address.name)
        return Wanted(address.top, self._addresses.record(replace(address, unit=unit, version=to)))

    def _check_free_tag(self, address: Address, tag: str) -> None:
        check_tag(tag)
        taken = None if address.unit is None else self._histories.tags(address.unit.unit).get(tag)
        if taken is not None:
            raise Conflict(f"the tag {tag!r} is that of version {taken}; untag it first")

    def _named_unit(self, caller: Caller, address: Address) -> Json:
        self._rights.require_owner(caller)
        if address.ino is None or address.version is not None:
            raise NotFound(f"there is no directory {address.text}")
        if address.ino == ROOT_INO:
            raise InvalidRequest("the root of a mount cannot be named a unit; its own files are one, @root")
        self._make_unit(address.ino)
        again = self._addresses.find(address.text)
        return {"name": os.fsdecode(again.name)}

    def _mark(self, caller: Caller, address: Address, request: AnyRequest) -> Json:
        """Tag, untag, pin, unpin and forget."""
        if isinstance(request, messages.Forget):
            self._rights.require_owner(caller)
        else:
            self._rights.require_unit(caller, address, _CHANGE)
        unit = address.unit
        if unit is None:
            raise NotFound(f"{address.text} has no version yet; `ckptfs publish` makes one")
        record = self._marked(address, unit, request)
        row = self._queries.row(unit, record)
        match request:
            case messages.Tag():
                self._histories.tag(unit.unit, record.number, request.name)
            case messages.Untag():
                self._histories.untag(unit.unit, request.name)
            case messages.Pin():
                self._histories.pin(unit.unit, record.number)
            case messages.Unpin():
                self._histories.unpin(unit.unit, record.number)
            case messages.Forget():
                self._histories.forget(unit.unit, record.number)
                return row
        return self._queries.row(unit, record)

    def _marked(self, address: Address, unit: Unit, request: AnyRequest) -> VersionRecord:
        """The version that a request is about."""
        if isinstance(request, messages.Untag):
            number = self._histories.tags(unit.unit).get(request.name)
            found = None if number is None else self._histories.version(unit.unit, number)
            if found is None:
                raise NotFound(
                    f"{os.fsdecode(unit.name)} has no tag {request.name!r}; `ckptfs log` lists them"
                )
            return found
        if address.version is None:
            raise InvalidRequest(
                f"{address.text} names no version; write PATH@VERSION, such as {address.text}@latest"
            )
        return self._addresses.record(address)
