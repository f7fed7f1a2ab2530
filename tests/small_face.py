"""The POSIX face over a store in a folder, without a kernel: what the tests of its parts work with.

The one rule: names are made as the request handlers make them, through Mutations and Files.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import trio

from ckptfs.daemon.open_store import OpenStore, opened_store
from ckptfs.fusefs.face import Face, FaceSettings, StoreParts
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.recording import Request
from ckptfs.store.disk import Disk, Space
from ckptfs.store.history import VersionRecord
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.keyring import Keyring
from ckptfs.store.signing import SigningKey

KEY = SigningKey(b"k" * 32)
Tree: TypeAlias = "Mapping[str, bytes | Tree]"


class NoRoom:
    """A disk that always has room, and never more."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def space(self) -> Space:
        """What statfs shows."""
        return self._disk.space()

    async def before_writing(self) -> None:
        """Nothing has to give way."""

    async def make_room(self, wanted_bytes: int) -> bool:
        """Nothing can give way."""
        return False


class SmallFace:
    """An open store and its face. `uid` owns what is made."""

    def __init__(self, parts: OpenStore) -> None:
        self.parts = parts
        self.uid = 0
        self.again(None)

    def again(self, taken_over: KeptState | None) -> None:
        """Make the face, or, as the next daemon would, another one that takes a session over."""
        parts = self.parts
        store = StoreParts(
            parts.disk,
            parts.index,
            parts.staging,
            parts.segments,
            parts.ingest,
            parts.histories,
            cuts_ahead=parts.cuts_ahead,
        )
        self.face = Face(store, FaceSettings(0.0, 1.0, (), (0, 0)), NoRoom(parts.disk), taken_over)

    def make(self, parent: int, tree: Tree) -> None:
        """Make directories and files, written and closed."""
        for name, node in tree.items():
            if isinstance(node, bytes):
                trio.run(self.write, parent, name, node)
            else:
                mode = stat.S_IFDIR | 0o755
                ino = self.face.mutations.make(parent, name.encode(), mode, self.uid, self.uid)
                self.make(ino, node)

    async def write(self, parent: int, name: str, content: bytes) -> None:
        """Make a file, or overwrite it."""
        files = self.face.files
        ino = self.face.namespace.child(parent, name.encode())
        if ino is None:
            mode = stat.S_IFREG | 0o644
            ino = self.face.mutations.create(parent, name.encode(), mode, self.uid, self.uid)
        else:
            await files.open(ino, write=True, truncate=True)
        await files.write(ino, 0, content)
        files.release(ino, write=True)

    def remove(self, parent: int, name: str) -> None:
        """`rm -r`."""
        ino = self.at(name, parent)
        if self.face.namespace.inode(ino).is_dir:
            for _, below, _ in self.face.namespace.entries(ino):
                self.remove(ino, below.decode())
            self.face.mutations.rmdir(parent, name.encode())
        else:
            self.face.mutations.unlink(parent, name.encode())
        self.face.mutations.reap(ino)

    def publish(self, unit: str) -> VersionRecord:
        """A version of what is there."""
        return trio.run(self.face.publisher.publish_now, self.at(unit), Request("command"))

    def at(self, path: str, parent: int = ROOT_INO) -> int:
        """The inode at a path."""
        for name in path.split("/"):
            child = self.face.namespace.child(parent, name.encode())
            assert child is not None, path
            parent = child
        return parent

    def tree(self, directory: int) -> dict[str, object]:
        """What a client would read below a directory."""
        found: dict[str, object] = {}
        for _, name, ino in self.face.namespace.entries(directory):
            is_dir = self.face.namespace.inode(ino).is_dir
            found[name.decode()] = self.tree(ino) if is_dir else trio.run(self._read, ino)
        return found

    async def _read(self, ino: int) -> bytes:
        files = self.face.files
        await files.open(ino, write=False, truncate=False)
        try:
            return files.read(ino, 0, self.face.namespace.attributes(ino).size)
        finally:
            files.release(ino, write=False)


@contextmanager
def small_face(store: Path) -> Iterator[SmallFace]:
    """The face of the store at a path, made if it is not there."""
    with opened_store(str(store), "/mnt", "/socket", lambda: Keyring(KEY)) as parts:
        yield SmallFace(parts)
