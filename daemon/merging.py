"""`pull --merge`: what several nodes have copied of one step of a run becomes one version here.

One rule: every history that something is taken from is checked before anything is fetched; if one is
doubtful, nothing is.

Source: FORMAT.md, "Remotes", "Merging".
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import trio

from ckptfs.daemon.copying import Copying, Report
from ckptfs.daemon.fetching import heads_of_path
from ckptfs.daemon.merge_choice import Choice, Chosen, choose
from ckptfs.daemon.messages import Json, Progress, Pull
from ckptfs.daemon.open_store import OpenStore
from ckptfs.fusefs.facts import Facts, VersionFacts
from ckptfs.store.errors import Corrupt, InvalidRequest, NotFound
from ckptfs.store.ids import TreeId
from ckptfs.store.merge_log import MergeLog
from ckptfs.store.remote.catalogue import RemoteUnit, read_unit
from ckptfs.store.remote.head import RemoteHead
from ckptfs.store.remote.heads import newest_heads
from ckptfs.store.remote.landing import Landing, Pulled
from ckptfs.store.remote.merge import Merged, Merger, Source, Wanted
from ckptfs.store.remote.objects import Remote
from ckptfs.store.signing import PublicKey
from ckptfs.store.tree_merge import Decision
from ckptfs.store.version_names import split_version


class Merging:
    """Belongs to the index thread; one merge at a time."""

    def __init__(self, parts: OpenStore, copying: Copying) -> None:
        self._parts = parts
        self._copying = copying
        self._facts = VersionFacts(parts.segments)
        self._log = MergeLog(parts.disk, parts.index, parts.histories)

    async def merge(
        self, request: Pull, keys: Sequence[PublicKey], report: Report
    ) -> tuple[Pulled, dict[str, Json]]:
        """Merge the versions of a step (or tag); what that became here, and the answer to be shown.

        NotFound or InvalidRequest say what there is instead; Corrupt: a history is not what `keys` signed;
        Conflict: contents differ, and the request does not decide. Else as Merger.merge. Durable when: this
        returned.
        """
        if request.node is not None:
            raise InvalidRequest("a merge takes `nodes`, not `node`")
        target = self._copying.target(request.remote)
        remote = target.open()
        await remote.open()
        newest = await newest_heads(remote)
        unreadable = [problem for one in newest if one.head is None for problem in one.problems]
        path, version = split_version(request.path)
        heads = [one.head for one in newest if one.head is not None]
        named, inner = heads_of_path(remote.url, heads, path)
        units = await self._read(remote, named, request)
        choice = choose(units, version, request.nodes, request.prefer)
        sources = [await self._checked(one, keys, path, target.name) for one in choice.chosen]
        name = units[0].name if request.name is None else os.fsencode(request.name).strip(b"/")
        total = sum(one.record.logical_bytes for one in sources)
        landing = Landing(
            remote,
            self._parts.index,
            self._parts.segments,
            self._parts.ingest,
            self._parts.histories,
            os.urandom,
            lambda done: report(Progress(done=done, total=total)),
        )
        lost = tuple(f"somebody's versions cannot be told: {problem}" for problem in unreadable)
        wanted = Wanted(
            sources=sources,
            name=name,
            inner=inner,
            decision=Decision(choice.preferred, request.keep_both),
            step=choice.step,
            lacking=(*choice.lacking, *lost),
        )
        merged = await Merger(landing, self._log, self._judged).merge(wanted)
        return merged.pulled, _answer(target.name, choice, sources, merged, name)

    async def _read(self, remote: Remote, named: Sequence[RemoteHead], request: Pull) -> list[RemoteUnit]:
        """The units, but for those that are damaged and not asked for."""
        units: list[RemoteUnit] = []
        for head in named:
            try:
                units.append(await read_unit(remote, head))
            except (Corrupt, NotFound) as e:
                if not request.nodes or {head.node, head.unit.hex()} & {*request.nodes}:
                    raise Corrupt(
                        f"{request.path} of {head.node} is not merged: {e}; --node names the nodes that are"
                    ) from None
        return units

    async def _judged(self, tree: TreeId, step: int | None) -> Facts:
        return await self._facts.of(tree, None, step)

    async def _checked(self, one: Chosen, keys: Sequence[PublicKey], path: str, remote: str) -> Source:
        """The version as a source; Corrupt if its history is doubtful."""
        checked = await trio.to_thread.run_sync(one.unit.check, keys)
        doubt = one.unit.doubt_of(checked, one.record, keys)
        if doubt is not None:
            raise Corrupt(
                f"{path} of {one.label} on {remote} is not merged: {doubt}; --node names the nodes that are"
            )
        signer = next((row.key for row in checked.versions if row.number == one.record.number), None)
        return Source(one.label, one.record, signer or "")


def _answer(
    remote: str, choice: Choice, sources: Sequence[Source], merged: Merged, name: bytes
) -> dict[str, Json]:
    record = merged.pulled.record
    rows: list[Json] = [
        {
            "node": one.node,
            "unit": one.record.unit.hex(),
            "of": one.record.number,
            "name": one.record.name,
            "key": one.key or None,
        }
        for one in sources
    ]
    return {
        "unit": os.fsdecode(name),
        "number": record.number,
        "name": record.name,
        "step": record.step,
        "state": record.state.value,
        "missing": list(record.missing),
        "remote": remote,
        "sources": rows,
        "conflicts": list(merged.notes),
        "newer_steps": list(choice.newer),
        "fetched_bytes": merged.pulled.fetched_bytes,
        "fetched_chunks": merged.pulled.fetched_chunks,
        "passed_over": [],
    }
