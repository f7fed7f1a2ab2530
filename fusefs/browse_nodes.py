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

import msgspec

from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_state import KeptState
from ckptfs.fusefs.node_ids import FIRST_VIRTUAL_INO
from ckptfs.fusefs.requests import Requests
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.ids import DIGEST_BYTES, UNIT_ID_BYTES, ChunkId, TreeId, UnitId
from ckptfs.store.tree import Entry

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
    """An inode below `.versions`."""

    __slots__ = ("ino",)

    def __init__(self, ino: int) -> None:
        self.ino = ino


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

    def __init__(self, ino: int, place: Place, name: bytes, *, is_dir: bool) -> None:
        super().__init__(ino)
        self.place = place
        self.name = name
        self.is_dir = is_dir

    @classmethod
    def of(cls, place: Place, entry: Entry) -> SavedNode:
        """That of an entry of a directory."""
        return cls(place.ino_of(entry), place, entry.name, is_dir=entry.is_dir)


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A node as it is noted: which field says what it is tells its kind."""

    live: int | None = None
    unit: bytes | None = None
    link: bytes | None = None
    place: tuple[int, bytes, int, bytes, bytes] | None = None
    saved: tuple[int, bytes, bool] | None = None


def encode_node(node: Node) -> bytes:
    """The note of a node, from which the next daemon makes it again."""
    match node:
        case VersionsNode():
            kept = _Kept(live=node.live)
        case UnitNode():
            kept = _Kept(unit=node.unit)
        case LinkNode(listing=VersionsNode() as listing):
            kept = _Kept(live=listing.live, link=node.name)
        case LinkNode(listing=UnitNode() as listing):
            kept = _Kept(unit=listing.unit, link=node.name)
        case VersionNode():
            kept = _Kept(place=_fields_of(node.place))
        case SavedNode():
            kept = _Kept(place=_fields_of(node.place), saved=(node.ino, node.name, node.is_dir))
        case _:
            raise AssertionError("a node of an unknown kind")
    return msgspec.msgpack.encode(kept)


def decode_node(encoded: bytes) -> Node:
    """The node of a note; Corrupt if it is none."""
    try:
        kept = msgspec.msgpack.decode(encoded, type=_Kept)
    except (msgspec.DecodeError, ValueError) as e:
        raise Corrupt(f"a note of a past version's inode cannot be read: {e}") from None
    if kept.place is not None:
        base, unit, number, path, tree = kept.place
        if len(unit) != UNIT_ID_BYTES or len(tree) != DIGEST_BYTES:
            raise Corrupt("a note of a past version's inode has ids of another length")
        place = Place(base, UnitId(unit), number, path, TreeId(ChunkId(tree)))
        if kept.saved is None:
            return VersionNode(place)
        return SavedNode(kept.saved[0], place, kept.saved[1], is_dir=kept.saved[2])
    if kept.live is None and (kept.unit is None or len(kept.unit) != UNIT_ID_BYTES):
        raise Corrupt("a note of a past version's inode says nothing")
    listing = VersionsNode(kept.live) if kept.live is not None else UnitNode(UnitId(kept.unit or b""))
    return listing if kept.link is None else LinkNode(listing, kept.link)


def _fields_of(place: Place) -> tuple[int, bytes, int, bytes, bytes]:
    return place.base, place.unit, place.number, place.path, place.tree


class NodeTable:
    """The nodes that the kernel holds, and the last few that it may be about to be told of.

    Belongs to the trio thread.
    """

    def __init__(self, state: KeptState, requests: Requests) -> None:
        self._state = state
        self._requests = requests
        self._held: dict[int, Node] = {}
        self._recent: dict[int, Node] = {}
        for ino, encoded in state.notes.items(Kind.NODE):
            self._held[ino] = decode_node(encoded)

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
        """The kernel is given the node once more."""
        node = self.get(ino)
        if ino not in self._held:
            self._state.notes.put(Kind.NODE, ino, encode_node(node))
            self._held[ino] = node
            self._recent.pop(ino, None)
        self._requests.add(Kind.HELD, ino)

    def forget(self, ino: int, count: int) -> None:
        """The kernel holds the node `count` times less."""
        left = self._state.count(Kind.HELD, ino) - count
        self._state.set_count(Kind.HELD, ino, max(left, 0))
        if left <= 0 and self._held.pop(ino, None) is not None:
            self._state.notes.delete(Kind.NODE, ino)
