"""Expect: what a version says of its tensors, for whoever verifies them in memory.

One rule: chunk ids are passed on as the recipes have them; only for a part of a tensor that does not fill
its chunk is a digest made here, from bytes that were verified on their way out of the store.

The index thread reads; a worker thread parses and hashes.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
import trio

from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.messages import Progress
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.daemon.usage import nothing_there
from ckptfs.daemon.verifying import Report
from ckptfs.gpu.expected import Expectation, ExpectedFile, ExpectedTensor, edges_of
from ckptfs.store.errors import Corrupt, NotPermitted
from ckptfs.store.far_reader import FarReader
from ckptfs.store.formats import Reader, Tensor, dcp, parse
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

_SLICE = 256
MayRead = Callable[[Entry], bool]


@dataclass(frozen=True, slots=True)
class _File:
    """A regular file of a version; `folder` is the directory that it lies in."""

    path: bytes
    entry: Entry
    folder: Entry


class Expecting:
    """Describes versions. Belongs to the index thread."""

    def __init__(self, segments: Segments, addresses: Addresses, limiter: trio.CapacityLimiter) -> None:
        """`limiter` bounds the worker threads of all requests together."""
        self._segments = segments
        self._addresses = addresses
        self._limiter = limiter

    async def expectation(
        self, address: Address, ways: int, report: Report, may_read: MayRead
    ) -> Expectation:
        """All files with tensors at and below a place of a version (the latest, if none is named), for
        `ways` ranks among which the rows of tensors are divided.

        `may_read` tells whether the caller may read a saved file, or list and enter a saved directory;
        NotPermitted if not. NotFound if there is nothing. Corrupt if a directory, a recipe or what a file
        says of its tensors cannot be read.
        """
        record = self._addresses.record(address)
        way = way_into(self._segments, record.top, address.inner)
        if len(way) <= len(address.inner):
            raise nothing_there(address.text)
        found = [one async for one in self._files(address, way, may_read)]
        total_bytes, done_bytes = sum(one.entry.size for one in found), 0
        files: list[ExpectedFile] = []
        others: list[str] = []
        for one in found:
            described = await self._described(one, ways, may_read)
            if described is not None:
                files.append(described)
            else:
                others.append(os.fsdecode(one.path))
            done_bytes += one.entry.size
            report(Progress(done=done_bytes, total=total_bytes))
        return Expectation(
            unit=os.fsdecode(address.name),
            number=record.number,
            name=record.name,
            path=os.fsdecode(self._addresses.path_of_version(address, record)),
            files=tuple(files),
            others=tuple(others),
        )

    async def _files(self, address: Address, way: list[Entry], may_read: MayRead) -> AsyncIterator[_File]:
        start = Saved(b"/".join(address.inner), way[-1])
        folders = {start.path: way[-1]}
        for step, saved in enumerate(walk(self._segments, start, _refuse)):
            if not may_read(saved.entry):
                raise NotPermitted(f"you may not read {os.fsdecode(saved.path)} in {address.text}")
            if saved.entry.is_dir:
                folders[saved.path] = saved.entry
            elif saved.entry.is_file and saved.entry.recipe is not None:
                folder = way[-2] if saved is start else folders[saved.path.rpartition(b"/")[0]]
                yield _File(saved.path, saved.entry, folder)
            if step % _SLICE == 0:
                await trio.lowlevel.checkpoint()

    async def _described(self, file: _File, ways: int, may_read: MayRead) -> ExpectedFile | None:
        """What to expect of a file; None if it has no tensors."""
        assert file.entry.recipe is not None, "a regular file has a recipe"
        recipe = self._segments.read_recipe(file.entry.recipe)
        encoded = self._segments.read(file.entry.recipe)
        beside = self._beside(file.folder, may_read)
        return await trio.to_thread.run_sync(
            self._parsed, os.fsdecode(file.path), recipe, encoded, beside, ways, limiter=self._limiter
        )

    def _beside(self, folder: Entry, may_read: MayRead) -> dict[str, RecipeId]:
        """The files of a saved directory in which names of tensors may stand (DCP)."""
        entries = () if folder.tree is None else self._segments.read_tree(folder.tree)
        names = (one for one in entries if one.name.endswith(b".metadata") and one.recipe is not None)
        return {os.fsdecode(one.name): one.recipe for one in names if one.recipe and may_read(one)}

    # -- in the worker thread -------------------------------------------------------------------

    def _parsed(
        self, path: str, recipe: Recipe, encoded: bytes, beside: dict[str, RecipeId], ways: int
    ) -> ExpectedFile | None:
        def sibling(name: str) -> Reader | None:
            identity = beside.get(name)
            if identity is None:
                return None
            other = trio.from_thread.run_sync(self._segments.read_recipe, identity)
            return FarReader(self._segments.file_reader(other))

        file = FarReader(self._segments.file_reader(recipe))
        layout = parse(file, path, sibling)
        if layout is None or not layout.tensors:
            return None
        # A shard of DCP is a rank's block already; where it lies in the whole, other files say.
        ways = 1 if layout.format == dcp.NAME else ways
        edges = _Edges(file, recipe, ways)
        tensors = tuple(edges.with_edges(one) for one in layout.tensors)
        return ExpectedFile(path, layout.format, encoded, tensors, layout.damage, ways)


class _Edges:
    """Hashes the parts of tensors that do not fill their chunks; small tensors share one, so that is read
    once."""

    def __init__(self, file: FarReader, recipe: Recipe, ways: int) -> None:
        self._file = file
        self._recipe = recipe
        self._ways = ways
        self._index = -1
        self._payload = b""

    def with_edges(self, one: Tensor) -> ExpectedTensor:
        """A tensor with these digests; with none if they are damaged in the store: the others can be
        verified all the same."""
        tensor = ExpectedTensor(one.name, one.offset, one.length, one.dtype, one.shape)
        found = edges_of(self._recipe, tensor.offset, tensor.end, tensor.cuts(self._ways))
        try:
            edges = b"".join(chunk_id(self._bytes(offset, length)) for offset, length in found)
        except Corrupt:
            return tensor
        return msgspec.structs.replace(tensor, edges=edges)

    def _bytes(self, offset: int, length: int) -> bytes:
        index = self._recipe.index_at(offset)
        start = self._recipe.start(index)
        if index != self._index:
            self._payload = self._file.pread(start, self._recipe.piece(index).length)
            self._index = index
        return self._payload[offset - start : offset - start + length]


def _refuse(path: bytes, tree: TreeId, error: Corrupt) -> None:
    raise error
