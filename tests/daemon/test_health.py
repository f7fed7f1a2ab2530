"""The health of saved tensors: looked at when digests are made, kept with the content, told by log."""

from __future__ import annotations

import shutil
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import trio
from history_edits import OURS
from kernelmounts import poll
from mounting import Mount, memory_folder
from rotting import flip, place_of_chunk, scrub
from safetensors.numpy import save as saved_bytes
from saved_store import File, SavedStore

from ckptfs.daemon import digesting as digesting_module
from ckptfs.daemon.cli_output import show_health
from ckptfs.daemon.digesting import Digesting
from ckptfs.daemon.health_making import HealthMaking
from ckptfs.daemon.health_queries import HealthQueries
from ckptfs.daemon.messages import Json
from ckptfs.daemon.saved_files import Saved, walk
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.digests import FileDigests
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.frames import decode_frames
from ckptfs.store.health_log import HealthLog
from ckptfs.store.health_records import HealthSum, VersionHealth, decode_health_record, encoded_records
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.history_log import history_path
from ckptfs.store.history_proof import prove
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.index import Change, Table
from ckptfs.store.layout import read_format
from ckptfs.store.rebuild import rebuild
from ckptfs.store.sweep import Sweeper
from ckptfs.store.whole_files import WholeFiles

FINE = saved_bytes({"w": np.linspace(1, 2, 100_000, dtype=np.float32), "n": np.arange(9)})


def bad(value: float = np.nan, place: int = 5) -> bytes:
    """A file of two float tensors, of which `layer.bias` is not finite."""
    bias = np.ones(1000, np.float16)
    bias[place] = value
    return saved_bytes({"layer.weight": np.full((300, 300), 0.5, np.float32), "layer.bias": bias})


class World:
    """A store, what looks at its contents, and which ones it has read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wanted = True
        self.open()

    def open(self) -> None:
        self.store = SavedStore(self.root, key=OURS)
        one = self.store
        self.log = HealthLog(one.disk, one.index, one.histories)
        self.digests = DigestLog(one.disk, one.index, one.histories)
        self.files = WholeFiles(one.disk, one.segments, trio.CapacityLimiter(1))
        self.read: list[RecipeId] = []
        whole = self.files.digests

        async def noted(recipe: RecipeId, *rest: object) -> FileDigests:
            self.read.append(recipe)
            return await whole(recipe, *rest)  # type: ignore[arg-type]

        self.files.digests = noted  # type: ignore[method-assign, assignment]
        making = HealthMaking(one.segments, self.log, trio.CapacityLimiter(1), lambda: self.wanted)
        self.digesting = Digesting(
            one.index, one.segments, one.histories, self.digests, self.files, lambda: True, making
        )

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def publish(self, unit: str = "run", **files: bytes | File) -> VersionRecord:
        tree = {name.replace("_", ".").encode(): content for name, content in files.items()}
        return trio.run(lambda: self.store.publish(unit.encode(), tree))

    def recipe(self, record: VersionRecord, name: str) -> RecipeId:
        assert record.top.tree is not None
        entries = self.store.segments.read_tree(record.top.tree)
        (recipe,) = [entry.recipe for entry in entries if entry.name == name.encode()]
        assert recipe is not None
        return recipe

    def look(self) -> None:
        trio.run(self.digesting.catch_up)

    def of(self, record: VersionRecord) -> VersionHealth:
        found = self.log.of_version(record.unit, record.number)
        assert found is not None
        return found

    def records(self, record: VersionRecord) -> list[set[RecipeId]]:
        """The contents in each health record of a unit; its history is whole."""
        report = prove(self.store.histories.evidence(record.unit), [OURS.public])
        assert report.findings == []
        frames = decode_frames((self.root / history_path(record.unit)).read_bytes())
        records = [frame.payload for frame in frames if frame.kind == RecordKind.HEALTH]
        return [set(decode_health_record(payload).contents) for payload in records]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(digesting_module, "LOOK_EVERY_S", 0.01)
    with memory_folder() as memory:
        world = World(memory / "store")
        yield world
        world.store.close()


def test_contents_are_read_once_for_digests_and_health(world: World) -> None:
    record = world.publish(
        a_safetensors=bad(), b_safetensors=FINE, notes=b"no tensors", copy_safetensors=FINE
    )
    world.look()
    recipes = {name: world.recipe(record, name) for name in ("a.safetensors", "b.safetensors", "notes")}
    assert sorted(world.read) == sorted(recipes.values())
    found = world.log.of(recipes["a.safetensors"])
    assert found is not None and [(one.dtype, one.nan) for one in found.listed] == [("F32", 0), ("F16", 1)]
    assert world.log.has(recipes["notes"]) and world.log.of(recipes["notes"]) is None
    total = world.of(record).total
    assert (total.tensors, total.bad, total.nan, total.elements) == (3, 1, 1, 91_000 + 100_000)
    assert world.of(record).unknown == 0 and total.largest == 2.0
    assert world.records(record) == [{recipes["a.safetensors"], recipes["b.safetensors"]}]
    assert read_format(world.store.disk).ro_compat == ("digests", "health")
    assert world.log.newest(record.unit) == (1, world.of(record))


def test_the_sum_of_a_later_version_has_what_did_not_change(world: World) -> None:
    world.publish(a_safetensors=bad(), b=b"1")
    world.look()
    world.read.clear()
    second = world.publish(a_safetensors=bad(), b=b"2")
    world.look()
    assert world.read == [world.recipe(second, "b")]
    assert world.of(second).total.bad == 1 and world.log.newest(second.unit) == (2, world.of(second))


def test_a_sum_over_many_files_leaves_the_core_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of a version are gone through, though nothing of them is read."""
    record = world.publish(**{f"n{number}": b"same" for number in range(600)})
    rests = list[int]()

    async def rest(done: int) -> None:
        rests.append(done)

    monkeypatch.setattr(world.digesting, "_rest", rest)
    world.look()
    assert world.of(record).unknown == 0 and {256, 512} <= {*rests}


