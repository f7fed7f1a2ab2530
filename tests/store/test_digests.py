"""digests: what others compute of the same bytes; recorded once, mirrored, gone with their content."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio
from awscrt import checksums
from blake3 import blake3
from golden import broken, plain, vectors
from history_edits import OURS
from hypothesis import given, settings
from hypothesis import strategies as st
from rotting import flip, place_of_chunk, scrub
from saved_store import File, SavedStore

from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.digests import (
    MOST_CONTENTS,
    DigestsRecord,
    FileDigests,
    decode_digests,
    decode_digests_record,
    encode_digests,
)
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NotFound
from ckptfs.store.hashing import WholeHash
from ckptfs.store.histories import Histories
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.history_check import Fault
from ckptfs.store.history_log import history_path
from ckptfs.store.history_proof import prove
from ckptfs.store.ids import ChunkId, RecipeId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.layout import read_format
from ckptfs.store.rebuild import rebuild
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.sweep import Sweeper
from ckptfs.store.tree import Entry
from ckptfs.store.whole_files import WholeFiles

IDS = st.binary(min_size=32, max_size=32)
FILES = st.builds(FileDigests, st.integers(0, (1 << 63) - 1), IDS, IDS, st.integers(0, (1 << 64) - 1))
RECORDS = st.dictionaries(IDS.map(lambda b: RecipeId(ChunkId(b))), FILES, min_size=1, max_size=5).map(
    DigestsRecord
)
RUN = b"run1"


def expected(content: bytes) -> FileDigests:
    return FileDigests(
        len(content),
        hashlib.sha256(content).digest(),
        blake3(content).digest(),
        int(checksums.crc64nvme(content)),
    )


@pytest.mark.parametrize("vector", vectors("digests"), ids=lambda v: v["name"])
def test_golden_records(vector: dict[str, Any]) -> None:
    encoded = bytes.fromhex(vector["hex"])
    record = decode_digests_record(encoded)
    assert record.encode() == encoded
    assert {recipe.hex(): plain(one) for recipe, one in record.contents.items()} == vector["contents"]
    rows = [encode_digests(one).hex() for one in record.contents.values()]
    assert rows == vector["rows"]


def test_the_golden_content_is_what_it_says() -> None:
    (digests,) = decode_digests_record(bytes.fromhex(vectors("digests")[0]["hex"])).contents.values()
    assert digests == expected(b"123456789") and digests.crc64 == 0xAE8B14860A799888


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_pieces_add_up_to_the_whole(pieces: list[bytes]) -> None:
    whole = WholeHash()
    for piece in pieces:
        whole.update(piece)
    joined = b"".join(pieces)
    assert FileDigests(whole.size, whole.sha256(), whole.blake3(), whole.crc64) == expected(joined)


def test_zeros_are_hashed_without_being_there() -> None:
    whole = WholeHash()
    whole.update(b"a")
    whole.update_zeros(3_000_001)
    found = FileDigests(whole.size, whole.sha256(), whole.blake3(), whole.crc64)
    assert found == expected(b"a" + bytes(3_000_001))


@settings(deadline=None)
@given(RECORDS)
def test_what_is_encoded_is_decoded(record: DigestsRecord) -> None:
    assert decode_digests_record(record.encode()) == record
    for one in record.contents.values():
        assert decode_digests(encode_digests(one)) == one


@settings(deadline=None, max_examples=300)
@given(broken(RECORDS.map(lambda record: record.encode())))
def test_any_bytes_are_a_record_or_corrupt(encoded: bytes) -> None:
    try:
        record = decode_digests_record(encoded)
    except Corrupt:
        return
    assert record.encode() == encoded


ROW: list[Node] = [bytes(32), 1, bytes(32), bytes(32), 2]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [ROW, ROW],
        [[b"\1" * 32, *ROW[1:]], ROW],
        [ROW[:4]],
        [[*ROW, 1]],
        [[bytes(31), *ROW[1:]]],
        [[bytes(32), -1, *ROW[2:]]],
        [[bytes(32), 1 << 63, *ROW[2:]]],
        [[bytes(32), True, *ROW[2:]]],
        [[*ROW[:4], -1]],
        [{"a": 1}],
        [[number.to_bytes(32, "big"), *ROW[1:]] for number in range(MOST_CONTENTS + 1)],
    ],
    ids=range(12),
)
def test_a_record_that_nobody_writes_is_corrupt(rows: list[Node]) -> None:
    with pytest.raises(Corrupt):
        decode_digests_record(encode_node({"digests": rows}))


@pytest.mark.parametrize("encoded", [b"", bytes(79), bytes(81), b"\xff" * 80], ids=len)
def test_a_row_that_nobody_writes_is_corrupt(encoded: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_digests(encoded)


# ---- in a store -----------------------------------------------------------------------------


class World:
    """A store with files in versions, and the digests of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.open()

    def open(self) -> None:
        self.store = SavedStore(self.root, key=OURS)
        self.log = DigestLog(self.store.disk, self.store.index, self.store.histories)

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def publish(self, **files: bytes | File) -> VersionRecord:
        tree = {name.encode(): content for name, content in files.items()}
        return trio.run(lambda: self.store.publish(RUN, tree))

    def entries(self, record: VersionRecord) -> dict[bytes, Entry]:
        assert record.top.tree is not None
        return {entry.name: entry for entry in self.store.segments.read_tree(record.top.tree)}

    def recipe(self, record: VersionRecord, name: bytes) -> RecipeId:
        recipe = self.entries(record)[name].recipe
        assert recipe is not None
        return recipe

    def digests(self, recipe: RecipeId) -> FileDigests:
        async def rest(count: int) -> None:
            assert count > 0

        files = WholeFiles(self.store.disk, self.store.segments, trio.CapacityLimiter(1))
        return trio.run(files.digests, recipe, rest)

    def make(self, record: VersionRecord) -> dict[RecipeId, FileDigests]:
        """Digests of all files of a version, recorded."""
        recipes = {entry.recipe for entry in self.entries(record).values() if entry.recipe is not None}
        made = {recipe: self.digests(recipe) for recipe in recipes}
        self.log.record(record.unit, made)
        return made

    def faults(self, record: VersionRecord) -> list[Fault]:
        """What `log --verify` finds."""
        report = prove(self.store.histories.evidence(record.unit), [OURS.public])
        differing = self.store.histories.differing_digests(report.digests.items())
        return [one.fault for one in report.findings] + [Fault.INDEX] * len(differing)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "store")
    yield world
    world.store.close()


