"""recovery: only what something synced vouches for is believed, also if recovery dies half way."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckptfs.store.disk import Disk
from ckptfs.store.errors import InvalidRequest, NotFound
from ckptfs.store.hashing import chunk_id
from ckptfs.store.ids import RecipeId
from ckptfs.store.index import Change, Index, Table
from ckptfs.store.inode import Content, Inode, decode_inode, encode_inode
from ckptfs.store.layout import open_store
from ckptfs.store.merkle import file_root
from ckptfs.store.pins import PinnedDirectory, PinnedFile, decode_pin, encode_pin
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.recovery import Recovery, recover
from ckptfs.store.segment_format import SegmentFacts, SegmentKind, encode_facts, segment_key, segment_paths
from ckptfs.store.staging import Staging

DURABLE = Recipe([Piece(5000, chunk_id(b"a")), Piece(9000, None)])
RECIPES = {DURABLE.identity(): DURABLE}
ROOT = Inode(stat.S_IFDIR | 0o755, 0, 0, ((1, b""),), 1, 1, 1, subdirs=1)
RUN = Inode(stat.S_IFDIR | 0o755, 0, 0, ((1, b"run"),), 1, 1, 1)


def read_recipe(recipe: RecipeId) -> Recipe:
    if recipe not in RECIPES:
        raise NotFound("no such recipe")
    return RECIPES[recipe]


def a_file(content: Content, *links: tuple[int, bytes], size: int = 3) -> Inode:
    return Inode(stat.S_IFREG | 0o644, 0, 0, links, 1, 2, 3, size=size, content=content)


class Dies(Exception):
    """The process is gone."""


class MortalDisk(Disk):
    """Dies before its call number `lives` of those that change something."""

    lives = 1 << 30

    def __getattribute__(self, name: str) -> object:
        if name in ("create", "pwrite", "link", "rename", "unlink", "truncate", "sync", "sync_dir"):
            if self.lives <= 0:
                raise Dies(name)
            self.lives -= 1
        return super().__getattribute__(name)


class Bench:
    """A store on disk that can be opened, left as by a dead process, and opened again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.disk = MortalDisk(open_store(str(root), create=True).root)
        self.open()

    def open(self) -> None:
        self.index = Index(self.disk)
        self.staging = Staging(self.disk, 1)

    def kill(self) -> None:
        self.index._transaction.abort()
        self.index._journal.close()
        self.index._env.close()
        self.disk.lives = 1 << 30

    def reopen(self) -> None:
        self.kill()
        self.open()

    def recover(self, boot_id: str = "boot-1") -> Recovery:
        return recover(self.disk, self.index, self.staging, read_recipe, boot_id=boot_id, now_ns=77)

    def put(self, ino: int, inode: Inode) -> None:
        change = Change()
        change.put(Table.INODE, ino.to_bytes(8, "big"), encode_inode(inode))
        self.index.apply(change)

    def inode(self, ino: int) -> Inode | None:
        encoded = self.index.get(Table.INODE, ino.to_bytes(8, "big"))
        return None if encoded is None else decode_inode(encoded)

    def stage(self, payload: bytes) -> int:
        number, fd = self.staging.create()
        os.write(fd, payload)
        os.close(fd)
        return number

    def segment(self, number: int, *, known: bool) -> None:
        for path in segment_paths(number):
            target = self.root / path
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(b"x")
        if known:
            change = Change()
            facts = encode_facts(SegmentFacts(SegmentKind.PACKED, 1, 1, 1, 1))
            change.put(Table.SEGMENT, segment_key(number), facts)
            self.index.apply(change)

    def everything(self) -> tuple[object, ...]:
        """All that a recovery may change."""
        tables = [self.index.scan(t) for t in Table if t is not Table.META]
        folders = ("staging", "segments", "quarantine")
        files = sorted(str(p) for folder in folders for p in (self.root / folder).rglob("*") if p.is_file())
        return tables, files


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    made.recover()
    made.put(1, ROOT)
    made.put(2, RUN)
    return made


def test_a_fresh_store_has_nothing_to_recover(tmp_path: Path) -> None:
    made = Bench(tmp_path)
    assert str(made.recover()) == "nothing to recover"
    assert str(made.recover()) == "nothing to recover"


def test_without_a_reboot_unsynced_bytes_are_believed(bench: Bench) -> None:
    number = bench.stage(b"new")
    bench.put(3, a_file(Content(staging=number, fallback=DURABLE.identity()), (2, b"f")))
    before = bench.everything()
    assert str(bench.recover()) == "nothing to recover"
    assert bench.everything() == before


