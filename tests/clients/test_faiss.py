"""faiss: an index that is mapped while it is replaced, one whose lists grow in a file mapped for writing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from asking import let_settle
from clients.clientproc import Client
from clients.recovery import Save, assert_all_recoverable, versions_with, wait_until_recoverable
from clients.writepaths import BOTH_PATHS
from mounting import Mount

STEPS, KEEP = 4, 2
pytestmark = [pytest.mark.heavy, BOTH_PATHS]


@pytest.fixture
def service(more_frameworks: Mapping[str, str]) -> Iterator[Client]:
    with Client("faiss_client.py", environment=more_frameworks) as client:
        yield client


def test_a_mapped_index_keeps_its_vectors_while_it_is_replaced(quick_mount: Mount, service: Client) -> None:
    """On its way the mapped index is stored, replaced by a rename and no file of the live tree any more."""
    path = quick_mount.path / "run" / "served.faiss"
    path.parent.mkdir()
    service.call("save", path=str(path), step=1)
    let_settle(quick_mount.settle_s)
    assert service.call("hold", path=str(path))
    quick_mount.wait_until_ingested()
    assert service.call("check_held", path=str(path), step=1)
    service.call("save", path=str(path), step=2)
    let_settle(quick_mount.settle_s)
    quick_mount.wait_until_ingested()
    assert service.call("check_held", path=str(path), step=1)
    assert service.call("check", path=str(path), step=2)
    path.unlink()
    assert service.call("check_held", path=str(path), step=1)


def test_each_index_can_be_had_back_after_rotation_and_mapped_in_its_version(
    quick_mount: Mount, service: Client
) -> None:
    """Each step reads the index of the step before, adds to it and writes a new one."""
    run = quick_mount.path / "run"
    run.mkdir()
    saves = []
    for step in range(1, STEPS + 1):
        target = run / f"step-{step}.faiss"
        if step == 1:
            service.call("save", path=str(target), step=step)
        else:
            service.call("resume", path=str(run / f"step-{step - 1}.faiss"), target=str(target), step=step)
        saves.append(Save.of(run, target.name))
        let_settle(quick_mount.settle_s)
        (run / f"step-{step - KEEP}.faiss").unlink(missing_ok=True)
    shutil.rmtree(run)
    assert_all_recoverable(quick_mount, "run", saves)
    for step in (1, STEPS):
        saved = version_of(quick_mount, saves[step - 1]) / saves[step - 1].path
        assert service.call("hold", path=str(saved))
        assert service.call("check_held", path=str(saved), step=step)
    assert quick_mount.verified("run")


def test_an_index_that_grows_through_its_mapping_is_found_as_it_was_at_each_step(
    quick_mount: Mount, service: Client
) -> None:
    """The lists are overwritten in place, so each step waits until the one before is in a version."""
    run = quick_mount.path / "run"
    run.mkdir()
    index, lists = run / "index.faiss", run / "index.lists"
    saves = []
    for step in range(1, STEPS + 1):
        if step == 1:
            service.call("start_on_disk", index_path=str(index), lists_path=str(lists))
        else:
            service.call("grow_on_disk", index_path=str(index), step=step)
        assert service.call("check", path=str(index), step=step)
        saves += [Save.of(run, path.name) for path in (index, lists)]
        wait_until_recoverable(quick_mount, "run", saves[-1])
    shutil.rmtree(run)
    assert_all_recoverable(quick_mount, "run", saves)
    assert quick_mount.verified("run")


def version_of(mount: Mount, save: Save) -> Path:
    """The newest version that holds a save."""
    return mount.history("run") / versions_with(mount, "run", save)[-1]
