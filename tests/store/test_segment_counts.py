"""store/segment_counts.py: how much is stored raw and how much encoded, which nobody walks the store for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import trio
from encoded_series import (
    PATH,
    Series,
    check_counts,
    encoded_series,
    rebuilt,
    reencoder,
    removed,
    saves,
    scrub,
)
from golden import plain, vectors

from ckptfs.store.index import Change, Table
from ckptfs.store.segment_counts import Counts, Stored, moved_by
from ckptfs.store.segment_format import (
    Codec,
    SegmentFacts,
    SegmentKind,
    decode_facts,
    decode_location,
    encode_facts,
)

SERIES = saves(4)


@pytest.fixture
def series(tmp_path: Path) -> Iterator[Series]:
    with encoded_series(tmp_path, SERIES) as one:
        yield one


@pytest.mark.parametrize("vector", vectors("segment_facts"), ids=lambda v: v["name"])
def test_golden_facts(vector: dict[str, object]) -> None:
    encoded = bytes.fromhex(str(vector["hex"]))
    facts = decode_facts(encoded)
    assert plain(facts) == vector["facts"]
    if not vector["older"]:
        assert encode_facts(facts) == encoded


def test_what_is_encoded_counts_at_once_and_after_a_restart(series: Series) -> None:
    before = check_counts(series.store)
    assert 0 < before.encoded_bytes < 0.8 * before.plain_bytes and before.raw_bytes > 0
    done = trio.run(reencoder(series.store).encode, series.planned(len(SERIES) - 1))
    assert done.encoded_bytes > 0
    after = check_counts(series.store)
    assert after.raw_bytes == before.raw_bytes - done.encoded_plain_bytes
    assert after.encoded_bytes == before.encoded_bytes + done.encoded_bytes
    assert after.plain_bytes == before.plain_bytes + done.encoded_plain_bytes
    series.store.reopen()
    assert check_counts(series.store) == after


def test_what_is_removed_counts_no_more(series: Series) -> None:
    store, before = series.store, check_counts(series.store)
    rows = {key: decode_location(value) for key, value in store.index.scan(Table.CHUNK)}
    half = [chunk for number in range(2) for path in SERIES[0] for chunk in series.chunks(number, path)]
    gone = removed(store, half)
    assert any(rows[chunk].codec != Codec.RAW for chunk in gone)
    after = check_counts(store)
    assert before.raw_bytes + before.encoded_bytes - sum(rows[chunk].stored for chunk in gone) == (
        after.raw_bytes + after.encoded_bytes
    )
    assert after.plain_bytes < before.plain_bytes


def test_a_rebuild_counts_the_same(series: Series) -> None:
    removed(series.store, series.chunks(0))
    before = check_counts(series.store)
    rebuilt(series)
    assert check_counts(series.store) == before


def test_what_an_older_release_encoded_is_counted_by_a_scrub_that_finds_nothing(series: Series) -> None:
    store, right = series.store, check_counts(series.store)
    change = Change()
    for key, row in store.index.scan(Table.SEGMENT):
        change.put(Table.SEGMENT, key, msgspec.msgpack.encode(msgspec.msgpack.decode(row)[:-1]))
    store.index.apply(change)
    store.reopen()
    uncounted = store.segments.stored()
    assert uncounted == Stored(right.raw_bytes, right.encoded_bytes, right.encoded_bytes)
    # What goes of it meanwhile does not make less of it than nothing.
    removed(store, series.chunks(0, PATH))
    assert store.segments.stored().plain_bytes == store.segments.stored().encoded_bytes
    assert scrub(store).findings == ()
    check_counts(store)
    assert store.segments.stored().plain_bytes > store.segments.stored().encoded_bytes


def test_no_count_falls_below_nothing() -> None:
    facts = SegmentFacts(SegmentKind.ENCODED, 100, 50, 2, 0, spared_bytes=10)
    less = moved_by(facts, Counts(-3, -60, -20))
    assert (less.chunks, less.payload_bytes, less.spared_bytes) == (0, 0, 0)
