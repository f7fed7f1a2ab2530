"""One flipped bit in every kind of stored object: found, not served, nothing else lost, healed if it can."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from rotting import Original, bits_of, contents, flip, opened, place_of_chunk, scrub, scrubber
from saved_store import SavedStore
from small_store import memory_or

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.histories import Histories
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.journal import JOURNAL_PATH
from ckptfs.store.layout import Format, mend_format, read_format
from ckptfs.store.page_sums import PAGE_SUMS_PATH
from ckptfs.store.scrub_state import ScrubRun
from ckptfs.store.segment_counts import Stored
from ckptfs.store.segment_format import (
    Location,
    decode_facts,
    decode_idx,
    decode_location,
    encode_facts,
    encode_location,
    segment_key,
)
from ckptfs.store.signing import SigningKey


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Original]:
    folder = memory_or(tmp_path_factory.mktemp("rot"))
    yield Original(folder / "store")
    shutil.rmtree(folder)


def left_after_scrub(root: Path) -> tuple[ScrubRun, dict[tuple[int, bytes], str]]:
    """What a scrub says, and what can be read afterwards in a new mount."""
    with opened(root) as store:
        run = scrub(store)
        # Healed places are known to be good; the rest is asked of the disk again.
        left = contents(store)
    with opened(root) as store:
        assert contents(store) == left
    return run, left


def chunks_of(store: SavedStore) -> dict[ChunkId, str]:
    """Every chunk of every version: `tree`, `recipe` or `payload`."""
    kinds: dict[ChunkId, str] = {}
    for unit in store.histories.units():
        waiting = [record.top for record in store.histories.versions(unit.unit)]
        while waiting:
            entry = waiting.pop()
            if entry.tree is not None:
                kinds[entry.tree] = "tree"
                waiting += store.segments.read_tree(entry.tree)
            if entry.recipe is not None:
                kinds[entry.recipe] = "recipe"
                kinds |= dict.fromkeys(store.segments.read_recipe(entry.recipe).chunks(), "payload")
    return kinds


def test_an_undamaged_store_is_clean(original: Original) -> None:
    with original.copy() as root:
        run, left = left_after_scrub(root)
        assert run.findings == () and run.chunks > 20 and run.finished_ns
        assert left == original.contents


@pytest.mark.parametrize("kind", ["payload", "tree", "recipe"])
def test_chunks(original: Original, rng: random.Random, kind: str) -> None:
    with opened(original.root) as store:
        places = {chunk: place_of_chunk(store, chunk) for chunk, k in chunks_of(store).items() if k == kind}
    assert len(places) >= 4
    for chunk in rng.sample(sorted(places), min(len(places), 8)):
        path, offset, length = places[chunk]
        bit = rng.choice(bits_of(rng, offset, length, 3))
        with original.copy() as root:
            flip(root / path.relative_to(original.root), bit)
            with opened(root) as store:
                served = contents(store)
                with pytest.raises(Corrupt):
                    store.segments.check(chunk)
            assert served.items() < original.contents.items(), (
                "what is left is right, and the chunk is not served"
            )
            run, left = left_after_scrub(root)
            if path.suffix == ".idx":  # the checksum of the .idx tells which bit it is
                assert [one.healed for one in run.findings] == [True] and left == original.contents
                continue
            damaged = [one for one in run.findings if one.chunk is not None]
            assert [one.chunk for one in damaged] == [chunk]
            assert str(path.relative_to(original.root)) in damaged[0].place
            assert damaged[0].path is not None and damaged[0].path.startswith("/run")
            assert left == served and run.corrupt == 1
            lost = {key for key in original.contents if key not in left}
            assert all(touches(original, chunk, kind, key) for key in lost)


def touches(original: Original, chunk: ChunkId, kind: str, key: tuple[int, bytes]) -> bool:
    """Whether a file of a version needs a chunk."""
    number, path = key
    with opened(original.root) as store:
        (unit,) = store.histories.units()
        record = store.histories.version(unit.unit, number)
        assert record is not None
        entry = record.top
        needed = {entry.tree}
        for name in path.split(b"/"):
            assert entry.tree is not None
            entry = next(e for e in store.segments.read_tree(entry.tree) if e.name == name)
            needed |= {entry.tree, entry.recipe}
        assert entry.recipe is not None
        return chunk in needed | set(store.segments.read_recipe(entry.recipe).chunks())


def test_the_tensor_is_named(original: Original) -> None:
    with opened(original.root) as store:
        (unit,) = store.histories.units()
        record = store.histories.version(unit.unit, 1)
        assert record is not None and record.top.tree is not None
        model = next(e for e in store.segments.read_tree(record.top.tree) if e.name == b"model.safetensors")
        assert model.recipe is not None
        recipe = store.segments.read_recipe(model.recipe)
        chunk = recipe.piece(recipe.index_at(recipe.size - 200_000)).chunk
        assert chunk is not None
        path, offset, _ = place_of_chunk(store, chunk)
    with original.copy() as root:
        flip(root / path.relative_to(original.root), 8 * offset)
        run, _ = left_after_scrub(root)
    assert [(one.path, one.tensor) for one in run.findings] == [("/run/model.safetensors@1", "w")]


IDX_FIELDS = {
    "magic": (0, 4), "version": (4, 2), "kind": (6, 1), "flags": (7, 1), "number": (8, 8), "created": (16, 8),
    "file_bytes": (24, 8), "inline_bytes": (32, 4), "rows": (36, 4),
}  # fmt: skip
ROW_FIELDS = {
    "chunk": (0, 32), "offset": (32, 8), "stored": (40, 4), "length": (44, 4), "codec": (48, 1),
    "flags": (49, 1), "reserved": (50, 2),
}  # fmt: skip


def idx_places(encoded: bytes) -> dict[str, tuple[int, int]]:
    """Every field of an `.idx`: (offset, length)."""
    rows = len(decode_idx(encoded).rows)
    start = len(encoded) - 8 - 52 * rows
    fields = dict(IDX_FIELDS)
    if start > 40:
        fields["inline"] = (40, start - 40)
    for name, (at, length) in ROW_FIELDS.items():
        for row in {0, rows - 1}:
            fields[f"row {row} {name}"] = (start + 52 * row + at, length)
    return fields | {"checksum": (len(encoded) - 8, 8)}


def test_every_field_of_an_idx(original: Original, rng: random.Random) -> None:
    paths = sorted(path.relative_to(original.root) for path in original.root.glob("segments/*/*.idx"))
    whole = {path: (original.root / path).read_bytes() for path in paths}
    with_inline = max(paths, key=lambda path: len(decode_idx(whole[path]).inline))
    for path in {with_inline, paths[-1]}:
        for field, (at, length) in idx_places(whole[path]).items():
            with original.copy() as root:
                flip(root / path, rng.choice(bits_of(rng, at, length, 2)))
                run, left = left_after_scrub(root)
                assert (root / path).read_bytes() == whole[path], (path, field)
            assert left == original.contents, (path, field)
            assert [(one.place, one.healed) for one in run.findings] == [(str(path), True)], (path, field)


def test_an_idx_that_is_damaged_beyond_one_bit_is_made_anew_from_the_index(original: Original) -> None:
    for path in sorted(path.relative_to(original.root) for path in original.root.glob("segments/*/*.idx")):
        for damaged in (b"", b"\0" * 300, None):
            with original.copy() as root:
                if damaged is None:
                    (root / path).unlink()
                else:
                    (root / path).write_bytes(damaged + (root / path).read_bytes()[len(damaged) :])
                    if not damaged:
                        flip(root / path, 4 * 8)
                        flip(root / path, 8 * (root / path).stat().st_size - 1)
                run, left = left_after_scrub(root)
                # Bytes of the inline area that are gone are a recipe that is gone.
                inline = decode_idx((original.root / path).read_bytes()).inline
                assert left == original.contents or (inline and damaged != b"")
                assert run.findings[0].place == str(path) and run.findings[0].healed
                assert scrub_again(root) == [one.chunk for one in run.findings if one.chunk is not None]


def scrub_again(root: Path) -> list[ChunkId | None]:
    with opened(root) as store:
        return [one.chunk for one in scrub(store).findings]


def test_pages_of_the_index(original: Original, rng: random.Random) -> None:
    size = (original.root / "index/data.mdb").stat().st_size
    for page in range(size // 4096):
        for bit in bits_of(rng, 4096 * page, 4096, 2):
            with original.copy() as root:
                flip(root / "index/data.mdb", bit)
                with opened(root) as store:
                    assert len(store.index.problems) == 1 and f"pages ({page},)" in store.index.problems[0]
                    assert contents(store) == original.contents
                    assert scrub(store).findings == ()


def test_a_page_with_more_than_a_bit_is_refused(original: Original) -> None:
    with original.copy() as root:
        flip(root / "index/data.mdb", 8 * 4096 + 100)
        flip(root / "index/data.mdb", 8 * 4096 + 7000)
        with pytest.raises(Corrupt, match="ckptfs rebuild"):
            SavedStore(root)
        with pytest.raises(Corrupt, match=r"index/data\.mdb at byte 4096"):
            Index(disk_of(root), read_only=True)


def disk_of(root: Path) -> Disk:
    return Disk(str(root))


def test_checksums_of_the_index_that_are_damaged_are_told(original: Original, rng: random.Random) -> None:
    size = (original.root / PAGE_SUMS_PATH).stat().st_size
    for bit in bits_of(rng, 0, size, 20):
        with original.copy() as root:
            flip(root / PAGE_SUMS_PATH, bit)
            with opened(root) as store:
                assert len(store.index.problems) == 1
                assert contents(store) == original.contents


def test_the_format_file(original: Original, rng: random.Random) -> None:
    encoded = (original.root / "format").read_bytes()
    with original.copy() as root:
        for bit in range(8 * len(encoded)):
            flip(root / "format", bit)
            assert read_format(disk_of(root)) == Format()
            assert mend_format(disk_of(root)) is not None
            assert mend_format(disk_of(root)) is None
            assert (root / "format").read_bytes() == encoded
    for bit in rng.sample(range(8 * len(encoded)), 5):
        with original.copy() as root:
            flip(root / "format", bit)
            run, left = left_after_scrub(root)
            assert [(one.place, one.healed) for one in run.findings] == [("format", True)], bit
            assert left == original.contents


FRAME_FIELDS = {
    "magic": (0, 4), "version": (4, 1), "kind": (5, 1), "reserved": (6, 2), "length": (8, 4),
    "sequence": (12, 8),
}  # fmt: skip


def frame_places(encoded: bytes, end: int) -> list[tuple[str, int, int]]:
    """(field, offset, length) of every frame up to byte `end`."""
    places = []
    at = 0
    while at < end:
        length = int.from_bytes(encoded[at + 8 : at + 12], "little")
        places += [(name, at + start, size) for name, (start, size) in FRAME_FIELDS.items()]
        places += [("payload", at + 20, length), ("checksum", at + 20 + length, 8)]
        at += 28 + length
    return places


def test_records_of_a_history(original: Original, rng: random.Random) -> None:
    (path,) = (original.root / "history").iterdir()
    whole = path.read_bytes()
    for field, at, length in frame_places(whole, len(whole)):
        with original.copy() as root:
            flip(root / "history" / path.name, rng.choice(bits_of(rng, at, length, 2)))
            run, left = left_after_scrub(root)
            assert [one.healed for one in run.findings] == [True], (field, at)
            assert (root / "history" / path.name).read_bytes() == whole, (field, at)
            assert left == original.contents


def test_records_of_a_history_without_an_index(original: Original, rng: random.Random) -> None:
    from ckptfs.store.rebuild import rebuild

    (path,) = (original.root / "history").iterdir()
    whole = path.read_bytes()
    for field, at, length in rng.sample(frame_places(whole, len(whole)), 12):
        with original.copy() as root:
            flip(root / "history" / path.name, rng.choice(bits_of(rng, at, length, 2)))
            shutil.rmtree(root / "index")
            found = rebuild(disk_of(root), boot_id="now", now_ns=1)
            assert found.versions == 2 and len(found.problems) == 1, (field, at)
            with opened(root) as store:
                assert contents(store) == original.contents
                assert scrub(store).findings == ()


def test_a_version_record_with_more_than_a_bit_comes_back_from_the_index(original: Original) -> None:
    (path,) = (original.root / "history").iterdir()
    whole = path.read_bytes()
    starts = [at for name, at, _ in frame_places(whole, len(whole)) if name == "magic"]
    versions = [at for at in starts if whole[at + 5] == 2]
    assert len(versions) == 2
    for at in versions:
        with original.copy() as root:
            damaged = root / "history" / path.name
            damaged.write_bytes(whole[: at + 20] + bytes(50) + whole[at + 70 :])
            run, left = left_after_scrub(root)
            assert [one.healed for one in run.findings] == [True]
            assert damaged.read_bytes() == whole
            assert left == original.contents


def test_seals_of_a_history(tmp_path: Path, rng: random.Random) -> None:
    with opened(tmp_path / "store") as store:
        store.histories = Histories(store.disk, store.index, key=SigningKey(bytes(32)))
        record = trio.run(store.publish, b"run", {b"x": b"y" * 1000})
        store.histories.tag(record.unit, 1, "good")
    (path,) = (tmp_path / "store/history").iterdir()
    whole = path.read_bytes()
    for field, at, length in frame_places(whole, len(whole)):
        flip(path, rng.choice(bits_of(rng, at, length, 2)))
        with opened(tmp_path / "store") as store:
            assert [one.healed for one in scrub(store).findings] == [True], (field, at)
        assert path.read_bytes() == whole, (field, at)


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A store whose daemon was killed: five changes are in its journal only; (root, the journal's end)."""
    folder = memory_or(tmp_path)
    store = SavedStore(folder / "store")
    for number in range(5):
        change = Change()
        change.put(Table.META, b"x%d" % number, b"value %d" % number)
        store.index.apply(change, sync=True)
    end = store.index._journal.size_bytes()
    shutil.copytree(folder / "store", folder / "killed")
    store.close()
    yield folder / "killed", end
    shutil.rmtree(folder)


