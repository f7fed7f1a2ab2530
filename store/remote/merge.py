"""Merging: versions of several nodes, of one step of one run, become one version of this store.

One rule: what the version says is judged on the merged tree, by the rules of any version; who has no part in
it is named in it.

Source: FORMAT.md, "Remotes", "Merging".
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import trio

from ckptfs.store.errors import Conflict, NotFound
from ckptfs.store.formats import Reader
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.merge_record import MOST_CHARACTERS, MergeRecord, MergeSource, bounded_notes
from ckptfs.store.remote.comparing import is_same_content
from ckptfs.store.remote.far_file import FarFile
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.landing import Landing, Pulled
from ckptfs.store.remote.shard import keys_of
from ckptfs.store.remote.tree_fetching import fetch_contents, fetch_trees, fetch_way, store_way
from ckptfs.store.tree import Entry
from ckptfs.store.tree_merge import Decision, MergedTree, merge_trees

_SHOWN_CONFLICTS = 5
_Pair = tuple[RecipeId, RecipeId]


class Judged(Protocol):
    """What is known of a tree: is it whole, and what is missing."""

    @property
    def root(self) -> bytes: ...
    @property
    def files(self) -> int: ...
    @property
    def logical_bytes(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def step(self) -> int | None: ...
    @property
    def steps(self) -> tuple[int, ...]: ...
    @property
    def missing(self) -> tuple[str, ...]: ...


Judge = Callable[[TreeId, int | None, Callable[[RecipeId], Reader] | None], Awaitable[Judged]]


@dataclass(frozen=True, slots=True)
class Source:
    """A version that goes in; `node` is what its node is called here and in names (each another), `key` the
    fingerprint of the key that has sealed it."""

    node: str
    record: VersionRecord
    key: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A merge: of `sources`, of which the first ones go before others, what lies at `inner`, as a version of
    the unit `name`. `lacking`: who has no such version, in sentences."""

    sources: Sequence[Source]
    name: bytes
    inner: tuple[bytes, ...]
    decision: Decision
    step: int | None
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge came to; `notes` are its decided conflicts, in sentences."""

    pulled: Pulled
    notes: tuple[str, ...]


class Merger:
    """Merges versions of one remote. Belongs to the index thread; one merge at a time."""

    def __init__(self, landing: Landing, log: MergeLog, judge: Judge) -> None:
        """`judge(tree, step, open_file)` gives the facts of a tree that is stored; saves of older steps than
        that do not hold it back, and `open_file` opens, in a worker thread, what is not stored."""
        self._landing = landing
        self._log = log
        self._judge = judge

    async def look(self, wanted: Wanted) -> VersionRecord:
        """What the version would be, in the number of the first source: of contents only headers are fetched.
        Errors as `merge`."""

        async def work(fetcher: Fetcher, held: set[ChunkId]) -> VersionRecord:
            now, tree = await self._tree(wanted, fetcher, held)
            segments = self._landing.segments

            async def reader(recipe: RecipeId) -> Reader:
                await fetcher.fetch(keys_of([recipe]))
                return FarFile(segments, fetcher, segments.read_recipe(recipe))

            def open_file(recipe: RecipeId) -> Reader:
                return trio.from_thread.run(reader, recipe)

            assert tree.top.tree is not None
            return _record(now, tree.top, await self._judge(tree.top.tree, now.step, open_file))

        return await self._landing.attempt([one.record for one in wanted.sources], work)

    async def merge(self, wanted: Wanted) -> Merged:
        """Make the version. Conflict: a live directory has the name, or contents differ and nobody has
        decided. NotFound: nobody has anything at `inner`. Else as Puller.pull. Durable when: this
        returned."""
        self._landing.check_free(wanted.name)

        async def work(fetcher: Fetcher, held: set[ChunkId]) -> Merged:
            return await self._merge(wanted, fetcher, held)

        return await self._landing.attempt([one.record for one in wanted.sources], work)

    async def _merge(self, wanted: Wanted, fetcher: Fetcher, held: set[ChunkId]) -> Merged:
        wanted, tree = await self._tree(wanted, fetcher, held)
        segments = self._landing.segments
        recipes = await fetch_trees(fetcher, segments, tree.top)
        await fetch_contents(fetcher, segments, recipes)
        assert tree.top.tree is not None
        facts = await self._judge(tree.top.tree, wanted.step, None)
        notes = bounded_notes([str(one) for one in tree.conflicts])

        def note_sources(record: VersionRecord) -> None:
            assert record.top.tree is not None
            sources = tuple(_row_of(one) for one in wanted.sources)
            self._log.record(record.unit, MergeRecord(record.number, record.top.tree, sources, notes))

        record = self._landing.list_version(_record(wanted, tree.top, facts), wanted.name, note_sources)
        return Merged(Pulled(record, fetcher.fetched_chunks, fetcher.fetched_bytes), notes)

    async def _tree(self, wanted: Wanted, fetcher: Fetcher, held: set[ChunkId]) -> tuple[Wanted, MergedTree]:
        """The merged tree, stored; of those that have something at `inner`."""
        wanted, tops = await self._tops(wanted, fetcher, held)
        for top in tops:
            await fetch_trees(fetcher, self._landing.segments, top)
        tree = await self._one_tree(wanted, tops, fetcher)
        if tree.open_conflicts:
            raise _undecided(tree)
        await self._landing.ingest.store_objects(tree.objects, held)
        return wanted, tree

    async def _tops(self, wanted: Wanted, fetcher: Fetcher, held: set[ChunkId]) -> tuple[Wanted, list[Entry]]:
        """The top directory of each source, with what is wanted of it; who has nothing there is lacking."""
        if not wanted.inner:
            return wanted, [one.record.top for one in wanted.sources]
        what, tops, having = os.fsdecode(b"/".join(wanted.inner)), [], []
        lacking, preferred = list(wanted.lacking), 0
        for at, one in enumerate(wanted.sources):
            way = await fetch_way(fetcher, self._landing.segments, one.record.top, wanted.inner)
            if len(way) <= len(wanted.inner):
                lacking.append(f"{one.node} has no {what} in {one.record.name}")
                continue
            having.append(one)
            preferred += at < wanted.decision.preferred
            tops.append(await store_way(self._landing.ingest, way[:-1], way[-1], held))
        if not tops:
            raise NotFound(f"none of these versions has {what}")
        decision = replace(wanted.decision, preferred=preferred)
        return replace(wanted, sources=having, lacking=tuple(lacking), decision=decision), tops

    async def _one_tree(self, wanted: Wanted, tops: Sequence[Entry], fetcher: Fetcher) -> MergedTree:
        """The merged tree. Contents are compared as they turn out to have the same name."""
        segments, nodes = self._landing.segments, [one.node for one in wanted.sources]
        known: dict[_Pair, bool] = {}

        def read_tree(tree: TreeId) -> Sequence[Entry]:
            return trio.from_thread.run_sync(segments.read_tree, tree)

        while True:
            asked: set[_Pair] = set()

            def is_same(one: RecipeId, other: RecipeId, asked: set[_Pair] = asked) -> bool:
                if (one, other) not in known:
                    asked.add((one, other))
                return known.get((one, other), True)

            merged = await trio.to_thread.run_sync(
                merge_trees, tops, nodes, read_tree, is_same, wanted.decision
            )
            if not asked:
                return merged
            await fetcher.fetch(keys_of(sorted({recipe for pair in asked for recipe in pair})))
            for one, other in sorted(asked):
                recipes = segments.read_recipe(one), segments.read_recipe(other)
                known[one, other] = await is_same_content(fetcher, segments, *recipes)


def _undecided(tree: MergedTree) -> Conflict:
    conflicts = tree.open_conflicts
    shown = "; ".join(str(one) for one in conflicts[:_SHOWN_CONFLICTS])
    more = f"; and {len(conflicts) - _SHOWN_CONFLICTS} more" if len(conflicts) > _SHOWN_CONFLICTS else ""
    return Conflict(
        f"nothing was merged: {shown}{more}. Say whose counts with --prefer NODE, or have all of them with "
        "--keep-both"
    )


def _row_of(source: Source) -> MergeSource:
    record = source.record
    return MergeSource(
        node=source.node[:MOST_CHARACTERS],
        unit=record.unit,
        number=record.number,
        link=record.link(),
        key=source.key,
    )


def _record(wanted: Wanted, top: Entry, facts: Judged) -> VersionRecord:
    lacking = [one.encode("utf-8", "backslashreplace").decode() for one in wanted.lacking]
    if wanted.inner:
        lacking.insert(0, f"only {os.fsdecode(b'/'.join(wanted.inner))} was merged")
    steps = {*facts.steps}
    if lacking:
        steps = set() if wanted.inner else steps - {wanted.step}
    elif facts.state is State.COMPLETE and wanted.step is not None:
        steps.add(wanted.step)  # the nodes know what the names do not tell
    return replace(
        wanted.sources[0].record,
        time_ns=max(one.record.time_ns for one in wanted.sources),
        top=replace(top, name=b"top"),
        root=facts.root,
        files=facts.files,
        logical_bytes=facts.logical_bytes,
        state=State.PARTIAL if lacking else facts.state,
        step=facts.step if wanted.step is None else wanted.step,
        steps=tuple(sorted(steps)),
        missing=(*lacking, *facts.missing),
    )
