"""Pull: a version of a remote becomes a version of this store.

One rule: what the version says here is what its record on the remote says, and that was checked by the
caller (catalogue.py).

Source: FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from ckptfs.store.histories import Histories
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Index
from ckptfs.store.ingest import Ingest
from ckptfs.store.merkle import version_root
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.landing import Landing, Pulled
from ckptfs.store.remote.objects import Random, Remote
from ckptfs.store.remote.tree_fetching import fetch_contents, fetch_only, fetch_trees, files_below
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

__all__ = ["Pulled", "Puller"]


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
        """As Landing."""
        self._landing = Landing(remote, index, segments, ingest, histories, random, on_progress)

    async def pull(self, source: VersionRecord, name: bytes, inner: tuple[bytes, ...] = ()) -> Pulled:
        """Make a version of the unit `name` here of the version `source` of the remote, or of the part of it
        that lies at `inner`.

        Conflict: a live directory has the name. InvalidRequest: it is none for a unit. NotFound: the version
        has no such part, or a collection of the remote let it go meanwhile. Corrupt: the remote lacks
        something, or has it with other bytes. NoSpace: nothing is listed. Durable when: this returned.
        """
        self._landing.check_free(name)

        async def work(fetcher: Fetcher, held: set[ChunkId]) -> Pulled:
            return await self._pull(source, name, inner, fetcher, held)

        return await self._landing.attempt([source], work)

    async def _pull(
        self,
        source: VersionRecord,
        name: bytes,
        inner: tuple[bytes, ...],
        fetcher: Fetcher,
        held: set[ChunkId],
    ) -> Pulled:
        segments, top = self._landing.segments, source.top
        if inner:
            top = await fetch_only(fetcher, segments, self._landing.ingest, source.top, inner, held)
        recipes = await fetch_trees(fetcher, segments, top)
        await fetch_contents(fetcher, segments, recipes)
        if inner:
            source = self._partial(source, top, inner)
        record = self._landing.list_version(source, name)
        return Pulled(record, fetcher.fetched_chunks, fetcher.fetched_bytes)

    def _partial(self, source: VersionRecord, top: Entry, inner: tuple[bytes, ...]) -> VersionRecord:
        """The record of that part."""
        files = list(files_below(self._landing.segments, top))
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
