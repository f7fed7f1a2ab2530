"""What is on the remotes, and `pull`: a version from there becomes one here.

One rule: the history that a version stands in is checked before anything of it is fetched.

Source: ARCHITECTURE.md, section 8; FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from ckptfs.daemon.copying import SLOW_S, Copying, Report, Target
from ckptfs.daemon.messages import Json, Progress, Pull
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.queries import iso_time
from ckptfs.store.errors import CkptfsError, Corrupt, InvalidRequest, NotFound, Unavailable
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_check import HistoryReport
from ckptfs.store.remote.catalogue import RemoteUnit, read_unit
from ckptfs.store.remote.head import RemoteHead
from ckptfs.store.remote.heads import newest_heads
from ckptfs.store.remote.landing import Landing, Pulled
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pull import Puller
from ckptfs.store.remote.several import done_for_each
from ckptfs.store.remote.tensor_pull import PulledTensors, TensorPuller
from ckptfs.store.remote.tensor_pull import Wanted as WantedTensors
from ckptfs.store.signing import PublicKey
from ckptfs.store.version_names import LATEST_COMPLETE, resolve, split_version


@dataclass(frozen=True, slots=True)
class Found:
    """A version on a remote: its unit, what the check of the history said, and where in it."""

    unit: RemoteUnit
    checked: HistoryReport
    record: VersionRecord
    inner: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A remote on which a version was found."""

    target: Target
    remote: Remote
    found: Found


