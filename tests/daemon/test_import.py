"""`ckptfs import`: directories that were there become units and versions."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio
from import_kills import KEY, make_checkpoint, make_run, run_seed, state_of
from kernelmounts import poll
from mounting import Mount

from ckptfs.daemon import cli_import, import_plan, import_trees, outside
from ckptfs.daemon.following import Following, Ready
from ckptfs.daemon.import_files import FileTaker
from ckptfs.daemon.import_plan import plan_import
from ckptfs.daemon.import_service import ImportService
from ckptfs.daemon.import_trees import TreeMaker
from ckptfs.daemon.importing import MOVING, _News
from ckptfs.daemon.messages import Import
from ckptfs.daemon.open_store import OpenStore, opened_store
from ckptfs.daemon.outside import Outside
from ckptfs.daemon.removing import Remover
from ckptfs.store import far_trees, segments
from ckptfs.store.errors import CkptfsError, Conflict, InvalidRequest, NoSpace, NotFound, Unavailable
from ckptfs.store.history import VersionRecord
from ckptfs.store.index import Change, Table
from ckptfs.store.keyring import Keyring
from ckptfs.store.recipe import Recipe
from ckptfs.store.sweep import Sweeper

Factory = Callable[..., Mount]


class Store:
    """A store that nobody has mounted, and what is imported into it."""

    def __init__(self, parts: OpenStore) -> None:
        self.parts = parts
        self._service = ImportService(parts, None)

    def imported(self, source: Path, unit: str = "run", **more: Any) -> dict[str, Any]:
        return trio.run(lambda: self.import_it(source, unit, **more))

    async def import_it(self, source: Path, unit: str = "run", **more: Any) -> dict[str, Any]:
        request = Import(path=f"/{unit}", source=str(source), **more)
        answer = await self._service.answer(request, lambda progress: None)
        return cast("dict[str, Any]", answer)

    def versions(self, unit: str = "run") -> list[VersionRecord]:
        found = self.parts.histories.unit_named(unit.encode())
        return [] if found is None else self.parts.histories.versions(found.unit)

    def shown(self, record: VersionRecord) -> dict[str, tuple[object, ...]]:
        """As import_kills.state_of, but for what a version shows, with contents in place of digests."""
        segments, found = self.parts.segments, dict[str, tuple[object, ...]]()

        def walk(tree: Any, prefix: str) -> None:
            for entry in segments.read_tree(tree):
                path = prefix + os.fsdecode(entry.name)
                if entry.is_dir:
                    walk(entry.tree, path + "/")
                elif entry.recipe is None:
                    found[path] = (os.fsdecode(entry.target or b""),)
                else:
                    recipe: Recipe = segments.read_recipe(entry.recipe)
                    found[path] = (entry.mode, entry.mtime_ns, segments.read_file(recipe, 0, recipe.size))

        walk(record.top.tree, "")
        return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened_store(str(tmp_path / "store"), "", "", lambda: Keyring(KEY)) as parts:
        yield Store(parts)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three checkpoints, whose names in order are not those of their steps."""
    run = tmp_path / "outside" / "run1"
    make_run(run, 3, 8000)
    return run


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    """What `Store.shown` of a version of a folder is to be."""
    return {
        path: (*state[:-1], (folder / path).read_bytes()) if len(state) > 1 else state
        for path, state in state_of(folder).items()
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("part", [".", "segments"])
@pytest.mark.parametrize("place", ["itself", "below"])
def test_the_store_by_another_name_is_refused(
    store: Store, tmp_path: Path, run: Path, part: str, place: str
) -> None:
    """As in a container, where the same directory is mounted at several places."""
    kept = store.imported(run)["versions"]
    point = tmp_path / "elsewhere"
    (point / "checkpoint-1").mkdir(parents=True)
    at = point if place == "itself" else point / "checkpoint-1"
    subprocess.run(["mount", "--bind", str(tmp_path / "store" / part), str(at)], check=True)
    try:
        with pytest.raises(InvalidRequest, match="the store itself"):
            store.imported(point, "other", move=True)
        (at / "new").mkdir()
        with pytest.raises(InvalidRequest, match="the store itself"):
            store.imported(at / "new", "other", move=True)
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
    assert store.shown(store.versions()[-1]) == contents(run) and len(kept) == 3


def test_another_directory_than_is_meant_is_refused(store: Store, run: Path) -> None:
    with pytest.raises(InvalidRequest, match="another directory"):
        store.imported(run, device=run.stat().st_dev, inode=run.stat().st_ino + 1)
    assert not store.versions()


def test_each_checkpoint_becomes_a_version(store: Store, run: Path) -> None:
    """In the order of the steps, with their times; what is no checkpoint comes with the last."""
    before = contents(run)
    plan = store.imported(run, dry_run=True)
    assert [one["step"] for one in plan["versions"]] == [50, 100, 150] and not store.versions()
    assert plan["versions"][2]["names"] == ["checkpoint-150", "README.md", "first"]
    done = store.imported(run)
    assert (len(done["versions"]), done["live"], done["problems"]) == (3, False, [])
    rows = store.versions()
    assert [(one.step, one.state.value, one.origin) for one in rows] == [
        (step, "complete", "import") for step in (50, 100, 150)
    ]
    assert [one.name for one in rows] == [
        f"v00000{number}_2023111{day}T{hour}1320Z"
        for number, day, hour in ((1, 4, 23), (2, 5, "00"), (3, 5, "01"))
    ]
    assert store.shown(rows[2]) == before == contents(run)
    assert {path.split("/")[0] for path in store.shown(rows[1])} == {"checkpoint-50", "checkpoint-100"}


def test_what_a_version_has_is_not_taken_again(store: Store, run: Path) -> None:
    store.imported(run)
    again = store.imported(run)
    assert again["versions"] == [] and sum(again["bytes"].values()) == 0
    # Another file of equal size and time is another file; its old name is kept by the version of old.
    model = run / "checkpoint-150/config.json"
    times = model.stat()
    model.write_bytes(b"[]")
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    make_checkpoint(run / "checkpoint-1000", 1000, 8000)
    assert [one["step"] for one in store.imported(run)["versions"]] == [150, 1000]
    newest = store.versions()[-1]
    assert store.shown(newest) == contents(run)
    shutil.rmtree(run / "checkpoint-50")
    # That something has gone is no news to who imports, but to who follows.
    assert store.imported(run)["versions"] == []
    assert len(store.imported(run, follows=True)["versions"]) == 1
    assert store.shown(store.versions()[-1]) == contents(run)


def test_holes_stay_holes_however_the_bytes_come(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel copies nothing by itself, as between file systems of old kernels."""
    run = tmp_path / "outside"
    for step in (1, 2):
        make_checkpoint(run / f"checkpoint-{step}", step, 100)
        with (run / f"checkpoint-{step}/sparse.bin").open("wb") as file:
            file.truncate(3_000_000)
            file.seek(2_000_000)
            file.write(b"\x07" * 300_000)

    def refused(*_: object) -> int:
        raise OSError(errno.EXDEV, "not by itself")

    assert store.imported(run / "checkpoint-1", "a")["files"]["copied"] == 4
    monkeypatch.setattr(os, "copy_file_range", refused)
    assert store.imported(run / "checkpoint-2", "b")["files"]["copied"] == 4
    for unit, step in (("a", 1), ("b", 2)):
        (newest,) = store.versions(unit)
        assert store.shown(newest) == contents(run / f"checkpoint-{step}")
        assert newest.top.tree is not None
        entries = {entry.name: entry for entry in store.parts.segments.read_tree(newest.top.tree)}
        assert entries[b"sparse.bin"].holes > 2_600_000


def test_saves_without_a_step_go_by_their_times(store: Store, tmp_path: Path) -> None:
    run = tmp_path / "outside"
    make_run(run, 1, 100)
    for name, day in (("best", 1), ("final", 9), ("averaged", 5)):
        shutil.copytree(run / "checkpoint-50", run / name)
        for file in (run / name).iterdir():
            os.utime(file, (day * 86_400, day * 86_400))
    plan = store.imported(run, dry_run=True)
    assert [one["names"][0] for one in plan["versions"]] == ["best", "averaged", "final", "checkpoint-50"]


def test_move_leaves_nothing(store: Store, tmp_path: Path) -> None:
    run = tmp_path / "outside"
    make_run(run, 2, 200_000)
    os.link(run / "checkpoint-50/model.safetensors", run / "same")
    os.setxattr(run / "checkpoint-50/config.json", "user.origin", b"a test")
    before = contents(run)
    done = store.imported(run, move=True)
    assert done["problems"] == [] and os.listdir(run) == []
    newest = store.versions()[-1]
    assert store.shown(newest) == before
    tree = store.parts.segments.read_tree
    assert newest.top.tree is not None
    top = {entry.name: entry for entry in tree(newest.top.tree)}
    below = {entry.name: entry for entry in tree(top[b"checkpoint-50"].tree)}  # type: ignore[arg-type]
    assert below[b"config.json"].xattrs == ((b"user.origin", b"a test"),)
    assert top[b"same"].file_key == below[b"model.safetensors"].file_key is not None
    # An empty directory is no news, and what comes later is imported by itself.
    assert store.imported(run, move=True)["versions"] == []
    make_checkpoint(run / "checkpoint-900", 900, 100)
    assert [one["step"] for one in store.imported(run, move=True)["versions"]] == [900]


def test_what_is_being_written_is_not_removed(store: Store, tmp_path: Path) -> None:
    run = tmp_path / "outside"
    make_run(run, 2, 200_000)
    log = run / "checkpoint-50/config.json"
    with log.open("ab"):
        done = store.imported(run, move=True)
    assert len(done["problems"]) == 1 and "open for writing" in done["problems"][0]
    assert [path for path in run.rglob("*") if path.is_file()] == [log]
    assert store.imported(run, move=True)["versions"] == [] and os.listdir(run) == []


@pytest.mark.parametrize("move", [False, True])
def test_weights_that_are_being_written_are_in_no_version(store: Store, run: Path, move: bool) -> None:
    """They may be half of what they are to be, whatever two readings show."""
    model = run / "checkpoint-50/model.safetensors"
    with model.open("ab"), pytest.raises(Unavailable, match="is open for writing"):
        store.imported(run, move=move)
    assert store.versions() == [] and model.exists()
    assert len(store.imported(run, move=move)["versions"]) == 3


def once_before(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, act: Callable[[], None]) -> None:
    """Have `act` happen before the first call of a method."""
    original, waits = getattr(kind, name), iter(range(1))

    def called(*arguments: Any) -> Any:
        if next(waits, None) is not None:
            act()
        return original(*arguments)

    monkeypatch.setattr(kind, name, called)


def test_a_mount_answers_while_trees_are_made_and_judged(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each encoding and decoding of a directory waits until another task has had its turn."""
    run, turns = tmp_path / "outside", [0]
    make_run(run, 1, 1000)

    def in_turn(work: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*arguments: Any) -> Any:
            before = turns[0]
            assert poll(lambda: turns[0] > before, 60), "nobody else had a turn"
            return work(*arguments)

        return waiting

    monkeypatch.setattr(import_trees, "encode_tree", in_turn(import_trees.encode_tree))
    monkeypatch.setattr(far_trees, "decode_tree", in_turn(far_trees.decode_tree))
    # What is made for a mount's own directories is another matter.
    monkeypatch.setattr(segments, "decode_tree", None)

    async def main() -> None:
        async def others() -> None:
            while True:
                turns[0] += 1
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            await store.import_it(run)
            (run / "checkpoint-50" / "more").write_bytes(b"more")
            await store.import_it(run)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert len(store.versions()) == 2 and turns[0]


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_what_took_a_name_meanwhile_is_not_removed(
    store: Store, run: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A file may take the name of anything, after the last look at it that goes by the name."""
    name = run / "name"
    if kind == "link":
        name.symlink_to("checkpoint-50")
    elif kind == "pipe":
        os.mkfifo(name)
    else:
        name.write_text("old")
    original = Outside.set_aside

    def set_aside(outside: Outside, path: tuple[bytes, ...]) -> Any:
        if path == (b"name",):
            (run / "new").write_text("the only copy")
            os.rename(run / "new", name)
        return original(outside, path)

    monkeypatch.setattr(Outside, "set_aside", set_aside)
    done = store.imported(run, move=True)
    assert len(done["problems"]) == 1 and "was replaced meanwhile" in done["problems"][0]
    assert os.listdir(run) == ["name"] and name.read_text() == "the only copy"
    monkeypatch.undo()
    assert store.imported(run, move=True)["problems"] == [] and os.listdir(run) == []
    assert store.shown(store.versions()[-1])["name"][-1] == b"the only copy"


def test_what_cannot_be_put_back_stays_and_is_imported(
    store: Store, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer comes late, and something else has the name by then."""
    log = run / "README.md"
    files = []
    original = Remover._is_other

    def is_other(remover: Remover, saved: Any, fd: Any, directory: int, name: bytes) -> str | None:
        if name == b"README.md":
            files.append(os.open(name, os.O_WRONLY, dir_fd=directory))
            log.write_text("new")
        return original(remover, saved, fd, directory, name)

    monkeypatch.setattr(Remover, "_is_other", is_other)
    done = store.imported(run, move=True)
    monkeypatch.undo()
    os.close(files[0])
    (aside,) = run.glob(".ckptfs-removing-*")
    assert "is open for writing" in done["problems"][0] and str(aside) in done["problems"][0]
    assert (aside / "README.md").read_text() == "a run" and log.read_text() == "new"
    log.unlink()
    assert store.imported(run)["problems"] == []
    assert os.listdir(run) == ["README.md"] and log.read_text() == "a run"


def test_a_writer_that_comes_late_changes_no_version(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the comparison and the removal, on the file system of the store, and in place."""
    run = tmp_path / "outside"
    make_run(run, 1, 400_000)
    model, before, files = run / "checkpoint-50/model.safetensors", contents(run), list[Any]()
    once_before(monkeypatch, Remover, "remove", lambda: files.append(model.open("r+b")))
    done = store.imported(run, move=True)
    assert len(done["problems"]) == 1 and "open for writing" in done["problems"][0]
    files[0].truncate(10)
    files[0].close()
    assert store.shown(store.versions()[-1]) == before


def test_a_move_that_failed_leaves_nothing_that_a_writer_could_change(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "outside"
    make_run(run, 1, 400_000)
    model, before = run / "checkpoint-50/model.safetensors", contents(run)

    def failing() -> None:
        raise Unavailable("a test")

    once_before(monkeypatch, TreeMaker, "make", failing)
    with pytest.raises(Unavailable):
        store.imported(run, move=True)
    assert model.stat().st_nlink == 1
    store.imported(run)
    model.write_bytes(b"next save")
    assert store.shown(store.versions()[-1]) == before


class Died(Exception):
    """Stands for a kill."""


def moving_row(store: Store) -> bytes | None:
    unit = store.parts.histories.unit_named(b"run")
    assert unit is not None
    return store.parts.index.get(Table.META, MOVING + unit.unit)


@pytest.mark.parametrize("other", ["device", "path"])
def test_a_move_goes_on_after_a_reboot_and_under_another_name(
    store: Store, run: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """The number of a device may be another one; what was moved before has not gone for that."""
    before = contents(run)
    original, calls = Remover.remove, iter(range(1000))

    def remove(remover: Remover, path: tuple[bytes, ...], saved: Any) -> str | None:
        if next(calls) == 5:
            raise Died
        return original(remover, path, saved)

    monkeypatch.setattr(Remover, "remove", remove)
    with pytest.raises(Died):
        store.imported(run, move=True)
    monkeypatch.undo()
    if other == "path":
        run = run.rename(run.parent / "renamed")
    else:
        row = moving_row(store)
        assert row is not None
        device, *rest = msgspec.msgpack.decode(row)
        unit, change = store.parts.histories.unit_named(b"run"), Change()
        assert unit is not None
        change.put(Table.META, MOVING + unit.unit, msgspec.msgpack.encode((device + 1, *rest)))
        store.parts.index.apply(change, sync=True)
    store.imported(run, move=True)
    assert [one.step for one in store.versions()] == [50, 100, 150]
    assert store.shown(store.versions()[-1]) == before
    assert os.listdir(run) == [] and moving_row(store) is None


def test_a_move_is_over_when_nothing_is_left(
    store: Store, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that came meanwhile is brought by the next import, beside all that was moved."""
    before = contents(run)
    once_before(monkeypatch, Remover, "remove", lambda: (run / "late").write_text("late") and None)
    assert store.imported(run, move=True)["problems"] == []
    assert os.listdir(run) == ["late"] and moving_row(store) is not None
    before |= contents(run)
    store.imported(run, move=True)
    assert store.shown(store.versions()[-1]) == before and moving_row(store) is None


def test_a_hole_is_not_read(store: Store, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (run / "checkpoint-50/sparse.bin").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(500 << 20)
        file.write(b"\x07" * 300_000)
    read, original = list[int](), FileTaker._read

    def counted(taker: FileTaker, source: int, at: int, end: int, buffer: memoryview) -> Any:
        read.append(end - at)
        return original(taker, source, at, end, buffer)

    monkeypatch.setattr(FileTaker, "_read", counted)
    store.imported(run)
    assert max(read) <= 8 << 20 and 300_000 < sum(read) < 16 << 20


class Name(bytes):
    """Counts how often names are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return bytes.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("saves", [0, 3])
def test_a_flat_directory_costs_as_much_as_it_has_files(
    run: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    scanned = Outside(str(run)).scan()
    checkpoints = [child for child in scanned.children if child.is_dir][:saves]
    log = next(child for child in scanned.children if child.is_file)
    files = [replace(log, name=Name(b"%04d" % at), mtime_ns=at) for at in range(1000)]
    made, original = list[int](), import_plan.replace

    def counted(*arguments: Any, **more: Any) -> Any:
        made.append(1)
        return original(*arguments, **more)

    monkeypatch.setattr(import_plan, "replace", counted)
    top = original(scanned, children=(*files, *checkpoints))
    steps = plan_import(top, {}, lambda entry: ())
    news = _News(top, None, {}, steps)
    assert sum(len(news.new(step)) for step in steps) == 1000 + saves
    assert len(steps) == max(1, saves) and len(made) <= 10 and Name.compared <= 5000


def test_no_failure_leaves_staging_files(store: Store, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    copy = FileTaker._copy

    def full(taker: FileTaker, source: int, fd: int, size: int) -> None:
        nonlocal calls
        copy(taker, source, fd, size)
        calls += 1
        if calls == 2:
            raise NoSpace("a test")

    monkeypatch.setattr(FileTaker, "_clone", lambda *arguments: False)
    monkeypatch.setattr(FileTaker, "_copy", full)
    with pytest.raises(NoSpace):
        store.imported(run)
    assert calls == 2 and store.parts.staging.numbers() == []


def test_a_file_system_of_many_machines_is_not_asked_who_writes(
    store: Store, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS answers that nobody may know, in the words that mean that somebody writes."""
    table = outside.mount_table()
    nfs = [replace(entry, file_system="nfs4") for entry in table]
    monkeypatch.setattr(outside, "mount_table", lambda: nfs)
    follower = Follower(store, run)
    with (run / "checkpoint-50/model.safetensors").open("ab"):
        assert follower.look(4) == [50, 100, 150]
    monkeypatch.setattr(outside, "mount_table", lambda: table)
    follower = Follower(store, run)
    with (run / "checkpoint-100/model.safetensors").open("ab") as file:
        file.write(b"\0")
        file.flush()
        assert follower.look(4) == []


def test_what_changes_while_it_is_read_makes_no_version(
    store: Store, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is read again where it came from, after it was stored."""
    ingest = store.parts.ingest
    store_files = ingest.store_files

    async def stored(candidates: Any, *rest: Any) -> Any:
        report = await store_files(candidates, *rest)
        (run / "checkpoint-50/config.json").write_text("[]")
        return report

    monkeypatch.setattr(ingest, "store_files", stored)
    with pytest.raises(Unavailable, match=r"config\.json was changed while it was read"):
        store.imported(run)
    assert store.versions() == [] and store.parts.staging.numbers() == []


def test_the_collector_takes_nothing_of_an_import_under_way(
    store: Store, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored and in no version yet; what nobody imports any more goes."""
    parts = store.parts
    reclaim = parts.ingest.reclaim
    sweeper = Sweeper(parts.disk, parts.index, parts.segments, parts.histories, reclaim, lambda: [])
    ingest, store_files, wanted = parts.ingest, parts.ingest.store_files, list[int]()

    async def stored(candidates: Any, *rest: Any) -> Any:
        report = await store_files(candidates, *rest)
        wanted.append((await sweeper.collect()).chunks)
        return report

    monkeypatch.setattr(ingest, "store_files", stored)
    store.imported(run)
    assert sum(wanted) and store.shown(store.versions()[-1]) == contents(run)
    monkeypatch.setattr(ingest, "store_files", store_files)
    make_checkpoint(run / "checkpoint-200", 200, 8000)
    monkeypatch.setattr(FileTaker, "_is_equal", lambda self, one, recipe: False)
    with pytest.raises(Unavailable):
        store.imported(run)
    before = parts.segments.payload_bytes()
    trio.run(sweeper.collect)
    assert parts.segments.payload_bytes() < before - 2000


def test_what_cannot_be_imported_is_refused_with_what_to_do(store: Store, run: Path, tmp_path: Path) -> None:
    cases: list[tuple[Path, type[CkptfsError], str]] = [
        (tmp_path / "none", NotFound, "there is no directory"),
        (run / "README.md", InvalidRequest, "is not a directory"),
        (tmp_path / "store", InvalidRequest, "the store"),
        (tmp_path / "store/segments", InvalidRequest, "the store"),
        (run.parent, InvalidRequest, "run1; import that"),
    ]
    for source, kind, words in cases:
        with pytest.raises(kind, match=words):
            store.imported(source)
    with pytest.raises(InvalidRequest, match="another directory"):
        store.imported(run, device=1, inode=1)
    for name in ("", "@root", "@other", "run@1", "a/.versions/b", ".versions", "/.versions"):
        with pytest.raises(InvalidRequest, match="no name for a unit"):
            store.imported(run, name)
    (run / "checkpoint-50/.versions").mkdir()
    with pytest.raises(InvalidRequest, match="a name that is ckptfs's own"):
        store.imported(run)


@pytest.mark.parametrize("move", [False, True], ids=["copy", "move"])
def test_an_import_that_is_killed_goes_on(seed: int, move: bool) -> None:
    """20 checkpoints; more seeds: see import_kills.py."""
    kills, wrong = run_seed(seed, move=move, first_calls=700)
    assert not wrong, f"seed {seed}, {kills} kills: {wrong}"


def test_from_the_command_line_to_a_live_directory(mount_factory: Factory, run: Path) -> None:
    mount = mount_factory(config={"settle_s": 0.2})
    unit = str(mount.path / "run1")
    assert mount.facts("import", str(run), "--as", unit)["live"]
    assert state_of(mount.path / "run1") == state_of(run)
    assert [one.step for one in mount.versions("run1")] == [50, 100, 150]
    assert mount.facts("log", unit, "--verify")["findings"] == []
    # A live directory goes its own way from now on.
    make_checkpoint(run / "checkpoint-200", 200, 100)
    refused = mount.cli("import", str(run), "--as", unit, check=False)
    assert refused.returncode == 1 and "is live here" in refused.stderr
    there = mount.cli("import", unit, "--as", str(mount.path / "x"), check=False)
    assert there.returncode == 1 and "on a ckptfs mount already" in there.stderr
    mount.stop()
    config = str(mount.store.parent / "logs/ckptfs.toml")
    bare = mount.facts("import", str(run), "--store", str(mount.store), "--config", config, "--as", "bare")
    assert (len(bare["versions"]), bare["live"]) == (4, False)  # type: ignore[arg-type]


# ---- following -----------------------------------------------------------------------------------


class Follower:
    """What `import --follow` does, by a clock of its own: a look every half second."""

    def __init__(self, store: Store, run: Path) -> None:
        self._store, self._run = store, run
        self._outside = Outside(str(run))
        self._following = Following(self._outside, settle_s=2.0, settle_max_s=20.0)
        self._now = 1000.0

    def look(self, for_s: float) -> list[int | None]:
        """The steps of the versions that come of it."""
        steps = []
        for _ in range(round(for_s * 2)):
            self._now += 0.5
            ready = self._following.look(self._outside.scan(), self._now)
            if ready is not None:
                steps += self._take(ready)
        return steps

    def _take(self, ready: Ready) -> list[int | None]:
        left = tuple(os.fsdecode(b"/".join(path)) or "." for path in ready.left)
        try:
            done = self._store.imported(self._run, left=left, follows=True, looked_ns=ready.looked_ns)
        except Unavailable:
            self._following.refused(self._now)
            return []
        self._following.taken(self._now)
        return [one["step"] for one in done["versions"]]


@pytest.fixture
def follower(store: Store, run: Path) -> Follower:
    follower = Follower(store, run)
    assert follower.look(1.5) == [] and follower.look(1.5) == [50, 100, 150]
    return follower


def test_follow_takes_a_save_when_it_is_done(follower: Follower, store: Store, run: Path) -> None:
    assert follower.look(60) == []
    make_checkpoint(run / "tmp-checkpoint-200", 200, 8000)
    assert follower.look(1) == []
    os.rename(run / "tmp-checkpoint-200", run / "checkpoint-200")
    shutil.rmtree(run / "checkpoint-50")
    assert follower.look(1) == [] and follower.look(5) == [200] and follower.look(60) == []
    newest = store.versions()[-1]
    assert store.shown(newest) == contents(run) and newest.state.value == "complete"


def test_follow_goes_on_through_many_rotations(follower: Follower, store: Store, run: Path) -> None:
    """Two checkpoints are kept; each number is given to one directory only."""
    steps = range(200, 800, 50)
    for step in steps:
        make_checkpoint(run / f"checkpoint-{step}", step, 1000)
        assert follower.look(1) == []
        shutil.rmtree(run / f"checkpoint-{step - 150}")
        assert step in follower.look(3.5)
    assert store.shown(store.versions()[-1]) == contents(run)


@contextmanager
def being_written(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        file.write(b"\x10" * 1000)
        file.flush()
        yield


def test_follow_leaves_a_directory_that_is_being_written(follower: Follower, store: Store, run: Path) -> None:
    """Nothing happens in it, but a file is open; what lies elsewhere is taken meanwhile."""
    (run / "checkpoint-300").mkdir()
    with being_written(run / "checkpoint-300/model.safetensors"):
        make_checkpoint(run / "checkpoint-200", 200, 8000)
        assert follower.look(10) == [200]
        assert "checkpoint-300/model.safetensors" not in store.shown(store.versions()[-1])
    # It was given up half-way: the next version says so.
    assert follower.look(10) == [200]
    assert store.versions()[-1].state.value == "partial"
    assert store.shown(store.versions()[-1]) == contents(run)


def test_follow_is_held_back_by_no_log_and_makes_few_versions_of_it(
    follower: Follower, store: Store, run: Path
) -> None:
    made = []
    log = run / "train.log"
    for second in range(120):
        with log.open("a") as file:
            file.write(f"{second}\n")
        if second == 40:
            make_checkpoint(run / "checkpoint-200", 200, 8000)
        made += [(second, step) for step in follower.look(1)]
    assert [step for second, step in made if 40 <= second <= 45] == [200]
    assert len(made) <= 4, made


def test_follow_goes_on_after_a_directory_that_never_rests(
    follower: Follower, store: Store, run: Path
) -> None:
    """After `settle_max_s` what has settled is taken."""
    make_checkpoint(run / "checkpoint-200", 200, 8000)
    (run / "checkpoint-200/adapter.bin").write_bytes(b"\x10" * 100)
    steps = []
    for beat in range(40):
        (run / "checkpoint-200/heartbeat").write_text(str(beat))
        steps += follower.look(1)
    assert 200 in steps and steps.count(200) <= 3
    shown = store.shown(store.versions()[-1])
    assert "checkpoint-200/adapter.bin" in shown


@pytest.mark.parametrize("kind", ["new", "renamed", "file"])
def test_follow_takes_nothing_that_it_has_not_looked_at(
    follower: Follower, store: Store, run: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What appears between its look and the daemon's: the beginning of a save, complete to look at."""
    other = run.parent / "other"
    make_checkpoint(other, 300, 1000)
    make_checkpoint(run / "checkpoint-200", 200, 8000)
    original, happens = store.imported, iter(range(1))

    def imported(*arguments: Any, **more: Any) -> dict[str, Any]:
        if next(happens, None) is not None:
            time.sleep(0.05)  # what happens in the same tick of the clock as the look counts as looked at
            if kind == "new":
                make_checkpoint(run / "checkpoint-300", 300, 1000)
            elif kind == "renamed":
                other.rename(run / "checkpoint-300")
            else:
                shutil.copy(other / "model.safetensors", run / "checkpoint-200/more.safetensors")
            done = original(*arguments, **more)
            assert all("checkpoint-300" not in path for path in store.shown(store.versions()[-1]))
            assert "checkpoint-200/more.safetensors" not in store.shown(store.versions()[-1])
            return done
        return original(*arguments, **more)

    monkeypatch.setattr(store, "imported", imported)
    made = follower.look(12)
    assert next(happens, None) is None and 200 in made and (kind == "file" or 300 in made)
    assert store.shown(store.versions()[-1]) == contents(run)


@pytest.mark.parametrize("kind", [NoSpace, Conflict])
def test_follow_waits_for_room(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[CkptfsError]
) -> None:
    """What may pass does not end it."""
    asked, pauses = list[int](), list[float]()

    class Full:
        def ask(self, request: Import) -> object:
            asked.append(1)
            raise kind("a test")

    @contextmanager
    def opened(*_: object) -> Iterator[Full]:
        yield Full()

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(asked) == 2 or len(pauses) == 200:
            raise Died

    clock = iter(range(1000))
    monkeypatch.setattr(cli_import, "_opened", opened)
    monkeypatch.setattr(cli_import, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=pause))
    with pytest.raises(Died):
        cli_import._follow(Import(path="/run", source=str(run)), "", None, "", (2.0, 20.0, 0.1), False)
    assert len(asked) == 2 and "a test; trying again" in capsys.readouterr().err


def test_follow_goes_on_after_a_directory_that_could_not_be_opened(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another one has its name, and the first try to open that fails: the one before is closed by then."""
    opened = Outside
    tries = iter((None, OSError(errno.ESTALE, "stale"), None))

    def sometimes(path: str) -> Outside:
        if (failure := next(tries)) is not None:
            raise failure
        return opened(path)

    pauses = list[float]()

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 1:
            run.rename(run.with_name("old"))
            make_checkpoint(run / "checkpoint-1", 1, 100)
        elif len(pauses) == 4:
            raise Died

    clock = iter(range(1000))
    monkeypatch.setattr(outside, "Outside", sometimes)
    monkeypatch.setattr(cli_import, "time", SimpleNamespace(monotonic=lambda: next(clock) / 100, sleep=pause))
    with pytest.raises(Died):
        cli_import._follow(Import(path="/run", source=str(run)), "", None, "", (2.0, 20.0, 0.1), False)
    said = capsys.readouterr().err
    assert "stale" in said and said.count("trying again") == 1 and next(tries, "none left") == "none left"


def test_follow_takes_nothing_of_what_changed_meanwhile(
    follower: Follower, store: Store, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and the daemon's reading somebody wrote: the next look takes it."""
    make_checkpoint(run / "checkpoint-200", 200, 8000)
    original, writes = store.imported, iter(range(1))

    def disturbed(*arguments: Any, **more: Any) -> dict[str, Any]:
        if next(writes, None) is not None:
            raise Unavailable("somebody wrote")
        return original(*arguments, **more)

    monkeypatch.setattr(store, "imported", disturbed)
    assert follower.look(2.5) == []
    assert follower.look(5) == [200]
