"""Scrub, as the daemon runs it: in the background at its rate, and at once when the owner asks.

One rule: a scrub that is due begins by itself and goes on after a restart; one that is asked for comes
before it. What is found goes to the log as soon as a run has ended, to `status`, and to who asked.

Belongs to the index thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import trio

from ckptfs.daemon.config import Config
from ckptfs.daemon.messages import Json, Progress
from ckptfs.daemon.saved_files import Saved, walk
from ckptfs.daemon.tensor_names import TensorNames
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.errors import CkptfsError
from ckptfs.store.histories import Histories
from ckptfs.store.ids import ChunkId, RecipeId, TreeId, cid_text
from ckptfs.store.index import Index, Table
from ckptfs.store.inode import decode_inode
from ckptfs.store.pins import decode_pin
from ckptfs.store.scrub import Scrubber, noted_run
from ckptfs.store.scrub_run import Interrupted, Met
from ckptfs.store.scrub_state import LAST_KEY, RUNNING_KEY, Finding, ScrubRun
from ckptfs.store.segment_format import decode_facts
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 60.0
_DAY_NS = 24 * 3600 * 10**9
_SLICE_ROWS = 256
# About 2 ms of looking up: others wait no longer for the index thread.
_SLICE_PIECES = 1024


class References:
    """Walks everything that refers to chunks, for naming what is damaged."""

    def __init__(self, index: Index, segments: Segments, histories: Histories, namespace: Namespace) -> None:
        self._index = index
        self._segments = segments
        self._histories = histories
        self._namespace = namespace

    async def find(self, wanted: set[ChunkId]) -> dict[ChunkId, Met]:
        """Where these chunks, and all that the index lacks, are met first; versions come first."""
        walk_ = _Walk(self._segments, wanted)
        for unit in self._histories.units():
            for record in self._histories.versions(unit.unit):
                name = f"/{os.fsdecode(unit.name)}"
                await walk_.version(name, record.number, record.top)
        start: bytes | None = None
        while rows := self._index.scan(Table.INODE, start=start, limit=_SLICE_ROWS):
            for key, value in rows:
                content = decode_inode(value).content
                if content.base is not None or content.fallback is not None:
                    path = os.fsdecode(self._namespace.path_of(int.from_bytes(key, "big")))
                    await walk_.content(path, content.base, content.fallback)
            start = rows[-1][0] + b"\0"
            await trio.lowlevel.checkpoint()
        for _, value in self._index.scan(Table.PREIMAGE):
            pin = decode_pin(value)
            names = [*(directory.name for directory in pin.directories), pin.name]
            content = pin.inode.content
            await walk_.content(os.fsdecode(b"/".join(names)), content.base, content.fallback)
        for key, value in self._index.scan(Table.PUBLISHED):
            walk_.published(f"directory {int.from_bytes(key, 'big')}", TreeId(ChunkId(value[:32])))
        return walk_.met


class _Walk:
    """One walk: what was looked at already, and what was met."""

    def __init__(self, segments: Segments, wanted: set[ChunkId]) -> None:
        self._segments = segments
        self._wanted = wanted
        self._names = TensorNames(segments)
        self._trees: set[tuple[bytes, TreeId]] = set()
        self._recipes: set[RecipeId] = set()
        self.met: dict[ChunkId, Met] = {}

    async def version(self, unit: str, number: int, top: Entry) -> None:
        """Everything in a version."""
        for saved in walk(self._segments, Saved(b"", top), lambda *_: None, self._trees):
            path = f"{unit}/{os.fsdecode(saved.path)}".rstrip("/") + f"@{number}"
            if saved.entry.tree is not None:
                self._meet(saved.entry.tree, path)
            if saved.entry.recipe is not None:
                await self._recipe(path, saved.entry.recipe, top, saved.path)

    async def content(self, path: str, *recipes: RecipeId | None) -> None:
        """The stored contents of a live or pinned file."""
        for recipe in recipes:
            if recipe is not None:
                await self._recipe(path, recipe, None, os.fsencode(path))

    def published(self, path: str, tree: TreeId) -> None:
        """The tree of a directory as it was published last."""
        self._meet(tree, path)

    async def _recipe(self, path: str, identity: RecipeId, top: Entry | None, inner: bytes) -> None:
        if identity in self._recipes:
            return
        self._recipes.add(identity)
        self._meet(identity, path)
        try:
            recipe = self._segments.read_recipe(identity)
        except CkptfsError:
            return
        offset = 0
        for at, piece in enumerate(recipe.pieces()):
            if at % _SLICE_PIECES == 0:
                await trio.lowlevel.checkpoint()
            chunk = piece.chunk
            if chunk is not None and self._is_wanted(chunk):
                tensor = self._names.tensor_at(top, inner, identity, offset)
                self.met.setdefault(chunk, Met(path, tensor))
            offset += piece.length

    def _meet(self, chunk: ChunkId, path: str) -> None:
        if self._is_wanted(chunk):
            self.met.setdefault(chunk, Met(path, None))

    def _is_wanted(self, chunk: ChunkId) -> bool:
        return chunk in self._wanted or self._segments.locate(chunk) is None


class Scrubbing:
    """Begins scrubs when they are due, and answers those who ask."""

    def __init__(self, scrubber: Scrubber, index: Index, config: Config) -> None:
        self._scrubber = scrubber
        self._index = index
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Another configuration, for the next scrub."""
        self._bytes_s = config.scrub_rate_mib_s * (1 << 20)
        self._every_ns = int(config.scrub_every_days * _DAY_NS)

    async def run(self) -> None:
        """Scrub whenever it is due, for ever; cancelled at shutdown."""
        while True:
            if self._bytes_s and self.is_due():
                try:
                    tell_log(await self._scrubber.go_on(self._bytes_s))
                except Interrupted:
                    pass
                except (CkptfsError, OSError) as e:
                    log.error("the scrub did not end: %s", e)
            await trio.sleep(_LOOK_EVERY_S)

    def is_due(self) -> bool:
        """Whether a run was interrupted, or `scrub_every_days` have passed since the last one."""
        if self._scrubber.unfinished() is not None:
            return True
        last = self._scrubber.last()
        since = last.finished_ns if last is not None else self._oldest_ns()
        return since is not None and time.time_ns() - since >= self._every_ns

    async def now(self, report: Callable[[Progress], None]) -> Json:
        """`ckptfs scrub`."""
        started = time.monotonic()
        run = await self._scrubber.run_now(lambda done, total: report(Progress(done=done, total=total)))
        tell_log(run)
        return {
            "checked_bytes": run.checked_bytes,
            "chunks": run.chunks,
            "elapsed_s": time.monotonic() - started,
            "corrupt": [_row(finding) for finding in run.findings],
            "more": run.more_findings,
        }

    def status(self) -> Json:
        """The key `scrub` of `status`."""
        return noted_scrubs(self._index)

    def _oldest_ns(self) -> int | None:
        """When the first segment that is left was made."""
        rows = self._index.scan(Table.SEGMENT, limit=1)
        return decode_facts(rows[0][1]).created_ns if rows else None


