"""torch.save and torch.load: zip and legacy files, mapped and read, kept, rotated and overwritten."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from asking import let_settle
from clients.clientproc import Client
from clients.recovery import Save, assert_all_recoverable, digest_tree, wait_until_recoverable
from clients.writepaths import BOTH_PATHS
from mounting import Mount

ELEMENTS = 256 * 1024
KEEP = 2
STEPS = 5


@BOTH_PATHS
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_each_torch_save_can_be_had_back_after_rotation_and_overwriting(
    quick_mount: Mount, torch_client: Client, tmp_path: Path, rng: random.Random, legacy: bool
) -> None:
    seed, run, truth = rng.randrange(2**31), quick_mount.path / "run", tmp_path / "truth"
    state = {"seed": seed, "elements": ELEMENTS}
    run.mkdir()
    truth.mkdir()
    saves = []
    for step in range(1, STEPS + 1):
        for name in (f"step_{step}.pt", "last.pt"):
            paths = [str(folder / name) for folder in (run, truth)]
            torch_client.call("torch_save", paths=paths, step=step, legacy=legacy, **state)
            saves.append(Save.of(truth, name))
        let_settle(quick_mount.settle_s)
        (run / f"step_{step - KEEP}.pt").unlink(missing_ok=True)

    last = {"path": str(run / "last.pt"), "step": STEPS, **state}
    assert torch_client.call("torch_load", mapped=False, **last)
    assert legacy or torch_client.call("torch_load", mapped=True, **last)
    shutil.rmtree(run)
    assert_all_recoverable(quick_mount, "run", saves)
    assert quick_mount.verified("run")


def test_a_torch_checkpoint_resumes_after_a_restart_of_the_daemon(
    quick_mount: Mount, torch_client: Client, rng: random.Random
) -> None:
    state = {"seed": rng.randrange(2**31), "elements": ELEMENTS, "step": 3}
    path = quick_mount.path / "run" / "last.pt"
    path.parent.mkdir()
    torch_client.call("torch_save", paths=[str(path)], legacy=False, **state)
    save = Save.of(path.parent, path.name)
    wait_until_recoverable(quick_mount, "run", save)
    quick_mount.stop()
    quick_mount.restart()
    assert digest_tree(path) == save.files
    assert torch_client.call("torch_load", path=str(path), mapped=True, **state)
    assert torch_client.call("read_mapped", path=str(path)) == save.files[""]


def test_a_mapped_torch_checkpoint_stays_readable_after_it_was_removed(
    quick_mount: Mount, torch_client: Client, rng: random.Random
) -> None:
    state = {"seed": rng.randrange(2**31), "elements": ELEMENTS, "step": 1}
    path = quick_mount.path / "run" / "step_1.pt"
    path.parent.mkdir()
    torch_client.call("torch_save", paths=[str(path)], legacy=False, **state)
    torch_client.call("hold", path=str(path))
    path.unlink()
    quick_mount.wait_until_ingested()
    assert torch_client.call("check_held", path=str(path), **state)


def test_a_saved_version_loads_from_the_versions_directory(
    quick_mount: Mount, torch_client: Client, rng: random.Random
) -> None:
    state = {"seed": rng.randrange(2**31), "elements": ELEMENTS}
    path = quick_mount.path / "run" / "last.pt"
    path.parent.mkdir()
    torch_client.call("torch_save", paths=[str(path)], step=1, legacy=False, **state)
    version = wait_until_recoverable(quick_mount, "run", Save.of(path.parent, path.name))
    torch_client.call("torch_save", paths=[str(path)], step=2, legacy=False, **state)
    old = path.parent / ".versions" / version / path.name
    assert torch_client.call("torch_load", path=str(old), step=1, mapped=True, **state)
    assert torch_client.call("torch_load", path=str(path), step=2, mapped=True, **state)