def values(store: SavedStore) -> list[bytes | None]:
    return [store.index.get(Table.META, b"x%d" % number) for number in range(5)]


def test_records_of_the_journal(killed: tuple[Path, int], rng: random.Random) -> None:
    root, end = killed
    whole = (root / JOURNAL_PATH).read_bytes()
    for field, at, length in frame_places(whole, end):
        copy = root.parent / "copy"
        shutil.copytree(root, copy)
        flip(copy / JOURNAL_PATH, rng.choice(bits_of(rng, at, length, 2)))
        with opened(copy) as store:
            assert values(store) == [b"value %d" % n for n in range(5)], (field, at)
            assert len(store.index.problems) == 1
        shutil.rmtree(copy)


def test_a_journal_damaged_in_the_middle_is_not_replayed_in_part(killed: tuple[Path, int]) -> None:
    root, end = killed
    whole = (root / JOURNAL_PATH).read_bytes()
    starts = [at for name, at, _ in frame_places(whole, end) if name == "magic"]
    (root / JOURNAL_PATH).write_bytes(whole[: starts[1] + 20] + b"\xff" * 9 + whole[starts[1] + 29 :])
    change_of_boot = root.parent / "rebooted"
    shutil.copytree(root, change_of_boot)
    with opened(change_of_boot) as store:
        assert values(store)[0] == b"value 0" and values(store)[1:] == [None] * 4
        assert "power cut" in store.index.problems[0]
        assert list((change_of_boot / "quarantine").glob("journal-*"))


