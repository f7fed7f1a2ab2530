"""A real store without a mount: files are ingested, trees stored and versions appended as a publish does.

For the tests of the modules that work on whole stores (collector, rebuild, extract).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

from ckptfs.store.disk import Disk
from ckptfs.store.hashing import chunk_id
from ckptfs.store.histories import Histories, Unit
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import ChunkId, TreeId, UnitId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.ingest import Candidate, Ingest, Ingested
from ckptfs.store.inode import Content, Inode, encode_inode
from ckptfs.store.layout import open_store
from ckptfs.store.merkle import version_root
from ckptfs.store.segments import Segments
from ckptfs.store.signing import SigningKey
from ckptfs.store.staging import Staging
from ckptfs.store.tree import Entry, encode_tree
from ckptfs.store.version_names import version_name

SECOND_NS = 10**9
START_NS = 1_790_000_000 * SECOND_NS


@dataclass(frozen=True, slots=True)
class File:
    """A file to be saved. `holes`: (offset, length) ranges that are never written."""

    content: bytes
    mode: int = 0o644
    link: int = 0
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    holes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Special:
    """A symbolic link (`target`), or a fifo."""

    target: bytes | None = None


Tree: TypeAlias = "Mapping[bytes, File | Special | bytes | Tree]"


class SavedStore:
    """Opens a store and publishes into it. One per store at a time; `close` it."""

    def __init__(
        self, root: Path, disk: Disk | None = None, key: SigningKey | None = None, node: bytes = b""
    ) -> None:
        """`node` makes the unit ids others than those of the same names elsewhere."""
        self.root = root
        self._node = node
        opened = open_store(str(root), create=True)
        self.disk = disk if disk is not None else opened
        self.index = Index(self.disk)
        self.segments = Segments(self.disk, self.index)
        self.staging = Staging(self.disk, 1)
        self.ingest = Ingest(self.disk, self.index, self.segments, self.staging)
        self.histories = Histories(self.disk, self.index, key=key)
        self.now_ns = START_NS
        self.before_listing: Callable[[VersionRecord], None] = lambda record: None

    def close(self) -> None:
        """Commit and close everything."""
        self.segments.close()
        self.index.close()

    def unit(self, name: bytes) -> Unit:
        """The unit of a name; made when first asked for."""
        unit = self.histories.unit_named(name)
        if unit is not None:
            return unit
        identity = UnitId(chunk_id(self._node + name)[:16])
        return self.histories.new_unit(identity, name, 2 + len(self.histories.units()), self.now_ns)

    async def publish(
        self, name: bytes, tree: Tree, *, state: State = State.COMPLETE, step: int | None = None
    ) -> VersionRecord:
        """Store a tree and make it the newest version of a unit."""
        self.now_ns += 60 * SECOND_NS
        unit = self.unit(name)
        files: list[tuple[bytes, bytes]] = []
        objects: list[tuple[ChunkId, bytes]] = []
        with self.segments.pins.hold() as pin:
            stored = await self._store(tree)
            top = self._tree(tree, b"", stored, objects, files)
            await self.ingest.store_objects(objects, pin)
            entry = Entry(
                name=b"top", mode=0o40755, uid=os.getuid(), gid=os.getgid(), mtime_ns=self.now_ns,
                ctime_ns=self.now_ns, tree=top,
            )  # fmt: skip
            record = VersionRecord(
                unit=unit.unit,
                number=unit.next_number,
                name=version_name(unit.next_number, self.now_ns),
                time_ns=self.now_ns,
                origin="settled",
                top=entry,
                root=version_root(files),
                files=len(files),
                logical_bytes=sum(one.size for one in stored.values()),
                state=state,
                step=step,
                steps=() if step is None else (step,),
                missing=(),
                before=unit.head,
            )
            change = Change()
            for one in stored.values():
                change.delete(Table.INODE, _inode_key(one))
            self.before_listing(record)
            self.histories.append_version(record, change)
            self.index.apply(change, sync=True)
        self.index.commit()
        return record

    async def _store(self, tree: Tree) -> dict[bytes, Ingested]:
        """Ingest all files of a tree; what they became, by path. A live inode names each of them."""
        candidates = []
        for path, file in _files(tree, b""):
            number, fd = self.staging.create()
            with os.fdopen(fd, "wb") as f:
                _write_sparse(f.fileno(), file)
            key = (number, path)
            name = os.fsdecode(path)
            candidates.append(Candidate(key, number, len(file.content), name, None, 0, None, lambda: False))

        def commit(change: Change, ingested: list[Ingested]) -> list[object]:
            for one in ingested:
                inode = Inode(stat.S_IFREG, 0, 0, ((1, b"x"),), 1, 1, 1, content=Content(base=one.recipe))
                change.put(Table.INODE, _inode_key(one), encode_inode(inode))
            return []

        report = await self.ingest.store_files(candidates, commit)
        assert len(report.stored) == len(candidates), report
        return {cast("tuple[int, bytes]", one.key)[1]: one for one in report.stored}

    def _tree(
        self,
        tree: Tree,
        path: bytes,
        stored: Mapping[bytes, Ingested],
        objects: list[tuple[ChunkId, bytes]],
        files: list[tuple[bytes, bytes]],
    ) -> TreeId:
        entries = []
        for name, node in tree.items():
            below = os.path.join(path, name)
            base = Entry(
                name=name, mode=0, uid=os.getuid(), gid=os.getgid(), mtime_ns=self.now_ns - 5,
                ctime_ns=self.now_ns - 5,
            )  # fmt: skip
            if isinstance(node, Mapping):
                child = self._tree(node, below, stored, objects, files)
                entries.append(replace(base, mode=0o40750, tree=child))
            elif isinstance(node, Special):
                kind = stat.S_IFLNK if node.target is not None else stat.S_IFIFO
                entries.append(replace(base, mode=kind | 0o777, target=node.target))
            else:
                file = node if isinstance(node, File) else File(node)
                one = stored[below]
                files.append((below, one.root))
                entries.append(
                    replace(
                        base, mode=stat.S_IFREG | file.mode, size=one.size, recipe=one.recipe,
                        holes=max(0, one.size - one.blocks * 512),
                        root=one.root, link=file.link, xattrs=file.xattrs,
                    )
                )  # fmt: skip
        encoded = encode_tree(entries)
        objects.append((chunk_id(encoded), encoded))
        return TreeId(objects[-1][0])

    def read_version(self, record: VersionRecord) -> dict[bytes, bytes]:
        """Every file of a version by path, read and verified."""
        assert record.top.tree is not None
        return dict(self._read(record.top.tree, b""))

    def _read(self, tree: TreeId, path: bytes) -> Iterator[tuple[bytes, bytes]]:
        for entry in self.segments.read_tree(tree):
            below = os.path.join(path, entry.name)
            if entry.tree is not None:
                yield from self._read(entry.tree, below)
            elif entry.recipe is not None:
                recipe = self.segments.read_recipe(entry.recipe)
                yield below, self.segments.read_file(recipe, 0, recipe.size)


def _inode_key(one: Ingested) -> bytes:
    number, _ = cast("tuple[int, bytes]", one.key)
    return (1000 + number).to_bytes(8, "big")


def contents(tree: Tree) -> dict[bytes, bytes]:
    """What `read_version` returns for a tree."""
    return {path: file.content for path, file in _files(tree, b"")}


def _files(tree: Tree, path: bytes) -> Iterator[tuple[bytes, File]]:
    for name, node in tree.items():
        below = os.path.join(path, name)
        if isinstance(node, Mapping):
            yield from _files(node, below)
        elif not isinstance(node, Special):
            yield below, node if isinstance(node, File) else File(node)


def _write_sparse(fd: int, file: File) -> None:
    at = 0
    for offset, length in [*file.holes, (len(file.content), 0)]:
        os.pwrite(fd, file.content[at:offset], at)
        assert not any(file.content[offset : offset + length]), "a hole is zeros"
        at = offset + length
    os.ftruncate(fd, len(file.content))
