"""The step of a rollback, without a kernel: atomic at every death, bound by rights, fast."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from mounting import memory_folder
from small_face import SmallFace, small_face
from synthetic_versions import roll_back, synthetic

from ckptfs.fusefs.namespace import key_of
from ckptfs.fusefs.recording import Request
from ckptfs.fusefs.rollback import Wanted
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt, NoSpace, NotFound, NotPermitted
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_proof import prove
from ckptfs.store.index import Change, Table
from ckptfs.store.inode import ROOT_INO

USER = 61001
OLD = {"a": b"old a" * 9000, "d": {"b": b"old b", "gone": {"deep": b"deep"}}, "same": b"same" * 50_000}
NEW = {"a": b"new a", "d": b"a file now", "same": b"same" * 50_000, "more": {"c": b"c"}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    with memory_folder() as memory:
        yield memory / "store"


def filled(small: SmallFace) -> dict[str, VersionRecord]:
    """Two units that were OLD, which is their version 1, and are NEW."""
    saved = {}
    for unit in ("one", "two"):
        small.make(ROOT_INO, {unit: OLD})
        saved[unit] = small.publish(unit)
        for name in ("a", "d", "same"):
            small.remove(small.at(unit), name)
        small.make(small.at(unit), NEW)
    return saved


class DyingDisk:
    """Copies the store before each call that changes it, and once with half of each write done."""

    def __init__(self, root: Path, copies: Path) -> None:
        self._root, self._copies = root, copies
        self.deaths: list[Path] = []
        self.is_on = False

    def copy(self) -> Path:
        copy = self._copies / f"{len(self.deaths):04d}"
        shutil.copytree(self._root, copy)
        self.deaths.append(copy)
        return copy

    def wrap(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(Disk, name)

        def call(disk: Disk, *args: object) -> object:
            if self.is_on:
                self.copy()
                if name == "pwrite":
                    self._half(*args)
            return real(disk, *args)

        monkeypatch.setattr(Disk, name, call)

    def _half(self, fd: object, payload: object, offset: object) -> None:
        assert isinstance(fd, int) and isinstance(payload, bytes) and isinstance(offset, int)
        written = Path(os.readlink(f"/proc/self/fd/{fd}"))
        torn = self.copy() / written.relative_to(self._root)
        with torn.open("r+b") as file:
            file.seek(offset)
            file.write(payload[: len(payload) // 2])


def test_every_death_leaves_all_old_trees_or_all_new_ones(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = DyingDisk(store, store.parent / "deaths")
    for name in ("pwrite", "sync", "sync_dir", "rename", "unlink", "create"):
        dying.wrap(name, monkeypatch)
    with small_face(store) as small:
        saved = filled(small)
        for unit in saved:
            small.publish(unit)
        small.parts.index.commit()
        dying.is_on = True
        roll_back(small, *saved.items())
        small.parts.index.commit()
        dying.is_on = False
        dying.copy()
    states = [check_death(death) for death in dying.deaths]
    assert states == sorted(states), "old trees, then new ones"
    assert {*states} == {0, 1}


def check_death(copy: Path) -> int:
    """What a store shows after a death: 0 the old trees, 1 the new ones; its history agrees."""
    with small_face(copy) as small:
        trees = [small.tree(small.at(unit)) for unit in ("one", "two")]
        assert trees in ([OLD, OLD], [NEW, NEW])
        for unit in ("one", "two"):
            identity = small.parts.histories.unit_of_ino(small.at(unit))
            assert identity is not None
            before = small.parts.histories.newest(identity.unit)
            now = small.publish(unit)
            assert now == before, f"{unit}: a start lists what is live, and a publish has nothing to add"
            assert prove(small.parts.histories.evidence(identity.unit), []).findings == []
            expected = {0: "command", 1: "rollback"}[trees[0] == OLD]
            assert now.origin == expected
            assert [v.number for v in small.parts.histories.versions(identity.unit)] == [
                *range(1, now.number + 1)
            ]
        return int(trees[0] == OLD)


def test_a_disk_that_is_full_behind_the_step_delays_the_version_only(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_face(store) as small:
        saved = filled(small)

        def full(record: VersionRecord, change: Change) -> None:
            raise NoSpace("full")

        with monkeypatch.context() as patched:
            small.publish("one")
            patched.setattr(small.parts.histories, "append_version", full)
            with pytest.raises(NoSpace, match="rolled back, but no version"):
                roll_back(small, ("one", saved["one"]))
        assert small.tree(small.at("one")) == OLD
        shutil.copytree(store, store.parent / "copy")
        listed = small.publish("one")
        assert listed.top.tree == saved["one"].top.tree
    with small_face(store.parent / "copy") as small:
        unit = small.parts.histories.unit_of_ino(small.at("one"))
        assert unit is not None
        newest = small.parts.histories.newest(unit.unit)
        assert newest is not None and newest.origin == "rollback"
        assert newest.top.tree == saved["one"].top.tree


def test_a_version_that_lacks_content_changes_nothing(store: Path) -> None:
    with small_face(store) as small:
        saved = filled(small)
        assert saved["two"].top.tree is not None
        lost = next(e for e in small.parts.segments.read_tree(saved["two"].top.tree) if e.name == b"a")
        assert lost.recipe is not None
        change = Change()
        change.delete(Table.CHUNK, lost.recipe)
        small.parts.index.apply(change)
        with pytest.raises(Corrupt, match="lacks the content of a"):
            roll_back(small, *saved.items())
        assert small.tree(small.at("one")) == small.tree(small.at("two")) == NEW


def test_a_version_that_was_forgotten_meanwhile_is_not_brought_back(store: Path) -> None:
    with small_face(store) as small:
        saved = filled(small)
        small.publish("one")
        small.parts.histories.forget(saved["one"].unit, saved["one"].number)
        with pytest.raises(NotFound):
            roll_back(small, ("one", saved["one"]))
        assert small.tree(small.at("one")) == NEW


def test_a_publish_that_waited_for_a_rollback_finds_nothing_to_do(store: Path) -> None:
    """What it was to publish is what the rollback has made a version of before its step, and undone. Links
    show it: they are other inodes then, so a tree that is made anew is another one."""
    with small_face(store) as small:
        small.make(ROOT_INO, {"one": OLD})
        face, top = small.face, small.at("one")
        face.mutations.link(small.at("one/a"), top, b"twin")
        saved = small.publish("one")
        small.remove(top, "a")
        small.remove(top, "twin")
        due = face.publisher.due_now(face.publisher.changed_dirs_by_unit()[top])

        async def steps() -> None:
            await face.rollback.roll_back([Wanted(top, saved)], None)
            assert await face.publisher.publish(top, due, Request("settled")) is None

        trio.run(steps)
        newest = face.recorder.newest(top)
        assert newest is not None and newest.origin == "rollback"


@pytest.mark.parametrize("what", ["set-uid", "capability", "device", "owner", "rights"])
def test_nobody_gets_by_a_rollback_what_he_could_not_make(store: Path, what: str) -> None:
    with small_face(store) as small:
        face = small.face
        small.make(ROOT_INO, {"run": {"d": {}, "x": b"x"}})
        run, d, x = small.at("run"), small.at("run/d"), small.at("run/x")
        draft = face.drafts.begin()
        if what == "set-uid":
            draft.update(x, mode=stat.S_IFREG | 0o4755)
        elif what == "capability":
            draft.set_xattr(x, b"security.capability", b"all")
        elif what == "rights":
            draft.update(d, mode=stat.S_IFDIR | 0o777)
        draft.mark_changed(x)
        draft.mark_changed(d)
        draft.commit()
        if what == "device":
            face.mutations.make(run, b"null", stat.S_IFCHR | 0o666, 0, 0, rdev=259)
        saved = small.publish("run")
        draft = face.drafts.begin()
        draft.update(x, mode=stat.S_IFREG | 0o644)
        draft.set_xattr(x, b"security.capability", None)
        draft.update(d, mode=stat.S_IFDIR | 0o755, uid=USER if what == "owner" else 0)
        draft.mark_changed(x)
        draft.mark_changed(d)
        draft.commit()
        if what == "device":
            small.remove(run, "null")
        before = face.namespace.inode(d)
        with pytest.raises(NotPermitted, match="only root and the store's owner"):
            roll_back(small, ("run", saved), uid=USER)
        assert face.namespace.inode(d) == before
        (rolled,) = roll_back(small, ("run", saved))
        assert rolled.now.origin == "rollback"


def test_whom_rights_bind_rolls_back_what_is_ordinary(store: Path) -> None:
    with small_face(store) as small:
        small.uid = USER
        saved = filled(small)
        roll_back(small, *saved.items(), uid=USER)
        assert small.tree(small.at("one")) == small.tree(small.at("two")) == OLD


@pytest.mark.parametrize(("folders", "files", "file_bytes"), [(1, 100, 200 << 20), (100, 100, 4096)])
def test_a_large_rollback_is_a_step_of_metadata(
    store: Path,
    figure: Callable[[str, object], None],
    folders: int,
    files: int,
    file_bytes: int,
) -> None:
    """Goals: 100 files of 20 GB in 20 ms, 10,000 files in 1 s; tests/benchmarks/history.py measures them."""
    with small_face(store) as small:
        small.make(ROOT_INO, {"run": {}})
        versions = [synthetic(small, "run", folders, files, file_bytes, seed) for seed in (1, 2)]
        small.parts.index.commit()
        trio.run(small.face.rollback.roll_back, [Wanted(small.at("run"), versions[0])], None)
        small.parts.index.commit()
        taken: list[float] = []
        for record in (versions * 4)[1:7]:
            begun = time.perf_counter()
            roll_back(small, ("run", record))
            taken.append(time.perf_counter() - begun)
            small.parts.index.commit()
            assert small.face.namespace.index.get(Table.PUBLISHED, key_of(small.at("run"))) == record.top.tree
        figure(f"rollback of {folders * files} files, ms", [round(s * 1000, 1) for s in taken])
