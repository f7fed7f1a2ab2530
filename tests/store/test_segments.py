"""store/segments.py: what is read is what was stored, or Corrupt that says where."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from kernelmounts import poll
from small_store import SmallStore

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, Unsupported
from ckptfs.store.hashing import chunk_id, crc64
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.index import Change, Table
from ckptfs.store.ingest import Ingested
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.segment_format import Location, encode_location, segment_paths
from ckptfs.store.verified import Pins, Verified


class CountingDisk(Disk):
    """Counts the reads."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int]] = []

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self.reads.append((offset, length))
        return super().pread(fd, length, offset)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SmallStore]:
    one = SmallStore(tmp_path, CountingDisk(str(tmp_path)))
    yield one
    one.close()


def reads(store: SmallStore) -> list[tuple[int, int]]:
    assert isinstance(store.disk, CountingDisk)
    return store.disk.reads


def random_bytes(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


def seg_path(store: SmallStore, chunk: ChunkId) -> tuple[Path, Location]:
    location = store.segments.locate(chunk)
    assert location is not None
    return store.root / segment_paths(location.segment)[location.in_idx], location


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def first_chunk(store: SmallStore, stored: Ingested, at: int = 0) -> ChunkId:
    recipe = store.segments.read_recipe(stored.recipe)
    chunk = recipe.piece(recipe.index_at(at)).chunk
    assert chunk is not None
    return chunk


@pytest.mark.parametrize("request_bytes", [1, 4096, 100_001, 1 << 20])
def test_any_request_reads_the_files_bytes(store: SmallStore, request_bytes: int) -> None:
    payload = random_bytes(600_000 if request_bytes > 1 else 3000)
    stored = store.store_bytes(payload)
    assert store.read(stored, request_bytes) == payload
    store.reopen()
    assert store.read(stored, request_bytes) == payload


def test_reads_stop_at_the_end_and_ranges_are_exact(store: SmallStore) -> None:
    payload = random_bytes(500_000)
    recipe = store.segments.read_recipe(store.store_bytes(payload).recipe)
    draw = random.Random(2)
    for _ in range(200):
        start, length = draw.randrange(510_000), draw.randrange(300_000)
        assert store.segments.read_file(recipe, start, length) == payload[start : start + length]
    reader = store.segments.file_reader(recipe)
    assert reader.size == 500_000
    assert reader.pread(499_990, 100) == payload[499_990:]
    assert reader.pread(-1, 5) == reader.pread(0, 0) == reader.pread(500_000, 1) == b""


def test_verified_neighbours_are_one_read(store: SmallStore) -> None:
    payload = random_bytes(2 << 20)
    recipe = store.segments.read_recipe(store.store_bytes(payload).recipe)
    reads(store).clear()
    assert store.segments.read_file(recipe, 1000, 1 << 20) == payload[1000 : 1000 + (1 << 20)]
    assert reads(store) == [(1000, 1 << 20)]


def test_a_chunk_is_hashed_once_a_mount(store: SmallStore) -> None:
    payload = random_bytes(1 << 20)
    stored = store.store_bytes(payload)
    store.reopen()
    recipe = store.segments.read_recipe(stored.recipe)
    reads(store).clear()
    store.segments.read_file(recipe, 10, 20)
    store.segments.read_file(recipe, 10, 20)
    assert reads(store) == [(0, recipe.piece(0).length), (10, 20)]


def test_holes_read_as_zeros(store: SmallStore) -> None:
    payload = random_bytes(200_000)
    number = store.stage((0, payload), (2 << 20, payload), size=3 << 20)
    (stored,) = store.store(store.candidate(number)).stored
    expected = payload + bytes((2 << 20) - len(payload)) + payload
    expected += bytes((3 << 20) - len(expected))
    assert store.read(stored) == expected
    recipe = store.segments.read_recipe(stored.recipe)
    assert recipe.data_bytes() < len(payload) * 2 + 20_000
    assert stored.blocks * 512 < len(payload) * 2 + 20_000


@pytest.mark.parametrize("length", [1000, 900_000])
def test_a_flipped_bit_is_corrupt_after_a_remount(store: SmallStore, length: int) -> None:
    payload = random_bytes(length)
    stored = store.store_bytes(payload)
    path, location = seg_path(store, first_chunk(store, stored))
    flip(path, location.offset + 5)
    store.reopen()
    recipe = store.segments.read_recipe(stored.recipe)
    for _ in range(2):
        with pytest.raises(Corrupt) as caught:
            store.segments.read_file(recipe, 0, 10)
    error = caught.value
    assert error.place is not None
    assert (error.place.file, error.place.offset) == (str(path.relative_to(store.root)), location.offset)
    assert error.expected == first_chunk(store, stored)
    assert error.got == chunk_id(bytes([*payload[:5], payload[5] ^ 1, *payload[6 : location.length]]))
    assert store.segments.corruptions[-1] == (error.expected, error.place)
    if length > 500_000:
        assert store.segments.read_file(recipe, length - 5, 5) == payload[-5:]


def test_what_is_shown_is_what_is_read(store: SmallStore) -> None:
    """Parts of several segments, small chunks, holes; hashed before and not."""
    shared = random_bytes(400_000)
    store.store_bytes(shared, "first")
    number = store.stage((0, shared), (600_000, random_bytes(700_000, 2)), (3 << 20, b"x"), size=4 << 20)
    (stored,) = store.store(store.candidate(number)).stored
    payload = store.read(stored)
    store.reclaim()
    draw = random.Random(4)
    for _ in range(2):
        store.reopen()
        recipe = store.segments.read_recipe(stored.recipe)
        for _ in range(100):
            start, length = draw.randrange(4_300_000), draw.randrange(3 << 20)
            shown = store.segments.show(store.segments.plan_read(recipe, start, length))
            assert bytes(shown) == payload[start : start + length]


def test_a_segment_that_was_shown_can_be_cut_off_and_leased(store: SmallStore) -> None:
    stored = store.store_bytes(random_bytes(900_000))
    recipe = store.segments.read_recipe(stored.recipe)
    plan = store.segments.plan_read(recipe, 0, 900_000)
    assert bytes(store.segments.show(plan)) == random_bytes(900_000)
    path, location = seg_path(store, first_chunk(store, stored))
    fd = store.disk.open_read(str(path.relative_to(store.root)))
    try:
        assert not store.disk.lease(fd, "write"), "a mapping is seen"
        store.segments.evict(location.segment)
        assert store.disk.lease(fd, "write")
        store.disk.unlease(fd)
    finally:
        store.disk.close(fd)
    store.segments.show(plan)
    os.truncate(path, 100)
    with pytest.raises(Corrupt):
        store.segments.show(plan)


def test_check_finds_what_went_bad_during_the_mount(store: SmallStore) -> None:
    stored = store.store_bytes(random_bytes(300_000))
    chunk = first_chunk(store, stored)
    store.segments.check(chunk)
    path, location = seg_path(store, chunk)
    flip(path, location.offset)
    with pytest.raises(Corrupt):
        store.segments.check(chunk)
    with pytest.raises(Corrupt):
        store.read(stored)


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_a_damaged_segment_file_is_corrupt(store: SmallStore, damage: str) -> None:
    stored = store.store_bytes(random_bytes(300_000))
    path, _ = seg_path(store, first_chunk(store, stored))
    store.reopen()
    if damage == "removed":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(100)
    with pytest.raises(Corrupt) as caught:
        store.read(stored)
    assert caught.value.place is not None and caught.value.place.file == str(path.relative_to(store.root))


def test_a_missing_chunk_and_a_wrong_length_are_corrupt(store: SmallStore) -> None:
    stored = store.store_bytes(random_bytes(1000))
    chunk = first_chunk(store, stored)
    with pytest.raises(Corrupt, match="not in the index"):
        store.segments.read_file(Recipe([Piece(10, ChunkId(b"\7" * 32))]), 0, 10)
    with pytest.raises(Corrupt, match="differ in length"):
        store.segments.read_file(Recipe([Piece(999, chunk)]), 0, 10)
    with pytest.raises(Corrupt):
        store.segments.read_recipe(RecipeId(chunk))


def test_an_unknown_codec_is_refused(store: SmallStore) -> None:
    body = bytes((9, 1, 7, 3)) + random_bytes(988)
    of_later = body + crc64(body).to_bytes(8, "little")
    chunk = first_chunk(store, store.store_bytes(of_later))
    _, location = seg_path(store, chunk)
    change = Change()
    later = Location(location.segment, location.offset, 1000, 1001, 9, 0)
    change.put(Table.CHUNK, chunk, encode_location(later))
    store.index.apply(change)
    with pytest.raises(Unsupported, match=r"codec 9 version 1: ckptfs 7\.3 or later"):
        store.segments.read(chunk)


def test_parts_of_a_chunk(store: SmallStore) -> None:
    payload = random_bytes(1000)
    chunk = first_chunk(store, store.store_bytes(payload))
    for remount in (False, True):
        if remount:
            store.reopen()
        assert store.segments.read(chunk, 10, 20) == payload[10:30]
        assert store.segments.read(chunk, 990) == payload[990:]
        assert store.segments.read(chunk, 1000, 5) == b""


def test_many_segments_do_not_keep_their_descriptors(store: SmallStore) -> None:
    stored = [store.store_bytes(random_bytes(50, seed)) for seed in range(300)]
    assert all(store.read(one) == random_bytes(50, seed) for seed, one in enumerate(stored))
    root = str(store.root / "segments")
    open_files = [link for fd in range(3000) if (link := link_of(fd)).startswith(root)]
    assert len(open_files) <= 256


def test_verified_is_per_place() -> None:
    verified = Verified()
    verified.add(Location(1, 100, 5, 5))
    assert Location(1, 100, 5, 5) in verified
    assert Location(1, 100, 5, 5, flags=1) not in verified
    assert Location(2, 100, 5, 5) not in verified
    verified.add_segment(2)
    assert Location(2, 1, 5, 5) in verified
    verified.remove_segment(2)
    verified.remove_segment(1)
    assert Location(2, 1, 5, 5) not in verified and Location(1, 100, 5, 5) not in verified


def test_pins_hold_until_the_block_ends() -> None:
    pins, one, two = Pins(), ChunkId(b"1" * 32), ChunkId(b"2" * 32)
    with pins.hold([one]) as first, pins.hold([one]):
        first.add(two)
        assert one in pins and two in pins
    assert one not in pins and two not in pins


def test_trees_are_read_through_the_same_check(store: SmallStore) -> None:
    from ckptfs.store.ids import TreeId
    from ckptfs.store.tree import Entry, encode_tree

    entry = Entry(name=b"a", mode=0o120777, uid=0, gid=0, mtime_ns=1, ctime_ns=2, target=b"b")
    encoded = encode_tree([entry])
    identity = TreeId(chunk_id(encoded))
    trio.run(store.ingest.store_objects, [(identity, encoded)])
    assert store.segments.read_tree(identity) == (entry,)
    assert store.segments.read_tree(identity) is store.segments.read_tree(identity)
    with pytest.raises(Corrupt):
        store.segments.read_tree(TreeId(ChunkId(b"\1" * 32)))


def link_of(fd: int) -> str:
    """What a descriptor of this process refers to; reading the link never waits for a mount."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


class OpenedMeanwhile(Disk):
    """A disk on which somebody opens the segment that is being punched, at its first range."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.punched: list[int] = []
        self.openers: list[threading.Thread] = []

    def punch(self, fd: int, offset: int, length: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.endswith(".seg"):
            return super().punch(fd, offset, length)
        self.punched.append(offset)
        if not self.openers:
            with contextlib.suppress(BlockingIOError):
                os.close(self.open_read(os.path.relpath(path, self.root), waits=False))
                raise AssertionError("nobody has a lease")
            self.openers.append(threading.Thread(target=lambda: os.close(os.open(path, os.O_RDONLY))))
            self.openers[0].start()
            assert poll(lambda: self.is_lease_wanted(fd), 30)
        return super().punch(fd, offset, length)


def test_who_opens_a_segment_waits_for_one_range_of_it_at_most(tmp_path: Path) -> None:
    """It may be the event loop, which everybody waits for."""
    disk = OpenedMeanwhile(str(tmp_path))
    store = SmallStore(tmp_path, disk)
    pieces = [random_bytes(1 << 20, seed + 1) for seed in range(5)]
    store.store_bytes(b"".join(pieces[1::2]), "one.bin")
    stored = store.store_bytes(b"".join(pieces), "two.bin")
    store.reclaim()
    assert len(disk.punched) == 1, "whoever wants it comes first"
    disk.openers[0].join(30)
    assert not disk.openers[0].is_alive()
    store.reclaim()
    assert len(disk.punched) > 1, "the rest is done later"
    assert store.read(stored) == b"".join(pieces)
    store.close()
