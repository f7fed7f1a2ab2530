"""Damage among encoded chunks: what a child is encoded against may be bad or gone for a while, and nothing
that can be read again once it is healed is given up meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
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
    reencoder,
    saves,
)
from small_store import SmallStore

from ckptfs.store.errors import Corrupt
from ckptfs.store.histories import Histories
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Table
from ckptfs.store.rebuild import rebuild
from ckptfs.store.recovery import recover
from ckptfs.store.scrub import Scrubber
from ckptfs.store.scrub_run import Met
from ckptfs.store.scrub_state import ScrubRun
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import Codec, segment_paths

SERIES = saves(4)
BOOT = "boot"


@pytest.fixture(params=["fast", "small"])
def series(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Series]:
    with encoded_series(tmp_path, SERIES, request.param) as one:
        yield one


def scrub(store: SmallStore) -> ScrubRun:
    async def uses(wanted: set[ChunkId]) -> dict[ChunkId, Met]:
        return {}

    histories = Histories(store.disk, store.index)
    scrubber = Scrubber(store.disk, store.index, store.segments, store.ingest.reclaim, histories, uses)
    return trio.run(scrubber.run_now)


def rebuilt(store: SmallStore) -> list[str]:
    """As `ckptfs rebuild` and the mount behind it; what the rebuild says."""
    store.close()
    try:
        found = rebuild(store.disk, boot_id=BOOT, now_ns=5)
    finally:
        store._open()
    recover(store.disk, store.index, store.staging, store.segments.read_recipe, boot_id=BOOT, now_ns=6)
    store.reclaim()
    return found.skipped + found.problems


def idx_of(store: SmallStore, chunk: ChunkId) -> Path:
    return store.root / segment_paths(located(store.segments, chunk).segment)[1]


def break_idx(store: SmallStore, chunk: ChunkId) -> None:
    """Make the .idx of a chunk's segment unreadable."""
    path = idx_of(store, chunk)
    right = path.read_bytes()
    path.write_bytes(right[:100] + bytes(20) + right[120:])


def put_back(store: SmallStore) -> list[str]:
    """Put what a rebuild kept of unreadable segments back; their names."""
    kept = sorted((store.root / "quarantine").glob("skipped-*"))
    for path in kept:
        name = path.name.removeprefix("skipped-")
        path.rename(store.root / segment_paths(int(name.partition(".")[0], 16))[name.endswith(".idx")])
    return [path.name for path in kept]


# ---- rebuild -----------------------------------------------------------------------------------


def test_what_a_rebuild_cannot_decode_is_read_again_once_its_parent_is_written_again(series: Series) -> None:
    store = series.store
    parent, child = family(series)
    break_idx(store, parent)
    told = rebuilt(store)
    assert [part for part in ("segment", "cannot be decoded") if part in " ".join(told)], told
    with pytest.raises(Corrupt):
        store.segments.check(child)
    for path in (PATH, BFLOAT16):
        store.store_bytes(SERIES[0][path], path)
    store.segments.check(child)
    store.reclaim()
    store.reopen()
    series.check()
    check_tables(store)


def test_a_segment_that_a_rebuild_cannot_read_is_kept_and_can_be_put_back(series: Series) -> None:
    store = series.store
    parent, _ = family(series)
    right = idx_of(store, parent).read_bytes()
    number = located(store.segments, parent).segment
    break_idx(store, parent)
    rebuilt(store)
    assert not (store.root / segment_paths(number)[0]).exists()
    assert len(put_back(store)) == 2
    (store.root / segment_paths(number)[1]).write_bytes(right)
    assert rebuilt(store) == []
    series.check()
    check_tables(store)


def test_a_payload_file_whose_idx_is_gone_is_kept(series: Series) -> None:
    store = series.store
    parent, _ = family(series)
    path = idx_of(store, parent)
    right = path.read_bytes()
    path.unlink()
    rebuilt(store)
    assert len(put_back(store)) == 1
    path.write_bytes(right)
    assert rebuilt(store) == []
    series.check()


def test_what_was_healed_is_not_taken_for_the_older_copy(series: Series) -> None:
    store = series.store
    fresh = Series(store, saves(2, seed=9))
    trio.run(reencoder(store).encode, fresh.planned(0))
    chunk = encoded_chunks(fresh, 0)[1]
    flip(store, chunk)
    assert scrub(store).healed == 1
    assert rebuilt(store) == []
    assert located(store.segments, chunk).codec == Codec.RAW
    store.reopen()
    fresh.check()
    check_tables(store)


# ---- scrub and what is given back behind it --------------------------------------------------------


