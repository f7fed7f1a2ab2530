"""`pull --merge` over real mounts: two nodes save their ranks of one run, a third has all of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from mounting import Mount
from seaweed import S3Server
from small_store import random_bytes, safetensors

Factory = Callable[..., Mount]
STEP = "step_100"


def shard(number: int, of: int) -> tuple[str, bytes]:
    """One shard of a model in several."""
    tensors = {f"layer{number}": random_bytes(200_000, number)}
    return f"model-{number:05d}-of-{of:05d}.safetensors", safetensors(tensors)


def save(mount: Mount, shards: list[int], of: int, step: int = 100, seed: int = 0) -> None:
    """What a node's ranks write of a sharded model. The index is the same on every node."""
    folder = mount.path / "run" / f"step_{step}"
    folder.mkdir(parents=True)
    index = {f"layer{number}": shard(number, of)[0] for number in range(1, of + 1)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for number in shards:
        name, content = shard(number, of)
        (folder / name).write_bytes(content)
    (folder / "notes").write_text(f"{seed}")


def write_as_rank(mount: Mount, rank: int, world: int) -> None:
    """A process of its own, since what it says of itself is read where it opens the file."""
    file = mount.path / "run" / f"of-{rank}"
    told = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    subprocess.run(["sh", "-c", f"echo {rank} > {file}"], env={**os.environ, **told}, check=True, timeout=30)


def published(mount: Mount, *more: str) -> None:
    mount.publish("run")
    mount.ask("push", str(mount.path), "--partial", *more)


def public_key(mount: Mount, file: Path) -> str:
    file.write_text(mount.cli("keys", "show", str(mount.path)).stdout)
    return str(file)


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def said(mount: Mount, *arguments: str) -> str:
    done = mount.cli(*arguments, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
    return done.stderr


@pytest.fixture
def config(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://tests/merged-{tmp_path.name}"
    remote = {"name": "backup", "url": url, "endpoint": s3.endpoint, "region": "us-east-1", "push": False}
    return {"settle_s": 0.3, "remote": [remote]}


def test_two_nodes_become_one_tree(mount_factory: Factory, config: dict[str, object], tmp_path: Path) -> None:
    first, second = mount_factory(config=config), mount_factory(config=config)
    save(first, [1, 2], 4)
    save(second, [3, 4], 4)
    write_as_rank(first, 0, 3)
    write_as_rank(second, 2, 3)
    published(first)
    published(second)
    keys = [public_key(one, tmp_path / f"{at}.pub") for at, one in enumerate((first, second))]
    given = ["--key", keys[0], "--key", keys[1]]
    third = mount_factory(config=config)
    run = str(third.path / "run")
    assert "is not merged: " in said(third, "pull", run, "--merge", "--key", keys[0])
    answer = third.facts("pull", run, "--merge", *given)
    assert (answer["state"], answer["step"], answer["live"], answer["missing"]) == ("complete", 100, True, [])
    expected = files_of(first.path / "run") | files_of(second.path / "run")
    assert files_of(third.path / "run") == expected and len(expected) == 8
    assert answer["ranks"] == {"world": 3, "wrote": [0, 2], "silent": [1]}
    prints = {one.cli("keys", "fingerprint", str(one.path)).stdout.strip() for one in (first, second)}
    assert {source["key"] for source in answer["sources"]} == prints
    assert len({source["node"] for source in answer["sources"]}) == 2, "two mounts of one host are told apart"
    log = cast("list[dict[str, Any]]", third.ask("log", run))
    (row,) = [one for one in log if one["number"] == answer["number"]]
    assert {source["of"] for source in row["merged"]["sources"]} == {
        source["of"] for source in answer["sources"]
    }
    assert "merged from " in third.cli("log", run).stdout
    assert third.facts("log", run, "--verify")["findings"] == []
    assert third.verified("run")
    # What is written from here on was not merged.
    (third.path / "run" / "more").write_text("more")
    third.publish("run")
    assert cast("list[dict[str, Any]]", third.ask("log", run))[-1]["merged"] is None
    assert "run is live here" in said(third, "pull", run, "--merge")
    third.stop()
    third.restart()
    assert files_of(third.path / "run") == expected | {"more": hashlib.sha256(b"more").hexdigest()}


def test_who_is_missing_and_what_differs(
    mount_factory: Factory, config: dict[str, object], tmp_path: Path
) -> None:
    first, second = mount_factory(config=config), mount_factory(config=config)
    save(first, [1, 2], 3, seed=1)
    save(second, [1], 3, seed=2)
    published(first)
    published(second)
    third = mount_factory(config=config)
    run = str(third.path / "run")
    conflict = said(third, "pull", run, "--merge")
    assert f"{STEP}/notes has other content on {os.uname().nodename}-" in conflict
    assert "--prefer" in conflict and "--keep-both" in conflict
    assert not (third.path / "run").exists()
    (listing,) = cast("list[dict[str, Any]]", third.ask("pull", str(third.path)))
    ids = {unit["id"] for unit in listing["units"]}
    texts = {}
    for identity in sorted(ids):
        name = f"prefer-{identity[:8]}"
        answer = third.facts("pull", run, "--merge", "--prefer", identity, "--as", name)
        assert answer["state"] == "partial" and len(answer["conflicts"]) == 1
        assert answer["missing"] == [f"{STEP}/{shard(3, 3)[0]}"]
        texts[identity] = (third.path / name / STEP / "notes").read_text()
    assert {*texts.values()} == {"1", "2"}
    both = third.facts("pull", run, "--merge", "--keep-both", "--as", "both", "--no-live")
    folder = third.history("both") / str(both["name"]) / STEP
    kept = {path.name: path.read_text() for path in folder.glob("notes*")}
    nodes = {source["node"] for source in both["sources"]}
    assert kept.keys() == {f"notes~{node}" for node in nodes} and {*kept.values()} == {"1", "2"}
    done = third.cli("pull", run + "@step:100", "--merge", "--prefer", sorted(ids)[0], "--as", "told")
    assert "differs: " in done.stdout and "missing: " in done.stdout
    assert "no node has a version of step 7" in said(third, "pull", run + "@step:7", "--merge")
    assert "each node counts its own versions" in said(third, "pull", run + "@latest", "--merge")
    assert third.cli("pull", run, "--keep-both", check=False).returncode == 2
    assert third.cli("pull", run, "--node", "a", "--node", "b", check=False).returncode == 2


def test_a_step_of_which_ranks_are_missing_is_passed_over(
    mount_factory: Factory, config: dict[str, object]
) -> None:
    first, second = mount_factory(config=config), mount_factory(config=config)
    for step, shards in ((100, [3, 4]), (200, [3])):
        save(first, [1, 2], 4, step)
        save(second, shards, 4, step)
        published(first)
        published(second)
    save(first, [1], 4, 300)
    published(first)
    third = mount_factory(config=config)
    run = str(third.path / "run")
    answer = third.facts("pull", run, "--merge")
    assert (answer["step"], answer["state"], answer["newer_steps"]) == (100, "complete", [200, 300])
    assert answer["passed_over"] == [
        # Of two mounts of one host it is not known which of them has no step 300.
        f"step 300 is not whole: step_300/{shard(4, 4)[0]} and 6 more",
        f"step 200 is not whole: step_200/{shard(4, 4)[0]}",
    ]
    named = third.cli("pull", run + "@step:300", "--merge", "--as", "later")
    assert "(partial, " in named.stdout and "missing: " in named.stdout
    log = cast("list[dict[str, Any]]", third.ask("log", str(third.path / "later")))
    # Two mounts of one host have one name, so only the files tell who is missing.
    assert len([one for one in log[-1]["missing"] if "step_300" in one]) == 3
