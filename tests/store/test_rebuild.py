"""rebuild: every version and each unit's last tree come back; dying on the way leaves the store as it was."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from saved_store import File, SavedStore, Special, Tree, contents

from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.history import State
from ckptfs.store.index import Change, Table
from ckptfs.store.inode import ROOT_INO, Content, Inode, decode_inode, encode_inode
from ckptfs.store.layout import open_store
from ckptfs.store.rebuild import Rebuilt, rebuild
from ckptfs.store.recovery import Recovery, recover
from ckptfs.store.segment_format import decode_location, segment_paths
from ckptfs.store.segments import Segments
from ckptfs.store.staging import staging_path

BOOT = "boot-1"


def recovered(store: SavedStore) -> Recovery:
    read = store.segments.read_recipe
    return recover(store.disk, store.index, store.staging, read, boot_id=BOOT, now_ns=1)


def rebuilt(root: Path, disk: Disk | None = None) -> Rebuilt:
    return rebuild(disk or open_store(str(root)), boot_id=BOOT, now_ns=5)


def rich_tree(rng: random.Random) -> Tree:
    """Every kind of entry."""
    sparse = bytes(1 << 20) + rng.randbytes(200_000)
    shared = rng.randbytes(1000)
    return {
        b"model.bin": rng.randbytes(400_000),
        b"empty": b"",
        b"sparse": File(sparse, holes=((0, 1 << 20),)),
        b"script": File(b"#!", mode=0o4755, xattrs=((b"user.note", b"\0x"),)),
        b"one": File(shared, link=7),
        b"latest": Special(b"step-1"),
        b"pipe": Special(),
        b"step-1": {b"two": File(shared, link=7), b"deep": {b"x": b"x" * 10}, b"none": {}},
        b"\xff\n": b"odd name",
    }


class Live:
    """What the tables say of the live tree."""

    def __init__(self, store: SavedStore) -> None:
        self.store = store
        self.paths = dict(self._walk(ROOT_INO, b""))

    def inode(self, ino: int) -> Inode:
        encoded = self.store.index.get(Table.INODE, ino.to_bytes(8, "big"))
        assert encoded is not None
        return decode_inode(encoded)

    def _walk(self, directory: int, path: bytes) -> Iterator[tuple[bytes, int]]:
        prefix = directory.to_bytes(8, "big")
        by_name = self.store.index.scan(Table.ENTRY, prefix)
        by_position = self.store.index.scan(Table.ENTRY_SEQ, prefix)
        assert {(k[8:], v[:8], v[8:]) for k, v in by_name} == {(v[8:], v[:8], k[8:]) for k, v in by_position}
        subdirs = 0
        for key, value in by_name:
            name, ino = bytes(key[8:]), int.from_bytes(value[:8], "big")
            inode = self.inode(ino)
            assert (directory, name) in inode.links
            yield path + b"/" + name, ino
            if inode.is_dir:
                subdirs += 1
                assert len(inode.links) == 1
                yield from self._walk(ino, path + b"/" + name)
        assert self.inode(directory).subdirs == subdirs

    def files(self) -> dict[bytes, bytes]:
        found = {}
        for path, ino in self.paths.items():
            inode = self.inode(ino)
            if inode.is_file:
                assert inode.content.base is not None
                recipe = self.store.segments.read_recipe(inode.content.base)
                assert recipe.size == inode.size
                found[path] = self.store.segments.read_file(recipe, 0, recipe.size)
        return found


def test_all_versions_and_the_last_trees_come_back(tmp_path: Path, rng: random.Random) -> None:
    root = tmp_path / "store"
    trees: dict[bytes, list[Tree]] = {
        b"run1": [{b"old": rng.randbytes(300_000)}, rich_tree(rng)],
        b"a": [{b"readme": b"outer", b"b": {b"c": {b"stale": b"x"}, b"other": b"y"}}],
        b"a/b/c": [{b"nested": rng.randbytes(1000)}],
        b"lonely/unit": [{b"f": b"f"}],
        b"@root": [{b"notes.txt": b"in the root"}],
    }

    async def scenario() -> None:
        store = SavedStore(root)
        recovered(store)
        records = {}
        for name, saves in trees.items():
            for tree in saves:
                record = await store.publish(name, tree, state=State.COMPLETE, step=3)
                records[name, record.number] = record
        store.histories.tag(store.unit(b"run1").unit, 1, "good")
        extra = await store.publish(b"run1", {b"gone": b"1"})
        await store.publish(b"run1", trees[b"run1"][1])
        store.histories.forget(extra.unit, extra.number)
        store.close()
        shutil.rmtree(root / "index")
        shutil.rmtree(root / "journal")

        report = rebuilt(root)
        assert report.skipped == report.problems == report.missing == []
        assert (report.units, report.versions, report.kept_aside) == (5, 7, 0)
        assert not (root / "index.new").exists()

        again = SavedStore(root)
        assert str(recovered(again)) == "nothing to recover"
        for (name, number), record in records.items():
            assert again.histories.version(again.unit(name).unit, number) == record
            assert again.read_version(record) == contents(trees[name][number - 1])
        unit = again.unit(b"run1")
        assert again.histories.numbers(unit.unit) == [1, 2, 4]
        assert again.histories.tags(unit.unit) == {"good": 1}
        check_live(again, trees)
        await again.publish(b"run1", {b"after": rng.randbytes(200_000)})
        again.close()

    trio.run(scenario)


def check_live(store: SavedStore, trees: dict[bytes, list[Tree]]) -> None:
    live = Live(store)
    expected = {b"/run1/" + path: text for path, text in contents(trees[b"run1"][1]).items()}
    expected |= {
        b"/a/readme": b"outer",
        b"/a/b/other": b"y",
        b"/a/b/c/nested": contents(trees[b"a/b/c"][0])[b"nested"],
        b"/lonely/unit/f": b"f",
        b"/notes.txt": b"in the root",
    }
    assert live.files() == expected
    one, two = live.paths[b"/run1/one"], live.paths[b"/run1/step-1/two"]
    assert one == two and len(live.inode(one).links) == 2
    assert live.inode(live.paths[b"/run1/latest"]).target == b"step-1"
    assert live.inode(live.paths[b"/run1/latest"]).size == 6
    assert stat.S_ISFIFO(live.inode(live.paths[b"/run1/pipe"]).mode)
    script = live.paths[b"/run1/script"]
    assert live.inode(script).mode == stat.S_IFREG | 0o4755
    assert store.index.get(Table.XATTR, script.to_bytes(8, "big") + b"user.note") == b"\0x"
    sparse = live.inode(live.paths[b"/run1/sparse"])
    assert 200_000 <= sparse.blocks * 512 < 210_000 < sparse.size
    for path in (b"/run1", b"/run1/step-1/deep", b"/a/b/c", b"/lonely/unit"):
        assert store.index.get(Table.PUBLISHED, live.paths[path].to_bytes(8, "big")) is not None
    assert [key for key, _ in store.index.scan(Table.DIRTY)] == [live.paths[b"/lonely"].to_bytes(8, "big")]
    run1 = store.unit(b"run1")
    assert run1.ino == live.paths[b"/run1"]
    named = {int.from_bytes(key[5:], "big") for key, _ in store.index.scan(Table.META, b"unit:")}
    assert named == {live.paths[b"/a/b/c"], live.paths[b"/lonely/unit"]}
    last = int.from_bytes(store.index.get(Table.META, b"next_ino") or b"", "big")
    assert last == max(live.paths.values()) + 1


class Dies(Exception):
    """The process is gone."""


class MortalDisk(Disk):
    """Dies before its call number `lives` of those that change something."""

    lives = 1 << 30

    def __getattribute__(self, name: str) -> object:
        if name in (
            "create",
            "pwrite",
            "link",
            "rename",
            "unlink",
            "truncate",
            "sync",
            "sync_dir",
            "make_dir",
        ):
            if self.lives <= 0:
                raise Dies(name)
            self.lives -= 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("lost", [True, False])
def test_dying_at_any_call_and_running_again(tmp_path: Path, rng: random.Random, lost: bool) -> None:
    async def scenario() -> None:
        root = tmp_path / "store"
        tree: Tree = {b"model.bin": rng.randbytes(300_000), b"d": {b"small": b"s"}}
        store = SavedStore(root)
        recovered(store)
        record = await store.publish(b"run1", tree)
        store.stage_orphan = store.staging.create()  # type: ignore[attr-defined]
        os.write(store.stage_orphan[1], b"unnamed")  # type: ignore[attr-defined]
        os.close(store.stage_orphan[1])  # type: ignore[attr-defined]
        store.close()
        if lost:
            shutil.rmtree(root / "index")
        died = 0
        while True:
            copy = tmp_path / f"copy-{died}"
            shutil.copytree(root, copy)
            disk = MortalDisk(str(copy))
            disk.lives = died
            try:
                rebuilt(copy, disk)
            except Dies:
                await check(copy, tree, record.number, rerun=True)
                shutil.rmtree(copy)
                died += 1
                continue
            await check(copy, tree, record.number, rerun=False)
            break
        assert died > 5

    async def check(root: Path, tree: Tree, number: int, *, rerun: bool) -> None:
        if rerun:
            rebuilt(root)
        store = SavedStore(root)
        recovered(store)
        record = store.histories.version(store.unit(b"run1").unit, number)
        assert record is not None and store.read_version(record) == contents(tree)
        assert {path for path in Live(store).files()} == {b"/run1/model.bin", b"/run1/d/small"}
        kept = list((root / "quarantine").glob("unnamed-*[0-9]"))
        assert [path.read_bytes() for path in kept] == [b"unnamed"]
        assert store.staging.numbers() == []
        store.close()

    trio.run(scenario)


def test_the_old_journal_is_not_replayed_into_the_new_index(tmp_path: Path, rng: random.Random) -> None:
    async def scenario() -> None:
        root = tmp_path / "store"
        store = SavedStore(root)
        recovered(store)
        await store.publish(b"run1", {b"f": rng.randbytes(200)})
        change = Change()
        inode = Inode(stat.S_IFREG, 0, 0, ((1, b"ghost"),), 1, 1, 1, content=Content())
        change.put(Table.INODE, (999).to_bytes(8, "big"), encode_inode(inode))
        store.index.apply(change, sync=True)
        left = tmp_path / "left-by-a-kill"
        shutil.copytree(root, left)
        store.close()

        journal = left / "journal" / "current"
        old = journal.read_bytes()
        assert old
        rebuilt(left)
        journal.write_bytes(old)  # as if the process had died before it removed it
        again = SavedStore(left)
        assert again.index.get(Table.INODE, (999).to_bytes(8, "big")) is None
        again.close()

    trio.run(scenario)


def test_what_is_damaged_is_told_and_the_rest_comes_back(tmp_path: Path, rng: random.Random) -> None:
    async def scenario() -> None:
        root = tmp_path / "store"
        store = SavedStore(root)
        recovered(store)
        first = await store.publish(b"run1", {b"model.bin": rng.randbytes(400_000)})
        lost_segment = _segment_of_file(store, first.top.tree)
        second = await store.publish(b"run1", {b"model.bin": rng.randbytes(400_000)})
        store.close()
        idx = root / segment_paths(lost_segment)[1]
        damaged = bytearray(idx.read_bytes())
        damaged[len(damaged) // 2] ^= 3
        idx.write_bytes(damaged)
        shutil.rmtree(root / "index")

        report = rebuilt(root)
        assert len(report.skipped) == 1 and f"{lost_segment:016x}" in report.skipped[0]
        assert len(report.missing) == 1 and report.missing[0].startswith("run1@1: ")
        again = SavedStore(root)
        assert again.histories.numbers(first.unit) == [1, 2]
        assert again.read_version(second)
        with pytest.raises(Corrupt):
            again.read_version(first)
        again.close()

    trio.run(scenario)


def _segment_of_file(store: SavedStore, tree: object) -> int:
    entries = store.segments.read_tree(tree)  # type: ignore[arg-type]
    assert entries[0].recipe is not None
    chunk = next(store.segments.read_recipe(entries[0].recipe).chunks())
    encoded = store.index.get(Table.CHUNK, chunk)
    assert encoded is not None
    return decode_location(encoded).segment


@pytest.mark.parametrize("written", [False, True])
def test_a_segment_that_was_being_adopted_is_trusted_only_if_its_bytes_are_right(
    tmp_path: Path, rng: random.Random, written: bool
) -> None:
    async def scenario() -> None:
        root = tmp_path / "store"
        store = SavedStore(root)
        recovered(store)
        record = await store.publish(b"run1", {b"model.bin": rng.randbytes(400_000)})
        segment = _segment_of_file(store, record.top.tree)
        store.close()
        seg = root / segment_paths(segment)[0]
        os.link(seg, root / staging_path(77))
        if written:
            with open(root / staging_path(77), "r+b") as f:
                f.write(b"written on")
        shutil.rmtree(root / "index")
        report = rebuilt(root)
        assert len(report.skipped) == report.kept_aside == int(written)
        again = SavedStore(root)
        recovered(again)
        assert again.staging.numbers() == []
        if written:
            kept = root / "quarantine" / "unnamed-77"
            assert kept.read_bytes().startswith(b"written on") and not seg.exists()
        else:
            assert again.read_version(record)
        again.close()

    trio.run(scenario)


def test_a_store_whose_index_is_gone_is_refused_until_it_is_rebuilt(tmp_path: Path) -> None:
    async def scenario() -> None:
        root = tmp_path / "store"
        store = SavedStore(root)
        recovered(store)
        await store.publish(b"run1", {b"f": b"x"})
        store.close()
        shutil.rmtree(root / "index")
        shutil.rmtree(root / "journal")
        for _ in range(2):
            broken = SavedStore(root)
            with pytest.raises(InvalidRequest, match="rebuild"):
                recovered(broken)
            broken.close()
        rebuilt(root)
        again = SavedStore(root)
        recovered(again)
        assert [bytes(u.name) for u in again.histories.units()] == [b"run1"]
        again.close()

    trio.run(scenario)


def test_a_rebuilt_index_agrees_with_the_one_that_was_lost(tmp_path: Path, rng: random.Random) -> None:
    """Chunk places and payload counts, after saves that share chunks."""

    async def scenario() -> None:
        root = tmp_path / "store"
        store = SavedStore(root)
        recovered(store)
        base = rng.randbytes(600_000)
        for _ in range(3):
            await store.publish(
                b"run1", {b"base": base, b"own": rng.randbytes(150_000), b"s": rng.randbytes(9)}
            )
        await store.ingest.reclaim.execute()
        before = store.index.scan(Table.CHUNK), store.segments.payload_bytes()
        store.close()
        shutil.rmtree(root / "index")
        rebuilt(root)
        again = SavedStore(root)
        assert (again.index.scan(Table.CHUNK), again.segments.payload_bytes()) == before
        assert Segments(again.disk, again.index).payload_bytes() == before[1]
        again.close()

    trio.run(scenario)
