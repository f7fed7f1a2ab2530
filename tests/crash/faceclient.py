"""A client of the face without a kernel: the handlers are called as the kernel would call them.

One rule: every call is told to the truth before it is made and when it is answered, with its place in the
log; the client itself decides nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import trio
from faultdisk import Log
from pyfuse3 import FUSEError
from reopened import face_on, look_at, version_outlines
from truth import FILE, Content, Node, Op, State, Truth, Version, after, outline

from ckptfs.daemon.encoding import EncodingTask
from ckptfs.daemon.last_sync import sync_staging
from ckptfs.daemon.open_store import OpenStore
from ckptfs.fusefs.mutations import RENAME_EXCHANGE
from ckptfs.fusefs.recording import Request
from ckptfs.fusefs.rollback import Wanted
from ckptfs.store.errors import CkptfsError, NotFound, ReadOnly
from ckptfs.store.ids import UnitId
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.reencode import Reencoder
from ckptfs.store.sweep import Sweeper

CTX = SimpleNamespace(uid=0, gid=0, pid=os.getpid(), umask=0o022)
_NO_FIELDS = dict.fromkeys(("mode", "uid", "gid", "size", "atime", "mtime"), False)
_REFUSED = (FUSEError, CkptfsError, OSError)


class FaceClient:
    """Calls on one open store. `inos` maps the truth's keys to inode numbers, `handles` keys that are
    open for writing to their handles. `findings`: what was wrong while it ran."""

    def __init__(self, log: Log, truth: Truth) -> None:
        self.log, self.truth = log, truth
        self.inos: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.findings: list[str] = []
        self._next_key = 1

    def attach(self, parts: OpenStore) -> None:
        """Work on this store from now on."""
        self.parts = parts
        self.face = face_on(parts)
        self.sweeper = Sweeper(
            parts.disk,
            parts.index,
            parts.segments,
            parts.histories,
            parts.ingest.reclaim,
            self.face.open_recipes,
        )
        committer = parts.ingest.committer
        self.encoding = EncodingTask(
            parts.index,
            parts.segments,
            parts.histories,
            Reencoder(parts.disk, parts.index, parts.segments, committer),
            lambda unit_name: 0.0,
            lambda: 0.0,
            lambda: True,
            trio.lowlevel.checkpoint,
        )
        self.handles.clear()

    def take_key(self) -> int:
        """A number for a new file."""
        self._next_key += 1
        return self._next_key - 1

    # -- calls -----------------------------------------------------------------------------------------

    async def create(self, path: str) -> int | None:
        """A new file, open for writing; its key."""
        key = self.take_key()
        folder, name = self._place(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL

        async def make() -> None:
            info, entry = await self.face.operations.create(folder, name, 0o644, flags, CTX)
            self.inos[key], self.handles[key] = entry.st_ino, info.fh
            await self.face.operations.forget([(entry.st_ino, 1)])

        return key if await self.call(Op("create", path, key=key), make) else None

    async def write(self, key: int, offset: int, payload: bytes) -> bool:
        """One write request."""
        fh = self.handles[key]
        op = Op("write", self.name_of(key), key=key, offset=offset, payload=payload)
        return await self.call(op, lambda: self.face.operations.write(fh, offset, payload))

    async def open(self, key: int) -> bool:
        """Open for writing."""

        async def make() -> None:
            info = await self.face.operations.open(self.inos[key], os.O_RDWR, CTX)
            self.handles[key] = info.fh

        return await self.call(Op("open", self.name_of(key)), make)

    async def open_truncated(self, key: int) -> bool:
        """Open with O_TRUNC."""

        async def make() -> None:
            info = await self.face.operations.open(self.inos[key], os.O_RDWR | os.O_TRUNC, CTX)
            self.handles[key] = info.fh

        return await self.call(Op("truncate", self.name_of(key), key=key), make)

    async def close(self, key: int) -> bool:
        """Close the handle."""
        fh = self.handles.pop(key)
        return await self.call(Op("close", self.name_of(key)), lambda: self.face.operations.release(fh))

    async def truncate(self, key: int, size: int) -> bool:
        """ftruncate."""
        fields = SimpleNamespace(**{f"update_{k}": v for k, v in {**_NO_FIELDS, "size": True}.items()})
        attr = SimpleNamespace(st_size=size, st_mode=0, st_uid=0, st_gid=0, st_atime_ns=0, st_mtime_ns=0)
        op = Op("truncate", self.name_of(key), key=key, offset=size)
        return await self.call(
            op, lambda: self.face.operations.setattr(self.inos[key], attr, fields, None, CTX)
        )

    async def fsync(self, key: int) -> bool:
        """fsync of an open file."""
        fh = self.handles[key]
        op = Op("fsync", self.name_of(key), key=key)
        return await self.call(op, lambda: self.face.operations.fsync(fh, False))

    async def fsyncdir(self, path: str) -> bool:
        """fsync of a directory."""
        ino = self._ino(path)
        return await self.call(Op("fsyncdir", path), lambda: self.face.operations.fsyncdir(ino << 1, False))

    async def mkdir(self, path: str) -> bool:
        """A new directory."""
        folder, name = self._place(path)
        return await self.call(
            Op("mkdir", path, key=self.take_key()),
            lambda: self._forgotten(self.face.operations.mkdir(folder, name, 0o755, CTX)),
        )

    async def symlink(self, path: str, target: str) -> bool:
        """A symbolic link."""
        folder, name = self._place(path)
        return await self.call(
            Op("symlink", path, target, key=self.take_key()),
            lambda: self._forgotten(self.face.operations.symlink(folder, name, target.encode(), CTX)),
        )

    async def link(self, path: str, other: str) -> bool:
        """One more name."""
        folder, name = self._place(other)
        ino = self._ino(path)
        return await self.call(
            Op("link", path, other),
            lambda: self._forgotten(self.face.operations.link(ino, folder, name, CTX)),
        )

    async def unlink(self, path: str) -> bool:
        """Take a name away."""
        folder, name = self._place(path)
        return await self.call(Op("unlink", path), lambda: self.face.operations.unlink(folder, name, CTX))

    async def rmdir(self, path: str) -> bool:
        """Remove an empty directory."""
        folder, name = self._place(path)
        return await self.call(Op("rmdir", path), lambda: self.face.operations.rmdir(folder, name, CTX))

    async def rename(self, path: str, other: str, *, exchange: bool = False) -> bool:
        """Rename, over what is there; or exchange two names."""
        old, new = self._place(path), self._place(other)
        flags = RENAME_EXCHANGE if exchange else 0
        op = Op("exchange" if exchange else "rename", path, other)
        return await self.call(op, lambda: self.face.operations.rename(*old, *new, flags, CTX))

    # -- what a daemon does ----------------------------------------------------------------------------

    async def publish(self, unit: str, tag: str | None = None) -> None:
        """A version now, as `ckptfs publish` makes one."""
        began, failures = self.log.mark(f"publish {unit}"), self._failures()
        expected = self._quiet_outline(unit)
        record = None
        try:
            record = await self.face.publisher.publish_now(self._ino(unit), Request("command"))
        except _REFUSED as e:
            if not isinstance(e, NotFound):
                self._refused(f"publish {unit}", e, failures)
        fresh = self.note_versions(began)
        self._note_stored(unit, floor=bool(fresh) and record is not None)
        if record is not None and (record.unit, record.number) in fresh:
            listed = fresh[record.unit, record.number].outline
            # What others do meanwhile, by another name of a file, may be in it or not.
            if expected is not None and listed != expected == self._quiet_outline(unit):
                self.findings.append(f"{record.name} of {unit} lists {listed}, there was {expected}")
        if record is not None and tag is not None:
            await self.tag(record.unit, record.number, tag)

    def note_versions(self, began: int) -> dict[tuple[bytes, int], Version]:
        """Versions that came since; they are read now, and must read so for ever."""
        place = self.log.mark("versions noted")
        fresh = {}
        with self.unfailing():
            for identity, listed in version_outlines(self.parts).items():
                if identity not in self.truth.versions:
                    fresh[identity] = Version(listed, began, place)
        self.truth.versions.update(fresh)
        return fresh

    async def rollback(self, unit: str, identity: tuple[bytes, int]) -> None:
        """`ckptfs rollback` of a unit to a version of its own."""
        record = self.parts.histories.version(*identity)  # type: ignore[arg-type]
        assert record is not None, "only versions that are listed are asked for"
        quiet, failures = self._quiet_outline(unit), self._failures()
        began = self.log.mark(f"rollback {unit} to {record.number}")
        step = self.truth.begin(Op("rollback", unit), began)
        try:
            rolled = await self.face.rollback.roll_back([Wanted(self._ino(unit), record)], None)
        except _REFUSED as e:
            self._refused(f"rollback {unit}", e, failures)
            rolled = []
        fresh = self.note_versions(began)
        step.op = replace(step.op, outcome=await self._found_below(unit))
        happened = after(self.truth.state, step.op)
        if rolled:
            self.truth.answer(step, self.log.mark(f"rolled back {unit}"))
            now = self.truth.versions[record.unit, rolled[0].now.number].outline
            wanted = self.truth.versions[identity].outline
            if not (outline(happened, unit) == now == wanted):
                self.findings.append(f"rolled back to {wanted}: {outline(happened, unit)}, listed {now}")
            before = self.truth.versions[record.unit, rolled[0].before.number]
            if quiet is not None and before.outline != quiet:
                self.findings.append(f"{before.outline} is kept before a rollback, there was {quiet}")
        else:
            same = outline(happened, unit) == outline(self.truth.state, unit)
            self.truth.fail(step, self.log.mark(f"not rolled back: {unit}"), None if same else step.op)
        self._note_stored(unit, floor=bool(fresh))

    async def _found_below(self, unit: str) -> State:
        """The names of a unit as they are now, and their files; a new inode is a new file."""
        keys = {self.inos[key]: key for key in self.truth.state.files if key in self.inos}
        names: dict[str, Node] = {}
        files: dict[int, Content] = {}
        for path, seen in (await self.look()).items():
            if not path.startswith(unit + "/"):
                continue
            key = keys.get(seen.inode) if seen.kind == FILE else None
            if key is None:
                key = keys[seen.inode] = self.take_key()
                self.inos[key] = seen.inode
                if seen.kind == FILE:
                    files[key] = Content((seen.held,), True)
            elif key not in files and self.truth.state.files[key].now != seen.held:
                self.findings.append(f"{path} is still the same file, with other bytes")
            names[path] = Node(seen.kind, key, seen.target)
        return State(names, files)

    async def tag(self, unit: UnitId, number: int, tag: str) -> None:
        """Name a version."""
        failures = self._failures()
        try:
            self.parts.histories.tag(unit, number, tag)
        except _REFUSED as e:
            self._refused(f"tag {tag}", e, failures)
            return
        self.truth.tags[unit, tag] = (number, self.log.mark(f"tagged {tag}"))

    async def forget(self, unit: UnitId, number: int) -> None:
        """Let a version go."""
        version = self.truth.versions[unit, number]
        version.forgetting = self.log.mark(f"forget version {number}")
        failures = self._failures()
        try:
            self.parts.histories.forget(unit, number)
        except _REFUSED as e:
            self._refused(f"forget {number}", e, failures)
            return
        version.forgotten = self.log.mark(f"forgot version {number}")

    async def collect(self) -> None:
        """`ckptfs gc`."""
        self.log.mark("gc")
        await self._background("gc", self.sweeper.collect)

    async def reclaim(self) -> None:
        """What the daemon does every few seconds."""
        self.log.mark("reclaim")
        await self._background("reclaim", self.parts.ingest.reclaim.execute)

    async def encode(self) -> None:
        """What the daemon does with saves that are not the newest."""
        self.log.mark("encode")
        await self._background("encode", self.encoding.catch_up)

    async def flush(self) -> None:
        """What the daemon does for files that nobody syncs."""
        self.log.mark("flush")
        await self._background("flush", lambda: self.face.flusher.flush(1 << 62))

    async def commit(self) -> None:
        """What the daemon does every second."""
        self.log.mark("commit")

        async def make() -> None:
            self.parts.index.commit()

        await self._background("commit", make)

    async def stop(self) -> None:
        """What the daemon does before it ends: all is durable then."""
        for key in list(self.handles):
            await self.close(key)

        async def make() -> None:
            directories = list(self.face.drafts.changed_dirs)
            parts = self.parts
            await sync_staging(parts.disk, parts.index, self.face.namespace, parts.staging, directories)

        await self._background("stop", make)

    # -- inside ----------------------------------------------------------------------------------------

    async def call(self, op: Op, make: Callable[[], Awaitable[object]]) -> bool:
        """Make a call; whether it was answered without an error."""
        step, failures = self.truth.begin(op, self.log.mark(f"{op}")), self._failures()
        try:
            await make()
        except _REFUSED as e:
            self._refused(str(op), e, failures)
            happened = await self._happened(op)
            if happened is not None and op.kind == "create":
                self.inos[op.key] = self._ino(op.path)
            self.truth.fail(step, self.log.mark(f"refused: {op}"), happened)
            return False
        self.truth.answer(step, self.log.mark(f"answered: {op}"))
        return True

    async def _happened(self, op: Op) -> Op | None:
        """What has happened of a call that was refused: nothing, all, or the first half of a write."""
        found = await self.look()
        if not Truth(states=[self.truth.state]).check_killed(found, 1 << 62):
            return None
        for one in (replace(op, payload=op.payload[: len(op.payload) // 2]), op):
            wrong = Truth(states=[after(self.truth.state, one)]).check_killed(found, 1 << 62)
            if not wrong:
                return one
        self.findings.append(f"a part of {op}, which was refused: {wrong}")
        return op

    async def look(self) -> Any:
        """The live tree, whatever fails."""
        with self.unfailing():
            return await look_at(self.face)

    def unfailing(self) -> Any:
        """No call fails in this block."""
        return self.log.faults.paused()

    def _failures(self) -> int:
        return len(self.log.faults.failed)

    def _refused(self, what: str, error: Exception, before: int) -> None:
        """Calls may fail while the disk does; afterwards only what a failed sync has broken for good."""
        failed = self.log.faults.failed
        if len(failed) > before:
            return
        is_read_only = isinstance(error, ReadOnly) or getattr(error, "errno", 0) == errno.EROFS
        is_of_a_failed_sync = "sync" in failed and what.startswith(("fsync", "rename"))
        if not is_read_only and not is_of_a_failed_sync:
            self.findings.append(f"{what} was refused: {error!r} {error}")

    def _quiet_outline(self, unit: str) -> dict[str, str] | None:
        """What a version of a unit lists now; None if somebody writes to a file of it, or a file stays
        out of the store because a sync of it has failed."""
        state = self.truth.state
        keys = [n.key for path, n in state.names.items() if path.startswith(unit + "/") and n.kind == FILE]
        elsewhere = {n.key for path, n in state.names.items() if not path.startswith(unit + "/")}
        staged = {key: self.face.namespace.inode(self.inos[key]).content.staging for key in keys}
        # A file that another unit has pinned waits for that one's pre-image.
        waiting = self.parts.staging.failed.keys() | self.face.drafts.pinned_staging
        out = {key for key, number in staged.items() if number in waiting}
        if out or any(
            key in self.handles or key in elsewhere or state.files[key].is_doubtful for key in keys
        ):
            return None
        return outline(state, unit)

    async def _background(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        failures = self._failures()
        try:
            await work()
        except _REFUSED as e:
            self._refused(what, e, failures)
        await trio.lowlevel.checkpoint()

    async def _forgotten(self, reply: Awaitable[Any]) -> None:
        entry = await reply
        await self.face.operations.forget([(entry.st_ino, 1)])

    def _note_stored(self, unit: str, *, floor: bool) -> None:
        stored = []
        for path, node in self.truth.state.names.items():
            if path.startswith(unit + "/") and node.kind == FILE:
                content = self.face.namespace.inode(self.inos[node.key]).content
                if not content.staging and content.base is not None:
                    stored.append(node.key)
        self.truth.stored(stored, self.log.mark(f"stored {unit}"), floor=floor)

    def name_of(self, key: int) -> str:
        """One name of a file, or that it has none."""
        return next((p for p, n in self.truth.state.names.items() if n.key == key), f"({key}, removed)")

    def _ino(self, path: str) -> int:
        ino = self.face.namespace.at_path(path.encode())
        assert ino is not None, path
        return ino

    def _place(self, path: str) -> tuple[int, bytes]:
        folder, _, name = path.rpartition("/")
        return (self._ino(folder) if folder else ROOT_INO), name.encode()