def noted_scrubs(index: Index) -> Json:
    """What `status` says of scrubs: the last result and its age, and whether one is under way."""
    last, unfinished = noted_run(index, LAST_KEY), noted_run(index, RUNNING_KEY)
    return {
        "age_s": (time.time_ns() - last.finished_ns) / 1e9 if last is not None else None,
        "checked_bytes": last.checked_bytes if last is not None else None,
        "corrupt": last.corrupt if last is not None else None,
        "healed": last.healed if last is not None else None,
        "under_way_bytes": unfinished.checked_bytes if unfinished is not None else None,
    }


def tell_log(run: ScrubRun) -> None:
    """One line for what was found, and one for the whole."""
    for one in run.findings:
        tensor = f", tensor {one.tensor!r}" if one.tensor is not None else ""
        where = f"{one.path}{tensor}: " if one.path is not None else ""
        log.error("scrub: %s%s (%s)%s", where, one.what, one.place, "; healed" if one.healed else "")
    log.info(
        "scrub: %d bytes in %d chunks, %d corrupt, %d healed",
        run.checked_bytes,
        run.chunks,
        run.corrupt,
        run.healed,
    )


def _row(one: Finding) -> Json:
    return {
        "path": one.path,
        "tensor": one.tensor,
        "chunk": cid_text(one.chunk) if one.chunk is not None else None,
        "place": one.place,
        "what": one.what,
        "healed": one.healed,
    }
