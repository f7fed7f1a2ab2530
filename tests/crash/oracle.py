"""What must be on the mount after a kill, told from the writers' journals, and whether it is.

One rule: a call that was answered has happened whole; of the one call that was not, each writer may
find all, nothing, or, where a call is divided into requests (a long write) or pages (a mapping), the
parts from the front (or any pages). Anything else is a finding.

What was written through a mapping and not synced is promised from the next call on that the daemon
answered: munmap tells nobody that its pages could not be written, and close is answered by the kernel
(read in Linux 6.18, fuse_send_writepage: a broken connection drops the pages without an error).
"""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """What a journal says of one writer's round: `unsure` are its last calls that only the kernel
    answered, from the first unsynced mapping on; `pending` is the call that was not answered, of a
    write the first `pending_bytes` were; `tags` are versions that it made, with what they must hold."""

    calls: int = 0
    unsure: list[Op] = field(default_factory=list)
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
            op = json.loads(text)
            continue
        if mark == "#":
            if float(text) < killed_at:
                ending.findings.append(f"came back short: {ending.pending}")
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
        ending.pending_tag = ending.pending["tag"], outline(_with(tree, ending.unsure))
        ending.pending = None
    return ending


def _lines(journal: Path) -> Iterator[tuple[str, str]]:
    for line in journal.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield line[0], line[1:-1]


def _answered(tree: Tree, ending: Ending, op: Op, result: int) -> None:
    ending.calls += 1
    if (op["op"] == "map" and not op["sync"]) or (ending.unsure and op["op"] in ("close", "map")):
        ending.unsure.append(op)
        return
    for earlier in ending.unsure:
        tree.apply(earlier)
    ending.unsure.clear()
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
    sure = _with(tree, ending.unsure) if ending.unsure else tree
    findings = differences(sure, found)
    if findings:
        for happened in _possible(tree, sure, ending, found):
            if not differences(happened, found):
                happened.open.clear()
                return happened, []
        return _as_found(found), findings
    sure.open.clear()
    return sure, []


def _possible(tree: Tree, sure: Tree, ending: Ending, found: Mapping[str, SeenNode]) -> Iterator[Tree]:
    """Trees in which the unanswered call has happened, or that part of it that is seen."""
    if ending.unsure:
        yield _partly(tree, ending.unsure, _pages, 0, found)
    op = ending.pending
    if op is None:
        return
    if op["op"] == "map":
        # An earlier unsynced mapping of the same file may have lost pages as well.
        maps = [one for one in ending.unsure if one["op"] == "map" and one["fd"] == op["fd"]]
        yield _partly(tree, [*maps, op], _pages, 0, found)
        return
    yield _with(sure, [op])
    if op["op"] == "write":
        yield _partly(sure, [op], _prefix, ending.pending_bytes, found)


def _with(tree: Tree, calls: Sequence[Op]) -> Tree:
    after = copy.deepcopy(tree)
    for op in calls:
        after.apply(op)
    return after


def _partly(
    tree: Tree,
    calls: Sequence[Op],
    take: Callable[[Bytes, Sequence[Op], int, bytes], bool],
    answered: int,
    found: Mapping[str, SeenNode],
) -> Tree:
    """The tree with those parts of the calls, all on one file, that are seen."""
    after = copy.deepcopy(tree)
    node = after.open[calls[0]["fd"]]
    seen = next((found[n] for n, other in after.names.items() if other is node and n in found), None)
    if seen is not None:
        take(_bytes(node), calls, answered, seen.held)
    return after


def _prefix(content: Bytes, calls: Sequence[Op], answered: int, held: bytes) -> bool:
    """Whether `held` is the content with at least the `answered` first bytes of the write."""
    payload, offset = payload_bytes(calls[0]["parts"]), calls[0]["offset"]
    # Bytes that agree with the payload may as well have been written: that changes nothing.
    content.put(offset, payload[: agreeing_bytes(payload, held[offset : offset + len(payload)])])
    return content.held == held and held[offset : offset + answered] == payload[:answered]


def agreeing_bytes(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """How many bytes two strings have in common at their beginnings."""
    both = min(len(one), len(other))
    at = next((i for i in range(0, both, 512) if one[i : i + 512] != other[i : i + 512]), both)
    return next((i for i in range(at, min(both, at + 512)) if one[i] != other[i]), min(both, at + 512))


def _pages(content: Bytes, calls: Sequence[Op], _: int, held: bytes) -> bool:
    """Whether each page of `held` is as before or as one of the mappings made it."""
    steps = [Bytes(bytes(content.held))]
    for op in calls:
        if op["op"] == "map":
            steps.append(Bytes(bytes(steps[-1].held)))
            steps[-1].write(op["offset"], op["parts"])
    if len(held) != content.size:
        return False
    for at in range(0, len(held), _PAGE_BYTES):
        page = held[at : at + _PAGE_BYTES]
        if not any(page == step.held[at : at + _PAGE_BYTES] for step in steps):
            return False
        content.put(at, page)
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
        at = agreeing_bytes(held, seen.held)
        zeros = at < len(seen.held) and not any(seen.held[at : at + 64])
        yield (
            f"{path}: {len(seen.held)} bytes, should be {len(held)}; they differ from byte {at}"
            + (" (zeros there)" if zeros else "")
        )
    if node.xattrs != seen.xattrs:
        yield f"{path} has the attributes {seen.xattrs}, not {node.xattrs}"


def _names_of_nodes(tree: Tree) -> dict[int, list[str]]:
    groups: dict[int, list[str]] = {}
    for path, node in tree.names.items():
        if node.kind == FILE:
            groups.setdefault(id(node), []).append(path)
    return {key: names for key, names in groups.items() if len(names) > 1}


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
