"""Pull: a version of a remote becomes a version of this store.

One rule: a version is listed here only after everything that it leads to is stored and durable; what it
says is what its record on the remote says, and that was checked by the caller (catalogue.py).

Source: FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import trio

from ckptfs.store.errors import Conflict, Corrupt, InvalidRequest, NotFound
from ckptfs.store.hashing import chunk_id
from ckptfs.store.histories import Histories
from ckptfs.store.history import PULLED, State, VersionRecord
from ckptfs.store.ids import UNIT_ID_BYTES, ChunkId, RecipeId, TreeId, UnitId
from ckptfs.store.index import Change, Index
from ckptfs.store.ingest import Ingest
from ckptfs.store.merkle import version_root
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.heads import newest_head
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.log import RemoteLog
from ckptfs.store.remote.objects import Random, Remote
from ckptfs.store.remote.reading import KeySet, add_recipe
from ckptfs.store.remote.shard import keys_of
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry, encode_tree
from ckptfs.store.version_names import version_name


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that is here now, and what had to be fetched for it."""

    record: VersionRecord
    fetched_chunks: int
    fetched_bytes: int


class Puller:
    """Fetches from one remote. Belongs to the index thread; one pull at a time."""

    def __init__(
        self,
        remote: Remote,
        index: Index,
        segments: Segments,
        ingest: Ingest,
        histories: Histories,
        random: Random,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """`random(n)` gives n unpredictable bytes; `on_progress` is told how many bytes were fetched."""
        self._remote = remote
        self._index = index
        self._segments = segments
        self._ingest = ingest
        self._histories = histories
        self._random = random
        self._on_progress = on_progress
        self._log = RemoteLog(remote)
        self._known = KnownChunks(remote)
        self._claim = 0

    async def pull(self, source: VersionRecord, name: bytes, inner: tuple[bytes, ...] = ()) -> Pulled:
        """Make a version of the unit `name` here of the version `source` of the remote, or of the part of it
        that lies at `inner`.

        Conflict: a live directory has the name. InvalidRequest: it is none for a unit. NotFound: the version
        has no such part, or a collection of the remote let it go meanwhile. Corrupt: the remote lacks
        something, or has it with other bytes. NoSpace: nothing is listed. Durable when: this returned.
        """
        self._check_free(name)
        for last in (False, True):
            known_as_of = await self._look()
            try:
                return await self._pull(source, name, inner)
            except (NotFound, Corrupt):
                if last or await self._look() == known_as_of:
                    await self._check_listed(source)
                    raise  # else packs were taken, or copied over, by a collector meanwhile
        raise AssertionError("unreachable")

    async def _check_listed(self, source: VersionRecord) -> None:
        """NotFound if the version is not on the remote any more."""
        head = (await newest_head(self._remote, source.unit)).head
        if head is not None and source.number not in head.versions:
            raise NotFound(
                f"version {source.number} was let go from {self._remote.url} by a collection meanwhile; "
                "`ckptfs pull` of the mount point lists what is there"
            )

    async def _look(self) -> int:
        """Know what the remote has, as of its newest decision; the number of that."""
        await self._log.refresh()
        kept = await self._log.kept()
        if kept.claim != self._claim:
            self._claim, self._known = kept.claim, KnownChunks(self._remote, kept)
        await self._known.refresh()
        return self._claim

    async def _pull(self, source: VersionRecord, name: bytes, inner: tuple[bytes, ...]) -> Pulled:
        with self._segments.pins.hold() as held:
            fetcher = Fetcher(
                self._remote, self._known, self._segments, self._ingest, held, self._on_progress
            )
            if inner:
                top = await self._only(fetcher, source.top, inner, held)
                await self._fetch_below(fetcher, top)
                source = self._partial(source, top, inner)
            else:
                await self._fetch_below(fetcher, source.top)
            record = self._list(source, name)
        return Pulled(record, fetcher.fetched_chunks, fetcher.fetched_bytes)

    async def _fetch_below(self, fetcher: Fetcher, top: Entry) -> None:
        """Trees, level by level, then recipes, then chunks."""
        level, seen = {one for one in [top.tree] if one is not None}, set[TreeId]()
        recipes = set[RecipeId]()
        while level:
            await fetcher.fetch(keys_of(sorted(level)))
            seen |= level
            below = set[TreeId]()
            for tree in level:
                for entry in self._segments.read_tree(tree):
                    if entry.tree is not None:
                        below.add(entry.tree)
                    elif entry.recipe is not None:
                        recipes.add(entry.recipe)
                await trio.lowlevel.checkpoint()
            level = below - seen
        await fetcher.fetch(keys_of(sorted(recipes)))
        chunks = KeySet()
        for recipe in recipes:
            add_recipe(chunks, self._segments.read_recipe(recipe))
            await trio.lowlevel.checkpoint()
        await fetcher.fetch(chunks.all())

    # ---- a part of a version ----------------------------------------------------------------

    async def _only(
        self, fetcher: Fetcher, top: Entry, inner: tuple[bytes, ...], held: set[ChunkId]
    ) -> Entry:
        """The top of a version that has nothing but what lies at `inner`; its trees are stored."""
        way = [top]
        for name in inner:
            tree = way[-1].tree
            if tree is not None:
                await fetcher.fetch(keys_of([tree]))
            entries = () if tree is None else self._segments.read_tree(tree)
            found = next((entry for entry in entries if entry.name == name), None)
            if found is None:
                raise NotFound(f"this version has no {os.fsdecode(b'/'.join(inner))}")
            way.append(found)
        entry, trees = way[-1], list[tuple[ChunkId, bytes]]()
        for parent in reversed(way[:-1]):
            encoded = encode_tree([entry])
            trees.append((chunk_id(encoded), encoded))
            entry = replace(parent, tree=TreeId(trees[-1][0]))
        await self._ingest.store_objects(trees, held)
        return entry

    def _partial(self, source: VersionRecord, top: Entry, inner: tuple[bytes, ...]) -> VersionRecord:
        """The record of that part."""
        files = list(self._files(top, b""))
        what = os.fsdecode(b"/".join(inner))
        return replace(
            source,
            top=top,
            root=version_root((path, entry.root) for path, entry in files if entry.root is not None),
            files=len(files),
            logical_bytes=sum(entry.size for _, entry in files),
            state=State.PARTIAL,
            steps=(),
            missing=(f"only {what} was pulled of version {source.number}",),
        )

    def _files(self, directory: Entry, path: bytes) -> Iterator[tuple[bytes, Entry]]:
        assert directory.tree is not None, "a directory has a tree"
        for entry in self._segments.read_tree(directory.tree):
            if entry.is_dir:
                yield from self._files(entry, path + entry.name + b"/")
            elif entry.is_file:
                yield path + entry.name, entry

    # ---- the version here -------------------------------------------------------------------

    def _check_free(self, name: bytes) -> None:
        if not name or b"\0" in name or {b"", b".", b".."} & {*name.split(b"/")}:
            raise InvalidRequest(f"{os.fsdecode(name)!r} is no name for a unit; give another")
        unit = self._histories.unit_named(name)
        if unit is not None and unit.ino:
            raise Conflict(f"{unit.text} is live here; give the copy another name, or move that away first")

    def _list(self, source: VersionRecord, name: bytes) -> VersionRecord:
        """Append the version; the unit's newest if that is the same already. One step of this thread."""
        self._check_free(name)
        unit = self._histories.unit_named(name)
        if unit is None:
            unit_id = UnitId(self._random(UNIT_ID_BYTES))
            unit = self._histories.new_unit(unit_id, name, 0, source.time_ns)
        newest = self._histories.newest(unit.unit)
        if newest is not None and (newest.top, newest.state) == (source.top, source.state):
            return newest
        record = replace(
            source,
            unit=unit.unit,
            number=unit.next_number,
            name=version_name(unit.next_number, source.time_ns),
            origin=PULLED,
            before=unit.head,
        )
        change = Change()
        self._histories.append_version(record, change)
        self._index.apply(change, sync=True)
        return record
