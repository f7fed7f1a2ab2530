"""Scrub, rebuild, collector and readers ahead of encoded segments: children never lose what they are encoded
against, and damage is found, named and put right."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from encoded_series import (
    BFLOAT16,
    PATH,
    Series,
    check_tables,
    encoded_chunks,
    encoded_series,
    family,
    flip,
    located,
    rebuilt,
    reencoder,
    removed,
    saves,
    scrub,
)

from ckptfs.store import reading_ahead
from ckptfs.store.bad_chunks import PlaceHasher
from ckptfs.store.codecs import Plain
from ckptfs.store.codecs.kernels import new_unpacker
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Table
from ckptfs.store.parent_table import Lineage
from ckptfs.store.places import Suspect
from ckptfs.store.reading_ahead import ReadingAhead
from ckptfs.store.segment_format import Codec, Location, segment_paths
from ckptfs.store.whole_segment import WholeSegments

SERIES = saves(4)


@pytest.fixture(params=["fast", "small"])
def series(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Series]:
    with encoded_series(tmp_path, SERIES, request.param) as one:
        yield one


# ---- scrub -------------------------------------------------------------------------------------


def test_a_scrub_of_what_is_right_finds_nothing(series: Series) -> None:
    run = scrub(series.store)
    assert run.findings == () and run.chunks > 0
    series.check()


def test_a_scrub_does_not_turn_back_to_raw_bytes_that_are_about_to_go(series: Series) -> None:
    store = series.store
    fresh = Series(store, saves(2, seed=9))
    trio.run(reencoder(store).encode, fresh.planned(0))
    chunk = encoded_chunks(fresh, 0)[1]
    place = located(store.segments, chunk)
    assert scrub(store).findings == ()
    assert located(store.segments, chunk) == place


def test_damage_that_raw_bytes_can_still_heal_is_healed(series: Series) -> None:
    store = series.store
    fresh = Series(store, saves(2, seed=9))
    trio.run(reencoder(store).encode, fresh.planned(0))
    chunk = encoded_chunks(fresh, 0)[1]
    flip(store, chunk)
    run = scrub(store)
    assert run.healed == 1 and run.corrupt == 0, run.findings
    assert located(store.segments, chunk).codec == Codec.RAW
    store.reclaim()
    store.reopen()
    fresh.check()
    check_tables(store)


def test_a_damaged_chunk_is_found_with_all_that_need_it(series: Series) -> None:
    store = series.store
    parent, _ = family(series)
    damaged = {parent} | store.segments.parents.descendants(parent)
    flip(store, parent)
    run = scrub(store)
    assert {one.chunk for one in run.findings} == damaged
    # A second copy heals all of them: the save is written again.
    store.store_bytes(SERIES[0][PATH], PATH)
    store.reclaim()
    assert all(one.healed for one in scrub(store).findings)
    assert scrub(store).findings == ()
    store.reopen()
    series.check()
    check_tables(store)


def test_a_damaged_idx_is_made_anew_with_its_edges(series: Series) -> None:
    store = series.store
    _, child = family(series)
    path = store.root / segment_paths(located(store.segments, child).segment)[1]
    right = path.read_bytes()
    path.write_bytes(right[:100] + bytes(20) + right[120:])
    store.reopen()
    run = scrub(store)
    assert [one.healed for one in run.findings] == [True]
    assert len(path.read_bytes()) == len(right)
    check_tables(store)
    assert scrub(store).findings == ()


@pytest.mark.parametrize("table", [Table.PARENT, Table.CHILD])
def test_what_rotted_in_the_tables_is_put_right_by_the_edges(series: Series, table: Table) -> None:
    store = series.store
    parent, child = family(series)
    key = child if table == Table.PARENT else parent + child
    for value in (None, b"", bytes(33)):
        change = Change()
        if value is None:
            change.delete(table, key)
        else:
            change.put(table, key, value)
        store.index.apply(change)
        assert all(one.healed for one in scrub(store).findings)
        check_tables(store)


# ---- rebuild -----------------------------------------------------------------------------------


def test_a_rebuild_finds_what_is_encoded_and_against_what(series: Series) -> None:
    before = {table: series.store.index.scan(table) for table in (Table.CHUNK, Table.PARENT, Table.CHILD)}
    assert before[Table.PARENT] and rebuilt(series) == []
    after = {table: series.store.index.scan(table) for table in (Table.CHUNK, Table.PARENT, Table.CHILD)}
    assert after == before
    series.check()


def test_a_rebuild_before_raw_bytes_went_takes_the_encoding(series: Series) -> None:
    store = series.store
    fresh = Series(store, saves(2, seed=9))
    trio.run(reencoder(store).encode, fresh.planned(0))
    encoded = encoded_chunks(fresh, 0)
    assert rebuilt(series) == []
    assert encoded_chunks(fresh, 0) == encoded
    fresh.check()
    series.check()
    check_tables(store)


def test_a_rebuild_without_a_parent_says_so_and_keeps_the_rest(series: Series) -> None:
    store = series.store
    parent, _ = family(series)
    children = store.segments.parents.descendants(parent)
    segment = located(store.segments, parent).segment
    at_home = {
        ChunkId(k) for k, v in store.index.scan(Table.CHUNK) if int.from_bytes(v[:8], "little") == segment
    }
    (store.root / segment_paths(segment)[1]).unlink()
    problems = rebuilt(series)
    assert len(problems) == 1 and "cannot be decoded" in problems[0]
    assert at_home.isdisjoint(ChunkId(key) for key, _ in store.index.scan(Table.CHUNK))
    for chunk in children:
        with pytest.raises(Corrupt):
            store.segments.check(chunk)
    for chunk in set(series.chunks(3)) - at_home:
        store.segments.check(chunk)


def test_a_rebuild_without_a_parent_takes_raw_bytes_that_are_still_there(series: Series) -> None:
    store = series.store
    fresh = Series(store, saves(3, seed=9))
    fresh.encode(0)
    trio.run(reencoder(store).encode, fresh.planned(1))
    child = next(one for one in encoded_chunks(fresh, 1) if store.segments.parents.lineage(one))
    lineage = store.segments.parents.lineage(child)
    assert lineage is not None
    (store.root / segment_paths(located(store.segments, lineage.parents[0]).segment)[1]).unlink()
    rebuilt(series)
    assert located(store.segments, child).codec == Codec.RAW
    assert store.read(fresh.stored[1][PATH]) == fresh.files[1][PATH]
    check_tables(store)


# ---- collection --------------------------------------------------------------------------------


def test_a_parent_stays_as_long_as_a_child_does(series: Series) -> None:
    store = series.store
    parent, child = family(series)
    family_of = store.segments.parents.descendants(parent)
    assert removed(store, [parent]) == set()
    grandchildren = family_of - {child}
    assert removed(store, [parent, child]) == (set() if grandchildren else {parent, child})
    series.check()
    assert removed(store, [parent, *family_of]) == family_of | {parent}
    check_tables(store)


def test_a_child_that_is_pinned_keeps_its_parent(series: Series) -> None:
    store = series.store
    parent, _ = family(series)
    family_of = store.segments.parents.descendants(parent)
    last = max(family_of, key=store.segments.parents.depth)
    with store.segments.pins.hold([last]):
        assert removed(store, [parent, *family_of]).isdisjoint({parent, last})
        store.segments.check(last)


# ---- readers -----------------------------------------------------------------------------------


def test_what_a_reader_wants_is_decoded_beside_and_what_follows_before(series: Series) -> None:
    store = series.store
    recipe = series.recipe(2, PATH)

    async def read_all() -> bytes:
        ahead = ReadingAhead(store.disk, store.segments)
        parts: list[bytes] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ahead.run)
            await trio.testing.wait_all_tasks_blocked()
            for at in range(0, recipe.size, 128 << 10):
                plan = store.segments.plan_read(recipe, at, 128 << 10)
                if plan.unverified and await ahead.prepare(recipe, at, plan):
                    plan = store.segments.plan_read(recipe, at, 128 << 10)
                    assert not plan.unverified, "nothing is left to decode in the event loop"
                parts.append(bytes(store.segments.show(plan)))
            if new_unpacker() is not None and series.level == "fast":
                # Neighbours that were decoded together (planes are) are answered together, uncopied.
                whole = store.segments.plan_read(recipe, 0, recipe.size)
                assert len(whole.parts) < len(recipe)
            nursery.cancel_scope.cancel()
        return b"".join(parts)

    assert trio.run(read_all) == SERIES[2][PATH]


def test_a_small_read_does_not_wait_for_what_is_planned_ahead(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = series.store
    recipe = series.recipe(1, PATH)
    is_answered = threading.Event()
    waited: list[bool] = []
    real = reading_ahead._hash_or_decode

    def hold_up(
        disk: Disk,
        suspects: Sequence[Suspect],
        parents: Mapping[ChunkId, Location],
        hasher: PlaceHasher | None,
    ) -> tuple[set[ChunkId], dict[ChunkId, Plain]]:
        if len(suspects) > 1:
            waited.append(is_answered.wait(30))
        return real(disk, suspects, parents, hasher)

    monkeypatch.setattr(reading_ahead, "_hash_or_decode", hold_up)

    async def scenario() -> None:
        ahead = ReadingAhead(store.disk, store.segments)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ahead.run)
            await trio.testing.wait_all_tasks_blocked()
            plan = store.segments.plan_read(recipe, 300_000, 1000)
            assert len(plan.unverified) == 1
            assert await ahead.prepare(recipe, 300_000, plan)
            plan = store.segments.plan_read(recipe, 300_000, 1000)
            assert bytes(store.segments.show(plan)) == SERIES[1][PATH][300_000:301_000]
            is_answered.set()
            await ahead.wait(store.segments.plan_read(recipe, 0, recipe.size))
            assert waited and all(waited)
            nursery.cancel_scope.cancel()

    trio.run(scenario)


@pytest.mark.parametrize("is_encoded", [True, False])
def test_what_is_ahead_is_decoded_on_both_cores_and_hashed_on_one(
    series: Series, monkeypatch: pytest.MonkeyPatch, is_encoded: bool
) -> None:
    """The reader of raw bytes needs the other core for himself."""
    store = series.store
    recipe = series.recipe(1 if is_encoded else len(SERIES) - 1, PATH)
    store.reopen()  # nothing is known to be right
    real = reading_ahead._hash_or_decode
    are_two = threading.Barrier(2)
    lock, within, most = threading.Lock(), 0, 0

    def counted(
        disk: Disk,
        suspects: Sequence[Suspect],
        parents: Mapping[ChunkId, Location],
        hasher: PlaceHasher | None,
    ) -> tuple[set[ChunkId], dict[ChunkId, Plain]]:
        nonlocal within, most
        with lock:
            within += 1
            most = max(most, within)
        try:
            if is_encoded and not are_two.broken:
                with suppress(threading.BrokenBarrierError):
                    are_two.wait(30)
                    are_two.abort()
            return real(disk, suspects, parents, hasher)
        finally:
            with lock:
                within -= 1

    monkeypatch.setattr(reading_ahead, "_hash_or_decode", counted)
    monkeypatch.setattr(reading_ahead, "_BATCH_BYTES", 128 << 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    async def scenario() -> None:
        ahead = ReadingAhead(store.disk, store.segments)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ahead.run)
            await trio.testing.wait_all_tasks_blocked()
            ahead._extend(recipe, 0, store.segments.plan_read(recipe, 0, 1))
            await ahead.wait(store.segments.plan_read(recipe, 0, recipe.size))
            nursery.cancel_scope.cancel()

    trio.run(scenario)
    assert most == (2 if is_encoded else 1)


def test_damage_is_told_to_the_reader_who_meets_it(series: Series) -> None:
    store = series.store
    parent, child = family(series)
    flip(store, parent)
    recipe = series.recipe(1, PATH)
    at = series.chunks(1).index(child)

    async def scenario() -> None:
        ahead = ReadingAhead(store.disk, store.segments)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ahead.run)
            await trio.testing.wait_all_tasks_blocked()
            plan = store.segments.plan_read(recipe, recipe.start(at), 1000)
            await ahead.prepare(recipe, recipe.start(at), plan)
            with pytest.raises(Corrupt):
                store.segments.show(store.segments.plan_read(recipe, recipe.start(at), 1000))
            nursery.cancel_scope.cancel()

    trio.run(scenario)


def test_an_encoded_file_is_never_read_by_the_kernel_itself(series: Series) -> None:
    store = series.store
    whole = WholeSegments(store.disk, store.segments)
    for stored in series.stored[0].values():
        whole.want(stored.recipe)
        trio.run(whole.execute)
        assert whole.open(stored.recipe, only_tensors=False) is None


def test_only_so_much_is_kept_decoded(series: Series) -> None:
    store = series.store
    kept = sum(len(p) for save in SERIES[:3] for p in save.values())
    series.check()
    assert 0 < store.segments._decoded.held_bytes <= max(kept, 64 << 20)
    for number in range(3):
        for chunk in series.chunks(number, BFLOAT16):
            assert store.segments.read(chunk, 5, 10) == store.segments.read(chunk)[5:15]


def test_lineages_name_what_is_there(series: Series) -> None:
    lineage = series.store.segments.parents.lineage(family(series)[1])
    assert lineage == Lineage(1, (family(series)[0],))
