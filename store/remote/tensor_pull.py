"""Pull of single tensors: they become a small safetensors file here, and little else is fetched.

One rule: a name means one tensor. Where several files hold it nothing is chosen, and where a tensor is
sharded all its parts come, each under its own name.

Source: FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import trio

from ckptfs.store.errors import InvalidRequest, NotFound
from ckptfs.store.formats import Reader, Tensor, parse
from ckptfs.store.formats.bounded_json import MAX_JSON_BYTES, TooLarge, members, parse_members
from ckptfs.store.formats.dcp import NAME as DCP
from ckptfs.store.formats.dcp import SUFFIX as DCP_SUFFIX
from ckptfs.store.formats.file_verdict import TENSOR_SUFFIXES
from ckptfs.store.formats.layout import tensor as described
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import ChunkId
from ckptfs.store.merkle import file_root, version_root
from ckptfs.store.remote.far_file import FarFile
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.landing import Landing, Pulled
from ckptfs.store.remote.shard import keys_of
from ckptfs.store.remote.tree_fetching import fetch_trees, fetch_way, store_way
from ckptfs.store.tensor_file import TensorPart, chunks_of_parts, make_tensor_file
from ckptfs.store.tree import Entry

_INDEX = ".index.json"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Wanted:
    """`tensors` of what lies at `inner` in a version, as the file `file` of the unit `name`; `told` is what
    the file says of where they are from."""

    source: VersionRecord
    inner: tuple[bytes, ...]
    tensors: Sequence[str]
    name: bytes
    file: bytes
    told: dict[str, str]


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor, and the path of the file that it is in."""

    path: str
    part: TensorPart


