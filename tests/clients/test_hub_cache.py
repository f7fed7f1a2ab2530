"""The cache of huggingface_hub: blobs, snapshots of symbolic links to them, refs, lock files."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.clientproc import Client
from clients.localhub import REPOSITORY, LocalHub, commit_of
from clients.recovery import Save, assert_all_recoverable, digest_tree, wait_until_recoverable
from clients.writepaths import BOTH_PATHS
from mounting import Mount

CLIENTS = 3


@pytest.fixture
def model(tmp_path: Path, rng: random.Random) -> Path:
    """A model of two large files and two small ones, one of them in a folder."""
    folder = tmp_path / "model"
    (folder / "extra").mkdir(parents=True)
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (folder / name).write_bytes(rng.randbytes(3_000_000))
    (folder / "config.json").write_text('{"model_type": "test"}')
    (folder / "extra" / "notes.txt").write_text("first")
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[LocalHub]:
    with LocalHub(model) as server:
        yield server


@BOTH_PATHS
def test_the_cache_is_filled_by_many_changed_cleaned_and_had_back(
    quick_mount: Mount, hub: LocalHub, model: Path
) -> None:
    """Several jobs want the same model at once; later there is a second commit, and the first one goes."""
    cache = quick_mount.path / "hub"
    for snapshot in fetch_at_once(cache, hub):
        assert digest_tree(Path(snapshot)) == digest_tree(model)
    first = commit_of(model)
    wait_until_recoverable(quick_mount, "hub", Save.of(cache, "models--someone--model"))
    (model / "extra" / "notes.txt").write_text("second")
    second = commit_of(model)
    with Client("hub_client.py", environment=hub.environment) as client:
        snapshot = client.call("fetch", cache=str(cache), repository=REPOSITORY)
        assert set(client.call("links", snapshot=snapshot)) == set(digest_tree(model))
        assert client.call("revisions", cache=str(cache)) == [first, second]
        save = Save.of(cache, "models--someone--model")
        wait_until_recoverable(quick_mount, "hub", save)
        client.call("remove", cache=str(cache), commit=first)
        assert client.call("revisions", cache=str(cache)) == [second]
    assert digest_tree(Path(str(snapshot))) == digest_tree(model)
    shutil.rmtree(cache)
    assert_all_recoverable(quick_mount, "hub", [save])
    assert quick_mount.verified("hub")


@BOTH_PATHS
def test_a_saved_cache_can_be_put_back_and_used_without_a_hub(
    quick_mount: Mount, hub: LocalHub, model: Path
) -> None:
    """Its symbolic links are relative, so they lead to the right blobs in `.versions` and in a copy."""
    cache = quick_mount.path / "hub"
    with Client("hub_client.py", environment=hub.environment) as client:
        snapshot = Path(str(client.call("fetch", cache=str(cache), repository=REPOSITORY)))
    version = wait_until_recoverable(quick_mount, "hub", Save.of(cache, "models--someone--model"))
    saved = quick_mount.history("hub") / version
    assert digest_tree(saved / snapshot.relative_to(cache)) == digest_tree(model)
    shutil.rmtree(cache)
    shutil.copytree(saved, cache, symlinks=True)
    with Client("hub_client.py") as client:
        found = client.call("fetch", cache=str(cache), repository=REPOSITORY, offline=True)
    assert found == str(snapshot)
    assert digest_tree(snapshot) == digest_tree(model)
    assert all(os.path.islink(snapshot / name) for name in digest_tree(model))


def fetch_at_once(cache: Path, hub: LocalHub) -> list[str]:
    """The snapshots that several clients get, started together."""
    found: list[str] = []

    def fetch() -> None:
        with Client("hub_client.py", environment=hub.environment) as client:
            found.append(str(client.call("fetch", cache=str(cache), repository=REPOSITORY)))

    threads = [threading.Thread(target=fetch) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == CLIENTS
    return found
