"""Walking the saved tree of a version.

One rule: a directory that cannot be read is reported and the walk goes on beside it, so that one bad
chunk does not hide what is wrong elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import TreeId
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry

Damaged = Callable[[bytes, TreeId, Corrupt], None]


@dataclass(frozen=True, slots=True)
class Saved:
    """One entry of a version; `path` is relative to the unit's directory, b"" for that itself."""

    path: bytes
    entry: Entry


def walk(
    segments: Segments, top: Saved, on_damage: Damaged, seen: set[tuple[bytes, TreeId]] | None = None
) -> Iterator[Saved]:
    """`top` and everything below it, directories before what they hold.

    With `seen`, a directory that was walked before under the same path and with the same tree is left
    out with all that it holds: so the unchanged part of many versions is walked once.
    """
    waiting = [top]
    while waiting:
        saved = waiting.pop()
        tree = saved.entry.tree
        if tree is not None and seen is not None:
            if (saved.path, tree) in seen:
                continue
            seen.add((saved.path, tree))
        yield saved
        if tree is None:
            continue
        try:
            entries = segments.read_tree(tree)
        except Corrupt as e:
            on_damage(saved.path, tree, e)
            continue
        prefix = saved.path + b"/" if saved.path else b""
        waiting += [Saved(prefix + entry.name, entry) for entry in reversed(entries)]


def way_into(segments: Segments, top: Entry, inner: tuple[bytes, ...]) -> list[Entry]:
    """The entries from a version's top along `inner`, as far as they exist; Corrupt if one is damaged."""
    way = [top]
    for name in inner:
        tree = way[-1].tree
        entries = () if tree is None else segments.read_tree(tree)
        found = next((entry for entry in entries if entry.name == name), None)
        if found is None:
            break
        way.append(found)
    return way
