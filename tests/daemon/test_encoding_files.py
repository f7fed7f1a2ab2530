"""encoding_files: what it remembers of a run does not grow with what has gone, and parents are looked for
among what is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from encoded_series import PATH, saves
from saved_store import SavedStore

from ckptfs.daemon import encoding_files
from ckptfs.daemon.encoding_files import EncodingFiles
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change

NAME = PATH.encode()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SavedStore]:
    one = SavedStore(tmp_path / "store")
    try:
        yield one
    finally:
        one.close()


def test_what_has_gone_is_not_remembered_for_ever(store: SavedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_files, "_KNOWN_VERSIONS", 4)
    files = EncodingFiles(store.segments, store.histories)

    async def scenario() -> list[int]:
        known = []
        for number in range(1, 25):
            record = await store.publish(b"run", {NAME: f"save {number}".encode() * 5000})
            if number > 3:
                store.histories.forget(record.unit, number - 3)
            found = await files.of_unit(record.unit)
            assert [save.number for save in found.saves][-3:] == list(range(1, number + 1))[-3:]
            known.append(len(found.saves))
        return known

    assert max(trio.run(scenario)) <= 2 * 3 + 4 + 1


def test_parents_are_those_of_the_nearest_saves_that_are_there(store: SavedStore) -> None:
    files = EncodingFiles(store.segments, store.histories)

    async def scenario() -> tuple[set[ChunkId], set[ChunkId]]:
        records = [await store.publish(b"run", {NAME: one[PATH]}) for one in saves(8, values=70_000)]
        unit = await files.of_unit(records[0].unit)
        first = set(store.segments.read_recipe(unit.saves[0].files[PATH].recipe).chunks())
        change = Change()
        gone = [save.files[PATH].recipe for save in unit.saves[1:6]]
        store.ingest.reclaim.stage_removal(change, [ChunkId(recipe) for recipe in gone])
        store.index.apply(change)
        [(_, planned)] = await files.planned(unit, unit.saves[6], lambda _: True)
        return {one.parent for one in planned if one.parent is not None}, first

    parents, first = trio.run(scenario)
    assert parents and parents <= first