def test_where_it_is_not_wanted_nobody_looks(world: World) -> None:
    world.wanted = False
    record = world.publish(a_safetensors=bad())
    world.look()
    assert world.read and world.log.of_version(record.unit, 1) is None and not world.records(record)
    assert "health" not in read_format(world.store.disk).ro_compat


def test_what_was_digested_before_is_looked_at_for_a_newer_version(world: World) -> None:
    world.wanted = False
    first = world.publish(a_safetensors=bad(), note=b"x")
    world.look()
    world.wanted = True
    world.reopen()
    world.look()
    assert world.read == [] and world.log.of_version(first.unit, 1) is None
    second = world.publish(a_safetensors=bad(), note=b"x", more=b"more")
    world.look()
    # What has no tensors is not read again to learn that.
    assert world.read == [world.recipe(second, name) for name in ("a.safetensors", "more")]
    assert world.of(second).total.bad == 1 and world.of(second).unknown == 0


def test_damage_is_not_known_until_it_is_healed(world: World) -> None:
    record = world.publish(a_safetensors=bad(), b_safetensors=FINE)
    chunks = list(world.store.segments.read_recipe(world.recipe(record, "a.safetensors")).chunks())
    for chunk in chunks[-1:]:
        path, offset, _ = place_of_chunk(world.store, chunk)
        flip(path, 8 * offset + 3)
    world.look()
    assert (world.of(record).total.bad, world.of(record).unknown) == (0, 1)
    world.publish("other", again=bad())  # Writing it again heals it.
    world.look()
    assert (world.of(record).total.bad, world.of(record).unknown) == (1, 0)


def test_a_header_that_is_damaged_is_no_file_without_tensors(world: World) -> None:
    record = world.publish(a_safetensors=bad())
    recipe = world.recipe(record, "a.safetensors")
    path, offset, _ = place_of_chunk(
        world.store, next(iter(world.store.segments.read_recipe(recipe).chunks()))
    )
    flip(path, 8 * offset + 100)
    world.reopen()
    world.look()
    assert not world.log.has(recipe) and world.of(record).unknown == 1