def test_a_child_keeps_its_bytes_while_its_parent_is_bad(series: Series) -> None:
    store = series.store
    parent, child = family(series)
    break_idx(store, child)
    flip(store, parent)
    scrub(store)
    # Something else of that segment goes, and what no row names with it.
    number = located(store.segments, child).segment
    rows = read_idx(store.disk, number).rows
    assert child in {row.chunk for row in rows}
    other = next(
        row.chunk for row in rows if not store.segments.parents.is_parent(row.chunk) and row.chunk != child
    )
    change = Change()
    store.ingest.reclaim.stage_removal(change, [other])
    store.index.apply(change)
    store.reclaim()
    store.store_bytes(SERIES[0][PATH], PATH)
    store.reopen()
    store.segments.check(child)
    check_tables(store)


def test_nothing_is_punched_where_an_idx_lacks_a_row(series: Series) -> None:
    store = series.store
    chunks = series.chunks(3)
    victim, other = chunks[1], chunks[2]
    place = located(store.segments, victim)
    assert place.codec == Codec.RAW and located(store.segments, other).segment == place.segment
    flip(store, victim)
    break_idx(store, victim)
    scrub(store)
    change = Change()
    store.ingest.reclaim.stage_removal(change, [other])
    store.index.apply(change)
    store.reclaim()
    flip(store, victim)  # the disk gives the right bytes again
    store.reopen()
    store.segments.check(victim)


@pytest.mark.parametrize("is_idx_broken", [False, True])
def test_a_rotten_row_of_the_parents_does_not_stop_a_scrub(series: Series, is_idx_broken: bool) -> None:
    store = series.store
    _, child = family(series)
    if is_idx_broken:
        break_idx(store, child)
    change = Change()
    change.put(Table.PARENT, child, bytes(33))
    store.index.apply(change)
    run = scrub(store)
    assert run.findings and all(one.healed for one in run.findings)
    check_tables(store)
    assert scrub(store).findings == ()
    series.check()


def test_a_rotten_place_of_a_damaged_chunk_does_not_stop_a_scrub(series: Series) -> None:
    store = series.store
    parent, child = family(series)
    flip(store, parent)
    change = Change()
    change.put(Table.CHUNK, child, b"")
    store.index.apply(change)
    assert {one.chunk for one in scrub(store).findings if not one.healed} >= {parent}
    store.store_bytes(SERIES[0][PATH], PATH)
    scrub(store)
    store.segments.check(child)


@pytest.mark.parametrize("value", [b"", bytes(25), b"\xff" * 26])
def test_a_rotten_place_does_not_stop_a_scrub(series: Series, value: bytes) -> None:
    store = series.store
    _, child = family(series)
    change = Change()
    change.put(Table.CHUNK, child, value)
    store.index.apply(change)
    assert scrub(store).findings
    store.segments.check(child)
    check_tables(store)


# ---- the end of a change -----------------------------------------------------------------------


class Exhausted:
    """Memory runs out when the index has a change in its journal."""

    def __init__(self, store: SmallStore) -> None:
        self._index = store.index
        self._put: Callable[..., None] = store.index._put_or_recover

    def __enter__(self) -> None:
        def fail(_: object) -> None:
            raise MemoryError

        self._index._put_or_recover = fail  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self._index._put_or_recover = self._put  # type: ignore[method-assign]


def reopened_as_after_a_kill(store: SmallStore) -> None:
    """Nothing of what this process still had in memory gets to the disk."""
    store.index._transaction.abort()
    store.index._journal.close()
    store.index._env.close()
    store.segments.close()
    store._open()


def test_bytes_that_the_journal_may_name_stay(series: Series) -> None:
    store = series.store
    store.index.commit()
    payload = saves(1, seed=5)[0][PATH]
    with Exhausted(store), pytest.raises(MemoryError):
        store.store_bytes(payload, PATH)
    reopened_as_after_a_kill(store)
    for number in {located(store.segments, ChunkId(key)).segment for key, _ in store.index.scan(Table.CHUNK)}:
        assert (store.root / segment_paths(number)[0]).exists()
    series.check()


def test_bytes_that_the_journal_may_name_stay_when_they_are_encoded(series: Series) -> None:
    store = series.store
    fresh = Series(store, saves(2, seed=9))
    store.index.commit()
    with Exhausted(store), pytest.raises(MemoryError):
        trio.run(reencoder(store).encode, fresh.planned(0))
    reopened_as_after_a_kill(store)
    assert encoded_chunks(fresh, 0)
    fresh.check()
    check_tables(store)
