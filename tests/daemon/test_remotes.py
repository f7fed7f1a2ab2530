"""Copies elsewhere, as users meet them: `push` and `pull` of real mounts, over a real S3 server."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from kernelmounts import poll
from mounting import Mount
from seaweed import S3Server
from small_store import random_bytes, safetensors

Factory = Callable[..., Mount]


def remote_of(s3: S3Server, prefix: str, **more: object) -> dict[str, object]:
    where = {"name": "backup", "url": f"s3://tests/{prefix}", "endpoint": s3.endpoint, "region": "us-east-1"}
    return {"settle_s": 0.3, "remote": [{**where, **more}]}


@pytest.fixture
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


def save(run: Path, seed: int) -> None:
    """A checkpoint, of which most stays the same."""
    tensors = {"base": random_bytes(2_000_000, 1), "head": random_bytes(100_000, seed)}
    (run / "nested").mkdir(parents=True, exist_ok=True)
    (run / "model.safetensors").write_bytes(safetensors(tensors))
    (run / "nested/args.json").write_text(json.dumps({"seed": seed}))
    os.chmod(run / "nested/args.json", 0o640)
    if not os.path.lexists(run / "newest"):
        os.symlink("model.safetensors", run / "newest")


def state_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every entry below a folder: its mode and times, and what it holds."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        entry = path.lstat()
        content = (
            os.readlink(path)
            if stat.S_ISLNK(entry.st_mode)
            else hashlib.sha256(path.read_bytes()).hexdigest()
            if stat.S_ISREG(entry.st_mode)
            else ""
        )
        found[str(path.relative_to(folder))] = (entry.st_mode, entry.st_mtime_ns, content)
    return found


def status(mount: Mount) -> dict[str, Any]:
    (remote,) = cast("list[dict[str, Any]]", mount.facts("status", str(mount.path))["remotes"])
    return remote


def pushed(mount: Mount, *arguments: str) -> dict[str, Any]:
    (row,) = cast("list[dict[str, Any]]", mount.ask("push", *arguments))
    return row


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_node_that_is_wiped_comes_back_elsewhere(
    mount_factory: Factory, s3: S3Server, tmp_path: Path, encrypted: bool
) -> None:
    """What is published is copied by itself; a new node needs the remote and the public key only."""
    (tmp_path / "remote.key").write_text("5e" * 32)
    more = {"key": str(tmp_path / "remote.key")} if encrypted else {}
    config = remote_of(s3, f"wiped-{encrypted}", **more)
    first = mount_factory(config=config)
    run = first.path / "run"
    save(run, 2)
    first.publish("run", step=5, tag="good")
    assert poll(lambda: status(first)["newest_safe"] is not None, 60)
    save(run, 3)
    first.publish("run", step=6)
    row = pushed(first, str(run))
    assert row["unit"] == "run" and len(row["safe"]) >= 2 and row["problems"] == []
    again = pushed(first, str(run), "--again")
    assert (again["sent_chunks"], again["copied"], again["problems"]) == (0, [], [])
    told = status(first)
    assert told["waiting_versions"] == 0 and told["failure"] is None and told["waiting_since"] is None
    saved = state_of(run)
    public = tmp_path / "node.pub"
    public.write_text(first.cli("keys", "show", str(first.path)).stdout)
    key = first.cli("keys", "fingerprint", str(first.path)).stdout.strip()
    first.stop()
    shutil.rmtree(first.store)

    second = mount_factory(config=config)
    (listing,) = cast("list[dict[str, Any]]", second.ask("pull", str(second.path), "--key", str(public)))
    (unit,) = listing["units"]
    assert (unit["unit"], unit["node"], listing["problems"]) == ("run", os.uname().nodename, [])
    assert [version["step"] for version in unit["versions"]][-1] == 6
    assert [version["doubt"] for version in unit["versions"]] == [None] * len(unit["versions"])
    answer = second.facts("pull", str(second.path / "run"), "--key", str(public))
    assert (answer["live"], answer["step"], answer["key"]) == (True, 6, key)
    assert state_of(second.path / "run") == saved
    assert second.verified("run")
    assert second.facts("log", str(second.path / "run"), "--verify")["findings"] == []

    older = second.facts("pull", f"{second.path}/run/nested@good", "--as", "older", "--no-live")
    assert (older["unit"], older["live"], older["state"]) == ("older", False, "partial")
    args = second.history("older") / str(older["name"]) / "nested/args.json"
    assert json.loads(args.read_text()) == {"seed": 2}


@pytest.mark.usefixtures("credentials")
def test_what_is_refused(mount_factory: Factory, s3: S3Server, tmp_path: Path) -> None:
    mount = mount_factory(config=remote_of(s3, "refused", push=False))
    save(mount.path / "run", 1)
    mount.publish("run")
    told = status(mount)
    assert (told["waiting_versions"], told["newest_safe"], told["push"]) == (1, None, False)
    assert told["waiting_bytes"] > 2_000_000 and told["waiting_since"] is not None

    def said(*arguments: str) -> str:
        done = mount.cli(*arguments, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done
        return done.stderr

    run = str(mount.path / "run")
    assert "the first `ckptfs push` makes one" in said("pull", str(mount.path))
    assert pushed(mount, str(mount.path))["safe"] != []
    assert "run is live here" in said("pull", run)
    assert "no remote 'other'; there are backup" in said("push", run, "--remote", "other")
    assert "has no gone; it has run" in said("pull", str(mount.path / "gone"))
    assert "was not copied by 'nobody'" in said("pull", run, "--node", "nobody", "--as", "x")
    stranger = tmp_path / "stranger"
    other = mount_factory(config={"settle_s": 0.3})
    stranger.write_text(other.cli("keys", "show", str(other.path)).stdout)
    assert "is not fetched: " in said("pull", run, "--as", "x", "--key", str(stranger))
    assert "no remote is configured" in other.cli("push", str(other.path), check=False).stderr


def test_a_remote_that_is_away_holds_back_nobody(mount_factory: Factory, tmp_path: Path) -> None:
    """A directory that is not mounted (yet): told by status, and copied to once it is there."""
    there = tmp_path / "elsewhere"
    figures = tmp_path / "figures.prom"
    config = {
        "settle_s": 0.3,
        "remote": [{"name": "backup", "url": f"file://{there}"}],
        "metrics": str(figures),
    }
    mount = mount_factory(config=config)
    assert poll(figures.exists, 60)
    assert 'ckptfs_remote_waiting_versions{remote="backup"} 0.0' in figures.read_text()
    save(mount.path / "run", 1)
    mount.publish("run")
    assert poll(lambda: "is not there" in str(status(mount)["failure"]), 30)
    assert status(mount)["waiting_versions"] == 1 and not there.exists()
    there.mkdir()
    save(mount.path / "run", 2)
    mount.publish("run")
    assert poll(lambda: status(mount)["waiting_versions"] == 0, 30)
    assert status(mount)["failure"] is None
    assert {path.name for path in there.iterdir()} >= {"ckptfs-remote", "heads", "packs", "shards"}


def test_two_of_three_are_enough(mount_factory: Factory, tmp_path: Path) -> None:
    """One is away, one loses something: neither holds back a push or a pull, and both are told."""
    names = ("a", "b", "away")
    remotes = [{"name": name, "url": f"file://{tmp_path / name}", "push": False} for name in names]
    for name in names[:2]:
        (tmp_path / name).mkdir()
    config = {"settle_s": 0.3, "copies": 2, "remote": remotes}
    mount = mount_factory(config=config)
    save(mount.path / "run", 1)
    mount.publish("run")
    assert mount.facts("status", str(mount.path))["copies"]["waiting_versions"] == 1
    done = mount.cli("push", str(mount.path))
    assert "nothing copied to away" in done.stdout
    told = mount.facts("status", str(mount.path))["copies"]
    assert (told["wanted"], told["waiting_versions"]) == (2, 0) and told["newest_safe"] is not None
    packs = [path for path in (tmp_path / "a" / "packs").rglob("*") if path.is_file()]
    packs[0].write_bytes(b"damaged")

    second = mount_factory(config=config)
    answer = second.facts("pull", str(second.path / "run"))
    assert answer["remote"] == "b" and answer["live"]
    said = " ".join(cast("list[str]", answer["passed_over"]))
    assert "a: " in said and "away: " in said
    assert state_of(second.path / "run") == state_of(mount.path / "run")
    healed = second.cli("push", str(second.path), "--remote", "a", "--verify", check=False)
    assert packs[0].name in healed.stdout and "made anew" in healed.stdout
    third = mount_factory(config={**config, "copies": 1, "remote": remotes[:1]})
    assert third.facts("pull", str(third.path / "run"))["remote"] == "a"


def test_a_remote_is_collected_by_the_policies(mount_factory: Factory, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    remote = {"name": "there", "url": f"file://{tmp_path / 'there'}", "push": False}
    mount = mount_factory(config={"settle_s": 0.3, "remote": [remote]})
    for seed in range(3):
        save(mount.path / "run", seed)
        mount.publish("run")
    assert pushed(mount, str(mount.path))["problems"] == []
    mount.stop()
    policy = {"path": "/*", "keep_last": 1}
    mount = mount_factory(config={"settle_s": 0.3, "remote": [remote], "policy": [policy]}, store=mount.store)
    would = cast(
        "dict[str, Any]", mount.ask("remote", "gc", "there", "--dry-run", "--mount", str(mount.path))
    )
    did = cast("dict[str, Any]", mount.ask("remote", "gc", "there", "--mount", str(mount.path)))
    assert would["forgotten"] == did["forgotten"] and len(did["forgotten"]) >= 2 and not did["called_off"]
    (listing,) = cast("list[dict[str, Any]]", mount.ask("pull", str(mount.path)))
    assert len(listing["units"][0]["versions"]) == 1
    heads = sorted((tmp_path / "there" / "heads").rglob("*"))
    heads[-1].write_bytes(b"damaged")
    said = mount.cli("remote", "gc", "--mount", str(mount.path), check=False)
    assert said.returncode == 1 and f"--give-up {heads[-1].parent.name}" in said.stderr
    given_up = "--give-up", heads[-1].parent.name
    done = mount.cli("remote", "gc", "--mount", str(mount.path), *given_up)
    assert "given up as lost: what it listed cannot be told" in done.stdout
    assert pushed(mount, str(mount.path))["problems"] == []
