"""Where a drill gets a version from: the mount, a store that nobody has mounted, or a remote.

One rule: each of them gives a folder that a program can load from, every byte of it proven, and the shapes of
the tensors of the version before; what it had to make for that is gone with it.

A remote is fetched from as a node would that has nothing: into a store of its own, which is thrown away.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from ckptfs.daemon.config import RemoteConfig
from ckptfs.daemon.copying import Copying
from ckptfs.daemon.drill_loader import layout_of
from ckptfs.daemon.drill_report import Shapes, shapes_of
from ckptfs.daemon.fetching import Fetching
from ckptfs.daemon.messages import Progress, Pull
from ckptfs.daemon.open_store import OpenStore
from ckptfs.daemon.remotes import default_node_name, open_remote
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.store.errors import CkptfsError, Corrupt, NotFound, Unavailable
from ckptfs.store.formats import parse
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.remote.far_file import FarFile
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.known_chunks import KnownChunks
from ckptfs.store.remote.log import RemoteLog
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.shard import keys_of
from ckptfs.store.segments import Segments
from ckptfs.store.signing import PublicKey
from ckptfs.store.tree import Entry

_WINDOW_BYTES = 8 << 20
Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Version:
    """What is known of a version without reading it."""

    number: int
    name: str
    time_ns: int
    step: int | None
    state: str
    missing: tuple[str, ...]


def version_of(record: VersionRecord) -> Version:
    """The same of a record."""
    return Version(
        record.number, record.name, record.time_ns, record.step, record.state.value, tuple(record.missing)
    )


def before(versions: Sequence[Version], number: int) -> Version | None:
    """What a version is compared with: the newest complete one before it."""
    older = (one for one in reversed(versions) if one.number < number and one.state == State.COMPLETE.value)
    return next(older, None)


# ---- a folder ------------------------------------------------------------------------------------


def files_in(folder: str) -> list[str]:
    """The regular files below a folder, by their paths in it."""
    return sorted(
        os.path.relpath(os.path.join(above, name), folder)
        for above, _, names in os.walk(folder)
        for name in names
        if stat.S_ISREG(os.lstat(os.path.join(above, name)).st_mode)
    )


def shapes_in(folder: str, paths: Iterable[str]) -> dict[str, Shapes]:
    """The tensors of files in a folder; without those whose format is not known, or that cannot be read."""
    shapes = {}
    for path in paths:
        try:
            layout = layout_of(os.path.join(folder, path))
        except OSError:
            continue
        if layout is not None:
            shapes[path] = shapes_of(layout)
    return shapes


def shown_at(mount: str, inner: str, name: str) -> str:
    """Where a mount shows what lies at `inner` in the version `name`. NotFound if it does not."""
    above, _, last = inner.strip("/").rpartition("/")
    parts = inner.strip("/").split("/")
    tries = [f"{mount}/{inner.strip('/')}/.versions/{name}", f"{mount}/{above}/.versions/{name}/{last}"]
    tries += [
        os.path.join(mount, ".versions", *parts[:depth], name, *parts[depth:])
        for depth in range(len(parts), 0, -1)
    ]
    found = next((path for path in tries if os.path.exists(path)), None)
    if found is None:
        raise NotFound(f"{inner} is not in {name}")
    return found


# ---- a store -------------------------------------------------------------------------------------


def write_out(segments: Segments, top: Entry, inner: tuple[bytes, ...], folder: str, report: Report) -> None:
    """Write what a version has at `inner` into an empty folder, each chunk proven as it is read. Symbolic
    links that lead out of it are left out, and so is what is no file. NotFound, Corrupt, OSError."""
    way = way_into(segments, top, inner)
    if len(way) <= len(inner):
        raise NotFound(f"this version has no {os.fsdecode(b'/'.join(inner))}")
    done = 0
    for saved in walk(segments, Saved(b"", way[-1]), _refuse):
        path = os.path.join(folder, os.fsdecode(saved.path)) if saved.path else folder
        if saved.entry.is_dir:
            os.makedirs(path, exist_ok=True)
        elif saved.entry.is_file:
            _write_file(
                segments, saved.entry, path if saved.path else os.path.join(folder, _name(saved.entry))
            )
            done += saved.entry.size
            report(Progress(done=done))
        elif saved.entry.target is not None and _stays_below(saved):
            os.symlink(saved.entry.target, path)


def _name(entry: Entry) -> str:
    return os.fsdecode(entry.name)


def _write_file(segments: Segments, entry: Entry, path: str) -> None:
    assert entry.recipe is not None
    recipe = segments.read_recipe(entry.recipe)
    with open(path, "xb") as file:
        for at in range(0, recipe.size, _WINDOW_BYTES):
            file.write(segments.read_file(recipe, at, _WINDOW_BYTES))


def _stays_below(saved: Saved) -> bool:
    target = saved.entry.target or b""
    return not target.startswith(b"/") and b".." not in target.split(b"/")


def _refuse(path: bytes, tree: TreeId, error: Corrupt) -> None:
    raise error


def stored_shapes(
    segments: Segments, top: Entry, inner: tuple[bytes, ...], wanted: Callable[[str], bool]
) -> dict[str, Shapes]:
    """The tensors of the files of a version at `inner` that are `wanted`. Corrupt if they cannot be read."""
    way = way_into(segments, top, inner)
    if len(way) <= len(inner):
        return {}
    shapes = {}
    for saved in walk(segments, Saved(b"", way[-1]), _refuse):
        path = os.fsdecode(saved.path or saved.entry.name)
        if saved.entry.recipe is not None and wanted(path):
            layout = parse(segments.file_reader(segments.read_recipe(saved.entry.recipe)), path)
            if layout is not None:
                shapes[path] = shapes_of(layout)
    return shapes


# ---- a remote ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Fetched:
    """A version of a remote, `was` as it is there, of which `inner` was wanted: as it is `here`, in the
    scratch store (None: it could not be fetched, for the reason `failure`); what it is compared with, and the
    shapes of that by path, or why they cannot be told."""

    was: VersionRecord
    unit: str
    inner: tuple[bytes, ...]
    here: VersionRecord | None = None
    failure: str = ""
    before: VersionRecord | None = None
    shapes: dict[str, Shapes] = field(default_factory=dict)
    no_shapes: str = ""
    fetch_s: float = 0.0
    fetched_bytes: int = 0


async def fetch(
    parts: OpenStore,
    remotes: Sequence[RemoteConfig],
    request: Pull,
    keys: Sequence[PublicKey],
    wanted: Callable[[str], bool],
    report: Report,
) -> Fetched:
    """Fetch a version into the scratch store `parts`, and of the one before it what tells the shapes of the
    files that are `wanted`. NotFound or InvalidRequest: there is no such version; NoSpace: no room for it."""
    copying = Copying(parts, remotes, lambda one: open_remote(one, os.environ), default_node_name())
    fetching = Fetching(parts, copying)
    remote = copying.target(request.remote).open()
    began = time.monotonic()
    await remote.open()
    found = await fetching.find(remote, request, keys)
    fetched = Fetched(found.record, os.fsdecode(found.unit.name), found.inner)
    try:
        pulled, _ = await fetching.pull(request, keys, report)
        fetched.here, fetched.fetched_bytes = pulled.record, pulled.fetched_bytes
    except (Corrupt, Unavailable) as e:
        fetched.failure = str(e)
    fetched.fetch_s = time.monotonic() - began
    older = before([version_of(one) for one in found.unit.versions], found.record.number)
    record = next((one for one in found.unit.versions if older and one.number == older.number), None)
    if record is not None and fetched.here is not None:
        fetched.before = record
        try:
            fetched.shapes = await _far_shapes(parts, remote, record, found.inner, wanted)
        except (CkptfsError, OSError) as e:
            fetched.no_shapes = str(e)
    return fetched


async def _far_shapes(
    parts: OpenStore,
    remote: Remote,
    record: VersionRecord,
    inner: tuple[bytes, ...],
    wanted: Callable[[str], bool],
) -> dict[str, Shapes]:
    """The shapes of a version of which only trees, recipes and headers are fetched."""
    log = RemoteLog(remote)
    await log.refresh()
    known = KnownChunks(remote, await log.kept())
    await known.refresh()
    shapes = {}
    with parts.segments.pins.hold() as held:
        fetcher = Fetcher(remote, known, parts.segments, parts.ingest, held)
        for path, recipe in await _far_files(parts.segments, fetcher, record.top, inner):
            if not wanted(path):
                continue
            await fetcher.fetch(keys_of([recipe]))
            reader = FarFile(parts.segments, fetcher, parts.segments.read_recipe(recipe))
            layout = await trio.to_thread.run_sync(parse, reader, path)
            if layout is not None:
                shapes[path] = shapes_of(layout)
    return shapes


async def _far_files(
    segments: Segments, fetcher: Fetcher, top: Entry, inner: tuple[bytes, ...]
) -> list[tuple[str, RecipeId]]:
    """(path, content) of the files of a version at `inner`."""
    waiting, files = [(b"", top, inner)], []
    while waiting:
        path, entry, rest = waiting.pop()
        if entry.recipe is not None and not rest:
            files.append((os.fsdecode(path or entry.name), entry.recipe))
        if entry.tree is None:
            continue
        await fetcher.fetch(keys_of([entry.tree]))
        for child in segments.read_tree(entry.tree):
            if rest and child.name == rest[0]:
                waiting.append((b"", child, rest[1:]))
            elif not rest:
                waiting.append((path + b"/" + child.name if path else child.name, child, ()))
    return files