def test_after_a_reboot_unsynced_bytes_are_set_aside(bench: Bench) -> None:
    unsynced, fresh, synced = bench.stage(b"torn"), bench.stage(b"new"), bench.stage(b"safe")
    bench.put(3, a_file(Content(staging=unsynced, fallback=DURABLE.identity()), (2, b"model.pt")))
    bench.put(4, a_file(Content(staging=fresh), (2, b"fresh")))
    bench.put(5, a_file(Content(staging=synced, synced=True), (2, b"synced")))
    report = bench.recover("boot-2")
    assert (report.rebooted, report.reverted, report.quarantined) == (True, 2, 2)
    assert report.staging_removed == 2 and not report.lost
    reverted, emptied, kept = bench.inode(3), bench.inode(4), bench.inode(5)
    assert reverted is not None and emptied is not None and kept is not None
    assert reverted.content == Content(base=DURABLE.identity())
    assert (reverted.size, reverted.blocks) == (14000, 16)
    assert reverted.root == file_root(DURABLE.root_leaves())
    assert (emptied.content, emptied.size, emptied.root) == (Content(), 0, None)
    assert kept.content.staging == synced
    assert bench.staging.numbers() == [synced]
    aside = bench.root / "quarantine" / f"suspect-{unsynced}"
    assert aside.read_bytes() == b"torn"
    note = json.loads(aside.with_name(aside.name + ".json").read_text())
    assert note["path"] == "/run/model.pt" and note["time_ns"] == 77
    assert bench.index.get(Table.DIRTY, (2).to_bytes(8, "big")) == b""
    assert str(bench.recover("boot-2")) == "nothing to recover"


def test_a_number_that_comes_again_does_not_hide_what_is_kept(bench: Bench) -> None:
    number = bench.stage(b"torn")
    (bench.root / "quarantine" / f"suspect-{number}").write_bytes(b"of another year")
    bench.put(3, a_file(Content(staging=number), (2, b"f")))
    bench.recover("boot-2")
    kept = {path.read_bytes() for path in (bench.root / "quarantine").glob("suspect-*[0-9]")}
    assert kept == {b"of another year", b"torn"}


def test_a_fallback_that_cannot_be_read_does_not_keep_the_store_shut(bench: Bench) -> None:
    number = bench.stage(b"torn")
    gone = RecipeId(chunk_id(b"gone"))
    bench.put(3, a_file(Content(staging=number, fallback=gone), (2, b"f"), size=42))
    bench.recover("boot-2")
    inode = bench.inode(3)
    assert inode is not None and inode.content == Content(base=gone) and inode.size == 42


def test_an_overlay_goes_back_to_what_it_lies_on(bench: Bench) -> None:
    number = bench.stage(b"torn")
    bench.put(3, a_file(Content(staging=number, base=DURABLE.identity(), base_limit=14000), (2, b"f")))
    bench.recover("boot-2")
    inode = bench.inode(3)
    assert inode is not None and inode.content == Content(base=DURABLE.identity()) and inode.size == 14000


def test_a_synced_staging_file_that_is_gone_is_reported(bench: Bench) -> None:
    bench.put(3, a_file(Content(staging=99, synced=True, fallback=DURABLE.identity()), (2, b"f")))
    report = bench.recover()
    assert report.lost == ["/run/f"] and "/run/f: staging file is gone" in str(report)
    inode = bench.inode(3)
    assert inode is not None and inode.content == Content(base=DURABLE.identity())


def test_orphans_are_removed_and_what_is_named_stays(bench: Bench) -> None:
    named, orphan = bench.stage(b"named"), bench.stage(b"orphan")
    bench.put(3, a_file(Content(staging=named), (2, b"f")))
    bench.segment(0x1AB, known=True)
    bench.segment(0x2AB, known=False)
    for name in ("staging/probe.tmp", "segments/ab/x.tmp", "format.tmp", "history/a.tmp"):
        (bench.root / name).write_bytes(b"")
    (bench.root / "segments" / "README").write_bytes(b"not ours")
    report = bench.recover()
    assert (report.staging_removed, report.segment_files_removed, report.temporaries_removed) == (1, 2, 4)
    assert bench.staging.numbers() == [named] and orphan != named
    assert sorted(os.listdir(bench.root / "segments" / "ab")) == [
        "00000000000001ab.idx",
        "00000000000001ab.seg",
    ]
    assert (bench.root / "segments" / "README").exists()