def test_scrub_checks_the_journal(original: Original) -> None:
    with original.copy() as root, opened(root) as store:
        change = Change()
        change.put(Table.META, b"x", b"y" * 100)
        store.index.apply(change, sync=True)
        flip(root / JOURNAL_PATH, 8 * 60)
        run = scrub(store)
        assert [(one.place.split()[0], one.healed) for one in run.findings] == [(JOURNAL_PATH, True)]
        assert scrub(store).findings == ()


# ---- rows of the index that are wrong, and second copies ---------------------------------------------


def payload_of(store: SavedStore) -> tuple[ChunkId, Location]:
    chunk = next(c for c, kind in sorted(chunks_of(store).items()) if kind == "payload")
    location = store.segments.locate(chunk)
    assert location is not None
    return chunk, location


@pytest.mark.parametrize(
    "wrong",
    [
        dict(segment=999), dict(offset=1), dict(offset=1 << 63), dict(stored=1), dict(length=5),
        dict(codec=3), dict(flags=1), dict(stored=(1 << 32) - 1), None,
    ],
)  # fmt: skip
def test_a_wrong_row_of_the_chunk_table(original: Original, wrong: dict[str, int] | None) -> None:
    with original.copy() as root:
        with opened(root) as store:
            chunk, location = payload_of(store)
            fields = {name: getattr(location, name) for name in location.__struct_fields__}
            change = Change()
            if wrong is None:
                change.delete(Table.CHUNK, chunk)
            else:
                change.put(Table.CHUNK, chunk, encode_location(Location(**fields | wrong)))
            store.index.apply(change)
        run, left = left_after_scrub(root)
        assert left == original.contents
        assert run.corrupt == 0 and chunk in [one.chunk for one in run.findings]
        with opened(root) as store:
            assert store.segments.locate(chunk) == location
            assert scrub(store).findings == ()
            assert counts_are_right(store)


