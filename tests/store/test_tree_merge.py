"""Trees of several nodes made one: what is taken, what is in conflict, what is kept beside it."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.remote.comparing import doubtful_spans
from ckptfs.store.tree import Entry, decode_tree, encode_tree
from ckptfs.store.tree_merge import Decision, MergedTree, merge_trees

UNDECIDED = Decision()
Plain: TypeAlias = "Mapping[str, str | Plain]"


class Trees:
    """Trees by id; a file's content is a text, its recipe the hash of that (`a` and `A` are the same)."""

    def __init__(self) -> None:
        self.trees: dict[TreeId, bytes] = {}
        self.contents: dict[RecipeId, str] = {}

    def of(self, plain: Plain, name: bytes = b"top", mode: int = 0o755) -> Entry:
        entries = [
            self.of(what, key.encode()) if not isinstance(what, str) else self.file(key.encode(), what)
            for key, what in plain.items()
        ]
        return self.directory(name, entries, mode)

    def directory(self, name: bytes, entries: Sequence[Entry], mode: int = 0o755) -> Entry:
        encoded = encode_tree(entries)
        identity = TreeId(chunk_id(encoded))
        self.trees[identity] = encoded
        return Entry(name=name, mode=stat.S_IFDIR | mode, uid=0, gid=0, mtime_ns=1, ctime_ns=1, tree=identity)

    def file(self, name: bytes, content: str, link: int = 0) -> Entry:
        if content.startswith("->"):
            return Entry(
                name=name, mode=stat.S_IFLNK | 0o777, uid=0, gid=0, mtime_ns=1, ctime_ns=1,
                target=content.encode(),
            )  # fmt: skip
        recipe = RecipeId(chunk_id(content.encode()))
        self.contents[recipe] = content
        return Entry(
            name=name, mode=stat.S_IFREG | 0o644, uid=0, gid=0, mtime_ns=1, ctime_ns=1, size=len(content),
            recipe=recipe, root=bytes(32), link=link,
        )  # fmt: skip

    def read(self, tree: TreeId) -> Sequence[Entry]:
        return decode_tree(self.trees[tree])

    def is_same(self, one: RecipeId, other: RecipeId) -> bool:
        return self.contents[one].lower() == self.contents[other].lower()

    def merge(self, *trees: Plain | Entry, decision: Decision = UNDECIDED) -> MergedTree:
        tops = [tree if isinstance(tree, Entry) else self.of(tree) for tree in trees]
        merged = merge_trees(tops, "abcdef"[: len(tops)], self.read, self.is_same, decision)
        self.trees |= {TreeId(identity): encoded for identity, encoded in merged.objects}
        return merged

    def plain(self, top: Entry) -> Plain:
        assert top.tree is not None
        return {
            one.name.decode(): self.plain(one) if one.is_dir else self._text(one)
            for one in self.read(top.tree)
        }

    def _text(self, entry: Entry) -> str:
        return self.contents[entry.recipe] if entry.recipe is not None else (entry.target or b"").decode()


def test_what_one_has_and_what_is_equal_is_taken() -> None:
    trees = Trees()
    merged = trees.merge(
        {"only": "1", "both": "x", "link": "->x", "dir": {"r0": "0", "sub": {"c": "same"}}},
        {"other": "2", "both": "X", "link": "->x", "dir": {"r1": "1", "sub": {"c": "same"}}},
    )
    assert merged.conflicts == []
    assert trees.plain(merged.top) == {
        "only": "1", "other": "2", "both": "x", "link": "->x",
        "dir": {"r0": "0", "r1": "1", "sub": {"c": "same"}},
    }  # fmt: skip


CONFLICTING: tuple[Plain, ...] = (
    {"f": "aa", "d": {"g": "1"}, "k": "file", "l": "->1"},
    {"f": "bb", "d": {"g": "22"}, "k": {"x": "dir"}, "l": "->2"},
    {"f": "AA", "d": {"g": "1"}},
)


def test_conflicts_are_named_with_their_nodes() -> None:
    merged = Trees().merge(*CONFLICTING)
    said = {one.path: one for one in merged.open_conflicts}
    assert {path: one.nodes for path, one in said.items()} == {
        "f": ("a", "b"), "d/g": ("a", "b"), "k": ("a", "b"), "l": ("a", "b"),
    }  # fmt: skip
    assert str(said["d/g"]) == "d/g has other content on a and b"


def test_who_is_preferred_is_taken() -> None:
    trees = Trees()
    merged = trees.merge(*CONFLICTING, decision=Decision(preferred=1))
    assert merged.open_conflicts == []
    assert trees.plain(merged.top) == CONFLICTING[0]
    assert "f is that of a; b has another" in [str(one) for one in merged.conflicts]
    # The preferred one has no such file: nobody has decided between the others.
    open_still = trees.merge({"x": "1"}, {"f": "2"}, {"f": "3"}, decision=Decision(preferred=1))
    assert [one.path for one in open_still.open_conflicts] == ["f"]


