"""What must be on the mount after a kill, told from the writers' journals, and whether it is.

One rule: a call that was answered has happened whole; of the one call that was not, each writer may
find all, nothing, or, where a call is divided into requests (a long write) or pages (a mapping), the
parts from the front (or any pages). Anything else is a finding.
"""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from livetree import DIRECTORY, FILE, LINK, Bytes, Node, Tree, payload_bytes, payload_length
from seen import SeenNode, outline_line

_PAGE_BYTES = 4096
_GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.EIO, errno.ESHUTDOWN}
Op = Mapping[str, Any]


@dataclass(slots=True)
class Ending:
    """What a journal says of one writer's round: `pending` is the call that was not answered, of a
    write the first `pending_bytes` were; `tags` are versions that it made, with what they must hold."""

    calls: int = 0
    pending: Op | None = None
    pending_bytes: int = 0
    synced: int = 0
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    pending_tag: tuple[str, dict[str, str]] | None = None
    findings: list[str] = field(default_factory=list)


def replay(tree: Tree, journal: Path, killed_at: float) -> Ending:
    """Apply a journal to the tree; what it says besides. `killed_at` is the clock of the kill."""
    ending = Ending()
    op: Op | None = None
    for mark, text in _lines(journal):
        if mark == ">":
            if ending.pending is not None:
                ending.findings.append(f"a write came back short without the mount being gone: {ending.pending}")
            op = json.loads(text)
            continue
        assert op is not None, "an answer comes after a call"
        if mark == "<":
            _answered(tree, ending, op, int(text))
        else:
            number, when = text.split()
            if int(number) not in _GONE or float(when) < killed_at:
                ending.findings.append(f"{op} failed with {errno.errorcode[int(number)]}")
            ending.pending = op
        op = None
    if op is not None:
        ending.pending = op
    if ending.pending is not None and ending.pending["op"] == "publish":
        ending.pending_tag = ending.pending["tag"], outline(tree)
        ending.pending = None
    return ending


def _lines(journal: Path) -> Iterator[tuple[str, str]]:
    for line in journal.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield line[0], line[1:-1]


def _answered(tree: Tree, ending: Ending, op: Op, result: int) -> None:
    ending.calls += 1
    if op["op"] == "write" and result < payload_length(op["parts"]):
        ending.pending, ending.pending_bytes = op, result
        return
    tree.apply(op)
    if op["op"] == "fsync":
        ending.synced += 1
    if op["op"] == "publish":
        ending.tags[op["tag"]] = outline(tree)


def outline(tree: Tree) -> dict[str, str]:
    """Path → kind and hash of everything in a tree."""
    return {path: outline_line(n.kind, n.target, _digest(n)) for path, n in tree.names.items()}


def _digest(node: Node) -> str:
    return _bytes(node).digest() if node.kind == FILE else ""


def _bytes(node: Node) -> Bytes:
    return cast(Bytes, node.content)


def settle(tree: Tree, ending: Ending, found: Mapping[str, SeenNode]) -> tuple[Tree, list[str]]:
    """Compare what is there with what may be there; the tree to go on with, and the findings."""
    tree.open.clear() if ending.pending is None else None
    findings = differences(tree, found)
    op = ending.pending
    if findings and op is not None:
        for happened in _possible(tree, op, ending.pending_bytes, found):
            if not differences(happened, found):
                happened.open.clear()
                return happened, []
    tree.open.clear()
    return (_as_found(found), findings) if findings else (tree, [])


def _possible(tree: Tree, op: Op, answered: int, found: Mapping[str, SeenNode]) -> Iterator[Tree]:
    """Trees in which the unanswered call has happened, or that part of it that is seen."""
    whole = _copied(tree)
    whole.apply(op)
    yield whole
    if op["op"] in ("write", "map"):
        partly = _copied(tree)
        node = partly.open[op["fd"]]
        names = [name for name, other in partly.names.items() if other is node]
        if names and names[0] in found:
            take = _prefix if op["op"] == "write" else _pages
            if take(_bytes(node), op, answered, found[names[0]].held):
                yield partly


