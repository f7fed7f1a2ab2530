"""`ckptfs diff`: files and tensors that were added, removed or changed, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import safetensors.numpy
import torch
from mounting import Mount

File = Mapping[str, object]


@pytest.fixture
def run(mount: Mount) -> Path:
    path = mount.path / "run"
    path.mkdir()
    return path


def changes(mount: Mount, before: str, after: str, *more: str) -> dict[str, File]:
    answer = mount.facts("diff", f"{mount.path}/{before}", f"{mount.path}/{after}", *more)
    files = cast("Sequence[File]", answer["files"])
    assert [one["path"] for one in files] == sorted(str(one["path"]) for one in files)
    return {str(one["path"]): one for one in files}


def tensors(file: File) -> dict[str, File]:
    return {str(one["name"]): one for one in cast("Sequence[File]", file["tensors"])}


def save(path: Path, **arrays: np.ndarray) -> None:
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})


def test_files_that_come_go_and_change(mount: Mount, run: Path) -> None:
    (run / "deep").mkdir()
    (run / "deep/stays").write_bytes(b"stays")
    (run / "deep/grows").write_bytes(b"a" * 1000)
    (run / "goes").write_bytes(b"goes")
    (run / "link").symlink_to("goes")
    mount.publish("run", tag="before")
    (run / "deep/grows").write_bytes(b"b" + b"a" * 1009)
    (run / "goes").unlink()
    (run / "link").unlink()
    (run / "link").symlink_to("elsewhere")
    (run / "new/er").mkdir(parents=True)
    (run / "new/er/file").write_bytes(b"new")
    (run / "deep/stays").chmod(0o600)
    mount.publish("run", tag="after")

    found = changes(mount, "run@before", "run@after")
    kinds = {path: one["change"] for path, one in found.items()}
    assert kinds == {
        "deep/grows": "changed",
        "deep/stays": "changed",
        "goes": "removed",
        "link": "changed",
        "new": "added",
        "new/er": "added",
        "new/er/file": "added",
    }
    assert found["deep/grows"]["changed_bytes"] == 11
    assert found["deep/stays"]["attributes"] and not found["deep/stays"]["changed_bytes"]
    assert not changes(mount, "run@after", "run@after")
    assert set(changes(mount, "run/deep@before", "run/deep@after")) == {"deep/grows", "deep/stays"}
    back = changes(mount, "run@after", "run@before")
    assert back["goes"]["change"] == "added" and back["new/er/file"]["change"] == "removed"


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_tensors(mount: Mount, run: Path, form: str) -> None:
    rng = np.random.default_rng(1)
    before = {
        "same": rng.standard_normal((300, 400)).astype(np.float32),
        "moved": rng.standard_normal((500, 700)).astype(np.float32),
        "goes": np.arange(1000, dtype=np.int64),
        "turned": np.zeros((10, 30), np.float32),
        "counts": np.arange(1000, dtype=np.int64),
    }
    after = {name: array.copy() for name, array in before.items() if name != "goes"}
    after["moved"][7, 9] += np.float32(0.25)
    after["moved"][8, 0] = np.nan
    # What is different no more than before counts as well: the health is the newer tensor's.
    before["moved"][9, :3] = after["moved"][9, :3] = (7e4, -1e5, 1e-39)
    after["turned"] = np.zeros((30, 10), np.float32)
    after["counts"][5] = -1
    after["comes"] = np.ones(77, np.float32)
    for tag, arrays in (("before", before), ("after", after)):
        if form == "safetensors":
            save(run / "model", **arrays)
        else:
            torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, run / "model")
        mount.publish("run", tag=tag)

    found = tensors(changes(mount, "run@before", "run@after")["model"])
    by_name = {name.rpartition("/")[2]: one for name, one in found.items()}
    if form == "torch":  # storages have numbers, so only what kept its place is told by its name
        assert any(one["change"] == "changed" and one["dtype"] == "F32" for one in by_name.values())
        return
    assert {name: one["change"] for name, one in by_name.items()} == {
        "moved": "changed",
        "goes": "removed",
        "turned": "changed",
        "counts": "changed",
        "comes": "added",
    }
    moved = by_name["moved"]
    assert (moved["max_difference"], moved["l2_difference"]) == (0.25, 0.25)
    assert (moved["nan"], moved["inf"]) == (1, 0)
    was = cast("File", moved["health_before"])
    assert (was["nan"], was["over_f16"], was["subnormal"]) == (0, 2, 1)
    assert (moved["over_f16"], moved["over_bf16"], moved["subnormal"]) == (2, 0, 1)
    assert moved["largest"] == 1e5
    assert cast("File", by_name["turned"]["before"])["shape"] == [10, 30]
    assert by_name["counts"]["changed_bytes"] == 8 and "nan" not in by_name["counts"]


def test_it_is_told_to_people_and_without_a_daemon(mount: Mount, run: Path) -> None:
    save(run / "model", w=np.zeros(1000, np.float32))
    mount.publish("run", tag="before")
    save(run / "model", w=np.full(1000, 0.5, np.float32))
    mount.publish("run", tag="after")
    paths = (f"{mount.path}/run@before", f"{mount.path}/run@after")
    said = mount.cli("diff", *paths).stdout
    assert "changed  model" in said and "by at most 0.5" in said
    live = mount.facts("diff", *paths)
    mount.stop()
    inner = ("/run@before", "/run@after")
    assert mount.facts("diff", *inner, "--store", str(mount.store)) == live


def test_what_is_not_there(mount: Mount, run: Path) -> None:
    (run / "a").write_bytes(b"a")
    mount.publish("run")
    wrong = mount.cli("diff", f"{mount.path}/run@1", f"{mount.path}/run@9", check=False)
    assert wrong.returncode == 1 and len(wrong.stderr.splitlines()) == 1