class Fetching:
    """Belongs to the index thread."""

    def __init__(self, parts: OpenStore, copying: Copying) -> None:
        self._parts = parts
        self._copying = copying

    async def listing(self, remote: str | None, keys: Sequence[PublicKey]) -> Json:
        """The units that are there, and their versions. One of several remotes that cannot be asked is told
        of in its `problems`."""
        targets = self._copying.targets(remote)
        return await done_for_each(lambda one: self._listed(one, keys, alone=len(targets) == 1), targets, 8)

    async def _listed(self, target: Target, keys: Sequence[PublicKey], *, alone: bool) -> Json:
        try:
            return await self._listing(target, keys)
        except (CkptfsError, OSError) as e:
            if alone:
                raise
            return {"remote": target.name, "url": target.config.url, "units": [], "problems": [str(e)]}

    async def _listing(self, target: Target, keys: Sequence[PublicKey]) -> Json:
        remote = target.open()
        await remote.open()
        rows: list[Json] = []
        problems: list[Json] = []
        for newest in await newest_heads(remote):
            problems += newest.problems
            if newest.head is None:
                continue
            try:
                unit = await read_unit(remote, newest.head)
            except (Corrupt, NotFound) as e:
                # The others are there all the same.
                problems.append(f"the history of {os.fsdecode(newest.head.name)} cannot be read: {e}")
                continue
            checked = await trio.to_thread.run_sync(unit.check, keys)
            rows.append(_unit_row(unit, checked, keys, newest.modified_ns))
        return {"remote": target.name, "url": target.config.url, "units": rows, "problems": problems}

    async def pull(
        self, request: Pull, keys: Sequence[PublicKey], report: Report
    ) -> tuple[Pulled, dict[str, Json]]:
        """Fetch a version; what it became here, and the answer to be shown. Of several remotes those are
        asked at once, and the newest that one of them has is fetched from whichever can give it.

        NotFound or InvalidRequest say what there is instead; Corrupt: the history is not what `keys` signed.
        Else as Puller.pull. Durable when: this returned.
        """
        targets = self._copying.targets(request.remote) or [self._copying.target(None)]
        places, failures = await self._search(targets, request, keys)
        for place in places:
            try:
                return await self._pull_from(place, request, keys, report, failures)
            except (CkptfsError, OSError) as e:
                failures.append(e if len(targets) == 1 else _of(place.target, e))
        raise failures[-1]

    async def _search(
        self, targets: Sequence[Target], request: Pull, keys: Sequence[PublicKey]
    ) -> tuple[list[_Place], list[CkptfsError | OSError]]:
        """Where the version is, and why it is not elsewhere; who is slow is not waited for. One whose history
        is doubtful counts as one that failed: else it would block the others with the newest of all."""
        places: list[_Place] = []
        asked = {target.name for target in targets}
        failures: list[CkptfsError | OSError] = []

        async def look(target: Target) -> None:
            try:
                remote = target.open()
                await remote.open()
                found = await self.find(remote, request, keys)
                doubt = found.unit.doubt_of(found.checked, found.record, keys)
                if doubt is not None:
                    raise Corrupt(f"{request.path} on {target.name} is not fetched: {doubt}")
                places.append(_Place(target, remote, found))
                asked.discard(target.name)
                nursery.cancel_scope.deadline = min(
                    nursery.cancel_scope.deadline, trio.current_time() + SLOW_S
                )
            except (CkptfsError, OSError) as e:
                failures.append(e if len(targets) == 1 else _of(target, e))
                asked.discard(target.name)

        async with trio.open_nursery() as nursery:
            for target in targets:
                nursery.start_soon(look, target)
        failures[:0] = [
            Unavailable(f"{name}: did not answer within {SLOW_S:.0f} s of another, and was not waited for")
            for name in sorted(asked)
        ]
        newest = max((one.found.record for one in places), key=lambda record: record.time_ns, default=None)
        same = [one for one in places if newest is not None and one.found.record == newest]
        return sorted(same, key=lambda one: targets.index(one.target)), failures

    async def _pull_from(
        self,
        place: _Place,
        request: Pull,
        keys: Sequence[PublicKey],
        report: Report,
        failures: Sequence[CkptfsError | OSError],
    ) -> tuple[Pulled, dict[str, Json]]:
        target, found, parts = place.target, place.found, self._parts
        total = 0 if request.tensors else found.record.logical_bytes
        store = (
            place.remote,
            parts.index,
            parts.segments,
            parts.ingest,
            parts.histories,
            os.urandom,
            lambda done: report(Progress(done=done, total=total)),
        )
        passed: list[Json] = [str(one) for one in failures]
        if request.tensors:
            wanted = _wanted_tensors(target, found, request)
            tensors = await TensorPuller(Landing(*store)).pull(wanted)
            pulled, more = tensors.pulled, _tensor_answer(tensors, wanted)
            name = wanted.name
        else:
            name = found.unit.name if request.name is None else os.fsencode(request.name).strip(b"/")
            pulled, more = await Puller(*store).pull(found.record, name, found.inner), {}
        return pulled, {**_answer(target, found, pulled, name), **more, "passed_over": passed}

    async def find(self, remote: Remote, request: Pull, keys: Sequence[PublicKey]) -> Found:
        """The version that a request names. NotFound or InvalidRequest say what there is instead."""
        path, version = split_version(request.path)
        newest = await newest_heads(remote)
        heads = [one.head for one in newest if one.head is not None and one.head.versions]
        named, inner = heads_of_path(remote.url, heads, path)
        # What is damaged of another node keeps nobody from this one.
        wanted = _of_node(named, request.node, request.path)
        unit = _newest([await read_unit(remote, head) for head in wanted])
        record = resolve(version or LATEST_COMPLETE, unit.versions, unit.tags)
        checked = await trio.to_thread.run_sync(unit.check, keys)
        return Found(unit, checked, record, inner)


def heads_of_path(
    url: str, heads: Sequence[RemoteHead], path: str
) -> tuple[list[RemoteHead], tuple[bytes, ...]]:
    """The units of all nodes that a path lies in, and where in them; NotFound says what there is instead."""
    parts = tuple(part for part in os.fsencode(path).split(b"/") if part)
    for depth in range(len(parts), 0, -1):
        name = b"/".join(parts[:depth])
        named = [head for head in heads if head.name == name]
        if named:
            return named, parts[depth:]
    there = ", ".join(sorted({os.fsdecode(head.name) for head in heads})) or "nothing"
    raise NotFound(f"{url} has no {os.fsdecode(b'/'.join(parts)) or 'unit'}; it has {there}")


def _of(target: Target, error: CkptfsError | OSError) -> CkptfsError:
    """The same error, which says of which remote."""
    kind = type(error) if isinstance(error, CkptfsError) else Unavailable
    return kind(f"{target.name}: {error}")


