"""Versions whose files' bytes are nowhere: so that what costs metadata alone can be tried with terabytes."""

from __future__ import annotations

import stat

import trio
from small_face import SmallFace

from ckptfs.fusefs.rollback import Rolled, Wanted
from ckptfs.store.hashing import chunk_id
from ckptfs.store.history import State, VersionRecord
from ckptfs.store.ids import ChunkId, TreeId
from ckptfs.store.index import Change
from ckptfs.store.merkle import file_root
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.tree import Entry, encode_tree
from ckptfs.store.version_names import version_name


def roll_back(small: SmallFace, *wanted: tuple[str, VersionRecord], uid: int | None = None) -> list[Rolled]:
    return trio.run(
        small.face.rollback.roll_back, [Wanted(small.at(unit), record) for unit, record in wanted], uid
    )


def synthetic(
    small: SmallFace, unit: str, folders: int, files: int, file_bytes: int, seed: int
) -> VersionRecord:
    """A version of a unit, whose files' chunks are nowhere."""
    chunk_bytes = 256 << 10
    objects: list[tuple[ChunkId, bytes]] = []

    def added(payload: bytes) -> ChunkId:
        objects.append((chunk_id(payload), payload))
        return objects[-1][0]

    def entry(name: str, mode: int, **fields: object) -> Entry:
        return Entry(name=name.encode(), mode=mode, uid=0, gid=0, mtime_ns=5, ctime_ns=5, **fields)  # type: ignore[arg-type]

    rows = []
    for folder in range(folders):
        entries = []
        for number in range(files):
            count = max(1, file_bytes // chunk_bytes)
            pieces = [
                Piece(min(chunk_bytes, file_bytes), chunk_id(b"%d %d %d %d" % (seed, folder, number, at)))
                for at in range(count)
            ]
            recipe = Recipe(pieces)
            identity, root = added(recipe.encode()), file_root(recipe.root_leaves())
            fields = {"size": recipe.size, "recipe": identity, "root": root}
            entries.append(entry(f"shard-{number:05d}.bin", stat.S_IFREG | 0o644, **fields))
        rows.append(entry(f"part{folder}", stat.S_IFDIR | 0o755, tree=TreeId(added(encode_tree(entries)))))
    top = entry("top", stat.S_IFDIR | 0o755, tree=TreeId(added(encode_tree(rows))))

    async def store() -> None:
        with small.parts.segments.pins.hold() as held:
            await small.parts.ingest.store_objects(objects, held)

    trio.run(store)
    row = small.face.recorder.unit_of(small.at(unit))
    record = VersionRecord(
        unit=row.unit, number=row.next_number, name=version_name(row.next_number, 10**18), time_ns=10**18,
        origin="command", top=top, root=bytes(32), files=folders * files, logical_bytes=1,
        state=State.OPAQUE, step=None, steps=(), missing=(), before=row.head,
    )  # fmt: skip
    change = Change()
    small.parts.histories.append_version(record, change)
    small.parts.index.apply(change, sync=True)
    return record