def test_a_hole_is_zeros(world: World) -> None:
    content = saved_bytes({"w": np.zeros(3 << 20, np.float32)})
    head = len(content) - (12 << 20)
    hole = (head + 4096, (12 << 20) - 8192)
    record = world.publish(a_safetensors=File(content, holes=(hole,)))
    world.look()
    assert world.of(record).total.zero == 3 << 20


def saved_dcp(folder: Path, state: dict[str, torch.Tensor]) -> dict[bytes, bytes]:
    dcp.save({"model": state}, checkpoint_id=folder)
    return {path.name.encode(): path.read_bytes() for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("first_seen", ["in its save", "beside another save's metadata", "by another name"])
def test_dcp_tensors_are_found_wherever_a_shard_was_seen_first(
    world: World, tmp_path: Path, first_seen: str
) -> None:
    weight = torch.ones(500, 300)
    weight[7, 7] = torch.inf
    half = torch.ones(77, dtype=torch.bfloat16)
    files = saved_dcp(tmp_path / "new", {"w": weight, "half": half})
    (shard,) = [name for name in files if name.endswith(b".distcp")]
    if first_seen == "beside another save's metadata":
        older = saved_dcp(tmp_path / "old", {"w": torch.ones(100, 100)})
        trio.run(lambda: world.store.publish(b"run", {b"step": files | {b".metadata": older[b".metadata"]}}))
    elif first_seen == "by another name":
        trio.run(lambda: world.store.publish(b"run", {b"shard.pt": files[shard]}))
    world.look()
    record = trio.run(lambda: world.store.publish(b"run", {b"step": files}))
    world.look()
    total = world.of(record).total
    assert (total.tensors, total.bad, total.infinite, total.elements) == (2, 1, 1, 150_077)
    assert world.of(record).unknown == 0


def test_a_file_of_which_a_part_cannot_be_told_is_not_known(world: World) -> None:
    """Nobody says of the half of a file that all of it is finite; and it is read once for its digests."""
    record = world.publish(cut_safetensors=bad()[:-1], whole_safetensors=FINE)
    cut = world.recipe(record, "cut.safetensors")
    world.look()
    assert not world.log.has(cut) and world.digests.has(cut)
    assert (world.of(record).total.tensors, world.of(record).unknown) == (1, 1)
    world.read.clear()
    later = world.publish(cut_safetensors=bad()[:-1], whole_safetensors=FINE, more=b"more")
    world.look()
    assert world.read == [world.recipe(later, "more")] and world.of(later).unknown == 1


def test_what_waits_to_be_recorded_is_bounded_and_recorded_in_turns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digesting_module, "_LISTED_A_RECORD", 4)
    tree = {f"{n}_safetensors": bad(n + 2.0) for n in range(6)}
    record = world.publish(**tree)
    world.look()
    # Two tensors a file.
    assert [len(contents) for contents in world.records(record)] == [2, 2, 2]

    recipes = [world.recipe(record, f"{n}.safetensors") for n in range(6)]
    found = {recipe: world.log.of(recipe) for recipe in recipes}
    made = [one for recipe in recipes for one in encoded_records({recipe: found[recipe]})]  # type: ignore[dict-item]
    before, seen = len(world.records(record)), set()

    async def watch() -> None:
        while True:
            seen.add(len(world.records(record)) - before)
            await trio.lowlevel.checkpoint()

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await world.log.record(record.unit, made)
            nursery.cancel_scope.cancel()

    trio.run(both)
    # Trio runs the two in any order in each turn: of six turns at least three are told apart.
    assert len(seen) >= 3 and len(world.records(record)) == before + 6


def test_it_goes_with_its_content_and_its_version(world: World) -> None:
    first, second = world.publish(a_safetensors=bad()), world.publish(a_safetensors=FINE)
    world.look()
    gone, kept = world.recipe(first, "a.safetensors"), world.recipe(second, "a.safetensors")
    world.store.histories.forget(first.unit, first.number)
    assert world.log.of_version(first.unit, first.number) is None
    sweeper = Sweeper(
        world.store.disk, world.store.index, world.store.segments, world.store.histories,
        world.store.ingest.reclaim, lambda: (),
    )  # fmt: skip
    trio.run(sweeper.collect)
    assert not world.log.has(gone) and world.log.has(kept)
    assert not scrub(world.store).findings
    trio.run(world.log.record, first.unit, [], [gone])
    assert not world.log.has(gone), "made while the content went: left out"