def counts_are_right(store: SavedStore) -> bool:
    counts: dict[int, list[int]] = {}
    for _, value in store.index.scan(Table.CHUNK):
        location = decode_location(value)
        counts.setdefault(location.segment, []).append(location.stored)
        assert location.stored == location.length
    rows = {int.from_bytes(key, "big"): decode_facts(v) for key, v in store.index.scan(Table.SEGMENT)}
    told = {n: (one.chunks, one.payload_bytes, one.spared_bytes) for n, one in rows.items() if one.chunks}
    total_bytes = sum(sum(sizes) for sizes in counts.values())
    is_summed_up = store.segments.stored() == Stored(total_bytes)
    return is_summed_up and told == {n: (len(sizes), sum(sizes), 0) for n, sizes in counts.items()}


@pytest.mark.parametrize("wrong", ["chunks", "payload_bytes", "spared_bytes", "gone"])
def test_a_wrong_row_of_the_segment_table(original: Original, wrong: str) -> None:
    with original.copy() as root, opened(root) as store:
        _, location = payload_of(store)
        key = segment_key(location.segment)
        right = store.segments.facts(location.segment)
        assert right is not None
        fields = {name: getattr(right, name) for name in right.__struct_fields__}
        change = Change()
        if wrong == "gone":
            change.delete(Table.SEGMENT, key)
        else:
            change.put(Table.SEGMENT, key, encode_facts(type(right)(**fields | {wrong: 77})))
        store.index.apply(change)
        run = scrub(store)
        assert [one.healed for one in run.findings] == [True]
        assert counts_are_right(store) and contents(store) == original.contents
        assert scrub(store).findings == ()


