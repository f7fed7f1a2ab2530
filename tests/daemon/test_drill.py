"""`ckptfs drill`: would it work to go on from a version?"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trio
from import_kills import KEY, make_checkpoint
from kernelmounts import poll
from mounting import Mount
from small_store import safetensors

from ckptfs.daemon import drill_loader, drilling
from ckptfs.daemon.config import RemoteConfig
from ckptfs.daemon.copying import Check, Copying
from ckptfs.daemon.drill_loading import load_all, memory_for
from ckptfs.daemon.drill_probe import KEPT_BYTES, run_probe
from ckptfs.daemon.drill_report import Drill, LoadedFile, deviations, newest_of_each
from ckptfs.daemon.drilling import Options, drill_remote, drill_stored
from ckptfs.daemon.import_service import ImportService
from ckptfs.daemon.messages import Import, Pull, unreported
from ckptfs.daemon.open_store import opened_store
from ckptfs.daemon.remotes import open_remote
from ckptfs.store.errors import NotFound
from ckptfs.store.keyring import Keyring
from ckptfs.store.remote.shard import decode_shard
from ckptfs.store.segment_format import segment_paths

HERE = Options()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load in this process, where torch is loaded once."""

    def load(paths: list[str], memory_bytes: int, limit_s: float) -> list[LoadedFile]:
        return [found for path in paths if (found := drill_loader.load(path)) is not None]

    monkeypatch.setattr(drilling, "load_all", load)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, a torch file in each."""
    run = tmp_path / "outside"
    for step in (100, 200):
        save(run, step)
    return run


def save(run: Path, step: int, rows: int = 8) -> Path:
    place = run / f"checkpoint-{step}"
    make_checkpoint(place, step, 4000)
    torch.save({"step": torch.tensor(step), "momentum": torch.zeros(rows, 4)}, place / "optimizer.pt")
    return place


def stored(tmp_path: Path, run: Path, *more: Callable[[Any], Any]) -> str:
    """The store into which the run was imported; `more` is done with its parts."""
    store = str(tmp_path / "store")
    with opened_store(store, "", "", lambda: Keyring(KEY)) as parts:
        request = Import(path="/run", source=str(run))
        trio.run(ImportService(parts, None).answer, request, unreported)
        for action in more:
            action(parts)
    return store


def drilled(store: str, version: str = "latest", path: str = "/run", options: Options = HERE) -> Drill:
    return drill_stored(store, "none", path, version, options, unreported)


def test_a_good_version(tmp_path: Path, run: Path) -> None:
    found = drilled(stored(tmp_path, run), "latest-complete")
    assert (found.outcome, found.reasons, found.step, found.unit) == ("good", [], 200, "run")
    loaded = {one.path: (one.loader, one.tensors) for one in found.files}
    assert loaded["checkpoint-200/model.safetensors"] == ("safetensors", 2)
    assert loaded["checkpoint-200/optimizer.pt"] == ("torch", 2)
    # What a job would go on from is loaded; of older checkpoints in the version the bytes are hashed.
    assert not [path for path in loaded if path.startswith("checkpoint-100")]
    assert found.before is not None and found.before.startswith("v000001")
    assert found.checked_bytes > 5000 and found.recovery_s >= found.load_s > 0 and found.data_age_s > 0
    report = found.as_json()
    assert json.loads(json.dumps(report))["outcome"] == "good" and "GOOD" in found.lines()[0]
    part = drilled(str(tmp_path / "store"), path="/run/checkpoint-100")
    assert {one.path for one in part.files} >= {"model.safetensors", "optimizer.pt"}
    assert (part.outcome, part.reasons) == ("good", [])
    single = drilled(str(tmp_path / "store"), path="/run/checkpoint-100/optimizer.pt")
    assert [(one.path, one.loader) for one in single.files] == [("optimizer.pt", "torch")]


def test_a_partial_version(tmp_path: Path, run: Path) -> None:
    model = run / "checkpoint-200/model.safetensors"
    model.write_bytes(model.read_bytes()[:-100])
    found = drilled(stored(tmp_path, run))
    assert found.outcome == "failed" and found.reasons[0].startswith("the version is partial:")
    assert any(reason.startswith("checkpoint-200/model.safetensors: ") for reason in found.reasons[1:])
    assert drilled(str(tmp_path / "store"), "latest-complete").outcome == "good"


def test_a_corrupt_version(tmp_path: Path, run: Path) -> None:
    """One bit of what is stored is another."""
    store = stored(tmp_path, run)
    with opened_store(store, "", "", lambda: Keyring(KEY)) as parts:
        (unit,) = parts.histories.units()
        newest = parts.histories.newest(unit.unit)
        assert newest is not None and newest.top.tree is not None
        top = {entry.name: entry for entry in parts.segments.read_tree(newest.top.tree)}
        tree = top[b"checkpoint-200"].tree
        assert tree is not None
        model = {entry.name: entry for entry in parts.segments.read_tree(tree)}[b"model.safetensors"]
        assert model.recipe is not None
        place = parts.segments.locate(list(parts.segments.read_recipe(model.recipe).chunks())[-1])
        assert place is not None
    with (Path(store) / segment_paths(place.segment)[0]).open("r+b") as file:
        file.seek(place.offset)
        byte = file.read(1)[0]
        file.seek(place.offset)
        file.write(bytes([byte ^ 4]))
    found = drilled(store)
    assert found.outcome == "failed"
    assert found.reasons[0].startswith(
        "checkpoint-200/model.safetensors: its bytes are not those that were saved"
    )


def test_a_version_of_another_shape(tmp_path: Path, run: Path) -> None:
    save(run, 300, rows=9)
    store = stored(tmp_path, run)
    found = drilled(store)
    assert found.outcome == "suspect"
    assert found.reasons == [
        "checkpoint-*/optimizer.pt: the tensor 'momentum' was F32 [8, 4] and is F32 [9, 4]"
    ]


def test_what_needs_unpickling_is_not_loaded_and_no_failure(tmp_path: Path, run: Path) -> None:
    """As training_args.bin of HF Trainer."""
    torch.save({"options": Options}, run / "checkpoint-200/training_args.bin")
    found = drilled(stored(tmp_path, run))
    assert found.outcome == "good"
    assert [one.path for one in found.files if one.refused] == ["checkpoint-200/training_args.bin"]


class Anything:
    """No weights."""


@pytest.mark.parametrize(("is_legacy", "is_whole"), [(False, True), (False, False), (True, True)])
def test_a_pickle_that_is_cut_off_is_not_taken_for_one_with_objects(
    tmp_path: Path, is_legacy: bool, is_whole: bool
) -> None:
    """torch says the same of both."""
    path = tmp_path / "some.pt"
    torch.save({"w": torch.zeros(9)} | ({"o": Anything()} if is_whole else {}), path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    if is_legacy:
        torch.save([torch.zeros(9), Anything()], path, _use_new_zipfile_serialization=False)
    elif not is_whole:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, content[: len(content) // 2] if name.endswith(".pkl") else content)
    found = drill_loader.load(str(path))
    assert found is not None and (found.error is None, bool(found.refused)) == (is_whole, is_whole), found


def test_the_probe_has_the_last_word(tmp_path: Path, run: Path) -> None:
    store = stored(tmp_path, run)
    good = drilled(
        store, options=Options(probe="test -f checkpoint-200/config.json && echo $CKPTFS_DRILL_DIR")
    )
    assert good.outcome == "good" and "ckptfs-drill-" in good.probe_output
    bad = drilled(store, options=Options(probe="echo it does not fit; exit 3"))
    assert bad.outcome == "failed" and bad.reasons == ["the probe ended with 3: it does not fit"]
    slow = run_probe("sleep 100", str(tmp_path), os.environ, 0.2)
    assert slow.code is None
    assert not list(Path(tmp_path).glob("ckptfs-drill-*"))


def test_what_a_probe_says_takes_no_room(tmp_path: Path) -> None:
    command = "echo the head; head -c 1073741824 /dev/zero; echo; echo the tail >&2; exit 3"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file of this process, or of the probe's, may grow beyond this.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    tracemalloc.start()
    try:
        probed = run_probe(command, str(tmp_path), os.environ, 600)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert probed.code == 3 and probed.said_bytes == (1 << 30) + 19
    assert probed.said.startswith("the head\n") and probed.said.endswith("\nthe tail")
    assert f"[{probed.said_bytes - 2 * KEPT_BYTES} bytes are left out]" in probed.said
    assert len(probed.said) < 3 * KEPT_BYTES and peak_bytes < 1 << 20


@pytest.mark.parametrize("said", ["", "short", "x" * KEPT_BYTES, "x" * (2 * KEPT_BYTES), "\u20ac" * 2000])
def test_what_a_probe_says_is_whole_where_it_is_short(tmp_path: Path, said: str) -> None:
    (tmp_path / "said").write_text(said)
    probed = run_probe("cat said", str(tmp_path), os.environ, 600)
    assert (probed.code, probed.said, probed.said_bytes) == (0, said, len(said.encode()))


def test_a_probe_may_close_its_output_and_go_on(tmp_path: Path) -> None:
    probed = run_probe("echo x; exec >&- 2>&-; until test -e go; do touch go; done", str(tmp_path), {}, 600)
    assert (probed.code, probed.said) == (0, "x") and (tmp_path / "go").exists()


def test_who_leaves_the_group_of_a_probe_holds_up_nobody(tmp_path: Path) -> None:
    # It writes into the pipe until nobody reads there any more.
    outlasting = "setsid sh -c 'echo $$ > pid; exec yes'"
    probed = run_probe(f"{outlasting} & until test -s pid; do :; done", str(tmp_path), os.environ, 600)
    status = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    assert probed.code == 0
    assert poll(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z", 60)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteConfig:
    (tmp_path / "remote").mkdir()
    return RemoteConfig(name="backup", url=f"file://{tmp_path}/remote")


def pushed(remote: RemoteConfig) -> Callable[[Any], None]:
    def push(parts: Any) -> None:
        copying = Copying(parts, [remote], lambda one: open_remote(one, {}), "node")

        async def run() -> None:
            units = parts.histories.units()
            rows: Any = await copying.push(
                units, None, None, partial=False, check=Check.NO, report=unreported
            )
            assert rows[0]["problems"] == []

        trio.run(run)

    return push


def far(remote: RemoteConfig, path: str = "/run@latest-complete", **more: Any) -> Drill:
    return drill_remote([remote], Pull(path=path, remote="backup", live=False, **more), (), HERE, unreported)


def test_a_remote_is_drilled_as_by_a_node_that_has_nothing(
    tmp_path: Path, run: Path, remote: RemoteConfig
) -> None:
    save(run, 300, rows=9)
    shutil.rmtree(stored(tmp_path, run, pushed(remote)))
    found = far(remote)
    assert (found.outcome, found.step, found.source) == ("suspect", 300, "the remote backup")
    assert found.reasons == [
        "checkpoint-*/optimizer.pt: the tensor 'momentum' was F32 [8, 4] and is F32 [9, 4]"
    ]
    assert found.fetch_s > 0 and {one.loader for one in found.files} == {"json", "safetensors", "torch"}
    assert far(remote, "/run@2").outcome == "good"
    part = far(remote, "/run/checkpoint-300@latest")
    assert {one.path for one in part.files} >= {"optimizer.pt"}
    with pytest.raises(NotFound, match="has no none"):
        far(remote, "/none@latest")


def test_damage_of_a_remote_is_a_failure(tmp_path: Path, run: Path, remote: RemoteConfig) -> None:
    stored(tmp_path, run, pushed(remote))
    packs = sorted((tmp_path / "remote").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    with packs[-1].open("r+b") as file:
        file.seek(-2000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-2000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    found = far(remote)
    assert found.outcome == "failed" and found.files == []


def test_a_pack_that_is_gone_is_a_failure_too(tmp_path: Path, run: Path, remote: RemoteConfig) -> None:
    stored(tmp_path, run, pushed(remote))
    for pack in (tmp_path / "remote/packs").rglob("*"):
        if pack.is_file():
            pack.unlink()
    found = far(remote)
    assert found.outcome == "failed" and "has lost something" in found.failures[0]


def test_damage_of_the_version_before_keeps_nobody_from_drilling(
    tmp_path: Path, run: Path, remote: RemoteConfig
) -> None:
    """It only cannot be compared with."""

    def of_the_older_tree(parts: Any) -> None:
        (unit,) = parts.histories.units()
        tree = parts.histories.version(unit.unit, 1).top.tree
        for shard in (tmp_path / "remote/shards").iterdir():
            decoded = decode_shard(shard.read_bytes())
            for row in decoded.rows:
                if row["chunk"].tobytes() == tree:
                    name = decoded.packs[row["pack"]].name.hex()
                    with (tmp_path / "remote/packs" / name[:2] / name).open("r+b") as file:
                        file.seek(int(row["offset"]))
                        file.write(b"rotten")

    stored(tmp_path, run, pushed(remote), of_the_older_tree)
    found = far(remote)
    assert found.outcome == "suspect" and found.files
    (reason,) = found.reasons
    assert "could not be compared with v000001" in reason


# ---- the child ----------------------------------------------------------------------------------


def test_loading_runs_nothing_that_lies_about_and_takes_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in the current directory stays unread; a name need not be UTF-8, also in an error."""
    for module in ("json.py", "msgspec.py", "ckptfs.py", "resource.py"):
        (tmp_path / module).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    names = [os.fsdecode(name) for name in (b"good\xff.json", b"bad\xff.json")]
    (tmp_path / names[0]).write_text("{}")
    paths = [str(tmp_path / name) for name in names]
    os.mkdir(paths[1])
    found = load_all(paths, memory_for([]), 60)
    assert not (tmp_path / "ran").exists()
    assert [one.path for one in found] == paths
    assert found[0].error is None and "bad" in (found[1].error or "")