def test_inodes_that_only_a_dead_daemon_held_go_with_all_that_is_theirs(bench: Bench) -> None:
    bench.put(3, a_file(Content(staging=bench.stage(b"unlinked but open"))))
    change = Change()
    change.put(Table.XATTR, (3).to_bytes(8, "big") + b"user.a", b"1")
    change.put(Table.XATTR, (2).to_bytes(8, "big") + b"user.b", b"2")
    bench.index.apply(change)
    report = bench.recover()
    assert (report.unlinked_removed, report.staging_removed) == (1, 1)
    assert bench.inode(3) is None and bench.inode(1) is not None
    assert [value for _, value in bench.index.scan(Table.XATTR)] == [b"2"]


def pin(content: Content) -> PinnedFile:
    directory = PinnedDirectory(b"step-1", 0o40755, 0, 0, 1, 1)
    return PinnedFile(3, (directory,), b"model.pt", a_file(content, (2, b"model.pt")), ())


def test_what_a_pre_image_pins_is_kept_and_after_a_reboot_doubted(bench: Bench) -> None:
    safe, torn, new = bench.stage(b"safe"), bench.stage(b"torn"), bench.stage(b"new")
    change = Change()
    change.put(Table.PREIMAGE, b"1", encode_pin(pin(Content(staging=safe, synced=True))))
    change.put(Table.PREIMAGE, b"2", encode_pin(pin(Content(staging=torn, fallback=DURABLE.identity()))))
    change.put(Table.PREIMAGE, b"3", encode_pin(pin(Content(staging=new))))
    bench.index.apply(change)
    assert bench.recover().staging_removed == 0
    report = bench.recover("boot-2")
    assert (report.quarantined, report.staging_removed) == (2, 2)
    rows = dict(bench.index.scan(Table.PREIMAGE))
    assert rows.keys() == {b"1", b"2"}
    assert decode_pin(rows[b"1"]).inode.content.staging == safe
    assert decode_pin(rows[b"2"]).inode.content == Content(base=DURABLE.identity())
    assert decode_pin(rows[b"2"]).inode.size == DURABLE.size


def test_a_new_index_beside_old_segments_is_refused(tmp_path: Path) -> None:
    made = Bench(tmp_path)
    made.segment(7, known=False)
    with pytest.raises(InvalidRequest, match="rebuild"):
        made.recover()
    assert (tmp_path / segment_paths(7)[0]).exists()


def trouble(bench: Bench) -> None:
    """A bit of everything that a recovery after a reboot has to do."""
    numbers = [bench.stage(b"%d" % i) for i in range(5)]
    bench.put(3, a_file(Content(staging=numbers[0], fallback=DURABLE.identity()), (2, b"a")))
    bench.put(4, a_file(Content(staging=numbers[1]), (2, b"b")))
    bench.put(5, a_file(Content(staging=numbers[2], synced=True), (2, b"c")))
    bench.put(6, a_file(Content(staging=numbers[3])))
    bench.segment(1, known=True)
    bench.segment(2, known=False)
    (bench.root / "staging" / "x.tmp").write_bytes(b"")
    bench.index.commit()


def expected(bench: Bench) -> tuple[object, ...]:
    trouble(bench)
    bench.recover("boot-2")
    return bench.everything()


def test_dying_at_any_call_and_running_again_ends_the_same_way(tmp_path: Path) -> None:
    def fresh(name: str) -> Bench:
        made = Bench(tmp_path / name)
        made.recover()
        made.put(1, ROOT)
        made.put(2, RUN)
        return made

    strip: Callable[[Bench, tuple[object, ...]], str] = lambda b, state: repr(state).replace(str(b.root), "")  # noqa: E731
    reference = fresh("reference")
    whole = strip(reference, expected(reference))
    reference.kill()
    died = 0
    while True:
        bench = fresh(f"dies-{died}")
        trouble(bench)
        bench.disk.lives = died
        try:
            bench.recover("boot-2")
        except Dies:
            bench.reopen()
            bench.recover("boot-2")
            bench.reopen()
            assert strip(bench, bench.everything()) == whole, f"died at call {died}"
            bench.kill()
            died += 1
            continue
        assert strip(bench, bench.everything()) == whole
        bench.kill()
        break
    assert died > 15


def test_a_record_with_every_field_survives(bench: Bench) -> None:
    full = msgspec.structs.replace(
        a_file(Content(base=DURABLE.identity()), (2, b"f"), (2, b"g")), rdev=5, blocks=8, root=bytes(32)
    )
    bench.put(3, full)
    bench.recover("boot-2")
    assert bench.inode(3) == full
