"""Fetching what a version leads to: trees, then recipes, then chunks; or a part of that.

One rule: nothing is asked for but what was read behind its id.

Source: FORMAT.md, "Remotes", "Fetching".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

import trio

from ckptfs.store.errors import NotFound
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import ChunkId, RecipeId, TreeId
from ckptfs.store.ingest import Ingest
from ckptfs.store.remote.fetching import Fetcher
from ckptfs.store.remote.reading import KeySet, add_recipe
from ckptfs.store.remote.shard import keys_of
from ckptfs.store.segments import Segments
from ckptfs.store.tree import Entry, encode_tree


async def fetch_trees(fetcher: Fetcher, segments: Segments, top: Entry) -> set[RecipeId]:
    """Have all trees below a directory, level by level; the recipes that they name."""
    level, seen = {one for one in [top.tree] if one is not None}, set[TreeId]()
    recipes = {one for one in [top.recipe] if one is not None}
    while level:
        await fetcher.fetch(keys_of(sorted(level)))
        seen |= level
        below = set[TreeId]()
        for tree in level:
            for entry in segments.read_tree(tree):
                if entry.tree is not None:
                    below.add(entry.tree)
                elif entry.recipe is not None:
                    recipes.add(entry.recipe)
            await trio.lowlevel.checkpoint()
        level = below - seen
    return recipes


async def fetch_contents(fetcher: Fetcher, segments: Segments, recipes: Iterable[RecipeId]) -> None:
    """Have these recipes, and all chunks in them."""
    wanted = sorted(recipes)
    await fetcher.fetch(keys_of(wanted))
    chunks = KeySet()
    for recipe in wanted:
        add_recipe(chunks, segments.read_recipe(recipe))
        await trio.lowlevel.checkpoint()
    await fetcher.fetch(chunks.all())


async def fetch_way(
    fetcher: Fetcher, segments: Segments, top: Entry, inner: tuple[bytes, ...]
) -> list[Entry]:
    """The entries from a version's top along `inner`, as far as they exist."""
    way = [top]
    for name in inner:
        tree = way[-1].tree
        if tree is not None:
            await fetcher.fetch(keys_of([tree]))
        entries = () if tree is None else segments.read_tree(tree)
        found = next((entry for entry in entries if entry.name == name), None)
        if found is None:
            break
        way.append(found)
    return way


async def fetch_only(
    fetcher: Fetcher,
    segments: Segments,
    ingest: Ingest,
    top: Entry,
    inner: tuple[bytes, ...],
    held: set[ChunkId],
) -> Entry:
    """The top of a version that has nothing but what lies at `inner`; the trees on the way are stored.
    NotFound if nothing lies there."""
    way = await fetch_way(fetcher, segments, top, inner)
    if len(way) <= len(inner):
        raise NotFound(f"this version has no {os.fsdecode(b'/'.join(inner))}")
    return await store_way(ingest, way[:-1], way[-1], held)


async def store_way(ingest: Ingest, above: list[Entry], entry: Entry, held: set[ChunkId]) -> Entry:
    """The top of a version that has nothing but `entry`, below the directories `above` (top first)."""
    trees = list[tuple[ChunkId, bytes]]()
    for parent in reversed(above):
        encoded = encode_tree([entry])
        trees.append((chunk_id(encoded), encoded))
        entry = replace(parent, tree=TreeId(trees[-1][0]))
    await ingest.store_objects(trees, held)
    return entry


def files_below(segments: Segments, directory: Entry, path: bytes = b"") -> Iterator[tuple[bytes, Entry]]:
    """(path, entry) of every regular file below a directory of which the trees are here."""
    assert directory.tree is not None, "a directory has a tree"
    for entry in segments.read_tree(directory.tree):
        if entry.is_dir:
            yield from files_below(segments, entry, path + entry.name + b"/")
        elif entry.is_file:
            yield path + entry.name, entry