def _prefix(content: Bytes, op: Op, answered: int, held: bytes) -> bool:
    """Whether `held` is the content with at least the `answered` first bytes of the write."""
    payload = payload_bytes(op["parts"])
    before = bytes(content.held)
    done = answered
    while done < len(payload) and held[op["offset"] + done : op["offset"] + done + 1] == payload[done : done + 1]:
        step = min(_PAGE_BYTES, len(payload) - done)
        here = op["offset"] + done
        if held[here : here + step] == payload[done : done + step]:
            done += step
        else:
            done += 1
    for length in range(done, max(answered, done - _PAGE_BYTES) - 1, -1):
        tried = Bytes(before)
        tried.write(op["offset"], [payload[:length].decode("latin-1")])
        if tried.held == held:
            content.held = tried.held
            return True
    return False


def _pages(content: Bytes, op: Op, _: int, held: bytes) -> bool:
    """Whether each page of `held` is as before or as the mapping made it."""
    after = Bytes(bytes(content.held))
    after.write(op["offset"], op["parts"])
    if len(held) != len(content.held):
        return False
    for at in range(0, len(held), _PAGE_BYTES):
        page = held[at : at + _PAGE_BYTES]
        if page not in (bytes(content.held[at : at + _PAGE_BYTES]), bytes(after.held[at : at + _PAGE_BYTES])):
            return False
    content.held = bytearray(held)
    content._digest = None
    return True


def differences(tree: Tree, found: Mapping[str, SeenNode]) -> list[str]:
    """One line for each name that is not as it must be."""
    lines = [f"{path} is gone" for path in tree.names.keys() - found.keys()]
    lines += [f"{path} should not be there" for path in found.keys() - tree.names.keys()]
    inodes: dict[int, Node] = {}
    for path in sorted(tree.names.keys() & found.keys()):
        node, seen = tree.names[path], found[path]
        if node.kind != seen.kind:
            lines.append(f"{path} is {seen.kind}, not {node.kind}")
        elif node.kind == LINK and node.target != seen.target:
            lines.append(f"{path} leads to {seen.target}, not {node.target}")
        elif node.kind != LINK and node.mode != seen.mode:
            lines.append(f"{path} has mode {seen.mode:o}, not {node.mode:o}")
        elif node.kind == FILE:
            lines += _file_differences(path, node, seen)
        if node.kind == FILE and inodes.setdefault(seen.inode, node) is not node:
            lines.append(f"{path} is one file with another name and should not be")
    for names in _names_of_nodes(tree).values():
        if len({found[name].inode for name in names if name in found}) > 1:
            lines.append(f"{', '.join(names)} should be one file")
    return lines


def _file_differences(path: str, node: Node, seen: SeenNode) -> Iterator[str]:
    held = _bytes(node).held
    if held != seen.held:
        both = min(len(held), len(seen.held))
        at = next((i for i in range(0, both, 512) if held[i : i + 512] != seen.held[i : i + 512]), both)
        at = next((i for i in range(at, min(both, at + 512)) if held[i] != seen.held[i]), at)
        zeros = not any(seen.held[at : at + 64])
        yield (
            f"{path}: {len(seen.held)} bytes, should be {len(held)}; they differ from byte {at}"
            + (" (zeros there)" if zeros and at < both else "")
        )
    if node.xattrs != seen.xattrs:
        yield f"{path} has the attributes {seen.xattrs}, not {node.xattrs}"


def _names_of_nodes(tree: Tree) -> dict[int, list[str]]:
    groups: dict[int, list[str]] = {}
    for path, node in tree.names.items():
        if node.kind == FILE:
            groups.setdefault(id(node), []).append(path)
    return {key: names for key, names in groups.items() if len(names) > 1}


def _copied(tree: Tree) -> Tree:
    return copy.deepcopy(tree, {id(Bytes): Bytes})


def _as_found(found: Mapping[str, SeenNode]) -> Tree:
    """A tree of what is there, to go on with after a finding."""
    tree = new_tree()
    nodes: dict[int, Node] = {}
    for path, seen in found.items():
        node = nodes.get(seen.inode) if seen.kind != DIRECTORY else None
        if node is None:
            node = Node(seen.kind, seen.mode, Bytes(seen.held), seen.target, dict(seen.xattrs))
            nodes[seen.inode] = node
        tree.names[path] = node
    return tree


def new_tree() -> Tree:
    """An empty directory, every byte of which will be known."""
    new_content: Callable[[], Bytes] = Bytes
    return Tree(new_content)