def test_they_are_what_others_compute(world: World, rng: random.Random) -> None:
    large, hole = rng.randbytes(700_000), (65536, 40 << 20)
    holed = rng.randbytes(65536) + bytes(hole[1]) + b"end"
    files: dict[str, bytes | File] = {
        "large": large,
        "small": b"s",
        "empty": b"",
        "holed": File(holed, holes=(hole,)),
    }
    record = world.publish(**files)
    whole = {"large": large, "small": b"s", "empty": b"", "holed": holed}
    assert any(
        p.chunk is None for p in world.store.segments.read_recipe(world.recipe(record, b"holed")).pieces()
    )
    for name, content in whole.items():
        assert world.digests(world.recipe(record, name.encode())) == expected(content), name


def test_a_wrong_chunk_has_no_digest(world: World, rng: random.Random) -> None:
    record = world.publish(model=rng.randbytes(700_000))
    recipe = world.recipe(record, b"model")
    chunk = list(world.store.segments.read_recipe(recipe).chunks())[1]
    path, offset, _ = place_of_chunk(world.store, chunk)
    assert world.digests(recipe)  # Verified in this mount: it is read again all the same.
    flip(path, 8 * offset)
    with pytest.raises(Corrupt) as caught:
        world.digests(recipe)
    assert caught.value.expected == chunk and caught.value.place is not None
    assert [bad for bad, _ in world.store.segments.corruptions] == [chunk]
    assert world.store.segments.damaged and world.log.of(recipe) is None


def test_a_content_that_is_gone_is_no_corruption(world: World) -> None:
    with pytest.raises(NotFound):
        world.digests(Recipe([Piece(1, ChunkId(bytes(31) + b"\1"))]).identity())
    assert not world.store.segments.corruptions


def test_a_recipe_whose_chunk_is_missing_or_of_another_length_is_corrupt(world: World) -> None:
    record = world.publish(model=b"abc")
    (chunk,) = world.store.segments.read_recipe(world.recipe(record, b"model")).chunks()
    for wrong in (Recipe([Piece(4, chunk)]), Recipe([Piece(3, ChunkId(b"\7" * 32))])):
        encoded = wrong.encode()
        trio.run(world.store.ingest.store_objects, [(wrong.identity(), encoded)])
        with pytest.raises(Corrupt):
            world.digests(wrong.identity())


def test_they_survive_reopening_and_the_loss_of_the_index(world: World, rng: random.Random) -> None:
    record = world.publish(model=rng.randbytes(300_000), other=b"x")
    made = world.make(record)
    assert read_format(world.store.disk).ro_compat == ("digests",)
    for _ in range(2):
        assert {recipe: world.log.of(recipe) for recipe in made} == made
        assert world.faults(record) == [] and world.store.histories.problems == []
        world.reopen()
    world.store.close()
    shutil.rmtree(world.root / "index")
    report = rebuild(Disk(str(world.root)), boot_id="boot", now_ns=1)
    assert report.problems == report.missing == []
    world.open()
    assert {recipe: world.log.of(recipe) for recipe in made} == made
    assert world.faults(record) == []
    frames = world.store.histories.evidence(record.unit).encoded
    assert frames == (world.root / history_path(record.unit)).read_bytes()


