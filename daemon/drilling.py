"""A drill: get a version, prove it, load it, compare it with the one before, run a probe; and say how long.

One rule: what goes wrong with the version is in the report; only what kept the drill itself from being made
is an error.

Runs in the process of the command, as on a node where something has happened, and not in the daemon.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import cast

import trio

from ckptfs.daemon import messages
from ckptfs.daemon.cli_source import Source
from ckptfs.daemon.config import RemoteConfig
from ckptfs.daemon.drill_loading import load_all, memory_for
from ckptfs.daemon.drill_probe import run_probe
from ckptfs.daemon.drill_report import Drill, LoadedFile, Shapes, deviations, newest_of_each
from ckptfs.daemon.drill_sources import (
    Report,
    Version,
    before,
    fetch,
    files_in,
    shapes_in,
    shown_at,
    stored_shapes,
    version_of,
    write_out,
)
from ckptfs.daemon.offline import OfflineStore
from ckptfs.daemon.open_store import opened_store
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound
from ckptfs.store.keyring import Keyring
from ckptfs.store.layout import open_store
from ckptfs.store.signing import PublicKey

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Options:
    """`limit_s`: how long loading, and then the probe, may take. `memory_bytes`: how much loading may use
    (None: by the size of the largest file). `scratch`: where there is room for the version (None: the usual
    folder for temporary files)."""

    probe: str | None = None
    limit_s: float = 3600.0
    memory_bytes: int | None = None
    scratch: str | None = None


def drill_mounted(source: Source, mount: str, inner: str, version: str, options: Options) -> Drill:
    """Of a mount: read through it, after its daemon has hashed every chunk again. Raises as Source.ask."""
    row, older = _rows(source, inner, version)
    drill = _begun(inner, _unit(source, inner), "the mount", row)
    began = time.monotonic()
    _note_verified(drill, source, f"{inner}@{row.number}")
    drill.verify_s = time.monotonic() - began
    shown = shown_at(mount, inner, row.name)
    folder, files = shown, []
    if os.path.isdir(shown):
        files = files_in(shown)
    else:
        folder, name = os.path.split(shown)
        files = [name]

    def shapes(wanted: Callable[[str], bool]) -> dict[str, Shapes]:
        assert older is not None
        place = shown_at(mount, inner, older.name)
        if not os.path.isdir(place):
            return shapes_in(os.path.dirname(place), filter(wanted, [os.path.basename(place)]))
        return shapes_in(place, filter(wanted, files_in(place)))

    return _finished(drill, folder, files, older, shapes, options)


def drill_stored(store: str, key: str, inner: str, version: str, options: Options, report: Report) -> Drill:
    """Of a store that nobody has mounted: written out into a scratch folder."""
    with OfflineStore(open_store(store, writing=False), key) as offline, _scratch(options) as folder:
        row, older = _rows(offline, inner, version)
        drill = _begun(inner, _unit(offline, inner), f"the store {store}", row)
        began = time.monotonic()
        _note_verified(drill, offline, f"{inner}@{row.number}")
        drill.verify_s = time.monotonic() - began
        record, place = offline.record(f"{inner}@{row.number}")
        _write_out(drill, lambda: write_out(offline.segments, record.top, place, folder, report))

        def shapes(wanted: Callable[[str], bool]) -> dict[str, Shapes]:
            assert older is not None
            saved, there = offline.record(f"{inner}@{older.number}")
            return stored_shapes(offline.segments, saved.top, there, wanted)

        return _finished(drill, folder, files_in(folder), older, shapes, options)


def drill_remote(
    remotes: Sequence[RemoteConfig],
    request: messages.Pull,
    keys: Sequence[PublicKey],
    options: Options,
    report: Report,
) -> Drill:
    """Of a remote: fetched into a store of its own, as on a node that has nothing, and written out."""
    with _scratch(options) as scratch:
        folder = os.path.join(scratch, "files")
        os.mkdir(folder)
        with opened_store(os.path.join(scratch, "store"), "", "", lambda: Keyring(None)) as parts:
            fetched = trio.run(fetch, parts, remotes, request, keys, _is_wanted, report)
            row = version_of(fetched.was)
            drill = _begun(request.path.rpartition("@")[0], fetched.unit, f"the remote {request.remote}", row)
            drill.fetch_s, drill.checked_bytes = fetched.fetch_s, fetched.fetched_bytes
            if fetched.here is None:
                drill.failures.append(fetched.failure)
                return drill
            top = fetched.here.top
            _write_out(drill, lambda: write_out(parts.segments, top, (), folder, report))
        inner = os.path.join(folder, *map(os.fsdecode, fetched.inner))
        older = None if fetched.before is None else version_of(fetched.before)
        place, files = (inner, files_in(inner)) if os.path.isdir(inner) else (folder, files_in(folder))

        def shapes(wanted: Callable[[str], bool]) -> dict[str, Shapes]:
            if fetched.no_shapes:
                raise Corrupt(fetched.no_shapes)
            return {path: one for path, one in fetched.shapes.items() if wanted(path)}

        return _finished(drill, place, files, older, shapes, options)


# ---- the parts -----------------------------------------------------------------------------------


def _rows(source: Source, inner: str, version: str) -> tuple[Version, Version | None]:
    rows = cast("Sequence[Row]", source.ask(messages.Log(path=f"{inner}@{version}")))
    if not rows:
        raise NotFound(f"{inner} is not in {version}")
    row = _version(rows[0])
    versions = [_version(one) for one in cast("Sequence[Row]", source.ask(messages.Log(path=inner)))]
    return row, before(versions, row.number)


def _version(row: Row) -> Version:
    return Version(
        cast(int, row["number"]),
        str(row["name"]),
        cast(int, row["time_ns"]),
        cast("int | None", row["step"]),
        str(row["state"]),
        tuple(map(str, cast("Sequence[object]", row["missing"]))),
    )


def _unit(source: Source, inner: str) -> str:
    (head,) = cast("Sequence[Row]", source.ask(messages.Head(path=inner)))
    return str(head["unit"])


def _begun(path: str, unit: str, source: str, version: Version) -> Drill:
    now_ns = time.time_ns()
    drill = Drill(
        path=path,
        unit=unit,
        version=version.name,
        number=version.number,
        step=version.step,
        state=version.state,
        source=source,
        started_ns=now_ns,
        data_age_s=(now_ns - version.time_ns) / 1e9,
    )
    if version.state == "partial":
        missing = "; ".join(version.missing) or "nobody knows what"
        drill.failures.append(f"the version is partial: {missing}")
    return drill


def _note_verified(drill: Drill, source: Source, address: str) -> None:
    answer = cast(Row, source.ask(messages.Verify(path=address)))
    drill.checked_bytes = cast(int, answer["checked_bytes"])
    for bad in cast("Sequence[Row]", answer["corrupt"]):
        tensor = f", tensor {bad['tensor']!r}" if bad.get("tensor") else ""
        drill.failures.append(
            f"{bad['path']}{tensor}: its bytes are not those that were saved ({bad['place']})"
        )


def _write_out(drill: Drill, write: Callable[[], None]) -> None:
    """What cannot be read is a failure of the version."""
    began = time.monotonic()
    try:
        write()
    except Corrupt as e:
        drill.failures.append(str(e))
    drill.fetch_s += time.monotonic() - began


def _finished(
    drill: Drill,
    folder: str,
    files: Sequence[str],
    older: Version | None,
    shapes_before: Callable[[Callable[[str], bool]], dict[str, Shapes]],
    options: Options,
) -> Drill:
    """Load, compare, probe."""
    newest = newest_of_each(files)
    began = time.monotonic()
    drill.files = _loaded(folder, list(newest.values()), options)
    drill.load_s = time.monotonic() - began
    drill.recovery_s = drill.fetch_s + drill.verify_s + drill.load_s
    if not any(one.tensors or one.refused for one in drill.files) and drill.outcome == "good":
        drill.deviations.append("nothing in it could be loaded: there is no file with tensors")
    if older is not None:
        _compare(drill, folder, newest, older, shapes_before)
    if options.probe is not None:
        _probe(drill, folder, options.probe, options.limit_s)
    return drill


def _loaded(folder: str, paths: Sequence[str], options: Options) -> list[LoadedFile]:
    full = [os.path.join(folder, path) for path in paths]
    memory = options.memory_bytes or memory_for([os.path.getsize(path) for path in full])
    prefix = os.path.join(folder, "")
    found = load_all(full, memory, options.limit_s)
    return [one.renamed(one.path.removeprefix(prefix)) for one in found]


def _compare(
    drill: Drill,
    folder: str,
    newest: Mapping[str, str],
    older: Version,
    shapes_before: Callable[[Callable[[str], bool]], dict[str, Shapes]],
) -> None:
    try:
        old = shapes_before(_is_wanted)
    except (CkptfsError, OSError) as e:
        drill.deviations.append(f"it could not be compared with {older.name}: {e}")
        return
    drill.before = older.name
    now = shapes_in(folder, newest.values())
    by_key = {key: now[path] for key, path in newest.items() if path in now}
    drill.deviations += deviations(by_key, {key: old[path] for key, path in newest_of_each(old).items()})


def _is_wanted(path: str) -> bool:
    """Whether a file may have tensors."""
    return not path.endswith((".json", ".txt", ".log", ".yaml", ".md", ".py"))


def _probe(drill: Drill, folder: str, command: str, limit_s: float) -> None:
    drill.probe = command
    probed = run_probe(command, folder, os.environ, limit_s)
    drill.probe_s, drill.probe_output = probed.took_s, probed.said
    drill.probe_output_bytes = probed.said_bytes
    if probed.code is None:
        drill.failures.append(f"the probe took longer than {limit_s:g} s")
    elif probed.code:
        last = probed.said.splitlines()[-1:] or ["it said nothing"]
        drill.failures.append(f"the probe ended with {probed.code}: {last[0]}")


@contextmanager
def _scratch(options: Options) -> Iterator[str]:
    with TemporaryDirectory(prefix="ckptfs-drill-", dir=options.scratch) as folder:
        yield folder
