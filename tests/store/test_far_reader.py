"""far_reader: a worker thread reads what the file holds, the index thread little of it in one go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
from bytes_reader import BytesReader
from saved_store import SavedStore

from ckptfs.store import far_reader
from ckptfs.store.far_reader import FarReader
from ckptfs.store.formats.layout import read_each
from ckptfs.store.recipe import Recipe


def test_a_read_of_any_length_comes_in_pieces(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_reader, "_PIECE_BYTES", 1000)
    content = rng.randbytes(300_001)
    store = SavedStore(tmp_path / "store")
    record = trio.run(lambda: store.publish(b"run", {b"a": content}))
    assert record.top.tree is not None
    (entry,) = store.segments.read_tree(record.top.tree)
    assert entry.recipe is not None
    whole, lengths = store.segments.read_file, []

    def noted(recipe: Recipe, offset: int, length: int) -> bytes:
        lengths.append(length)
        return whole(recipe, offset, length)

    monkeypatch.setattr(store.segments, "read_file", noted)
    reader = FarReader(store.segments.file_reader(store.segments.read_recipe(entry.recipe)))
    ranges = [(0, 0), (0, 999), (0, 1000), (1, 1001), (5, 300_001), (300_000, 5), (300_001, 9), (400_000, 3)]
    ranges += [(rng.randrange(300_001), rng.randrange(20_000)) for _ in range(20)]

    async def read() -> list[bytes]:
        return await trio.to_thread.run_sync(lambda: [reader.pread(*one) for one in ranges])

    assert trio.run(read) == [content[at : at + length] for at, length in ranges]
    assert reader.size == len(content) and max(lengths) == 1000
    store.close()


def test_many_short_reads_are_a_few_ways_to_the_index_thread(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch file has a header for each of its tensors: one way for each is what its judging takes."""
    monkeypatch.setattr(far_reader, "_PLACES_AT_ONCE", 10)
    content, ways = rng.randbytes(300_001), 0
    from_thread = trio.from_thread.run_sync

    def counted(*arguments: object) -> object:
        nonlocal ways
        ways += 1
        return from_thread(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trio.from_thread, "run_sync", counted)
    places = [(rng.randrange(310_000), rng.randrange(100)) for _ in range(31)]

    async def read() -> list[bytes]:
        reader = FarReader(BytesReader(content))
        return await trio.to_thread.run_sync(read_each, reader, places)

    assert trio.run(read) == [content[at : at + length] for at, length in places]
    assert ways == 4
