"""Must show 9: history gives way to new saves; a store that is really full says so, and recovers unaided."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asking import let_settle
from clients.clientproc import Client, ClientError, named, run_script
from clients.recovery import Save, digest_tree, reported, wait_until_recoverable
from clients.writepaths import BOTH_PATHS_SMALL
from kernelmounts import poll
from mounting import Mount, sized_tmpfs

MIB = 1024 * 1024
SAVE_BYTES = 8 * MIB
# Room for four saves, and for what a store needs itself: index, journal, the reserve file.
STORE_BYTES = 4 * SAVE_BYTES + 16 * MIB


@pytest.fixture
def small_mount(
    request: pytest.FixtureRequest, mount_factory: Callable[..., Mount], tmp_path: Path
) -> Iterator[Mount]:
    """A mount on a store with room for four checkpoints. An indirect parameter adds to its configuration."""
    config = {"settle_s": 0.5, **getattr(request, "param", {})}
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(sized_tmpfs(tmp_path / "disk", STORE_BYTES))
        mount = mount_factory(store=disk / "store", config=config)
        yield mount
        if mount.is_alive():
            mount.stop()
        mount.clean_up()


@BOTH_PATHS_SMALL
def test_fifty_rotating_saves_fit_a_store_with_room_for_four(small_mount: Mount) -> None:
    saves = save_steps(small_mount, 1, 50)
    assert len(saves) == 50
    newest = wait_until_recoverable(small_mount, "run", saves[-1])
    version = small_mount.wait_for_version("run", lambda version: version.name == newest)
    assert version.state == "complete", version
    assert {path.name for path in (small_mount.path / "run").iterdir()} == {"checkpoint-49", "checkpoint-50"}
    for save in saves[-2:]:
        assert digest_tree(small_mount.path / "run" / save.path) == save.files
    assert small_mount.verified("run")


@BOTH_PATHS_SMALL
def test_a_full_store_refuses_the_writer_keeps_the_last_complete_save_and_recovers(
    small_mount: Mount,
) -> None:
    run, daemon = small_mount.path / "run", small_mount.pid
    last = save_steps(small_mount, 1, 2)[-1]
    wait_until_recoverable(small_mount, "run", last)
    filler = fill(small_mount.path / "filler")

    with Client("rotating_run.py", *job(run, 3, 3)) as refused:
        [failure] = named(refused.finish(expected=errno.ENOSPC), "failed")
    assert os.strerror(errno.ENOSPC) in str(failure["error"]), failure
    complete = run / ".versions" / "latest-complete" / last.path
    assert digest_tree(complete) == last.files
    verified = small_mount.facts("verify", f"{run}@latest-complete")
    assert verified["corrupt"] == [] and verified["checked_bytes"], verified

    subprocess.run(["rm", "-r", str(filler.parent), str(run / "tmp-checkpoint-3")], check=True, timeout=60)
    [save] = save_steps(small_mount, 4, 4)
    newest = wait_until_recoverable(small_mount, "run", save)
    version = small_mount.wait_for_version("run", lambda version: version.name == newest)
    assert version.state == "complete", version
    assert small_mount.pid == daemon and small_mount.is_alive()


@BOTH_PATHS_SMALL
def test_a_torch_save_that_fills_the_store_does_not_cost_the_good_file(
    small_mount: Mount, torch_client: Client
) -> None:
    """torch.save truncates last.pt before it meets ENOSPC; what was there stays in its version."""
    last, good = save_last(small_mount, torch_client)
    wait_until_recoverable(small_mount, "run", good)
    fail_to_save(last, torch_client)
    wait_until_recoverable(small_mount, "run", good)
    last.unlink()
    save_torch(last, torch_client, step=3)
    wait_until_recoverable(small_mount, "run", Save.of(last.parent, last.name))


@pytest.mark.parametrize(
    "small_mount",
    [pytest.param({"write_path": path, "settle_s": 5.0}, id=path) for path in ("auto", "plain")],
    indirect=True,
)
def test_a_good_file_that_had_no_version_when_the_store_filled_up_gets_it_with_the_next_room(
    small_mount: Mount, torch_client: Client
) -> None:
    """It is all there is of the unit's only save: it outlives a disk that has no room for a version."""
    last, good = save_last(small_mount, torch_client)
    (last.parent / "latest").write_text("step-1")  # a commit point: from now on the file is not to be lost
    fail_to_save(last, torch_client)
    last.unlink()
    wait_until_recoverable(small_mount, "run", good)


@BOTH_PATHS_SMALL
def test_what_is_removed_from_a_full_store_gives_its_room_back(small_mount: Mount) -> None:
    """Although no version had it: there was no room for one."""
    filler = fill(small_mount.path / "run")
    let_settle(small_mount.settle_s)
    filler.unlink()
    [save] = save_steps(small_mount, 1, 1)
    wait_until_recoverable(small_mount, "run", save)


def test_df_counts_the_space_of_history_as_free(small_mount: Mount) -> None:
    """Tools that ask statfs before they write know that history will give way."""
    run = small_mount.path / "run"
    [first] = save_steps(small_mount, 1, 1)
    wait_until_recoverable(small_mount, "run", first)
    before = free_bytes(small_mount.path)
    [second] = save_steps(small_mount, 2, 2)
    subprocess.run(["rm", "-r", str(run / first.path)], check=True, timeout=60)
    wait_until_recoverable(small_mount, "run", second)
    assert poll(lambda: free_bytes(small_mount.path) > before - 2 * MIB, 20), free_bytes(small_mount.path)


def save_torch(path: Path, client: Client, *, step: int, elements: int = MIB // 4) -> None:
    client.call("torch_save", paths=[str(path)], seed=1, legacy=False, step=step, elements=elements)


def save_last(mount: Mount, client: Client) -> tuple[Path, Save]:
    """A first save as last.pt, which fits."""
    last = mount.path / "run" / "last.pt"
    last.parent.mkdir()
    save_torch(last, client, step=1)
    return last, Save.of(last.parent, last.name)


def fail_to_save(last: Path, client: Client) -> None:
    """Save over it what the store has no room for."""
    with pytest.raises(ClientError):
        save_torch(last, client, step=2, elements=STORE_BYTES // 10)


def job(run: Path, first: int, last: int) -> list[str]:
    return [str(run), "--first", str(first), "--last", str(last), "--size-bytes", str(SAVE_BYTES)]


def save_steps(mount: Mount, first: int, last: int) -> list[Save]:
    """Run the job over these steps; each must succeed."""
    return reported(run_script("rotating_run.py", *job(mount.path / "run", first, last)))


def fill(folder: Path) -> Path:
    """Write a live file until the store refuses; it must refuse with ENOSPC, and in no other way."""
    folder.mkdir()
    filler = folder / "filler.bin"
    command = ["dd", "if=/dev/urandom", f"of={filler}", "bs=1M"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and os.strerror(errno.ENOSPC) in done.stderr, done
    return filler


def free_bytes(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize
