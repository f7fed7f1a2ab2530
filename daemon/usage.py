"""Du: what the files of a unit add up to, and what they really take.

One rule: a content counts once. `logical_bytes` adds up the size of every distinct (path, content) in
what is looked at, so a file that did not change from one version to the next counts once, and a file
saved anew under the same name counts again; `unique_bytes` are the distinct chunks of these contents,
`stored_bytes` what those chunks take in segments. Metadata (trees, recipes) is left out.

So logical over stored is what deduplication saves on real content, not what it saves on copies that
versions never made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from ckptfs.daemon.saved_files import Saved, walk
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.disk import Disk
from ckptfs.store.encoding_plan import plan_file
from ckptfs.store.errors import CkptfsError, NotFound
from ckptfs.store.far_reader import FarReader
from ckptfs.store.formats import Layout, parse
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.ingest_job import ask
from ckptfs.store.recipe import Recipe
from ckptfs.store.segment_format import Codec, Location
from ckptfs.store.segments import Segments
from ckptfs.store.staging import staging_path

_SLICE = 256
_LEAST_TENSORS_BYTES = 32 << 10


@dataclass(slots=True)
class Usage:
    """The three sums; `by_codec`: unique and stored bytes of the chunks that are stored so, `by_dtype`: of
    those that hold values of such a type ("other": of none, or of several), if somebody wants to know."""

    logical_bytes: int = 0
    unique_bytes: int = 0
    stored_bytes: int = 0
    by_codec: dict[str, tuple[int, int]] = field(default_factory=dict)
    by_dtype: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add_chunk(self, location: Location, unique: int) -> None:
        """Count a chunk, of `unique` plain bytes."""
        self.stored_bytes += location.stored
        codec = Codec(location.codec).name.lower() if location.codec in set(Codec) else str(location.codec)
        _add(self.by_codec, codec, unique, location.stored)


class UsageCount:
    """One count. Belongs to one task in the index thread, and lets others run between files."""

    def __init__(self, disk: Disk, namespace: Namespace, segments: Segments) -> None:
        self._disk = disk
        self._namespace = namespace
        self._segments = segments
        self._walked: set[tuple[bytes, TreeId]] = set()
        self._contents: set[tuple[bytes, RecipeId]] = set()
        self._recipes: dict[RecipeId, bytes] = {}
        self._chunks: set[int] = set()
        self.usage = Usage()

    async def add_saved(self, top: Saved) -> None:
        """Count everything of a version at and below `top`; Corrupt if a directory cannot be read."""

        def refuse(path: bytes, tree: TreeId, error: Exception) -> None:
            raise error

        for saved in walk(self._segments, top, refuse, self._walked):
            entry = saved.entry
            if entry.recipe is not None:
                link = b"\0%d" % entry.link if entry.link else saved.path
                self._add_content(link, entry.recipe, entry.size, saved.path)
                await trio.lowlevel.checkpoint()

    async def add_live(self, ino: int, path: bytes, is_part: Callable[[int], bool]) -> None:
        """Count what is at `ino` and below now; `is_part(directory)` says whether to go into it."""
        waiting = [(ino, path)]
        met: set[int] = set()
        while waiting:
            ino, path = waiting.pop()
            inode = self._namespace.find(ino)
            if inode is None or ino in met:
                continue
            if inode.is_dir:
                after = -1
                while rows := self._namespace.entries(ino, after, _SLICE):
                    after = rows[-1][0]
                    prefix = path + b"/" if path else b""
                    waiting += [(child, prefix + name) for _, name, child in rows if is_part(child)]
                    await trio.lowlevel.checkpoint()
            elif inode.is_file:
                if inode.nlink > 1:
                    met.add(ino)
                self._add_live_file(ino, path)

    def _add_live_file(self, ino: int, path: bytes) -> None:
        inode = self._namespace.inode(ino)
        content = inode.content
        if not content.staging:
            if content.base is not None:
                self._add_content(path, content.base, inode.size, path)
            return
        found = self._disk.stat(staging_path(content.staging))
        self.usage.logical_bytes += found.st_size
        own = min(found.st_size, found.st_blocks * 512)
        self.usage.unique_bytes += own
        self.usage.stored_bytes += own
        if content.base is not None:
            self._add_recipe(content.base, path)

    async def add_dtypes(self) -> None:
        """Find out what was counted by the types of values. Parses every file that is not small."""
        seen: set[int] = set()
        for identity, path in self._recipes.items():
            recipe = self._segments.read_recipe(identity)
            layout = None
            if recipe.size >= _LEAST_TENSORS_BYTES:
                layout = await trio.to_thread.run_sync(_parsed, self._segments, recipe, os.fsdecode(path))
            for one in plan_file(recipe, layout, {}, {}):
                short = int.from_bytes(one.chunk[:8], "big")
                location = self._segments.locate(one.chunk)
                if short not in seen and location is not None:
                    seen.add(short)
                    _add(self.usage.by_dtype, one.dtype or "other", one.length, location.stored)
            await trio.lowlevel.checkpoint()

    def _add_content(self, name: bytes, recipe: RecipeId, size: int, path: bytes) -> None:
        if (name, recipe) not in self._contents:
            self._contents.add((name, recipe))
            self.usage.logical_bytes += size
            self._add_recipe(recipe, path)

    def _add_recipe(self, identity: RecipeId, path: bytes) -> None:
        if identity in self._recipes:
            return
        self._recipes[identity] = path
        for piece in self._segments.read_recipe(identity).pieces():
            if piece.chunk is None:
                continue
            # Eight bytes of the digest tell chunks apart well enough for a sum.
            short = int.from_bytes(piece.chunk[:8], "big")
            if short in self._chunks:
                continue
            self._chunks.add(short)
            location = self._segments.locate(piece.chunk)
            self.usage.unique_bytes += piece.length
            if location is not None:
                self.usage.add_chunk(location, piece.length)


def _add(sums: dict[str, tuple[int, int]], name: str, unique: int, stored: int) -> None:
    known = sums.get(name, (0, 0))
    sums[name] = known[0] + unique, known[1] + stored


def _parsed(segments: Segments, recipe: Recipe, path: str) -> Layout | None:
    """In a worker thread, as headers may be large or hostile; the bytes come from the index thread."""
    try:
        return parse(FarReader(ask(segments.file_reader, recipe)), path)
    except (CkptfsError, OSError):
        return None


def nothing_there(text: str) -> NotFound:
    """The error for a path that no version and no live file has."""
    return NotFound(f"there is nothing at {text}, now or in any version")
