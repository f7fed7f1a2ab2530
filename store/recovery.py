"""What is put right when a store is opened after its daemon, or its machine, died.

One rule: bytes are believed only if something synced says so. After a reboot an unsynced staging
file is not; its name goes back to its last durable content and the bytes are kept aside.

Order, so that dying anywhere and running again ends the same way:
1. suspect staging files get a second name in quarantine/, synced;
2. one change turns their inodes back, removes inodes that only a dead daemon held, and notes the
   boot id; it is committed;
3. only then go the staging files, segments and temporary files that nothing names.

Source: FORMAT.md, "Recovery".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

import msgspec

from ckptfs.store.disk import BLOCK_BYTES, Disk
from ckptfs.store.errors import CkptfsError, InvalidRequest
from ckptfs.store.ids import RecipeId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.inode import EMPTY_CONTENT, ROOT_INO, Content, Inode, decode_inode, encode_inode
from ckptfs.store.merkle import file_root
from ckptfs.store.pins import decode_pin, encode_pin
from ckptfs.store.recipe import Recipe
from ckptfs.store.segment_format import SEGMENTS_PATH, segment_key, segment_number
from ckptfs.store.staging import Staging, staging_path

QUARANTINE_PATH = "quarantine"
NEW_INDEX_PATH = "index.new"
BOOT_ID = b"boot_id"
_SLICE_ROWS = 4096
_SYNCED_BYTES_LOST = "staging file is gone"


@dataclass(slots=True)
class Recovery:
    """What was done; for the log. All zero after a clean stop."""

    rebooted: bool = False
    reverted: int = 0
    quarantined: int = 0
    lost: list[str] = field(default_factory=list)
    unlinked_removed: int = 0
    staging_removed: int = 0
    segment_files_removed: int = 0
    temporaries_removed: int = 0

    def __str__(self) -> str:
        counts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("rebooted", "lost")}
        parts = [f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count]
        parts += [f"{path}: {_SYNCED_BYTES_LOST}" for path in self.lost]
        return ("after a reboot: " if self.rebooted else "") + ("; ".join(parts) or "nothing to recover")


def recover(
    disk: Disk,
    index: Index,
    staging: Staging,
    read_recipe: Callable[[RecipeId], Recipe],
    *,
    boot_id: str,
    now_ns: int,
    is_held: Callable[[int], bool] = lambda ino: False,
) -> Recovery:
    """Put the store right; to be called once, after the journal was replayed, before anything writes.

    `read_recipe` is that of Segments, `boot_id` the kernel's. `is_held(ino)` tells of an inode without a
    name whether somebody has it open all the same: in a mount that outlived its daemon. Raises
    InvalidRequest if the index is not that of this store's segments (then `rebuild` makes a new one),
    NoSpace or OSError if the store cannot be written. Durable when: this returned.
    """
    known = index.get(Table.META, BOOT_ID)
    if known is None:
        _refuse_foreign_index(disk, index)
    report = Recovery(rebooted=known is not None and known != boot_id.encode())
    work = _Work(disk, index, staging, read_recipe, report, now_ns)
    work.check_inodes(is_held)
    work.check_preimages()
    work.keep_suspects()
    if known != boot_id.encode():
        work.change.put(Table.META, BOOT_ID, boot_id.encode())
    index.apply(work.change, sync=True)
    index.commit()
    work.remove_staging()
    report.segment_files_removed = _remove_orphans(disk, index)
    report.temporaries_removed = _remove_temporaries(disk)
    return report


def _refuse_foreign_index(disk: Disk, index: Index) -> None:
    """An index that has never seen a recovery is new. Taken for the truth beside segments or a
    history of old, it would have all of them removed."""
    if index.count(Table.SEGMENT) == 0 and (disk.list_dir("history") or next(segment_files(disk), None)):
        raise InvalidRequest(f"the index of {disk.root} is missing; run `ckptfs rebuild` first")


class _Work:
    """The decisions of one recovery, gathered before anything is changed."""

    def __init__(
        self,
        disk: Disk,
        index: Index,
        staging: Staging,
        read_recipe: Callable[[RecipeId], Recipe],
        report: Recovery,
        now_ns: int,
    ) -> None:
        self.change = Change()
        self._disk, self._index, self._staging = disk, index, staging
        self._read_recipe = read_recipe
        self._report = report
        self._now_ns = now_ns
        self._there = set(staging.numbers())
        self._named: set[int] = set()
        self._suspects: dict[int, bytes] = {}

    def check_inodes(self, is_held: Callable[[int], bool]) -> None:
        """Decide on every inode: keep, turn back, or remove."""
        for key, value in rows(self._index, Table.INODE):
            inode = decode_inode(value)
            if not inode.links and not is_held(int.from_bytes(key, "big")):
                self._remove_inode(key)
            elif inode.content.staging and not self._is_trusted(inode.content):
                self._turn_back(key, inode)
            elif inode.content.staging:
                self._named.add(inode.content.staging)
                self._finish_truncate(key, inode)

    def check_preimages(self) -> None:
        """Decide on what the next publish is to list of content that is already taken away."""
        for key, value in rows(self._index, Table.PREIMAGE):
            pin = decode_pin(value)
            content = pin.inode.content
            if not content.staging or self._is_trusted(content):
                self._named.add(content.staging)
                continue
            self._suspect(content.staging, b"/".join([*(d.name for d in pin.directories), pin.name]))
            if durable_content(content) is None:
                self.change.delete(Table.PREIMAGE, key)
            else:
                pin = msgspec.structs.replace(pin, inode=self._turned_back(pin.inode))
                self.change.put(Table.PREIMAGE, key, encode_pin(pin))

    def keep_suspects(self) -> None:
        """Give each suspect staging file a second name, and say beside it what it was."""
        for number, path in self._suspects.items():
            why = "not synced before the machine went down"
            keep_aside(self._disk, number, "suspect", path, self._now_ns, why)
        self._report.quarantined = len(self._suspects)

    def remove_staging(self) -> None:
        """Remove every staging file that no inode and no pre-image names. Only after the commit."""
        orphans = self._there - self._named
        for number in orphans:
            self._staging.drop(number)
        self._report.staging_removed = len(orphans)

    def _is_trusted(self, content: Content) -> bool:
        return content.staging in self._there and (content.synced or not self._report.rebooted)

    def _finish_truncate(self, key: bytes, inode: Inode) -> None:
        """A daemon that died after it had cut an overlay's staging file, and before it noted that:
        what was cut off must not come back from the base when the file grows again."""
        content = inode.content
        if content.base is None:
            return
        size = self._disk.size(staging_path(content.staging))
        if size < content.base_limit:
            content = msgspec.structs.replace(content, base_limit=size)
            self.change.put(Table.INODE, key, encode_inode(msgspec.structs.replace(inode, content=content)))

    def _turn_back(self, key: bytes, inode: Inode) -> None:
        path = self._path_of(inode)
        if not self._report.rebooted or inode.content.synced:
            self._report.lost.append(path.decode("utf-8", "backslashreplace"))
        self._suspect(inode.content.staging, path)
        self._report.reverted += 1
        self.change.put(Table.INODE, key, encode_inode(self._turned_back(inode)))
        for parent, _ in inode.links:
            self.change.put(Table.DIRTY, parent.to_bytes(8, "big"), b"")

    def _turned_back(self, inode: Inode) -> Inode:
        fallback = durable_content(inode.content)
        if fallback is None:
            return msgspec.structs.replace(inode, content=EMPTY_CONTENT, size=0, blocks=0, root=None)
        content = Content(base=fallback)
        try:
            recipe = self._read_recipe(fallback)
        except CkptfsError:
            # The read of the file will say what is wrong with it; the store opens all the same.
            return msgspec.structs.replace(inode, content=content)
        return msgspec.structs.replace(
            inode,
            content=content,
            size=recipe.size,
            blocks=blocks_of(recipe),
            root=file_root(recipe.root_leaves()),
        )

    def _suspect(self, number: int, path: bytes) -> None:
        if number in self._there:
            self._suspects[number] = path

    def _remove_inode(self, key: bytes) -> None:
        self._report.unlinked_removed += 1
        for attribute, _ in self._index.scan(Table.XATTR, key):
            self.change.delete(Table.XATTR, attribute)
        for table in (Table.INODE, Table.DIRTY, Table.PUBLISHED):
            self.change.delete(table, key)

    def _path_of(self, inode: Inode) -> bytes:
        parts: list[bytes] = []
        while inode.links:
            parent, name = inode.links[0]
            if name:
                parts.append(name)
            encoded = self._index.get(Table.INODE, parent.to_bytes(8, "big"))
            if parent == ROOT_INO or encoded is None:
                break
            inode = decode_inode(encoded)
        return b"/" + b"/".join(reversed(parts))


def keep_aside(disk: Disk, number: int, kind: str, path: bytes, now_ns: int, why: str) -> None:
    """Give a staging file a second name in quarantine/, and say beside it what it was.

    May be repeated. Durable when: this returned.
    """
    kept = f"{QUARANTINE_PATH}/{kind}-{number}"
    if disk.exists(kept) and disk.stat(kept).st_ino != disk.stat(staging_path(number)).st_ino:
        kept += f"-{now_ns}"
    if not disk.exists(kept):
        disk.make_dir(QUARANTINE_PATH)
        disk.link(staging_path(number), kept)
    note = {"path": path.decode("utf-8", "backslashreplace"), "time_ns": now_ns, "why": why}
    disk.write_file(kept + ".json", json.dumps(note).encode() + b"\n")


def durable_content(content: Content) -> RecipeId | None:
    """What an inode goes back to when its staging file is not believed; None: to an empty file.

    What an overlay lies on is stored, so it is durable whether or not a fallback was noted.
    """
    return content.fallback if content.fallback is not None else content.base


def blocks_of(recipe: Recipe) -> int:
    """st_blocks of a stored file: its bytes without the holes, in whole disk blocks of 4 KiB."""
    return -(-recipe.data_bytes() // BLOCK_BYTES) * (BLOCK_BYTES // 512)


def rows(index: Index, table: Table) -> Iterator[tuple[bytes, bytes]]:
    """All rows of a table, a slice in memory at a time. The table must not change meanwhile."""
    start: bytes | None = None
    while part := index.scan(table, start=start, limit=_SLICE_ROWS):
        yield from part
        start = part[-1][0] + b"\0"


def segment_files(disk: Disk) -> Iterator[tuple[int, str]]:
    """(segment number, path) of every .idx and .seg, a segment's .idx first.

    In that order they are removed, so that no .idx is ever left that describes nothing.
    """
    for folder in disk.list_dir(SEGMENTS_PATH):
        if len(folder) == 2:
            for name in disk.list_dir(f"{SEGMENTS_PATH}/{folder}"):
                number = segment_number(name)
                if number is not None:
                    yield number, f"{SEGMENTS_PATH}/{folder}/{name}"


def _remove_orphans(disk: Disk, index: Index) -> int:
    orphans = [
        path for number, path in segment_files(disk) if index.get(Table.SEGMENT, segment_key(number)) is None
    ]
    for path in orphans:
        disk.unlink(path)
    return len(orphans)


def _remove_temporaries(disk: Disk) -> int:
    folders = ["", "staging", "history", QUARANTINE_PATH, SEGMENTS_PATH]
    folders += [f"{SEGMENTS_PATH}/{name}" for name in disk.list_dir(SEGMENTS_PATH) if len(name) == 2]
    names = [f"{folder}/{name}".lstrip("/") for folder in folders for name in disk.list_dir(folder)]
    left = [name for name in names if name.endswith(".tmp")]
    for name in left:
        disk.unlink(name)
    # What a rebuild that was killed had made; it begins anew.
    disk.remove_tree(NEW_INDEX_PATH)
    return len(left)
