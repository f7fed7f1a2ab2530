"""store/bad_chunks.py: whatever way bytes are read, the chunks found are those that are wrong one by one."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_store import BLOCK_BYTES, SmallStore, memory_or, random_bytes, safetensors

from ckptfs.store import bad_chunks
from ckptfs.store.bad_chunks import find_bad
from ckptfs.store.chunk_files import ChunkFiles
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.hashing import chunk_id, crc64
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Table
from ckptfs.store.mapped_file import MappedFile
from ckptfs.store.places import Suspect, decode_places, places_of
from ckptfs.store.segment_files import Bad, SegmentFiles
from ckptfs.store.segment_format import Location, decode_location, encode_location, segment_paths

MIB = 1 << 20


class WatchedDisk(Disk):
    """Counts mappings; refuses them with `refuses`."""

    maps = 0
    refuses: OSError | None = None

    def map(self, fd: int, length: int, offset: int) -> MappedFile:
        self.maps += 1
        if self.refuses is not None:
            raise self.refuses
        return super().map(fd, length, offset)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SmallStore]:
    """Tensors, plain content, a file with a hole, and small files that share a segment."""
    root = memory_or(tmp_path)
    one = SmallStore(root, WatchedDisk(str(root)))
    try:
        one.store_bytes(
            safetensors({"a": random_bytes(3 * MIB), "b": random_bytes(100_000, 2)}), "a.safetensors"
        )
        one.store_bytes(random_bytes(2 * MIB, 3))
        number = one.stage((0, random_bytes(MIB, 4)), (4 * MIB, random_bytes(MIB, 5)), size=6 * MIB)
        one.store(one.candidate(number))
        numbers = [one.stage((0, random_bytes(n * 1000, n)), size=n * 1000) for n in range(6, 40)]
        one.store(*map(one.candidate, numbers))
        yield one
    finally:
        one.close()
        shutil.rmtree(root)


def suspects_of(store: SmallStore) -> list[Suspect]:
    rows = store.index.scan(Table.CHUNK)
    suspects = [(ChunkId(chunk), decode_location(value)) for chunk, value in rows]
    random.Random(1).shuffle(suspects)
    return suspects


def one_by_one(disk: Disk, suspects: list[Suspect]) -> list[Bad]:
    """What find_bad has to find, by place."""
    files = SegmentFiles(disk)
    chunks = ChunkFiles(files)
    bad = []
    for chunk, one in sorted(suspects, key=lambda pair: (pair[1].segment, pair[1].flags, pair[1].offset)):
        try:
            chunks.read(chunk, one)
        except Corrupt as e:
            bad.append(Bad(chunk, one, None if e.got is None else ChunkId(e.got)))
    files.close()
    return bad


def damage(store: SmallStore, location: Location, at: int) -> None:
    path = store.root / segment_paths(location.segment)[location.in_idx]
    with path.open("r+b") as file:
        file.seek(location.offset + at)
        byte = file.read(1)[0]
        file.seek(location.offset + at)
        file.write(bytes([byte ^ 0x10]))


def watched(store: SmallStore) -> WatchedDisk:
    assert isinstance(store.disk, WatchedDisk)
    return store.disk


def test_what_is_right_is_right_and_holes_stay(store: SmallStore) -> None:
    before = store.occupied_bytes()
    assert find_bad(store.disk, suspects_of(store)) == []
    assert watched(store).maps >= 3, "the long runs were mapped"
    assert store.occupied_bytes() == before


@pytest.mark.parametrize("refusal", [None, errno.EINVAL, errno.EFAULT, errno.ENOMEM])
def test_each_flipped_bit_is_found_with_its_place(store: SmallStore, refusal: int | None) -> None:
    if refusal is not None:
        watched(store).refuses = OSError(refusal, os.strerror(refusal))
    suspects = suspects_of(store)
    draw = random.Random(7)
    for _ in range(3):
        chunk, location = draw.choice(suspects)
        damage(store, location, draw.randrange(location.stored))
        expected = one_by_one(store.disk, suspects)
        assert chunk in [one.chunk for one in expected]
        assert find_bad(store.disk, suspects) == expected


def test_every_chunk_at_each_end_of_a_window(store: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_chunks, "_WINDOW_BYTES", 512 << 10)
    suspects = suspects_of(store)
    last = max((one for _, one in suspects), key=lambda one: one.offset)
    rows = [pair for pair in suspects if pair[1].segment == last.segment and not pair[1].in_idx]
    for chunk, location in rows:
        for at in (0, location.stored - 1):
            damage(store, location, at)
            assert [one.chunk for one in find_bad(store.disk, rows)] == [chunk]
            damage(store, location, at)


def test_a_huge_chunk_needs_no_pipe_for_each_mib_of_it(store: SmallStore) -> None:
    """A recipe of a file of 100 GB is one chunk of 16 MB."""
    content = random_bytes(9 * MIB, 50)
    suspect = chunk_id(content), Location(9999, 0, len(content), len(content))
    path = store.root / segment_paths(9999)[0]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert find_bad(store.disk, [suspect]) == []
    assert watched(store).maps == 0
    damage(store, suspect[1], 5 * MIB)
    assert find_bad(store.disk, [suspect]) == one_by_one(store.disk, [suspect]) != []


def test_a_segment_that_was_cut_off_or_is_gone(store: SmallStore) -> None:
    suspects = suspects_of(store)
    last = max((one for _, one in suspects), key=lambda one: one.offset)
    path = store.root / segment_paths(last.segment)[0]
    os.truncate(path, last.offset + last.stored - BLOCK_BYTES - 1)
    expected = one_by_one(store.disk, suspects)
    assert expected and find_bad(store.disk, suspects) == expected
    path.unlink()
    expected = one_by_one(store.disk, suspects)
    assert len(expected) > 1 and find_bad(store.disk, suspects) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        dict(segment=999), dict(offset=1), dict(offset=1 << 63), dict(offset=(1 << 64) - 1), dict(stored=0),
        dict(stored=1), dict(stored=(1 << 32) - 1), dict(flags=1), dict(offset=0),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_hides_no_other(store: SmallStore, wrong: dict[str, int]) -> None:
    suspects = suspects_of(store)
    at = max(range(len(suspects)), key=lambda i: suspects[i][1].offset)
    chunk, location = suspects[at]
    fields = {name: getattr(location, name) for name in location.__struct_fields__}
    suspects[at] = chunk, Location(**fields | wrong)
    expected = one_by_one(store.disk, suspects)
    assert [one.chunk for one in expected] == [chunk]
    assert find_bad(store.disk, suspects) == expected


def test_an_unknown_codec_is_not_guessed(store: SmallStore) -> None:
    body = bytes((9, 1, 7, 3)) + random_bytes(988)
    of_later = body + crc64(body).to_bytes(8, "little")
    one = store.segments.locate(next(store.segments.read_recipe(store.store_bytes(of_later).recipe).chunks()))
    assert one is not None
    there = Location(one.segment, one.offset, one.stored, one.length + 1, 9, one.flags)
    suspects = [(chunk_id(b"what it was"), there), *suspects_of(store)]
    assert [(bad.location, bad.got) for bad in find_bad(store.disk, suspects)] == [(there, None)]
    with pytest.raises(Unsupported):
        ChunkFiles(SegmentFiles(store.disk)).read(*suspects[0])


def test_nothing_is_nothing_wrong(store: SmallStore) -> None:
    assert find_bad(store.disk, []) == []


def test_a_mapping_hands_out_only_what_is_there(tmp_path: Path) -> None:
    content = random_bytes(3 * BLOCK_BYTES + 100)
    (tmp_path / "x").write_bytes(content)
    disk = Disk(str(tmp_path))
    fd = disk.open_read("x")
    ends = len(content) - 1
    for offset, length in ((0, ends + 1), (1, 1), (BLOCK_BYTES + 7, 2 * BLOCK_BYTES), (ends, 1)):
        mapping = disk.map(fd, len(content) - offset, offset)
        with mapping.loaded(length, offset) as view:
            assert view == content[offset : offset + length]
        mapping.close()
    with pytest.raises(OSError, match="ends before"):
        disk.map(fd, len(content), 1)
    mapping = disk.map(fd, len(content), 0)
    os.truncate(tmp_path / "x", BLOCK_BYTES)
    assert mapping.loaded(BLOCK_BYTES, 0) == content[:BLOCK_BYTES]
    with pytest.raises(OSError) as caught:
        mapping.loaded(1, 2 * BLOCK_BYTES)
    assert caught.value.errno == errno.EFAULT, "and no SIGBUS"
    mapping.close()
    disk.close(fd)


LOCATIONS = st.builds(
    Location,
    st.integers(0, 5), st.integers(0, (1 << 62) - 1), st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1), st.integers(0, 255), st.integers(0, 1),
)  # fmt: skip


@given(st.lists(LOCATIONS, max_size=20), st.data())
def test_columns_are_the_rows(locations: list[Location], data: st.DataObject) -> None:
    chunks = [chunk_id(bytes([i])) for i in range(len(locations))]
    places = places_of(zip(chunks, locations, strict=True))
    assert [places.location(i) for i in range(len(places))] == locations
    encoded = [encode_location(one) for one in locations]
    assert decode_places(chunks, encoded).encoded() == places.encoded() == encoded
    ordered = places.by_place()
    keys = [(one.segment, one.flags, one.offset) for one in map(ordered.location, range(len(ordered)))]
    assert keys == sorted(keys) and sorted(ordered.chunks) == sorted(chunks)
    gone = set(data.draw(st.lists(st.sampled_from(chunks)) if chunks else st.just([])))
    left = places.without(gone)
    assert left.chunks == [chunk for chunk in chunks if chunk not in gone]
    assert left.same_as(places).encoded() == left.encoded()
    assert places.same_as(left).encoded() == left.encoded()
    marks = {(n, mark) for n in places.segments() for mark in places.marks(n)}
    assert marks == {(one.segment, one.offset << 1 | one.flags) for one in locations}


def moved(store: SmallStore, chunk: ChunkId) -> None:
    from ckptfs.store.index import Change

    location = store.segments.locate(chunk)
    assert location is not None
    change = Change()
    there = Location(999, location.offset, location.stored, location.length)
    change.put(Table.CHUNK, chunk, encode_location(there))
    store.index.apply(change)


@pytest.mark.parametrize("forgets", [True, False])
def test_what_moved_while_it_was_hashed_is_not_marked(store: SmallStore, forgets: bool) -> None:
    """A segment is forgotten before its bytes change; so long as none is, what was hashed holds."""
    store.reopen()
    places = store.segments.locate_many([chunk for chunk, _ in suspects_of(store)])
    since = store.segments.verified.epoch
    chunk, first = places.chunks[0], places.location(0)
    moved(store, chunk)
    if forgets:
        store.segments.forget(first.segment)
    store.segments.note_all_good(places, since)
    assert (first in store.segments.verified) != forgets
    assert all(places.location(i) in store.segments.verified for i in range(1, len(places)))
