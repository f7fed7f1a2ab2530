"""encoding_files: what it remembers of a run does not grow with what has gone, and parents are looked for
among what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from encoded_series import PATH, saves
from saved_store import SavedStore, Tree

from ckptfs.daemon import encoding_files
from ckptfs.daemon.encoding_files import EncodingFiles
from ckptfs.store.encoding_saves import SavedFiles
from ckptfs.store.formats import Reader
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change
from ckptfs.store.segment_format import Location

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
            record = await store.publish(b"run", {NAME: f"save {number}".encode() * 6000})
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


def test_the_first_save_of_a_run_is_encoded_against_what_it_began_with(store: SavedStore) -> None:
    files = EncodingFiles(store.segments, store.histories)

    async def scenario() -> None:
        base, tuned, later, last = saves(4, values=70_000)
        tree: Tree = {b"base": {NAME: base[PATH]}}
        await store.publish(b"run", tree)
        for number, one in ((5, tuned), (9, later), (12, last)):
            tree = {**tree, b"checkpoint-%d" % number: {NAME: one[PATH]}}
            record = await store.publish(b"run", tree)
        unit = await files.of_unit(record.unit)

        def chunks(save: SavedFiles) -> set[ChunkId]:
            [file] = save.files.values()
            return set(store.segments.read_recipe(file.recipe).chunks())

        assert [save.step for save in unit.saves] == [None, 5, 9, 12]
        for save, parent in ((unit.saves[1], unit.saves[0]), (unit.saves[2], unit.saves[1])):
            [(_, planned)] = await files.planned(unit, save, lambda _: True)
            parents = {one.parent for one in planned if one.parent is not None}
            assert parents and parents <= chunks(parent)

    trio.run(scenario)


def test_what_has_no_layout_is_parsed_once(store: SavedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    files = EncodingFiles(store.segments, store.histories)
    parsed: list[str] = []

    def parse(reader: Reader, path: str, sibling: Callable[[str], Reader | None]) -> None:
        parsed.append(path)

    monkeypatch.setattr(encoding_files, "parse", parse)

    async def scenario() -> None:
        for number in range(4):
            record = await store.publish(b"run", {b"log": b"%d" % number * 40_000})
        unit = await files.of_unit(record.unit)
        for save in unit.saves:
            await files.planned(unit, save, lambda _: True)

    trio.run(scenario)
    assert parsed == ["log"] * 4


def test_saves_that_have_gone_are_looked_up_once(store: SavedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    files = EncodingFiles(store.segments, store.histories)
    looked_up: list[ChunkId] = []
    locate = store.segments.locate

    def counted(chunk: ChunkId) -> Location | None:
        looked_up.append(chunk)
        return locate(chunk)

    async def scenario() -> None:
        records = [await store.publish(b"run", {b"log": b"%d" % number * 40_000}) for number in range(6)]
        unit = await files.of_unit(records[0].unit)
        change = Change()
        gone = [ChunkId(save.files["log"].recipe) for save in unit.saves[:4]]
        store.ingest.reclaim.stage_removal(change, gone)
        store.index.apply(change)
        monkeypatch.setattr(store.segments, "locate", counted)
        for _ in range(3):
            await files.planned(unit, unit.saves[5], lambda _: True)
        assert [looked_up.count(one) for one in gone] == [1] * 4

    trio.run(scenario)


def test_only_what_may_be_encoded_is_remembered_and_only_of_units_that_are_asked_for(
    store: SavedStore,
) -> None:
    files = EncodingFiles(store.segments, store.histories)

    async def scenario() -> None:
        tree: Tree = {b"log": b"a" * 1000, b"step-5": {b".metadata": b"m", b"__0.metadata": b"m"}}
        record = await store.publish(b"run", {**tree, b"model.bin": b"b" * 40_000})
        await store.publish(b"other", {b"model.bin": b"c" * 40_000})
        found = await files.of_unit(record.unit)
        paths = sorted(path for save in found.saves for path in save.files)
        assert paths == ["model.bin", "step-5/.metadata", "step-5/__0.metadata"]
        files.forget_others({record.unit})
        assert await files.of_unit(record.unit) is found
        files.forget_others(())
        assert await files.of_unit(record.unit) is not found

    trio.run(scenario)


def test_what_was_rolled_back_to_is_newest_too(store: SavedStore) -> None:
    files = EncodingFiles(store.segments, store.histories)

    async def scenario() -> None:
        def save(step: int) -> Tree:
            return {b"checkpoint-%d" % step: {NAME: b"%d" % step * 40_000}}

        trees = [{**save(1)}, {**save(1), **save(2)}, {**save(1), **save(2), **save(3)}]
        for tree in trees:
            record = await store.publish(b"run", tree)
        assert len((await files.of_unit(record.unit)).newest) == 1
        await store.publish(b"run", trees[1])
        unit = await files.of_unit(record.unit)
        newest = [save.step for save in unit.saves if save.files.popitem()[1].recipe in unit.newest]
        assert newest == [2, 3]

    trio.run(scenario)
