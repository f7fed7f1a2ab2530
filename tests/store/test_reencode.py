"""reencode, encoded_writer, encoding_batch, chunk_files: encoded or not, every byte is the one that was
saved, and no raw byte goes before its encoding is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
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
    rebuilt,
    reencoder,
    saves,
    tensor_file,
)
from small_store import SmallStore, memory_or

from ckptfs.store.bad_chunks import find_bad, find_bad_places
from ckptfs.store.chain_shape import ChainShape
from ckptfs.store.encoding_batch import EncodingBatch, encode_batch, freed_bytes
from ckptfs.store.encoding_plan import PlannedChunk
from ckptfs.store.errors import Corrupt
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Table
from ckptfs.store.layout import CONTEXTS, ENCODED, Format, encode_format, read_format
from ckptfs.store.packing import Built
from ckptfs.store.reencode import Reencoder
from ckptfs.store.segment_files import read_idx
from ckptfs.store.segment_format import (
    BLOCK_BYTES,
    MAX_DEPTH,
    Codec,
    Location,
    SegmentKind,
    encode_location,
    segment_paths,
)

SERIES = saves(5)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SmallStore]:
    root = memory_or(tmp_path)
    (root / "format").write_bytes(encode_format(Format()))
    one = SmallStore(root)
    try:
        yield one
    finally:
        one.close()
        shutil.rmtree(root)


@pytest.fixture
def series(store: SmallStore) -> Series:
    return Series(store, SERIES)


def codecs(series: Series, number: int, path: str) -> set[int]:
    return {located(series.store.segments, chunk).codec for chunk in series.chunks(number, path)}


def test_every_byte_is_the_same_and_it_takes_less(series: Series) -> None:
    before = series.store.occupied_bytes()
    series.encode_all()
    series.check()
    series.store.reopen()
    series.check(100_000)
    check_tables(series.store)
    assert codecs(series, 0, PATH) >= {Codec.PLANES}
    assert codecs(series, 1, PATH) >= {Codec.DELTA} and Codec.RAW not in codecs(series, 1, PATH) - {Codec.RAW}
    assert codecs(series, 1, BFLOAT16) >= {Codec.CAST}
    assert series.store.segments.payload_bytes() < 0.8 * sum(len(p) for s in SERIES for p in s.values())
    assert series.store.occupied_bytes() < 0.8 * before
    kinds = {read_idx(series.store.disk, int(p.stem, 16)).kind for p in idx_files(series.store)}
    assert SegmentKind.ENCODED in kinds


def test_at_the_small_level_it_takes_less_still_and_what_was_encoded_stays(
    tmp_path: Path, series: Series
) -> None:
    series.encode_all()
    fast = series.store.segments.payload_bytes()
    series.level = "small"
    series.encode_all()
    assert series.store.segments.payload_bytes() == fast
    with encoded_series(tmp_path, SERIES, "small") as one:
        assert codecs(one, 0, PATH) >= {Codec.PLANES}
        assert codecs(one, 1, PATH) >= {Codec.CONTEXT} and codecs(one, 1, BFLOAT16) >= {Codec.CAST}
        assert one.store.segments.payload_bytes() < 0.99 * fast
        one.check(100_000)
        check_tables(one.store)
        assert rebuilt(one) == []
        one.check()
        check_tables(one.store)


def idx_files(store: SmallStore) -> list[Path]:
    return [path for path in store.segment_files() if path.suffix == ".idx"]


def test_programs_that_do_not_know_encoded_segments_are_kept_out_before_the_first(series: Series) -> None:
    store = series.store
    flags: list[tuple[str, ...]] = []

    async def run(batch: EncodingBatch) -> Built | None:
        flags.append(read_format(store.disk).incompat)
        return encode_batch(store.disk, batch)

    one = reencoder(store)
    one._run_batch = run
    trio.run(one.encode, series.planned(0))
    trio.run(one.encode, series.planned(1), "small")
    assert flags == [(ENCODED,), (ENCODED, CONTEXTS)]


def test_a_chain_is_no_longer_than_it_may_be(store: SmallStore) -> None:
    series = Series(store, saves(MAX_DEPTH + 5, values=20_000))
    series.encode_all()
    depths = [
        max(store.segments.parents.depth(chunk) for chunk in series.chunks(n)) for n in range(MAX_DEPTH + 4)
    ]
    assert depths == [*range(MAX_DEPTH + 1), *[MAX_DEPTH] * 3]
    store.reopen()
    series.check()
    check_tables(store)


def test_saves_are_encoded_against_a_base_that_has_room_for_them(store: SmallStore) -> None:
    """Two children each: the third stands alone, and is the base of the next two."""
    series = Series(store, [{PATH: save[PATH]} for save in saves(8, values=20_000)])
    one = Reencoder(
        store.disk, store.index, store.segments, store.ingest.committer, shape=ChainShape(depth=1, children=2)
    )
    for number in range(7):
        trio.run(one.encode, series.planned(number))
    for number in range(7):
        lineages = [
            lineage
            for chunk in encoded_chunks(series, number)
            if (lineage := store.segments.parents.lineage(chunk)) is not None
        ]
        assert bool(lineages) == (number % 3 > 0)
        bases = set(series.chunks(number - number % 3))
        assert all(lineage.depth == 1 and bases.issuperset(lineage.parents) for lineage in lineages)
    store.reopen()
    series.check()
    check_tables(store)


def test_by_itself_a_difference_leads_to_one_chunk_and_a_cast_to_two_more_at_most(series: Series) -> None:
    store = series.store
    one = Reencoder(store.disk, store.index, store.segments, store.ingest.committer)
    for number in range(4):
        trio.run(one.encode, series.planned(number))
    depths = {
        codec: {
            store.segments.parents.depth(chunk)
            for number in range(4)
            for path in series.files[number]
            for chunk in series.chunks(number, path)
            if located(store.segments, chunk).codec == codec
        }
        for codec in (Codec.DELTA, Codec.CAST)
    }
    assert depths == {Codec.DELTA: {1}, Codec.CAST: {1, 2}}
    series.check()
    check_tables(store)


def test_what_was_encoded_is_left_alone_the_next_time(series: Series) -> None:
    first = series.encode(1)
    assert first.encoded_chunks > 0
    files = series.store.segment_files()
    again = series.encode(1)
    assert (again.encoded_chunks, again.chunks) == (0, first.chunks)
    assert series.store.segment_files() == files


def test_a_parent_that_is_encoded_later_stays_above_its_children(series: Series) -> None:
    for number in (3, 1, 0, 2):
        series.encode(number)
        check_tables(series.store)
    series.store.reopen()
    series.check()


def test_chunks_that_moved_or_are_pinned_meanwhile_stay(series: Series) -> None:
    store = series.store
    planned = series.planned(0)
    pinned = planned[2].chunk
    where = located(store.segments, pinned)
    one = reencoder(store)

    async def scenario() -> None:
        async def run(batch: EncodingBatch) -> Built | None:
            built = encode_batch(store.disk, batch)
            stack.enter_context(store.segments.pins.hold([pinned]))
            return built

        with ExitStack() as stack:
            one._run_batch = run
            await one.encode(planned)

    trio.run(scenario)
    assert located(store.segments, pinned) == where
    store.reclaim()
    store.reopen()
    series.check()
    check_tables(store)


def test_raw_bytes_stay_until_the_encoding_is_committed(series: Series) -> None:
    store = series.store
    store.index.commit()
    before = {path: path.read_bytes() for path in store.segment_files()}
    trio.run(reencoder(store).encode, series.planned(0))
    trio.run(store.ingest.reclaim.execute)
    assert {path: path.read_bytes() for path in before} == before
    store.reclaim()
    assert {path: path.exists() and path.read_bytes() for path in before} != before


def test_a_damaged_chunk_is_left_where_it_is(series: Series) -> None:
    store = series.store
    planned = series.planned(1)
    bad = planned[1].chunk
    flip(store, bad)
    trio.run(reencoder(store).encode, planned)
    assert located(store.segments, bad).codec == Codec.RAW
    with pytest.raises(Corrupt):
        store.segments.check(bad)


def test_a_damaged_parent_is_named_and_its_children_are_wrong(series: Series) -> None:
    series.encode_all()
    store = series.store
    parent, child = family(series)
    flip(store, parent)
    store.reopen()
    place = located(store.segments, parent)
    for chunk in (parent, child):
        with pytest.raises(Corrupt) as error:
            store.segments.read(chunk)
        assert error.value.place is not None
        assert (error.value.place.file, error.value.place.offset) == (
            segment_paths(place.segment)[0],
            place.offset,
        )
        assert error.value.expected == chunk
    assert place.segment in store.segments.suspect and place.segment in store.segments.damaged
    suspects = [(one, located(store.segments, one)) for one in (parent, child)]
    bad = find_bad(store.disk, suspects, store.segments.parents_of(suspects))
    assert {one.chunk for one in bad} == {parent, child}
    assert {(one.place.file, one.place.offset) for one in bad} == {
        (segment_paths(place.segment)[0], place.offset)
    }


def test_a_chunk_whose_parent_is_gone_is_corrupt(series: Series) -> None:
    series.encode_all()
    store = series.store
    parent, child = family(series)
    change = Change()
    change.delete(Table.CHUNK, parent)
    store.index.apply(change)
    with pytest.raises(Corrupt, match="is not in the index"):
        store.segments.check(child)


def test_a_writer_heals_a_chunk_that_cannot_be_decoded(series: Series) -> None:
    series.encode_all()
    store = series.store
    victim = next(one for one in encoded_chunks(series, 2) if store.segments.parents.lineage(one))
    flip(store, victim)
    store.reopen()
    with pytest.raises(Corrupt):
        store.segments.read(victim)
    again = store.store_bytes(SERIES[2][PATH], PATH)
    assert store.read(again) == SERIES[2][PATH]
    assert located(store.segments, victim).codec == Codec.RAW
    store.reclaim()
    store.reopen()
    series.check()
    check_tables(store)


def test_a_dedup_hit_on_an_encoded_chunk_is_a_hit(series: Series) -> None:
    series.encode_all()
    store = series.store
    store.now_ns += 30 * 24 * 3600 * 10**9
    store.reopen()
    before = store.segments.payload_bytes()
    again = store.store_bytes(SERIES[1][PATH], PATH)
    assert store.read(again) == SERIES[1][PATH]
    assert store.segments.payload_bytes() == before
    assert encoded_chunks(series, 1)


def changed_a_little(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    other = values.copy()
    other[::100] += 1
    return other


@pytest.mark.parametrize("kind", ["swapped", "kept as another"])
def test_chunks_of_one_batch_that_may_be_encoded_against_each_other(store: SmallStore, kind: str) -> None:
    """What nothing makes smaller alone is raw still when the save after it is encoded, where it is twice: as
    a chunk, and as the parent of another."""
    rng = np.random.default_rng(3)
    a = np.frombuffer(rng.bytes(8 * 32768), np.int64)
    b = changed_a_little(a)
    c = changed_a_little(b)
    pairs = {"swapped": [(a, b), (b, a), (c, c)], "kept as another": [(b, a), (c, b), (c, c)]}[kind]
    series = Series(
        store,
        [
            {PATH: tensor_file({"a": ("I64", one.tobytes()), "b": ("I64", two.tobytes())})}
            for one, two in pairs
        ],
    )
    series.encode(0)
    series.encode(1)
    for number in (1, 0, 2):  # nothing of it is in memory, and no chunk was decoded on the way to another
        store.reopen()
        for chunk in series.chunks(number):
            store.segments.check(chunk)
    series.check()
    check_tables(store)


def test_a_payload_that_names_itself_is_corrupt(series: Series) -> None:
    """However it came there; and says so in one line, not by an endless descent."""
    series.encode(1)
    store = series.store
    segments = store.segments
    chunk = next(one for one in series.chunks(1) if segments.parents.depth(one) > 0)
    location = located(segments, chunk)
    row = Change()
    lineage = segments.parents.lineage(chunk)
    assert lineage is not None
    row.put(Table.CHUNK, lineage.parents[0], encode_location(location))
    store.index.apply(row)
    with pytest.raises(Corrupt):
        segments.check(chunk)


def test_marks_of_what_was_encoded_do_not_count_for_what_stays(store: SmallStore) -> None:
    """A segment of which some chunks are known to be right, and then gone, is not known to be right."""
    values = np.random.default_rng(1).standard_normal(65536 * 12, np.float32)
    stored = store.store_bytes(tensor_file({"w": ("F32", values.tobytes())}), PATH)
    store.store_bytes(tensor_file({"w": ("F32", (values + 1).tobytes())}), PATH)
    store.reopen()
    segments = store.segments
    chunks = list(segments.read_recipe(stored.recipe).chunks())
    bad, read, next_one = chunks[-1], chunks[1:8], chunks[8]
    flip(store, bad)

    def note_verified(*some: ChunkId) -> None:
        """As verify does, and whoever finds whole files."""
        places = segments.locate_many(some)
        assert find_bad_places(store.disk, places) == []
        segments.note_all_good(places, segments.verified.epoch)

    note_verified(*read)
    planned = [PlannedChunk(chunk, located(segments, chunk).length, "F32") for chunk in read]
    assert trio.run(reencoder(store).encode, planned).encoded_chunks == len(read)
    note_verified(next_one)
    with pytest.raises(Corrupt):
        segments.read(bad)


def test_what_is_written_again_heals_chunks_whose_parents_are_damaged(store: SmallStore) -> None:
    """Also in a mount that has not met the damage: the segment of the chunks themselves is sound."""
    series = Series(store, saves(3, values=65536 * 30, counters=100))
    series.encode(0)
    series.encode(1)
    store.reclaim()
    lineages = [store.segments.parents.lineage(chunk) for chunk in encoded_chunks(series, 1)]
    for parent in {parent for one in lineages if one is not None for parent in one.parents}:
        flip(store, parent)
    store.reopen()
    store.store_bytes(series.files[1][PATH], "again.safetensors")
    store.reclaim()
    for chunk in series.chunks(1):
        store.segments.check(chunk)


def test_what_is_freed_are_the_whole_blocks_that_nothing_else_touches() -> None:
    def place(segment: int, offset: int, stored: int) -> Location:
        return Location(segment, offset, stored, stored)

    block = BLOCK_BYTES
    assert freed_bytes([]) == 0
    assert freed_bytes([place(1, 1, block - 1)]) == 0
    assert freed_bytes([place(1, 1, 2 * block)]) == block
    halves = [place(1, 1, block), place(1, block + 1, 2 * block - 1)]
    assert freed_bytes(halves) == freed_bytes(halves[::-1]) == 2 * block
    assert freed_bytes([place(1, 0, block), place(2, block, block), place(3, 1, block)]) == 2 * block


def test_where_no_room_is_saved_nothing_is_written(store: SmallStore) -> None:
    """What is gained here is less than the two blocks that a segment takes."""
    stored = store.store_bytes(np.random.default_rng(1).bytes(4_000) + bytes(3_000), "a.bin")
    chunks = store.segments.read_recipe(stored.recipe).chunks()
    planned = [PlannedChunk(chunk, located(store.segments, chunk).length) for chunk in chunks]
    files = store.segment_files()
    done = trio.run(reencoder(store).encode, planned)
    assert done.chunks and not done.encoded_chunks
    assert store.segment_files() == files