def test_a_chunk_heals_from_its_copy_in_another_segment(original: Original) -> None:
    from ckptfs.store.cutting import Fresh
    from ckptfs.store.packing import PackWriter

    with original.copy() as root:
        with opened(root) as store:
            chunk = payload_of(store)[0]
            payload = store.segments.read(chunk)
            path, offset, _ = place_of_chunk(store, chunk)
            writer = PackWriter(store.disk, 500, 1)
            writer.append([Fresh(chunk, 0, len(payload), payload)])
            built = writer.seal()
            change = Change()
            change.put(Table.SEGMENT, segment_key(500), encode_facts(built.facts()))
            store.index.apply(change)
        flip(path, 8 * offset)
        run, left = left_after_scrub(root)
        assert left == original.contents
        assert [(one.chunk, one.healed) for one in run.findings] == [(chunk, True)]
        with opened(root) as store:
            moved = store.segments.locate(chunk)
            assert moved is not None and moved.segment == 500
            assert counts_are_right(store)
            trio.run(store.ingest.reclaim.execute)
            assert scrub(store).findings == ()


def test_a_chunk_heals_from_what_is_written_again(original: Original) -> None:
    from rotting import trees

    with original.copy() as root:
        with opened(root) as store:
            path, offset, _ = place_of_chunk(store, payload_of(store)[0])
        flip(path, 8 * offset)
        with opened(root) as store:
            assert scrub(store).corrupt == 1
        # Another mount remembers that the segment is not to be trusted: every hit in it is checked.
        with opened(root) as store:
            trio.run(store.publish, b"run", trees()[0])
            trio.run(store.publish, b"run", trees()[1])
            assert contents(store).items() >= original.contents.items()
            assert scrub(store).corrupt == 0