def test_a_record_whose_rows_were_not_written_is_mirrored(world: World) -> None:
    record = world.publish(model=b"x")
    recipe = world.recipe(record, b"model")
    digests = world.digests(recipe)
    payload = DigestsRecord({recipe: digests}).encode()

    class Died(Exception):
        pass

    def die(*_: object, **__: object) -> None:
        raise Died

    world.store.index.apply = die  # type: ignore[method-assign]
    with pytest.raises(Died):
        world.store.histories.append_record(record.unit, RecordKind.DIGESTS, payload, Change())
    del world.store.index.apply  # type: ignore[method-assign]
    assert world.log.of(recipe) is None
    world.reopen()
    assert world.log.of(recipe) == digests and world.faults(record) == []


def test_many_contents_are_several_records(world: World) -> None:
    record = world.publish(**{f"f{number}": b"%d" % number for number in range(MOST_CONTENTS + 1)})
    made = world.make(record)
    assert len(made) == MOST_CONTENTS + 1
    report = prove(world.store.histories.evidence(record.unit), [OURS.public])
    assert report.findings == [] and report.digests == made
    world.log.record(record.unit, {})
    assert prove(world.store.histories.evidence(record.unit), [OURS.public]).head == report.head


def test_rows_go_with_their_content_and_records_stay(world: World) -> None:
    first, second = world.publish(model=b"first"), world.publish(model=b"second")
    made = world.make(first) | world.make(second)
    gone, kept = world.recipe(first, b"model"), world.recipe(second, b"model")
    world.store.histories.forget(first.unit, first.number)
    sweeper = Sweeper(
        world.store.disk, world.store.index, world.store.segments, world.store.histories,
        world.store.ingest.reclaim, lambda: (),
    )  # fmt: skip
    trio.run(sweeper.collect)
    assert world.log.of(gone) is None and world.log.of(kept) == made[kept]
    assert world.faults(second) == []
    assert not scrub(world.store).findings, "a row that went with its content is no finding"
    again = world.publish(model=b"first")
    assert world.recipe(again, b"model") == gone and world.log.of(gone) is None
    assert not scrub(world.store).findings, "a content that came back without its row is no finding"
    assert world.log.of(gone) == made[gone], "its record is still there"
    world.store.histories.forget(again.unit, again.number)
    world.publish(model=b"second")
    trio.run(sweeper.collect)
    world.log.record(first.unit, made)  # Made while the content went: left out.
    assert world.log.of(gone) is None
    world.store.close()
    shutil.rmtree(world.root / "index")
    rebuild(Disk(str(world.root)), boot_id="boot", now_ns=1)
    world.open()
    assert world.log.of(gone) is None and world.log.of(kept) == made[kept]


def test_a_row_that_says_something_else_is_found_and_healed(world: World) -> None:
    record = world.publish(model=b"model", other=b"other")
    made = world.make(record)
    wrong, lost = world.recipe(record, b"model"), world.recipe(record, b"other")
    change = Change()
    change.put(Table.DIGEST, wrong, encode_digests(expected(b"something else")))
    change.delete(Table.DIGEST, lost)
    world.store.index.apply(change)
    assert world.faults(record) == [Fault.INDEX]
    found = scrub(world.store)
    assert [(wrong.hex() in one.what, one.healed) for one in found.findings] == [(True, True)]
    assert {recipe: world.log.of(recipe) for recipe in made} == made
    assert world.faults(record) == []


def test_an_index_from_before_there_were_digests(tmp_path: Path) -> None:
    """Its table is made when it is opened for writing; read only it is as good as empty."""
    store = SavedStore(tmp_path / "store")
    record = trio.run(lambda: store.publish(RUN, {b"model": b"x"}))
    store.close()
    (tmp_path / "store" / "index" / "pages").unlink()
    env = lmdb.open(str(tmp_path / "store" / "index"), max_dbs=20)
    with env.begin(write=True) as transaction:
        transaction.drop(env.open_db(b"digest", txn=transaction))
    env.close()
    disk = Disk(str(tmp_path / "store"))
    index = Index(disk, read_only=True)
    log = DigestLog(disk, index, Histories(disk, index, read_only=True))
    assert log.of(RecipeId(ChunkId(bytes(32)))) is None
    assert index.scan(Table.DIGEST) == [] and index.count(Table.DIGEST) == 0
    index.close()
    world = World(tmp_path / "store")
    made = world.make(record)
    assert {recipe: world.log.of(recipe) for recipe in made} == made
    world.store.close()
