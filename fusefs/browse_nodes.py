"""The inodes below `.versions`: what they are, their numbers, and which of them the kernel holds.

One rule: a number follows from what an inode is and from nothing else, so it is the same after a
restart, and memory is only spent on what the kernel remembers.

Numbers are 62 bits of a hash with bit 62 set. Directories have one number per way that leads to
them (the kernel wants each directory to have one parent), other inodes one per version: a file
is the same file under `run/.versions/V/sub/f` and `run/sub/.versions/V/f`.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from ckptfs.store.errors import NotFound
from ckptfs.store.ids import TreeId, UnitId
from ckptfs.store.tree import Entry

FIRST_VIRTUAL_INO = 1 << 62
_RECENT_NODES = 4096


def virtual_ino(kind: bytes, *parts: int | bytes) -> int:
    """The number of an inode that is given by `parts`."""
    fields = [p if isinstance(p, bytes) else p.to_bytes(16, "little", signed=True) for p in parts]
    framed = b"".join(len(field).to_bytes(4, "little") + field for field in (kind, *fields))
    hashed = blake2b(framed, digest_size=8, person=b"ckptfs-inode").digest()
    return int.from_bytes(hashed, "little") & (FIRST_VIRTUAL_INO - 1) | FIRST_VIRTUAL_INO


@dataclass(frozen=True, slots=True)
class Base:
    """A directory that lists versions, of the directory `path` (b"" or b"a/b") of a unit."""

    ino: int
    unit: UnitId
    path: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """A saved directory: `path` in its unit, `tree` its entries, `base` the number of the directory
    that lists the versions and through which it was reached. Shared by all nodes in it."""

    base: int
    unit: UnitId
    number: int
    path: bytes
    tree: TreeId

    @property
    def ino(self) -> int:
        """Its inode number."""
        return virtual_ino(b"dir", self.base, self.unit, self.number, self.path)

    def inside(self, name: bytes, tree: TreeId) -> Place:
        """The place of a directory in this one."""
        return Place(self.base, self.unit, self.number, self.path_of(name), tree)

    def path_of(self, name: bytes) -> bytes:
        """The path in the unit of something in this directory."""
        return self.path + b"/" + name if self.path else name

    def ino_of(self, entry: Entry) -> int:
        """The number of an entry of this directory. Hard links of one file share it."""
        if entry.is_dir:
            return virtual_ino(b"dir", self.base, self.unit, self.number, self.path_of(entry.name))
        if entry.file_key is not None:
            return virtual_ino(b"link", self.unit, self.number, *entry.file_key)
        return virtual_ino(b"file", self.unit, self.number, self.path_of(entry.name))


class Node:
    """An inode below `.versions`; `count` is how often the kernel holds it."""

    __slots__ = ("count", "ino")

    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.count = 0


class VersionsNode(Node):
    """The `.versions` of a live directory."""

    __slots__ = ("live",)

    def __init__(self, live: int) -> None:
        super().__init__(virtual_ino(b"versions", live))
        self.live = live


class UnitNode(Node):
    """`.versions/UNIT` at the root."""

    __slots__ = ("unit",)

    def __init__(self, unit: UnitId) -> None:
        super().__init__(virtual_ino(b"unit", unit))
        self.unit = unit


class LinkNode(Node):
    """A symbolic link to a version: `latest`, `latest-complete`, a tag or `step-N`."""

    __slots__ = ("listing", "name")

    def __init__(self, listing: VersionsNode | UnitNode, name: bytes) -> None:
        super().__init__(virtual_ino(b"symlink", listing.ino, name))
        self.listing = listing
        self.name = name


class VersionNode(Node):
    """A version's directory, or that of a subdirectory in the version."""

    __slots__ = ("place",)

    def __init__(self, place: Place) -> None:
        super().__init__(place.ino)
        self.place = place


class SavedNode(Node):
    """Anything inside a version: the entry `name` of the directory `place`."""

    __slots__ = ("is_dir", "name", "place")

    def __init__(self, place: Place, entry: Entry) -> None:
        super().__init__(place.ino_of(entry))
        self.place = place
        self.name = entry.name
        self.is_dir = entry.is_dir


class NodeTable:
    """The nodes that the kernel holds, and the last few that it may be about to be told of.

    Belongs to the trio thread.
    """

    def __init__(self) -> None:
        self._held: dict[int, Node] = {}
        self._recent: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, ino: int) -> Node:
        """The node of this number; NotFound if neither the kernel nor a recent answer has it."""
        node = self._held.get(ino) or self._recent.get(ino)
        if node is None:
            raise NotFound(f"inode {ino} of a past version is not known any more")
        return node

    def note(self, node: Node) -> None:
        """A node is about to be told to the kernel: `remember` will follow soon, or never."""
        if node.ino in self._held:
            return
        self._recent.pop(node.ino, None)
        self._recent[node.ino] = node
        if len(self._recent) > _RECENT_NODES:
            del self._recent[next(iter(self._recent))]

    def remember(self, ino: int) -> None:
        """The kernel holds the node once more."""
        node = self.get(ino)
        node.count += 1
        self._recent.pop(ino, None)
        self._held[ino] = node

    def forget(self, ino: int, count: int) -> None:
        """The kernel holds the node `count` times less."""
        node = self._held.get(ino)
        if node is None:
            return
        node.count -= count
        if node.count <= 0:
            del self._held[ino]
