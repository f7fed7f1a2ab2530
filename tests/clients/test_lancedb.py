"""LanceDB, a local vector database: tables that grow, are compacted and are cleaned of their old versions."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import pytest
from asking import let_settle
from clients.clientproc import Client
from clients.recovery import Save, assert_all_recoverable, versions_with
from clients.writepaths import BOTH_PATHS
from mounting import Mount

STEPS = 4


@pytest.mark.heavy
@BOTH_PATHS
def test_each_state_of_a_vector_database_can_be_had_back_and_searched(
    quick_mount: Mount, more_frameworks: Mapping[str, str]
) -> None:
    """Each step is a process of its own; compacting removes the files of all steps before."""
    run = quick_mount.path / "run"
    table = str(run / "vectors.lancedb")
    saves = []
    for step in range(1, STEPS + 1):
        with Client("lance_client.py", environment=more_frameworks) as database:
            database.call("append", path=table, step=step)
            if step % 2 == 0:
                database.call("compact", path=table)
            assert database.call("check", path=table, steps=step)
        saves.append(Save.of(run, "vectors.lancedb"))
        let_settle(quick_mount.settle_s)
    shutil.rmtree(run)
    assert_all_recoverable(quick_mount, "run", saves)
    with Client("lance_client.py", environment=more_frameworks) as database:
        for step, save in enumerate(saves, start=1):
            saved = quick_mount.history("run") / versions_with(quick_mount, "run", save)[-1] / save.path
            assert database.call("check", path=str(saved), steps=step)
    assert quick_mount.verified("run")
