"""A store opened as the daemon opens it, and what a client then sees.

One rule: only doors that a client or a daemon has are used: `opened_store`, the parts of the face, and for
versions also store/extract.py, which knows nothing of the rest.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

from truth import FILE, FOLDER, LINK, Seen, Tree, VersionId, outline_line

from ckptfs.daemon import open_store as opening
from ckptfs.daemon.open_store import OpenStore, opened_store
from ckptfs.fusefs.face import Face, FaceSettings, StoreParts
from ckptfs.store.disk import Disk, Space
from ckptfs.store.errors import CkptfsError
from ckptfs.store.ids import TreeId
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.keyring import Keyring
from ckptfs.store.segments import Segments
from ckptfs.store.signing import SigningKey

_READ_BYTES = 1 << 20
_KEY = SigningKey(b"the key of the crash tests, 32 B")
EXTRACT = Path(__file__).parents[2] / "store" / "extract.py"


class PlentyOfRoom:
    """What the face asks of whoever looks after the space: the disk is never full for long."""

    def __init__(self, disk: Disk) -> None:
        self.space = lambda: Space(1 << 40, 1 << 40, 1 << 40, 1 << 20, 1 << 20)
        self._disk = disk

    async def before_writing(self) -> None:
        return None

    async def make_room(self, wanted_bytes: int) -> bool:
        return False


@contextmanager
def opened(root: str, boot: str) -> Iterator[OpenStore]:
    """The store at `root`, in the run of a machine that is called `boot`."""
    with (
        mock.patch.object(opening, "boot_id", lambda: boot),
        opened_store(root, "/mnt", "", lambda: Keyring(_KEY)) as parts,
    ):
        yield parts


def face_on(parts: OpenStore) -> Face:
    """The face of a mount, without a kernel: everything that is closed counts as settled."""
    store = StoreParts(parts.disk, parts.index, parts.staging, parts.segments, parts.ingest, parts.histories)
    return Face(store, FaceSettings(0.0, 0.0, (), (0, 0)), PlentyOfRoom(parts.disk))


async def look_at(face: Face) -> Tree:
    """Every name of the live tree and what is behind it, read as a client reads."""
    found: dict[str, Seen] = {}
    todo = [("", ROOT_INO)]
    while todo:
        folder, directory = todo.pop()
        for _, name, ino in face.namespace.entries(directory):
            path = f"{folder}/{os.fsdecode(name)}".lstrip("/")
            inode = face.namespace.inode(ino)
            if inode.is_dir:
                found[path] = Seen(FOLDER, ino)
                todo.append((path, ino))
            elif stat.S_ISLNK(inode.mode):
                found[path] = Seen(LINK, ino, target=inode.target or b"")
            else:
                found[path] = Seen(FILE, ino, await read_file(face, ino))
    return found


async def read_file(face: Face, ino: int) -> bytes:
    """All bytes of a live file."""
    await face.files.open(ino, write=False, truncate=False)
    try:
        size = face.namespace.attributes(ino).size
        parts = [face.files.read(ino, at, _READ_BYTES) for at in range(0, size, _READ_BYTES)]
    finally:
        face.files.release(ino, write=False)
    return b"".join(parts)


def version_outlines(parts: OpenStore) -> dict[VersionId, dict[str, str]]:
    """Every version that is listed, and what it lists, verified by the store."""
    found = {}
    for unit in parts.histories.units():
        for record in parts.histories.versions(unit.unit):
            outline: dict[str, str] = {}
            assert record.top.tree is not None
            _outline(parts.segments, record.top.tree, "", outline)
            found[unit.unit, record.number] = outline
    return found


def _outline(segments: Segments, tree: TreeId, folder: str, outline: dict[str, str]) -> None:
    for entry in segments.read_tree(tree):
        path = folder + os.fsdecode(entry.name)
        try:
            if entry.tree is not None:
                outline[path] = outline_line(FOLDER, b"")
                _outline(segments, entry.tree, path + "/", outline)
            elif entry.target is not None:
                outline[path] = outline_line(LINK, entry.target)
            elif entry.recipe is not None:
                recipe = segments.read_recipe(entry.recipe)
                outline[path] = outline_line(FILE, segments.read_file(recipe, 0, recipe.size))
        except CkptfsError as e:
            outline[path] = f"unreadable: {e}"


# ---- the same by extract.py -------------------------------------------------------------------------


def _load_extract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("extract_under_test", EXTRACT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    slow, known = module.crc64, dict[bytes, int]()

    def crc64(encoded: bytes) -> int:
        """The same answer for the same bytes, which it takes 10 MB/s to find."""
        if encoded not in known:
            if len(known) > 20_000:
                known.clear()
            known[encoded] = slow(encoded)
        return known[encoded]

    module.crc64 = crc64  # type: ignore[attr-defined]
    return module


_extract = _load_extract()


def extracted_outlines(root: str) -> tuple[dict[VersionId, dict[str, str]], list[str]]:
    """Every version as extract.py reads it from `format`, `segments/` and `history/`; its warnings."""
    warnings: list[str] = []
    store = _extract.Store(root, warnings.append)
    store.load_segments()
    found: dict[VersionId, dict[str, str]] = {}
    for history in store.histories():
        for number, record in history.versions.items():
            outline: dict[str, str] = {}
            _extracted(store, record["top"]["tree"], "", outline)
            found[bytes.fromhex(history.identity), number] = outline
    return found, warnings


def _extracted(store: object, tree: bytes, folder: str, outline: dict[str, str]) -> None:
    try:
        entries = store.entries(tree)  # type: ignore[attr-defined]
    except _extract.Damaged as e:
        outline[folder] = f"unreadable: {e}"
        return
    for entry in entries:
        path = folder + os.fsdecode(entry["name"])
        if "tree" in entry:
            outline[path] = outline_line(FOLDER, b"")
            _extracted(store, entry["tree"], path + "/", outline)
        elif "target" in entry:
            outline[path] = outline_line(LINK, entry["target"])
        elif "recipe" in entry:
            outline[path] = _extracted_line(store, entry["recipe"])


def _extracted_line(store: object, recipe: bytes) -> str:
    try:
        _, pieces = store.pieces(recipe)  # type: ignore[attr-defined]
        parts = [bytes(n) if chunk == bytes(32) else store.read(chunk) for n, chunk in pieces]  # type: ignore[attr-defined]
    except _extract.Damaged as e:
        return f"unreadable: {e}"
    return outline_line(FILE, b"".join(parts))
