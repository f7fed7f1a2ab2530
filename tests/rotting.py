"""A small store of every kind of object, copies of it to damage, and what is left of them after a scrub.

The one rule: what a file should hold comes from the test, as hashes; a copy is opened by nothing but the
code under test.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import trio
from saved_store import File, SavedStore
from small_store import random_bytes, safetensors

from ckptfs.daemon.scrubbing import References
from ckptfs.fusefs.namespace import Namespace
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.scrub import Scrubber
from ckptfs.store.scrub_state import ScrubRun

Contents = Mapping[tuple[int, bytes], str]
SMALL = {b"config.json": b'{"hidden": 8}' * 40, b"vocab.txt": random_bytes(30_000, 3)}


def trees() -> list[dict[bytes, File | bytes | Mapping[bytes, File | bytes]]]:
    """The versions of the unit `run`: an adopted tensor file, small files in packs, a directory."""
    first = {"w": random_bytes(700_000, 1), "b": random_bytes(40_000, 2)}
    second = {"w": first["w"][:300_000] + random_bytes(400_000, 4), "b": first["b"]}
    names = (first, second)
    return [
        {b"model.safetensors": safetensors(tensors), b"notes": b"run %d" % n, b"tokenizer": SMALL}
        for n, tensors in enumerate(names)
    ]


class Original:
    """The undamaged store in `root`, and what its versions hold, as SHA-256."""

    def __init__(self, root: Path) -> None:
        self.root = root
        store = SavedStore(root)
        try:
            for step, tree in enumerate(trees()):
                record = trio.run(lambda tree=tree, step=step: store.publish(b"run", tree, step=step))
                store.histories.tag(record.unit, record.number, f"tag{step}")
            store.histories.pin(record.unit, record.number)
            self.contents = contents(store)
        finally:
            store.close()

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """A copy to damage."""
        target = self.root.parent / f"copy-{os.getpid()}"
        shutil.copytree(self.root, target)
        try:
            yield target
        finally:
            shutil.rmtree(target)


def contents(store: SavedStore) -> dict[tuple[int, bytes], str]:
    """What can be read of every version: (number, path) → SHA-256; what is refused is left out."""
    found: dict[tuple[int, bytes], str] = {}
    for unit in store.histories.units():
        for record in store.histories.versions(unit.unit):
            assert record.top.tree is not None
            waiting = [(b"", record.top.tree)]
            while waiting:
                path, tree = waiting.pop()
                try:
                    entries = store.segments.read_tree(tree)
                except Corrupt:
                    continue
                for entry in entries:
                    below = os.path.join(path, entry.name)
                    if entry.tree is not None:
                        waiting.append((below, entry.tree))
                    elif entry.recipe is not None:
                        try:
                            recipe = store.segments.read_recipe(entry.recipe)
                            payload = store.segments.read_file(recipe, 0, recipe.size)
                        except Corrupt:
                            continue
                        found[record.number, below] = hashlib.sha256(payload).hexdigest()
    return found


@contextmanager
def opened(root: Path) -> Iterator[SavedStore]:
    """The store, closed in the end."""
    store = SavedStore(root)
    try:
        yield store
    finally:
        store.close()


def scrub(store: SavedStore) -> ScrubRun:
    """`ckptfs scrub`."""
    return trio.run(scrubber(store).run_now)


def scrubber(store: SavedStore) -> Scrubber:
    """A scrubber of an open store."""
    namespace = Namespace(store.index, store.disk)
    references = References(store.index, store.segments, store.histories, namespace)
    reclaim = store.ingest.reclaim
    return Scrubber(store.disk, store.index, store.segments, reclaim, store.histories, references.find)


def flip(path: Path, bit: int) -> None:
    """Flip a bit of a file, counted from byte 0, bit 0."""
    with path.open("r+b") as file:
        file.seek(bit >> 3)
        byte = file.read(1)[0]
        file.seek(bit >> 3)
        file.write(bytes([byte ^ 1 << (bit & 7)]))


def bits_of(rng: random.Random, start: int, length: int, count: int) -> list[int]:
    """Some bits of the bytes from `start` on: the first, the last, and others between them."""
    edges = {8 * start, 8 * (start + length) - 1}
    return sorted(edges | {rng.randrange(8 * start, 8 * (start + length)) for _ in range(count)})


def place_of_chunk(store: SavedStore, chunk: ChunkId) -> tuple[Path, int, int]:
    """(file, offset, length) of a stored chunk."""
    from ckptfs.store.segment_format import segment_paths

    location = store.segments.locate(chunk)
    assert location is not None
    path = store.root / segment_paths(location.segment)[location.in_idx]
    return path, location.offset, location.stored