def _of_node(named: Sequence[RemoteHead], node: str | None, path: str) -> list[RemoteHead]:
    """The units of a node; of several nodes the one has to be told."""
    wanted = [head for head in named if node is None or node in (head.node, head.unit.hex())]
    if len({head.node for head in wanted}) == 1:
        return wanted
    nodes = ", ".join(f"{head.node} ({head.unit.hex()})" for head in named)
    if not wanted:
        raise NotFound(f"{path} was not copied by {node!r}; it was by {nodes}")
    raise InvalidRequest(f"{path} was copied by several, say whose with --node (its name or id): {nodes}")


def _newest(units: Sequence[RemoteUnit]) -> RemoteUnit:
    """A node that was set up anew has several units of one name: then it is that of the newest version."""
    return max(units, key=lambda unit: unit.versions[-1].time_ns if unit.versions else 0)


def _unit_row(unit: RemoteUnit, checked: HistoryReport, keys: Sequence[PublicKey], modified_ns: int) -> Json:
    tags: dict[int, list[Json]] = {}
    for tag, number in sorted(unit.tags.items()):
        tags.setdefault(number, []).append(tag)
    versions: list[Json] = [
        {
            "number": record.number,
            "name": record.name,
            "time": iso_time(record.time_ns),
            "step": record.step,
            "state": record.state.value,
            "bytes": record.logical_bytes,
            "tags": tags.get(record.number, []),
            "doubt": unit.doubt_of(checked, record, keys),
        }
        for record in unit.versions
    ]
    return {
        "unit": os.fsdecode(unit.name),
        "id": unit.head.unit.hex(),
        "node": unit.head.node,
        "copied_at": iso_time(modified_ns),
        "keys": list(checked.keys),
        "versions": versions,
    }


_OTHER_NAME = re.compile(r"[^\w.=@+-]")
_MOST_NAME = 100


def _wanted_tensors(target: Target, found: Found, request: Pull) -> WantedTensors:
    """InvalidRequest if the name is none of a file in a directory."""
    unit, record = os.fsdecode(found.unit.name), found.record
    if request.name is None:
        label = _OTHER_NAME.sub("_", request.tensors[0])[:_MOST_NAME]
        label += f"+{len(request.tensors) - 1}" if len(request.tensors) > 1 else ""
        directory, file = f"{unit}.{label}", f"{label}.safetensors"
    else:
        directory, _, file = request.name.strip("/").rpartition("/")
        if not directory:
            raise InvalidRequest(
                f"a tensor becomes a file in a directory of its own: --as DIR/{file or 'FILE'}"
            )
    node = found.unit.head.node
    told = {
        "ckptfs.version": f"{unit}@{record.name} of {node} on {target.name}",
        "ckptfs.root": record.root.hex(),
    }
    name = os.fsencode(directory)
    return WantedTensors(record, found.inner, request.tensors, name, os.fsencode(file), told)


def _tensor_answer(tensors: PulledTensors, wanted: WantedTensors) -> dict[str, Json]:
    rows: list[Json] = [
        {
            "name": one.part.name,
            "dtype": one.part.dtype,
            "shape": list(one.part.shape),
            "bytes": one.part.length,
            "path": one.path,
        }
        for one in tensors.tensors
    ]
    file = os.fsdecode(wanted.name + b"/" + wanted.file)
    return {"tensors": rows, "file": file, "file_bytes": tensors.size_bytes}


def _answer(target: Target, found: Found, pulled: Pulled, name: bytes) -> dict[str, Json]:
    signer = next((one.key for one in found.checked.versions if one.number == found.record.number), None)
    return {
        "unit": os.fsdecode(name),
        "number": pulled.record.number,
        "name": pulled.record.name,
        "step": pulled.record.step,
        "state": pulled.record.state.value,
        "remote": target.name,
        "node": found.unit.head.node,
        "of": found.record.number,
        "key": signer,
        "fetched_bytes": pulled.fetched_bytes,
        "fetched_chunks": pulled.fetched_chunks,
    }
