"""One tree of several: what the nodes of a run have saved, name by name. Pure.

One rule: nothing is lost without being named: where two have the same name and not the same content, both are
told, and which one was taken.

Source: FORMAT.md, "Merging".
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.tree import Entry, encode_tree

MOST_NAME_BYTES = 255
_MOST_LINK = (1 << 64) - 1
ReadTree = Callable[[TreeId], Sequence[Entry]]
IsSame = Callable[[RecipeId, RecipeId], bool]
_Owned = tuple[int, Entry]


@dataclass(frozen=True, slots=True)
class TreeConflict:
    """Several contents of one path: who has them, of each the first, and whose the path is now (None: it is
    not decided)."""

    path: str
    nodes: tuple[str, ...]
    taken: str | None
    is_kept: bool = False

    def __str__(self) -> str:
        others = ", ".join(node for node in self.nodes if node != self.taken)
        kept = ", which is kept beside it" if self.is_kept else ""
        if self.taken is None:
            return f"{self.path} has other content on {' and '.join(self.nodes)}" + (
                ": each is kept under its node's name" if self.is_kept else ""
            )
        return f"{self.path} is that of {self.taken}; {others} has another{kept}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done about conflicts: the first `preferred` of the sources are taken where they have the name,
    and with `keep_both` the others stay beside them."""

    preferred: int = 0
    keep_both: bool = False


@dataclass(slots=True)
class MergedTree:
    """The top directory, the trees that are new, and what was in conflict. The tree lacks what has an open
    conflict."""

    top: Entry
    objects: list[tuple[ChunkId, bytes]] = field(default_factory=list)
    conflicts: list[TreeConflict] = field(default_factory=list)

    @property
    def open_conflicts(self) -> list[TreeConflict]:
        """Those that nobody has decided."""
        return [one for one in self.conflicts if one.taken is None and not one.is_kept]


def merge_trees(
    tops: Sequence[Entry], nodes: Sequence[str], read_tree: ReadTree, is_same: IsSame, decision: Decision
) -> MergedTree:
    """Make one tree of the directories `tops` of these nodes; of what is equal the first is taken.

    `is_same` tells of two recipes of one size whether they are of the same bytes. Errors as `read_tree`
    raises.
    """
    run = _Merge(nodes, read_tree, is_same, decision)
    return run.merged(tops)


class _Merge:
    def __init__(
        self, nodes: Sequence[str], read_tree: ReadTree, is_same: IsSame, decision: Decision
    ) -> None:
        self._nodes = nodes
        self._read_tree = read_tree
        self._is_same = is_same
        self._decision = decision
        self._objects: list[tuple[ChunkId, bytes]] = []
        self._conflicts: list[TreeConflict] = []

    def merged(self, tops: Sequence[Entry]) -> MergedTree:
        top = self._directory(list(enumerate(tops)), b"")
        return MergedTree(top, self._objects, self._conflicts)

    def _directory(self, owned: Sequence[_Owned], path: bytes) -> Entry:
        """One directory of several, with the attributes of the first."""
        source, first = owned[0]
        if all(entry.tree == first.tree for _, entry in owned):
            return self._adopted(source, first)
        by_name: dict[bytes, list[_Owned]] = {}
        for owner, directory in owned:
            assert directory.tree is not None, "a directory has a tree"
            for entry in self._read_tree(directory.tree):
                by_name.setdefault(entry.name, []).append((owner, entry))
        entries: list[Entry] = []
        taken = {*by_name}
        for name, candidates in by_name.items():
            entries += self._named(candidates, path + name, taken)
        return self._with_entries(first, entries)

    def _named(self, candidates: Sequence[_Owned], path: bytes, taken: set[bytes]) -> list[Entry]:
        """What becomes of the entries of one name; `taken` are the names that are there."""
        groups: list[list[_Owned]] = []
        for owner, entry in candidates:
            group = next((one for one in groups if self._is_equal(one[0][1], entry)), None)
            groups.append([(owner, entry)]) if group is None else group.append((owner, entry))
        if len(groups) == 1:
            return [self._joined(groups[0], path)]
        is_decided = groups[0][0][0] < self._decision.preferred
        nodes = tuple(self._nodes[group[0][0]] for group in groups)
        self._conflicts.append(
            TreeConflict(
                path.decode("utf-8", "surrogateescape"),
                nodes,
                nodes[0] if is_decided else None,
                self._decision.keep_both,
            )
        )
        found = [self._joined(groups[0], path)] if is_decided else []
        for group in groups[len(found) :] if self._decision.keep_both else ():
            entry = self._joined(group, path)
            name = _free_name(entry.name, self._nodes[group[0][0]], taken)
            taken.add(name)
            found.append(replace(entry, name=name))
        return found

    def _is_equal(self, one: Entry, other: Entry) -> bool:
        if stat.S_IFMT(one.mode) != stat.S_IFMT(other.mode):
            return False
        if one.recipe is not None and other.recipe is not None:
            if one.recipe == other.recipe:
                return True
            return one.size == other.size and self._is_same(one.recipe, other.recipe)
        return one.is_dir or (one.target, one.rdev) == (other.target, other.rdev)

    def _joined(self, group: Sequence[_Owned], path: bytes) -> Entry:
        source, first = group[0]
        return self._directory(group, path + b"/") if first.is_dir else self._adopted(source, first)

    def _adopted(self, source: int, entry: Entry) -> Entry:
        """An entry of one node, with all below it: hard links of other nodes are others."""
        if entry.tree is not None:
            before = self._read_tree(entry.tree)
            entries = [self._adopted(source, one) for one in before]
            return entry if entries == list(before) else self._with_entries(entry, entries)
        if not entry.link:
            return entry
        link = entry.link * len(self._nodes) + source
        return replace(entry, link=link if link <= _MOST_LINK else 0)

    def _with_entries(self, directory: Entry, entries: Sequence[Entry]) -> Entry:
        encoded = encode_tree(entries)
        identity = chunk_id(encoded)
        self._objects.append((identity, encoded))
        return replace(directory, tree=TreeId(identity))


def _free_name(name: bytes, node: str, taken: set[bytes]) -> bytes:
    """NAME~NODE, with a number behind it if somebody has that name."""
    label = node.replace("/", "_").encode("utf-8", "surrogateescape").replace(b"\0", b"_")[:100]
    number = 1
    while True:
        suffix = b"~" + label + (b"~%d" % number if number > 1 else b"")
        found = name[: MOST_NAME_BYTES - len(suffix)] + suffix
        if found not in taken:
            return found
        number += 1
