"""safetensors 0.8 (renames before it closes) and 0.7 (truncates the good file in place)."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from asking import let_settle
from clients.clientproc import Client
from clients.recovery import Save, assert_all_recoverable, wait_until_recoverable
from clients.writepaths import BOTH_PATHS
from mounting import Mount

ELEMENTS = 256 * 1024
STEPS = 4


@pytest.fixture(params=["0.7", "0.8"])
def client(request: pytest.FixtureRequest) -> Client:
    """A process with that release of safetensors."""
    chosen = request.getfixturevalue({"0.7": "old_safetensors_client", "0.8": "torch_client"}[request.param])
    assert isinstance(chosen, Client)
    libraries = chosen.call("libraries")
    assert isinstance(libraries, dict)
    assert libraries["safetensors"].startswith(request.param), libraries
    return chosen


@BOTH_PATHS
def test_each_safetensors_save_can_be_had_back_after_rotation_and_overwriting(
    quick_mount: Mount, client: Client, tmp_path: Path, rng: random.Random
) -> None:
    state = {"seed": rng.randrange(2**31), "elements": ELEMENTS}
    run, truth = quick_mount.path / "run", tmp_path / "truth"
    saves = []
    for step in range(1, STEPS + 1):
        for name in (f"checkpoint-{step}/model.safetensors", "model.safetensors"):
            paths = [folder / name for folder in (run, truth)]
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
            client.call("safetensors_save", paths=[str(path) for path in paths], step=step, **state)
            saves.append(Save.of(truth, name))
        let_settle(quick_mount.settle_s)
        shutil.rmtree(run / f"checkpoint-{step - 2}", ignore_errors=True)

    assert client.call("safetensors_load", path=str(run / "model.safetensors"), step=STEPS, **state)
    shutil.rmtree(run)
    assert_all_recoverable(quick_mount, "run", saves)
    assert quick_mount.verified("run")


def test_a_mapped_safetensors_file_stays_readable_after_it_was_removed(
    quick_mount: Mount, client: Client, rng: random.Random
) -> None:
    state = {"seed": rng.randrange(2**31), "elements": ELEMENTS, "step": 1}
    path = quick_mount.path / "run" / "model.safetensors"
    path.parent.mkdir()
    client.call("safetensors_save", paths=[str(path)], **state)
    wait_until_recoverable(quick_mount, "run", Save.of(path.parent, path.name))
    client.call("hold", path=str(path))
    path.unlink()
    quick_mount.wait_until_ingested()
    assert client.call("check_held", path=str(path), **state)


@BOTH_PATHS
def test_a_mapped_safetensors_file_that_is_saved_over(
    quick_mount: Mount, client: Client, torch_client: Client, tmp_path: Path, rng: random.Random
) -> None:
    """0.8 renames: the old reader keeps the old tensors. 0.7 overwrites what is mapped: it gets the new ones,
    or, where the kernel reads the stored file by itself, keeps the old ones, as after a rename.

    Who opens the file anew sees the new ones. The same calls in a plain directory say what is right.
    """
    state = {"seed": rng.randrange(2**31), "elements": ELEMENTS}
    run, plain = quick_mount.path / "run", tmp_path / "plain"
    seen = []
    for folder in (run, plain):
        folder.mkdir()
        path = folder / "model.safetensors"
        client.call("safetensors_save", paths=[str(path)], step=1, **state)
        old = Save.of(folder, path.name)
        if folder == run:
            wait_until_recoverable(quick_mount, "run", old)
            quick_mount.wait_until_ingested()
        torch_client.call("hold", path=str(path))
        client.call("safetensors_save", paths=[str(path)], step=2, **state)
        assert torch_client.call("safetensors_load", path=str(path), step=2, **state)
        if folder == run:
            wait_until_recoverable(quick_mount, "run", Save.of(folder, path.name))
            quick_mount.wait_until_ingested()
        seen.append(torch_client.call("held_step", path=str(path), steps=[1, 2], **state))
    ours, hosts = seen
    assert hosts == (2 if client is not torch_client else 1)
    kernel_may_read = quick_mount.facts("status", str(quick_mount.path))["write_path"] == "passthrough"
    assert ours == hosts or (kernel_may_read and ours == 1)
    assert_all_recoverable(quick_mount, "run", [old])


def test_a_safetensors_file_has_its_final_mode_and_no_temporary_neighbour(
    quick_mount: Mount, client: Client, tmp_path: Path, rng: random.Random
) -> None:
    """The same calls on a plain directory say what is right."""
    modes = []
    for folder in (quick_mount.path / "run", tmp_path / "plain"):
        folder.mkdir()
        path = folder / "model.safetensors"
        client.call("safetensors_save", paths=[str(path)], seed=1, step=1, elements=ELEMENTS)
        modes.append({entry.name: oct(entry.stat().st_mode) for entry in folder.iterdir()})
    assert modes[0] == modes[1]
