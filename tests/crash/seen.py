"""What a plain client sees on a mount: trees, and versions below `.versions`.

One rule: everything is asked of the kernel anew, with lstat, readlink, getxattr and read, and nothing
of ckptfs is imported: the eyes of the crash tests are not the code that is tested.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field

from livetree import DIRECTORY, FILE, LINK, digest_of

_VERSION = re.compile(r"v[0-9]{6,}_.*Z")
_READ_BYTES = 1 << 20


@dataclass(slots=True)
class SeenNode:
    """One name: `inode` tells which names are one file; `held` are its bytes."""

    kind: str
    inode: int = 0
    mode: int = 0
    held: bytes = b""
    target: str = ""
    xattrs: dict[str, str] = field(default_factory=dict)


def read_file(path: str) -> bytes:
    """All bytes, in requests of 1 MiB; a length that is not what stat says is an error."""
    parts = []
    with open(path, "rb", buffering=0) as f:
        while part := f.read(_READ_BYTES):
            parts.append(part)
        held = b"".join(parts)
        size = os.fstat(f.fileno()).st_size
    if len(held) != size:
        raise AssertionError(f"{path}: {len(held)} bytes could be read, stat says {size}")
    return held


def look_at_tree(top: str) -> dict[str, SeenNode]:
    """Every name below a directory, relative to it."""
    found: dict[str, SeenNode] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        for name in os.listdir(os.path.join(top, folder)):
            path = os.path.join(folder, name)
            found[path] = _look_at(os.path.join(top, path))
            if found[path].kind == DIRECTORY:
                folders.append(path)
    return found


def _look_at(path: str) -> SeenNode:
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        return SeenNode(DIRECTORY, status.st_ino, mode)
    if stat.S_ISLNK(status.st_mode):
        return SeenNode(LINK, status.st_ino, mode, target=os.readlink(path))
    xattrs = {name: os.getxattr(path, name).decode() for name in os.listxattr(path)}
    return SeenNode(FILE, status.st_ino, mode, read_file(path), xattrs=xattrs)


def outline_of(tree: dict[str, SeenNode]) -> dict[str, str]:
    """Path → what is there, in one line, for comparing and hashing."""
    return {path: outline_line(n.kind, n.target, digest_of(n.held)) for path, n in tree.items()}


def outline_line(kind: str, target: str, digest: str) -> str:
    """One name's kind and content."""
    return {FILE: f"file {digest}", LINK: f"link {target}", DIRECTORY: "directory"}[kind]


def list_units(mount: str) -> list[str]:
    """The units that `.versions` at the root of the mount shows."""
    return sorted(os.listdir(os.path.join(mount, ".versions")))


def list_versions(mount: str, unit: str) -> list[str]:
    """Names of a unit's versions, oldest first (links and tags left out)."""
    folder = os.path.join(mount, ".versions", unit)
    return sorted(name for name in os.listdir(folder) if _VERSION.fullmatch(name))


def version_digest(mount: str, unit: str, version: str) -> str:
    """A hash of every name, kind and byte of a version."""
    return tree_digest(os.path.join(mount, ".versions", unit, version))


def tree_digest(top: str) -> str:
    """The same of any directory."""
    outline = outline_of(look_at_tree(top))
    return digest_of(repr(sorted(outline.items())).encode())