def test_a_version_that_was_forgotten_meanwhile_has_no_sum(world: World) -> None:
    record = world.publish(a_safetensors=bad())
    world.publish(b=b"b")
    world.look()
    found = world.of(record)
    world.store.histories.forget(record.unit, record.number)
    world.log.put_version(record.unit, record.number, found)
    assert world.log.of_version(record.unit, record.number) is None


def test_a_rebuild_brings_it_back_and_nothing_is_read_again(world: World) -> None:
    record = world.publish(a_safetensors=bad(), b=b"b")
    world.look()
    before = world.of(record)
    world.store.close()
    shutil.rmtree(world.root / "index")
    rebuild(Disk(str(world.root)), boot_id="boot", now_ns=1)
    world.open()
    world.look()
    assert world.of(record) == before and world.read == []


def test_rows_that_say_something_else_are_put_right_by_a_scrub(world: World) -> None:
    record = world.publish(a_safetensors=bad(), b_safetensors=FINE)
    world.look()
    recipes = [world.recipe(record, name) for name in ("a.safetensors", "b.safetensors")]
    before = [world.log.of(recipe) for recipe in recipes]
    change = Change()
    change.put(Table.HEALTH, recipes[0], world.store.index.get(Table.HEALTH, recipes[1]) or b"")
    change.delete(Table.HEALTH, recipes[1])
    world.store.index.apply(change)
    found = scrub(world.store).findings
    assert [(recipes[0].hex() in one.what, one.healed) for one in found] == [(True, True)]
    assert [world.log.of(recipe) for recipe in recipes] == before


# ---- on a mount -----------------------------------------------------------------------------


def healths(mount: Mount) -> list[dict[str, float] | None]:
    versions = cast("list[dict[str, object]]", mount.ask("log", f"{mount.path}/run"))
    return [cast("dict[str, float] | None", version["health"]) for version in versions]


