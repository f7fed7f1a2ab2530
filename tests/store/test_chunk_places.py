"""store/chunk_places.py: what is remembered is what the index would say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.store.chunk_places import ChunkPlaces
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import chunk_id
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.segment_format import Location, encode_location

CHUNK = chunk_id(b"a chunk")


class CountingIndex(Index):
    """Counts the look-ups."""

    looked_up = 0

    def get(self, table: Table, key: bytes) -> bytes | None:
        self.looked_up += 1
        return super().get(table, key)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[CountingIndex]:
    one = CountingIndex(Disk(str(tmp_path)))
    yield one
    one.close()


def place(offset: int) -> Location:
    return Location(1, offset, 7, 7)


def put(index: Index, encoded: bytes | None) -> None:
    change = Change()
    if encoded is None:
        change.delete(Table.CHUNK, CHUNK)
    else:
        change.put(Table.CHUNK, CHUNK, encoded)
    index.apply(change)


def test_a_place_is_looked_up_once_until_something_changes(index: CountingIndex) -> None:
    places = ChunkPlaces(index)
    put(index, encode_location(place(4096)))
    index.looked_up = 0
    assert [places.get(CHUNK) for _ in range(3)] == [place(4096)] * 3
    assert index.looked_up == 1
    put(index, encode_location(place(8192)))
    assert places.get(CHUNK) == place(8192)
    put(index, None)
    assert places.get(CHUNK) is None


def test_what_is_not_there_or_damaged_is_not_remembered(index: CountingIndex) -> None:
    places = ChunkPlaces(index)
    assert places.get(CHUNK) is None
    put(index, b"no place")
    for _ in range(2):
        with pytest.raises(Corrupt):
            places.get(CHUNK)


def test_who_looks_up_while_a_change_is_made_does_not_keep_what_was_before(index: CountingIndex) -> None:
    """Watchers are told of a change before it is to be read."""
    places = ChunkPlaces(index)
    put(index, encode_location(place(4096)))
    with index.watch(lambda _: places.get(CHUNK) and None):
        put(index, encode_location(place(8192)))
    assert places.get(CHUNK) == place(8192)
