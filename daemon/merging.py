"""`pull --merge`: what several nodes have copied of one step of a run becomes one version here.

One rule: every history that something is taken from is checked before anything is fetched; if one is
doubtful, nothing is.

Source: FORMAT.md, "Remotes", "Merging".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from ckptfs.daemon.copying import Copying, Report
from ckptfs.daemon.fetching import heads_of_path
from ckptfs.daemon.merge_choice import Choice, Chosen, choose, common_steps
from ckptfs.daemon.merge_ranks import ranks_of
from ckptfs.daemon.messages import Json, Progress, Pull
from ckptfs.daemon.open_store import OpenStore
from ckptfs.fusefs.facts import Facts, OpenFile, VersionFacts
from ckptfs.store.errors import Corrupt, InvalidRequest, NotFound
from ckptfs.store.history import State
from ckptfs.store.history_check import HistoryReport
from ckptfs.store.ids import TreeId, UnitId
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

# So many steps are looked at for the newest whose ranks are all there.
_MOST_STEPS = 8


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
        run = await self._read(remote, target.name, request, keys)
        landing = Landing(
            remote,
            self._parts.index,
            self._parts.segments,
            self._parts.ingest,
            self._parts.histories,
            os.urandom,
            lambda done: report(Progress(done=done)),
        )
        merger = Merger(landing, self._log, self._judged)
        landing.check_free(run.name)
        _, version = split_version(request.path)
        passed: list[str] = []
        if version is None:
            choice, wanted = await _newest_whole(run, merger, passed)
        else:
            choice, wanted = await run.wanted(version)
        merged = await merger.merge(wanted)
        return merged.pulled, _answer(target.name, choice, wanted, merged, passed)

    async def _read(self, remote: Remote, remote_name: str, request: Pull, keys: Sequence[PublicKey]) -> _Run:
        newest = await newest_heads(remote)
        path, _ = split_version(request.path)
        heads = [one.head for one in newest if one.head is not None]
        named, inner = heads_of_path(remote.url, heads, path)
        return _Run(
            f"{path.lstrip('/')} on {remote_name}",
            request,
            keys,
            await _units(remote, named, request),
            inner,
            named[0].name if request.name is None else os.fsencode(request.name).strip(b"/"),
            tuple(
                f"somebody's versions cannot be told: {problem}"
                for one in newest
                if one.head is None
                for problem in one.problems
            ),
        )

    async def _judged(self, tree: TreeId, step: int | None, open_file: OpenFile | None) -> Facts:
        return await self._facts.of(tree, None, step, open_file)


async def _units(remote: Remote, named: Sequence[RemoteHead], request: Pull) -> list[RemoteUnit]:
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


@dataclass(frozen=True, slots=True)
class _Run:
    """What nodes have copied of a run to a remote, and what is asked of it; `lost`: what cannot be told."""

    text: str
    request: Pull
    keys: Sequence[PublicKey]
    units: Sequence[RemoteUnit]
    inner: tuple[bytes, ...]
    name: bytes
    lost: tuple[str, ...]
    checked: dict[UnitId, HistoryReport] = field(default_factory=dict)

    async def wanted(self, version: str) -> tuple[Choice, Wanted]:
        """The merge of a step or tag; Corrupt if a history that has a part in it is doubtful."""
        choice = choose(self.units, version, self.request.nodes, self.request.prefer)
        sources = [await self._source(one) for one in choice.chosen]
        decision = Decision(choice.preferred, self.request.keep_both)
        lacking = (*choice.lacking, *self.lost)
        return choice, Wanted(sources, self.name, self.inner, decision, choice.step, lacking)

    async def _source(self, one: Chosen) -> Source:
        unit = one.unit.head.unit
        if unit not in self.checked:
            self.checked[unit] = await trio.to_thread.run_sync(one.unit.check, self.keys)
        checked = self.checked[unit]
        doubt = one.unit.doubt_of(checked, one.record, self.keys)
        if doubt is not None:
            raise Corrupt(
                f"{self.text} is not merged: of {one.label}, {doubt}; --node names the nodes that are"
            )
        signer = next((row.key for row in checked.versions if row.number == one.record.number), None)
        return Source(one.label, one.record, signer or "")


async def _newest_whole(run: _Run, merger: Merger, passed: list[str]) -> tuple[Choice, Wanted]:
    """The newest step of all nodes whose ranks are all there, else the newest; why newer ones are not, is
    added to `passed`. Of contents nothing but headers is fetched for it."""
    steps = common_steps(run.units, run.request.nodes)[:_MOST_STEPS]
    candidates = [await run.wanted(f"step:{step}") for step in steps[:1]]
    for step in steps if len(steps) > 1 and not run.inner else ():
        choice, wanted = await run.wanted(f"step:{step}")
        seen = await merger.look(wanted)
        if seen.state is not State.PARTIAL:
            return choice, wanted
        # The last ones are of the newest save.
        first = wanted.lacking[0] if wanted.lacking else seen.missing[-1]
        more = f" and {len(seen.missing) - 1} more" if len(seen.missing) > 1 else ""
        passed.append(f"step {step} is not whole: {first}{more}")
    passed.clear()
    return candidates[0]


def _answer(
    remote: str, choice: Choice, wanted: Wanted, merged: Merged, passed: Sequence[str]
) -> dict[str, Json]:
    record, ranks = merged.pulled.record, ranks_of(choice.chosen)
    told: Json = None
    if ranks is not None:
        told = {"world": ranks.world, "wrote": [*sorted(ranks.wrote)], "silent": [*ranks.silent]}
    rows: list[Json] = [
        {
            "node": one.node,
            "unit": one.record.unit.hex(),
            "of": one.record.number,
            "name": one.record.name,
            "key": one.key or None,
        }
        for one in wanted.sources
    ]
    return {
        "unit": os.fsdecode(wanted.name),
        "number": record.number,
        "name": record.name,
        "step": record.step,
        "state": record.state.value,
        "missing": list(record.missing),
        "remote": remote,
        "sources": rows,
        "conflicts": list(merged.notes),
        "ranks": told,
        "newer_steps": list(choice.newer),
        "fetched_bytes": merged.pulled.fetched_bytes,
        "fetched_chunks": merged.pulled.fetched_chunks,
        "passed_over": list(passed),
    }