def test_log_marks_a_save_with_a_nan(mount_factory: Callable[..., Mount]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mount = mount_factory(config={"settle_s": 0.3, "metrics": f"127.0.0.1:{port}", "metrics_names": True})
    run = mount.path / "run"
    run.mkdir()
    for content in (bad(1.0), bad()):
        (run / "model.safetensors").write_bytes(content)
        mount.publish("run")
    poll(lambda: None not in healths(mount), 30)
    first, second = healths(mount)
    assert first is not None and first["bad_tensors"] == 0
    assert second is not None and (second["nan"], second["bad_tensors"], second["tensors"]) == (1, 1, 2)
    lines = mount.cli("log", str(run)).stdout.splitlines()
    assert "finite" in lines[1] and "1 NaN in 1 tensor" in lines[2]
    assert "1 NaN (before 0)" in mount.cli("diff", f"{run}@1", f"{run}@2").stdout
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert b'ckptfs_unit_bad_tensors{live="yes",unit="run"} 1.0' in answer.read()

    said = mount.cli("health", f"{run}@2", check=False)
    assert said.returncode == 1 and len(said.stdout.splitlines()) == 2, said
    assert "layer.bias: F16, up to 1: 1 NaN" in said.stdout
    mount.stop()
    inner = ("/run@2", "--store", str(mount.store))
    offline = mount.cli("health", *inner, check=False)
    assert (offline.returncode, offline.stdout) == (1, said.stdout)
    (unit,) = cast("list[dict[str, object]]", mount.facts("status", *inner[1:])["units"])
    assert unit["bad_tensors"] == 1


def test_it_is_told_to_people(capsys: pytest.CaptureFixture[str]) -> None:
    counts = HealthSum(tensors=3, largest=2.5).facts()
    tensor = {"name": "w", "dtype": "F32", "offset": 8} | counts
    listed = [tensor, tensor | {"name": None, "subnormal": 2}]
    files = [{"path": "a", "damage": "cut", "listed": listed} | counts]
    show_health(files, every=False)
    assert capsys.readouterr().out.splitlines() == [
        "a: 3 float tensors, up to 2.5: nothing to say",
        "    (of the rest of it nothing can be told: cut)",
        "    at byte 8: F32, up to 2.5: 2 subnormal",
        "    (only 2 of them are listed)",
    ]
    show_health(files, every=True)
    assert "    w: F32, up to 2.5" in capsys.readouterr().out.splitlines()
    show_health([], every=True)
    assert capsys.readouterr().out == "there are no float tensors in a format that is known\n"


def test_what_was_not_looked_at_is_looked_at_when_asked_for(world: World) -> None:
    tree = {b"below": {b"a.safetensors": bad(np.inf)}, b"notes": b"notes"}
    record = trio.run(lambda: world.store.publish(b"run", tree))
    saved = [one for one in walk(world.store.segments, Saved(b"", record.top), refuse) if one.entry.is_file]
    queries = HealthQueries(world.store.segments, world.files, world.log, trio.CapacityLimiter(1))

    def asked() -> tuple[list[Json], list[Json]]:
        return trio.run(queries.rows, record, [(one.path, one) for one in saved], lambda progress: None)

    (row,), others = asked()
    assert isinstance(row, dict) and others == ["notes"] and not world.log.has(saved[0].entry.recipe or b"")
    assert (row["path"], row["source"], row["inf"], row["bad_tensors"]) == (
        "below/a.safetensors",
        "chunks",
        1,
        1,
    )
    listed = cast("list[dict[str, object]]", row["listed"])
    assert [(one["name"], one["inf"]) for one in listed] == [("layer.weight", 0), ("layer.bias", 1)]
    world.look()
    world.read.clear()
    assert asked() == ([row | {"source": "index"}], others) and world.read == []


def test_of_a_file_that_is_cut_off_nobody_says_that_it_is_fine(world: World) -> None:
    record = world.publish(cut_safetensors=FINE[:-1], header_safetensors=FINE[:5000], b_safetensors=FINE)
    saved = [one for one in walk(world.store.segments, Saved(b"", record.top), refuse) if one.entry.is_file]
    queries = HealthQueries(world.store.segments, world.files, world.log, trio.CapacityLimiter(1))
    rows, others = trio.run(queries.rows, record, [(one.path, one) for one in saved], lambda progress: None)
    found = {row["path"]: row["damage"] for row in cast("list[dict[str, Json]]", rows)}
    assert others == [] and found["b.safetensors"] is None
    assert "truncated" in str(found["cut.safetensors"]) and "truncated" in str(found["header.safetensors"])


@pytest.mark.parametrize("what", ["all of it", "its list"])
def test_a_row_that_is_damaged_says_nothing(world: World, what: str) -> None:
    record = world.publish(a_safetensors=bad())
    world.look()
    recipe = world.recipe(record, "a.safetensors")
    row = world.store.index.get(Table.HEALTH, recipe) or b""
    change = Change()
    change.put(Table.HEALTH, recipe, b"\0rot" if what == "all of it" else row.replace(b"F16", b"F99"))
    world.store.index.apply(change)
    assert world.log.has(recipe) == (what == "its list") and not world.log.has_no_tensors(recipe)
    queries = HealthQueries(world.store.segments, world.files, world.log, trio.CapacityLimiter(1))
    found = [
        (one.path, one) for one in walk(world.store.segments, Saved(b"", record.top), refuse) if one.path
    ]
    (answer,), others = trio.run(queries.rows, record, found, lambda progress: None)
    assert isinstance(answer, dict) and others == []
    assert (answer["source"], answer["nan"]) == ("chunks", 1)
    if what == "all of it":
        world.publish(a_safetensors=bad(), b=b"b")
        world.look()
        assert world.log.has(recipe), "it was looked at again"


def refuse(path: bytes, tree: TreeId, error: Corrupt) -> None:
    raise error