def test_the_child_dies_alone(tmp_path: Path) -> None:
    """What kills or holds up the process that loads is the fault of the file that it was at; the others are
    loaded all the same."""
    good, bad, slow = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    good.write_text("{}")
    bad.write_text("[" * 10)
    found = load_all([str(good), str(bad), str(good)], memory_for([]), 60)
    assert [bool(one.error) for one in found] == [False, True, False]
    os.mkfifo(slow)  # whoever opens it waits
    found = load_all([str(good), str(slow), str(good)], memory_for([]), 3)
    assert [one.path for one in found] == [str(good), str(slow)]
    assert found[1].error == "loading took longer than 3 s"


def test_the_child_has_so_much_memory_and_no_more(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.json"
    bomb.write_text("[" + "[]," * 6_000_000 + "0]")
    (found,) = load_all([str(bomb)], 300 << 20, 60)
    assert found.error is not None and ("MemoryError" in found.error or "MiB" in found.error), found


def test_the_child_writes_nothing(tmp_path: Path) -> None:
    code = (
        "from ckptfs.daemon.drill_loader import _bound; _bound(8 << 30)\n"
        f"with open({str(tmp_path / 'x')!r}, 'w') as file: file.write('x' * 10)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode != 0 and b"File too large" in done.stderr
    assert (tmp_path / "x").stat().st_size == 0


# ---- the judgement --------------------------------------------------------------------------------


def test_what_is_compared_with_what() -> None:
    paths = [
        "run/checkpoint-9/m.bin",
        "run/checkpoint-10/m.bin",
        "global_step10/mp_rank_00.pt",
        "m-00001.bin",
    ]
    assert newest_of_each(paths) == {
        "run/checkpoint-*/m.bin": "run/checkpoint-10/m.bin",
        "global_step*/mp_rank_00.pt": "global_step10/mp_rank_00.pt",
        "m-00001.bin": "m-00001.bin",
    }
    old = {"a": {"x": ("F32", (2,)), "y": ("F32", (2,))}, "b": {"z": ("F16", ())}}
    new = {"a": {"x": ("F16", (2,)), "w": ("F32", (2,))}, "c": {"z": ("F16", ())}}
    assert deviations(new, old) == [
        "a: the tensor 'y' is missing",
        "a: the tensor 'w' is new",
        "a: the tensor 'x' was F32 [2] and is F16 [2]",
        "b: the version before has it, and this one has not",
    ]
    assert deviations(old, old) == []
    many = {f"t{number}": ("F32", (1,)) for number in range(500)}
    assert len(deviations({"a": {}}, {"a": many})) == 101


def test_a_mount_shows_the_last_drill(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    """By the command line, with the real child."""
    mount = mount_factory(config={"settle_s": 0.2})
    run, out = mount.path / "run", tmp_path / "report.json"
    model = run / "checkpoint-50/model.safetensors"
    make_checkpoint(model.parent, 50, 4000)
    mount.publish("run")
    model.write_bytes(safetensors({"base": bytes(4), "head": bytes(8)}))
    mount.publish("run")
    said = mount.cli("drill", str(run), "--latest-complete", "--out", str(out), check=False)
    assert said.returncode == 1 and said.stdout.startswith("SUSPECT: run v"), said
    report = json.loads(out.read_text())
    assert report["reasons"][0] == (
        "checkpoint-*/model.safetensors: the tensor 'base' was F32 [1000] and is F32 [1]"
    )
    assert {one["loader"] for one in report["files"]} == {"safetensors", "json"}
    (unit,) = cast("list[dict[str, Any]]", mount.facts("status", str(mount.path))["units"])
    assert unit["drill"]["outcome"] == "suspect" and unit["drill"]["age_s"] >= 0