def test_both_are_kept() -> None:
    trees = Trees()
    both = trees.merge(*CONFLICTING, {"f~b": "bb"}, decision=Decision(keep_both=True))
    assert both.open_conflicts == []
    assert trees.plain(both.top) == {
        "f~a": "aa", "f~b~2": "bb", "f~b": "bb", "d": {"g~a": "1", "g~b": "22"}, "k~a": "file",
        "k~b": {"x": "dir"}, "l~a": "->1", "l~b": "->2",
    }  # fmt: skip
    one = trees.merge(*CONFLICTING, decision=Decision(1, keep_both=True))
    assert trees.plain(one.top) == {
        "f": "aa", "f~b": "bb", "d": {"g": "1", "g~b": "22"}, "k": "file", "k~b": {"x": "dir"},
        "l": "->1", "l~b": "->2",
    }  # fmt: skip


def test_long_names_and_strange_nodes() -> None:
    trees = Trees()
    tops = [trees.of({"n" * 255: content}) for content in ("1", "2", "3")]
    nodes = ["a/b", "a_b", "x" * 300]
    merged = merge_trees(tops, nodes, trees.read, trees.is_same, Decision(keep_both=True))
    names = [one.name for one in decode_tree(merged.objects[-1][1])]
    assert len({*names}) == 3 and max(map(len, names)) <= 255
    assert sorted(name.partition(b"~")[2] for name in names) == [b"a_b", b"a_b~2", b"x" * 100]


def test_hard_links_of_two_nodes_are_not_one_file() -> None:
    trees = Trees()
    ours = trees.directory(
        b"top", [trees.file(b"a", "x", 5), trees.directory(b"d", [trees.file(b"b", "x", 5)])]
    )
    theirs = trees.directory(
        b"top", [trees.file(b"c", "x", 5), trees.directory(b"e", [trees.file(b"f", "x", (1 << 64) - 1)])]
    )
    merged = trees.merge(ours, theirs)
    assert merged.top.tree is not None
    top = {one.name: one for one in trees.read(merged.top.tree)}
    below = {
        one.name: one
        for directory in (top[b"d"], top[b"e"])
        for one in trees.read(directory.tree or TreeId(ChunkId(b"")))
    }
    assert top[b"a"].file_key == below[b"b"].file_key != top[b"c"].file_key
    assert below[b"f"].link == 0, "a number that does not fit is none"


FILES = st.text("aAbB", min_size=1, max_size=2)
NAMES = st.sampled_from(["x", "y", "z", "x~b"])
TREES: st.SearchStrategy[Plain] = st.recursive(
    st.dictionaries(NAMES, FILES, max_size=4),
    lambda below: st.dictionaries(NAMES, st.one_of(FILES, below), max_size=4),
    max_leaves=8,
)


def _contents(plain: Plain) -> set[str]:
    found: set[str] = set()
    for one in plain.values():
        found |= {one.lower()} if isinstance(one, str) else _contents(one)
    return found


@given(st.lists(TREES, min_size=1, max_size=4))
def test_nothing_is_lost_that_is_not_named(plains: list[Plain]) -> None:
    trees = Trees()
    kept = trees.merge(*plains, decision=Decision(keep_both=True))
    assert _contents(trees.plain(kept.top)) == set().union(*map(_contents, plains))
    first = trees.merge(*plains, decision=Decision(preferred=len(plains)))
    assert first.open_conflicts == []
    undecided = trees.merge(*plains)
    if not undecided.conflicts:
        assert _contents(trees.plain(undecided.top)) == set().union(*map(_contents, plains))
        assert first.top == undecided.top == kept.top
    assert len(undecided.open_conflicts) == len(undecided.conflicts)
    assert trees.merge(plains[0], plains[0]).top == trees.of(plains[0])


# ---- contents that are cut differently -----------------------------------------------------------


def cut(content: bytes, at: Sequence[int]) -> Recipe:
    """A recipe of these bytes; pieces of zeros are holes where they are longer than one."""
    edges = sorted({0, len(content), *(one for one in at if one < len(content))})
    parts = [content[start:end] for start, end in pairwise(edges)]
    return Recipe(
        Piece(len(part), None if not any(part) and len(part) > 1 else chunk_id(part)) for part in parts
    )


CONTENTS = st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=12).map(bytes)


@given(CONTENTS, CONTENTS, st.sets(st.integers(1, 11)), st.sets(st.integers(1, 11)))
def test_recipes_tell_of_contents(one: bytes, other: bytes, cuts: set[int], others: set[int]) -> None:
    """What is not among the spans is equal, and what is different at once is told at once."""
    other = (other * 12)[: len(one)]
    first, second = cut(one, sorted(cuts)), cut(other, sorted(others))
    spans = doubtful_spans(first, second)
    if spans is None:
        assert one != other
        return
    doubted = {at for start, end in spans for at in range(start, end)}
    assert all(one[at] == other[at] for at in range(len(one)) if at not in doubted)
    assert doubtful_spans(first, cut(one, sorted(cuts))) == []


@pytest.mark.parametrize("content", [b"", b"\1"])
def test_small_contents(content: bytes) -> None:
    assert doubtful_spans(cut(content, ()), cut(content, ())) == []