def test_a_scrub_goes_on_where_it_was_interrupted(original: Original) -> None:
    with original.copy() as root:
        with opened(root) as store:
            path, offset, _ = place_of_chunk(store, payload_of(store)[0])
            whole = scrub(store).chunks
        flip(path, 8 * offset)
        with opened(root) as store:
            one = scrubber(store)

            async def interrupted() -> None:
                # As slow as this, not even the first segment is through when the time is up.
                with trio.move_on_after(0.4):
                    await one.go_on(1000.0)

            trio.run(interrupted)
            unfinished = one.unfinished()
            assert unfinished is not None and not unfinished.finished_ns
        with opened(root) as store:
            one = scrubber(store)
            run = trio.run(one.go_on, 1e12)
            assert one.unfinished() is None and one.last() == run
            assert run.started_ns == unfinished.started_ns
            assert run.corrupt == 1 and run.chunks >= whole


def test_a_copy_of_the_segment_goes_to_quarantine_once(original: Original) -> None:
    from ckptfs.store.quarantine import Quarantine

    with original.copy() as root:
        with opened(root) as store:
            path, offset, _ = place_of_chunk(store, payload_of(store)[0])
        flip(path, 8 * offset)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with opened(root) as store:
            quarantine = Quarantine(store.disk, store.index, store.segments, lambda: 0)
            contents(store)
            number = int(path.stem, 16)

            async def killed_meanwhile() -> None:
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await quarantine.execute()

            trio.run(killed_meanwhile)
            assert number in store.segments.damaged, "the copy is still to be made"
            trio.run(quarantine.execute)
            assert number not in store.segments.damaged
            kept = sorted(p.name for p in (root / "quarantine").iterdir())
            assert kept == [path.with_suffix(".idx").name, path.name]
            assert hashlib.sha256((root / "quarantine" / path.name).read_bytes()).hexdigest() == digest
            facts = store.segments.facts(int(path.stem, 16))
            assert facts is not None and facts.verified_ns == 0
            (root / "quarantine" / path.name).write_bytes(b"looked at")
            contents(store)
            trio.run(quarantine.execute)
            assert (root / "quarantine" / path.name).read_bytes() == b"looked at"


def test_no_copy_is_made_on_a_disk_that_is_nearly_full(original: Original) -> None:
    from ckptfs.store.quarantine import keep_copy

    with original.copy() as root, opened(root) as store:
        segment = payload_of(store)[1].segment
        assert keep_copy(store.disk, segment, 1 << 60) is None
        assert not list((root / "quarantine").iterdir())
        assert keep_copy(store.disk, 12345, 0) is False
