"""Must show 5: what is the same in two saves is stored once. Ratios are logical bytes over stored ones.

Each ratio must hold for what `du` says and for what the segments really occupy on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clients.clientproc import Client
from kernelmounts import poll
from mounting import Mount

Figure = Callable[[str, object], None]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client("similar_saves.py") as process:
        yield process


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_four_whole_model_saves_of_a_lora_run_cost_little_more_than_one(
    quick_mount: Mount, client: Client, figure: Figure, suffix: str
) -> None:
    for step in range(1, 5):
        path = new_folder(quick_mount, f"checkpoint-{step}") / f"model.{suffix}"
        client.call("save_model", path=str(path), step=step)
    assert_ratio(quick_mount, 3.8, figure)


def test_the_same_weights_as_pt_and_as_safetensors_are_stored_once(
    quick_mount: Mount, client: Client, figure: Figure
) -> None:
    for name in ("model.pt", "model.safetensors"):
        client.call("save_model", path=str(new_folder(quick_mount, "both") / name), step=1)
    assert_ratio(quick_mount, 1.95, figure)


def test_two_rank_duplicates_that_differ_in_rng_and_host_are_stored_once(
    quick_mount: Mount, client: Client, figure: Figure
) -> None:
    for rank in range(2):
        path = new_folder(quick_mount, "step-1") / f"rank_{rank}.pt"
        client.call("save_rank", path=str(path), rank=rank)
    assert_ratio(quick_mount, 1.95, figure)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_saving_identical_bytes_again_costs_less_than_one_percent(
    quick_mount: Mount, client: Client, figure: Figure, suffix: str
) -> None:
    path = new_folder(quick_mount, "same") / f"model.{suffix}"
    costs = []
    for versions in (1, 2, 3):
        client.call("save_model", path=str(path), step=1)
        wait_until_stored(quick_mount)
        quick_mount.publish("run", tag=f"save-{versions}")
        costs.append(quick_mount.count("du", "stored_bytes", str(quick_mount.path / "run")))
    figure("stored bytes after each save", costs)
    assert max(costs) < costs[0] * 1.01, costs
    once = costs[0] * 1.01
    assert poll(lambda: occupied_bytes(quick_mount) < once, 20, every_s=0.5), occupied_bytes(quick_mount)


def new_folder(mount: Mount, name: str) -> Path:
    folder = mount.path / "run" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wait_until_stored(mount: Mount) -> None:
    mount.publish("run")
    mount.wait_until_ingested()


def assert_ratio(mount: Mount, least: float, figure: Figure) -> None:
    """Logical over stored bytes is at least this, as `du` tells it and on the disk."""
    logical = sum(path.stat().st_size for path in (mount.path / "run").rglob("*") if path.is_file())
    wait_until_stored(mount)
    du = mount.facts("du", str(mount.path / "run"))
    assert du["logical_bytes"] == logical, du
    poll(lambda: logical / occupied_bytes(mount) >= least, 20, every_s=0.5)
    ratios = {"du": logical / int(str(du["stored_bytes"])), "disk": logical / occupied_bytes(mount)}
    figure("logical over stored", {name: round(ratio, 3) for name, ratio in ratios.items()})
    assert min(ratios.values()) >= least, (ratios, du)


def occupied_bytes(mount: Mount) -> int:
    """Disk blocks below STORE/segments and STORE/staging: everything that holds payload."""
    folders = [mount.store / "segments", mount.store / "staging"]
    files = [Path(top, name) for folder in folders for top, _, names in os.walk(folder) for name in names]
    return sum(file.stat().st_blocks * 512 for file in files if file.exists())