@dataclass(frozen=True, slots=True)
class PulledTensors:
    """A version that has one file with these tensors, of `size_bytes`."""

    pulled: Pulled
    tensors: tuple[FoundTensor, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Folder:
    """A directory of the version: its path and its entries, of the regular files, by name."""

    path: bytes
    files: dict[str, Entry]


class TensorPuller:
    """Fetches tensors from one remote. Belongs to the index thread; one pull at a time."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing

    async def pull(self, wanted: Wanted) -> PulledTensors:
        """Make the version. NotFound: no such file or tensor. InvalidRequest: several files hold a tensor of
        that name. Else as Puller.pull. Durable when: this returned."""
        self._landing.check_free(wanted.name)

        async def work(fetcher: Fetcher, held: set[ChunkId]) -> PulledTensors:
            return await _Run(self._landing, fetcher, held, wanted).run()

        return await self._landing.attempt([wanted.source], work)


class _Run:
    def __init__(self, landing: Landing, fetcher: Fetcher, held: set[ChunkId], wanted: Wanted) -> None:
        self._landing = landing
        self._segments = landing.segments
        self._fetcher = fetcher
        self._held = held
        self._wanted = wanted

    async def run(self) -> PulledTensors:
        wanted, segments = self._wanted, self._segments
        way = await fetch_way(self._fetcher, segments, wanted.source.top, wanted.inner)
        if len(way) <= len(wanted.inner):
            raise NotFound(f"this version has no {os.fsdecode(b'/'.join(wanted.inner))}")
        found = await self._find(way)
        parts = [one.part for one in found]
        await self._fetcher.fetch(keys_of(sorted(chunks_of_parts(parts))))
        told = {**wanted.told, "ckptfs.files": ", ".join(dict.fromkeys(one.path for one in found))}
        made = await trio.to_thread.run_sync(
            make_tensor_file, parts, told, lambda *of: trio.from_thread.run_sync(segments.read_file, *of)
        )
        recipe = made.recipe
        await self._landing.ingest.store_objects(
            [*made.fresh, (recipe.identity(), recipe.encode())], self._held
        )
        first = await self._entry_of(found[0].path)
        entry = replace(
            first,
            name=wanted.file,
            size=recipe.size,
            holes=made.holes,
            recipe=recipe.identity(),
            root=file_root(recipe.root_leaves()),
            link=0,
            xattrs=(),
        )
        top = await store_way(self._landing.ingest, [wanted.source.top], entry, self._held)
        record = self._landing.list_version(self._record(top, entry), wanted.name)
        pulled = Pulled(record, self._fetcher.fetched_chunks, self._fetcher.fetched_bytes)
        return PulledTensors(pulled, tuple(found), recipe.size)

    def _record(self, top: Entry, entry: Entry) -> VersionRecord:
        wanted = self._wanted
        assert entry.root is not None
        names = ", ".join(wanted.tensors)
        only = f"only {names} was pulled of version {wanted.source.number}"
        return replace(
            wanted.source,
            top=top,
            root=version_root([(entry.name, entry.root)]),
            files=1,
            logical_bytes=entry.size,
            state=State.PARTIAL,
            steps=(),
            missing=(only.encode("utf-8", "backslashreplace").decode(),),
        )

    async def _entry_of(self, path: str) -> Entry:
        inner = tuple(os.fsencode(path).split(b"/"))
        return (await fetch_way(self._fetcher, self._segments, self._wanted.source.top, inner))[-1]

    # ---- finding them -----------------------------------------------------------------------

    async def _find(self, way: Sequence[Entry]) -> list[FoundTensor]:
        """The tensors in their order, each with its parts."""
        inner = self._wanted.inner
        if way[-1].is_dir:
            await fetch_trees(self._fetcher, self._segments, way[-1])
            folders = self._folders(way[-1], b"/".join(inner))
            searched = [pair for folder in folders for pair in await self._candidates(folder)]
        elif way[-1].is_file:
            assert way[-2].tree is not None
            folder = self._folder(way[-2], b"/".join(inner[:-1]))
            searched = [(folder, os.fsdecode(inner[-1]))]
        else:
            raise InvalidRequest(f"{os.fsdecode(b'/'.join(inner))} is neither a file nor a directory")
        by_file = [(*one, await self._tensors(*one)) for one in searched]
        return [part for name in self._wanted.tensors for part in await self._parts(name, by_file)]

    def _folder(self, directory: Entry, path: bytes) -> _Folder:
        assert directory.tree is not None, "a directory has a tree"
        entries = self._segments.read_tree(directory.tree)
        return _Folder(path, {os.fsdecode(one.name): one for one in entries if one.is_file})

    def _folders(self, directory: Entry, path: bytes) -> list[_Folder]:
        assert directory.tree is not None, "a directory has a tree"
        found = [self._folder(directory, path)]
        for entry in self._segments.read_tree(directory.tree):
            if entry.is_dir:
                found += self._folders(entry, path + b"/" + entry.name if path else entry.name)
        return found

    async def _candidates(self, folder: _Folder) -> list[tuple[_Folder, str]]:
        """The files of a directory that may hold one of the tensors; an index tells which do."""
        suffixes = (*(f".{one}" for one in TENSOR_SUFFIXES), DCP_SUFFIX)
        names = [name for name in sorted(folder.files) if name.endswith(suffixes)]
        for index in [name for name in sorted(folder.files) if name.endswith(_INDEX)]:
            shards = await self._index(folder.files[index])
            holding = {shards[one] for one in self._wanted.tensors if one in shards}
            names = [name for name in names if name in holding or name not in shards.values()]
        return [(folder, name) for name in names]

    async def _index(self, entry: Entry) -> dict[str, str]:
        """Which shard holds which tensor; nothing, where the index cannot be read as one."""
        reader = await self._reader(entry)

        def read() -> dict[str, str]:
            try:
                top = dict(parse_members(reader.pread(0, MAX_JSON_BYTES + 1)))
            except (ValueError, TooLarge):
                return {}
            return {name: shard for name, shard in members(top.get("weight_map")) if isinstance(shard, str)}

        return await trio.to_thread.run_sync(read)

    async def _reader(self, entry: Entry) -> FarFile:
        assert entry.recipe is not None, "a regular file has a recipe"
        await self._fetcher.fetch(keys_of([entry.recipe]))
        return FarFile(self._segments, self._fetcher, self._segments.read_recipe(entry.recipe))

    async def _tensors(self, folder: _Folder, name: str) -> tuple[str, tuple[Tensor, ...]]:
        """The format of a file ("": none that is known), and its tensors."""
        reader = await self._reader(folder.files[name])

        def sibling(other: str) -> Reader | None:
            entry = folder.files.get(other)
            return None if entry is None else trio.from_thread.run(self._reader, entry)

        layout = await trio.to_thread.run_sync(parse, reader, name, sibling)
        return ("", ()) if layout is None else (layout.format, layout.tensors)

    async def _parts(
        self, wanted: str, by_file: Sequence[tuple[_Folder, str, tuple[str, tuple[Tensor, ...]]]]
    ) -> list[FoundTensor]:
        part = re.compile(re.escape(wanted) + r"\[\d+(?:,\d+)*\]")
        hits = [
            (folder, file, one, form)
            for folder, file, (form, tensors) in by_file
            for one in tensors
            if one.name == wanted or (form == DCP and part.fullmatch(one.name))
        ]
        if not hits:
            raise _not_found(wanted, [one.name for _, _, (_, tensors) in by_file for one in tensors])
        places = {(folder.path, "" if form == DCP else file) for folder, file, _, form in hits}
        if len(places) > 1:
            raise _ambiguous(wanted, [_path(folder, file) for folder, file, _, _ in hits])
        found = []
        for folder, file, one, _ in hits:
            # What DCP calls it becomes a text; the first part is called as the others are.
            is_first_part = len(hits) > 1 and one.name == wanted
            name = f"{wanted}[{','.join('0' * max(1, len(one.shape)))}]" if is_first_part else one.name
            as_text = described(name, one.offset, one.length, one.dtype, one.shape)
            recipe_id = folder.files[file].recipe
            assert recipe_id is not None
            recipe = self._segments.read_recipe(recipe_id)
            of = TensorPart(
                as_text.name, as_text.dtype, as_text.shape, recipe, as_text.offset, as_text.length
            )
            found.append(FoundTensor(_path(folder, file), of))
        return found


def _path(folder: _Folder, file: str) -> str:
    return os.fsdecode(folder.path) + "/" + file if folder.path else file


def _not_found(wanted: str, names: Sequence[str]) -> NotFound:
    if not names:
        return NotFound(f"there is no tensor {wanted!r}: nothing there is a file with tensors")
    near = difflib.get_close_matches(wanted, names[:10_000], _SHOWN, 0.0)
    return NotFound(f"there is no tensor {wanted!r}; the names that are nearest: {', '.join(near)}")


def _ambiguous(wanted: str, paths: Sequence[str]) -> InvalidRequest:
    shown = ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
    return InvalidRequest(f"several files hold a tensor {wanted!r}, name one as PATH: {shown}")
