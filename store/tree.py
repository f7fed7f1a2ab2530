"""A directory as it was saved: its entries, canonical DAG-CBOR, identified by BLAKE3.

One rule: a tree is complete by itself. Every attribute that `ls -l` and `getfattr` show of an
entry stands in the entry; the directory's own attributes stand in its parent's entry, those of
a unit's top directory in the version record.

Source: FORMAT.md, "Trees".
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from ckptfs.store.dagcbor import Link, Node, decode_array_head, decode_run, encode_array_head, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import CidCodec, RecipeId, TreeId

_VERSION = 1
# What stands before and behind the array of entries: the map of two keys, in canonical order.
_HEAD = b"\xa2\x67entries"
_TAIL = b"\x67version" + bytes((_VERSION,))
FileKey = tuple[int, bytes, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name of a saved directory.

    `mode` is the full st_mode; times are nanoseconds since the epoch; `size` is that of a regular
    file, and `holes` how many of its bytes no data stands for; `recipe` and `root` (the Merkle file
    root) are there for regular files, `tree` for directories, `target` for symbolic links, `rdev`
    for device nodes. `link` is not 0 where the file had several names (see `file_key`).
    """

    name: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    size: int = 0
    holes: int = 0
    recipe: RecipeId | None = None
    root: bytes | None = None
    tree: TreeId | None = None
    target: bytes | None = None
    rdev: int = 0
    link: int = 0
    xattrs: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def file_key(self) -> FileKey | None:
        """What entries of one version have in common that are hard links of one file; None for a
        file with one name. The number alone does not tell: a busy directory is listed as it was
        last published, so one of the names may show an older content."""
        if not self.link:
            return None
        recipe = self.recipe or b""
        return self.link, recipe, self.mode, self.uid, self.gid, self.mtime_ns, self.ctime_ns

    @property
    def is_dir(self) -> bool:
        """Whether the entry is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """Whether the entry is a regular file."""
        return stat.S_ISREG(self.mode)


def encode_tree(entries: Iterable[Entry]) -> bytes:
    """Canonical bytes of a directory; the order of `entries` does not matter."""
    rows = [encode_node(entry_node(entry)) for entry in sorted(entries, key=lambda e: e.name)]
    return b"".join((_HEAD, encode_array_head(len(rows)), *rows, _TAIL))


def decode_tree(encoded: bytes) -> tuple[Entry, ...]:
    """The entries, sorted by name; Corrupt unless `encoded` is one canonical tree."""
    return tuple(iter_tree(encoded))


def iter_tree(encoded: bytes) -> Iterator[Entry]:
    """The entries, sorted by name, one in memory at a time: a directory may have very many.

    Corrupt at the first byte that is not of a canonical tree, so not before the last entry.
    """
    if not encoded.startswith(_HEAD):
        raise Corrupt("not a tree")
    count, at = decode_array_head(encoded, len(_HEAD))
    before = b""
    for node, stop in decode_run(encoded, at, count):
        entry, at = entry_of(node), stop
        if entry.name <= before:
            raise Corrupt("the entries of a tree are not in order")
        before = entry.name
        yield entry
    if encoded[at:] != _TAIL:
        raise Corrupt(f"not a tree of version {_VERSION}")


def entry_node(entry: Entry) -> Node:
    """The DAG-CBOR item of an entry; what has its default is left out."""
    node: dict[str, Node] = {
        "name": entry.name,
        "mode": entry.mode,
        "uid": entry.uid,
        "gid": entry.gid,
        "mtime": entry.mtime_ns,
        "ctime": entry.ctime_ns,
    }
    optional: dict[str, Node] = {
        "size": entry.size or None,
        "holes": entry.holes or None,
        "recipe": Link(entry.recipe, CidCodec.RAW) if entry.recipe else None,
        "root": entry.root,
        "tree": Link(entry.tree, CidCodec.DAG_CBOR) if entry.tree else None,
        "target": entry.target,
        "rdev": entry.rdev or None,
        "link": entry.link or None,
        "xattrs": [[name, value] for name, value in sorted(entry.xattrs)] or None,
    }
    node.update({key: value for key, value in optional.items() if value is not None})
    return node


_INTEGERS = {
    "mode": range(1 << 32),
    "uid": range(1 << 32),
    "gid": range(1 << 32),
    "mtime": range(-(1 << 63), 1 << 64),
    "ctime": range(-(1 << 63), 1 << 64),
}
# What has its default is left out, so these begin at 1.
_COUNTS = {
    "size": range(1, 1 << 63),
    "holes": range(1, 1 << 63),
    "rdev": range(1, 1 << 64),
    "link": range(1, 1 << 64),
}
_OPTIONAL: dict[str, type] = {
    "size": int,
    "holes": int,
    "recipe": Link,
    "root": bytes,
    "tree": Link,
    "target": bytes,
    "rdev": int,
    "link": int,
    "xattrs": list,
}
_ALWAYS = {"name", *_INTEGERS}


def entry_of(node: Node) -> Entry:
    """The entry in a DAG-CBOR item; Corrupt if it is not what `entry_node` makes of an entry."""
    if not isinstance(node, dict) or not isinstance(node.get("name"), bytes):
        raise Corrupt("a tree entry has no name")
    for key, allowed in _INTEGERS.items():
        if type(value := node.get(key)) is not int or value not in allowed:
            raise Corrupt(f"a tree entry lacks a {key}, or it is out of range")
    for key in node.keys() - _ALWAYS:
        value = node[key]
        if type(value) is not _OPTIONAL.get(key) or (type(value) is int and value not in _COUNTS[key]):
            raise Corrupt(f"a tree entry has a bad field {key[:40]!r}")
    entry = Entry(
        name=cast(bytes, node["name"]),
        mode=cast(int, node["mode"]),
        uid=cast(int, node["uid"]),
        gid=cast(int, node["gid"]),
        mtime_ns=cast(int, node["mtime"]),
        ctime_ns=cast(int, node["ctime"]),
        size=cast(int, node.get("size", 0)),
        holes=cast(int, node.get("holes", 0)),
        recipe=cast("RecipeId | None", _digest(node.get("recipe"), CidCodec.RAW)),
        root=cast("bytes | None", node.get("root")),
        tree=cast("TreeId | None", _digest(node.get("tree"), CidCodec.DAG_CBOR)),
        target=cast("bytes | None", node.get("target")),
        rdev=cast(int, node.get("rdev", 0)),
        link=cast(int, node.get("link", 0)),
        xattrs=_xattrs(node["xattrs"]) if "xattrs" in node else (),
    )
    _check_kind(entry)
    return entry


def _digest(node: Node, codec: CidCodec) -> bytes | None:
    if node is None:
        return None
    assert isinstance(node, Link)
    if node.codec != codec:
        raise Corrupt(f"a tree entry links to {node.codec.name} where {codec.name} belongs")
    return node.digest


def _xattrs(node: Node) -> tuple[tuple[bytes, bytes], ...]:
    rows = cast("list[Node]", node)
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(part, bytes) for part in row):
            raise Corrupt("a tree entry has a bad extended attribute")
    xattrs = tuple((cast(bytes, row[0]), cast(bytes, row[1])) for row in cast("list[list[Node]]", rows))
    if not xattrs or any(a[0] >= b[0] for a, b in pairwise(xattrs)):
        raise Corrupt("the extended attributes of a tree entry are not in order")
    return xattrs


def _check_kind(entry: Entry) -> None:
    if not entry.name or b"/" in entry.name or entry.name in (b".", b"..") or b"\0" in entry.name:
        raise Corrupt("a tree entry has an impossible name")
    if entry.is_file != (entry.recipe is not None) or entry.is_file != (entry.root is not None):
        raise Corrupt("a tree entry is a file without content, or content without a file")
    if entry.is_dir != (entry.tree is not None):
        raise Corrupt("a tree entry is a directory without a tree, or the other way round")
    if stat.S_ISLNK(entry.mode) != (entry.target is not None):
        raise Corrupt("a tree entry is a link without a target, or the other way round")
    if entry.root is not None and len(entry.root) != 32:
        raise Corrupt("a file root is not 32 bytes")
