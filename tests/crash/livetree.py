"""What a writer of the crash tests has been told is there: names, kinds, bytes, modes, attributes.

One rule: a tree changes only by `apply`, one answered call at a time, so the writer that chooses the
calls and the oracle that checks what is left of them after a kill cannot disagree.

Standard library only: the writers run without ckptfs on their path.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Op = Mapping[str, Any]
"""One system call as JSON: "op" names it, the other keys are its arguments."""

Part = list[int] | str
"""A piece of a payload: [seed, length], or the characters themselves (latin-1)."""
FILE, DIRECTORY, LINK = "f", "d", "l"
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755


@functools.lru_cache(maxsize=64)
def _random_bytes(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def payload_bytes(parts: list[Part]) -> bytes:
    """The bytes of a payload."""
    return b"".join(p.encode("latin-1") if isinstance(p, str) else _random_bytes(*p) for p in parts)


def payload_length(parts: list[Part]) -> int:
    """Their number, without making them."""
    return sum(len(p) if isinstance(p, str) else p[1] for p in parts)


class Content(Protocol):
    """The bytes of a file, or what is known of them."""

    @property
    def size(self) -> int: ...
    def write(self, offset: int, parts: list[Part]) -> None: ...
    def truncate(self, size: int) -> None: ...


class Length:
    """Knows only how long a file is: enough to choose calls."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, offset: int, parts: list[Part]) -> None:
        """`parts` were written at `offset`."""
        self.size = max(self.size, offset + payload_length(parts))

    def truncate(self, size: int) -> None:
        """The length was set."""
        self.size = size


class Bytes:
    """Knows every byte."""

    def __init__(self, held: bytes = b"") -> None:
        self.held = bytearray(held)
        self._digest: str | None = None

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.held)

    def write(self, offset: int, parts: list[Part]) -> None:
        """`parts` were written at `offset`; a gap is zeros."""
        self.put(offset, payload_bytes(parts))

    def put(self, offset: int, payload: bytes) -> None:
        """The same with the bytes themselves."""
        if payload:
            self.held.extend(bytes(max(0, offset - len(self.held))))
            self.held[offset : offset + len(payload)] = payload
            self._digest = None

    def truncate(self, size: int) -> None:
        """The length was set; what is new is zeros."""
        del self.held[size:]
        self.held.extend(bytes(size - len(self.held)))
        self._digest = None

    def digest(self) -> str:
        """A hash of the bytes."""
        if self._digest is None:
            self._digest = digest_of(self.held)
        return self._digest


def digest_of(held: bytes | bytearray) -> str:
    """How the crash tests hash the bytes of a file."""
    return hashlib.blake2b(held, digest_size=16).hexdigest()


@dataclass(eq=False, slots=True)
class Node:
    """One inode; several names for one node are hard links."""

    kind: str
    mode: int = 0
    content: Content = field(default_factory=Length)
    target: str = ""
    xattrs: dict[str, str] = field(default_factory=dict)


class Tree:
    """The names below a writer's directory (relative, "/" between) and the descriptors it has open."""

    def __init__(self, new_content: Callable[[], Content]) -> None:
        self.names: dict[str, Node] = {}
        self.open: dict[int, Node] = {}
        self._new_content = new_content

    def apply(self, op: Op) -> None:
        """The call was answered without an error."""
        step = getattr(self, f"_{op['op']}", None)
        if step is not None:
            step(op)

    def below(self, folder: str) -> Iterator[str]:
        """Every name in a directory and its subdirectories."""
        return (name for name in self.names if name.startswith(folder + "/"))

    def files(self) -> list[str]:
        """Names of regular files."""
        return [name for name, node in self.names.items() if node.kind == FILE]

    def _create(self, op: Op) -> None:
        node = Node(FILE, FILE_MODE, self._new_content())
        self.names[op["path"]] = self.open[op["fd"]] = node

    def _open(self, op: Op) -> None:
        node = self.open[op["fd"]] = self.names[op["path"]]
        if op.get("truncate"):
            node.content.truncate(0)

    def _write(self, op: Op) -> None:
        self.open[op["fd"]].content.write(op["offset"], op["parts"])

    _map = _write

    def _ftruncate(self, op: Op) -> None:
        self.open[op["fd"]].content.truncate(op["size"])

    def _truncate(self, op: Op) -> None:
        self.names[op["path"]].content.truncate(op["size"])

    def _close(self, op: Op) -> None:
        del self.open[op["fd"]]

    def _mkdir(self, op: Op) -> None:
        self.names[op["path"]] = Node(DIRECTORY, DIRECTORY_MODE)

    def _symlink(self, op: Op) -> None:
        self.names[op["path"]] = Node(LINK, target=op["target"])

    def _link(self, op: Op) -> None:
        self.names[op["new"]] = self.names[op["path"]]

    def _unlink(self, op: Op) -> None:
        del self.names[op["path"]]

    _rmdir = _unlink

    def _rename(self, op: Op) -> None:
        old, new = op["path"], op["new"]
        for name in list(self.below(old)):
            self.names[new + name[len(old) :]] = self.names.pop(name)
        self.names[new] = self.names.pop(old)

    def _chmod(self, op: Op) -> None:
        self.names[op["path"]].mode = op["mode"]

    def _setxattr(self, op: Op) -> None:
        self.names[op["path"]].xattrs[op["name"]] = op["value"]

    def to_json(self) -> list[dict[str, Any]]:
        """The names without the bytes, for a writer that goes on with this tree."""
        numbers: dict[int, int] = {}
        return [
            {
                "path": path,
                "node": numbers.setdefault(id(node), len(numbers)),
                "kind": node.kind,
                "mode": node.mode,
                "size": node.content.size if node.kind == FILE else 0,
                "target": node.target,
            }
            for path, node in self.names.items()
        ]


def tree_of_lengths(rows: list[dict[str, Any]]) -> Tree:
    """What `to_json` wrote."""
    tree = Tree(Length)
    nodes: dict[int, Node] = {}
    for row in rows:
        node = nodes.get(row["node"])
        if node is None:
            node = nodes[row["node"]] = Node(row["kind"], row["mode"], Length(), row["target"])
            node.content.truncate(row["size"])
        tree.names[row["path"]] = node
    return tree
