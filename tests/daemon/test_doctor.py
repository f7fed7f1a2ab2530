"""`ckptfs doctor`: what is planted is found, named, and mended where that is safe; a sound mount is fine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import DAEMON
from kernelmounts import poll
from mounting import Mount
from small_store import safetensors

from ckptfs.daemon import doctor_machine, doctor_store
from ckptfs.daemon.diagnosis import Finding, Level, carried_out, fine, mended, problem
from ckptfs.store.disk import Disk, Space
from ckptfs.store.errors import NotFound

Row = dict[str, str]


@pytest.fixture
def mount(mount_factory: Callable[..., Mount]) -> Mount:
    return mount_factory(config={"settle_s": 0.2})


def key_of(mount: Mount) -> Path:
    return Path(str(mount.config.get("key", mount.log.parent / "signing.pem")))


def configuration(mount: Mount) -> Path:
    return mount.log.parent / "ckptfs.toml"


def doctor(mount: Mount, *more: str, on_store: bool = False) -> list[Row]:
    """What it says; its exit code must agree."""
    where = ["--store", str(mount.store)] if on_store else [str(mount.path)]
    done = mount.cli("doctor", *where, "--config", str(configuration(mount)), "--json", *more, check=False)
    rows: list[Row] = json.loads(done.stdout)
    assert done.returncode == any(row["level"] == "problem" for row in rows), done.stderr
    return rows


def problems(rows: list[Row]) -> dict[str, str]:
    return {row["check"]: row["said"] for row in rows if row["level"] == "problem"}


def test_a_healthy_mount_has_no_problem(mount: Mount) -> None:
    run = mount.path / "run"
    run.mkdir()
    (run / "model.safetensors").write_bytes(safetensors({"w": bytes(100_000)}))
    mount.publish("run")
    rows = doctor(mount)
    assert not problems(rows)
    said = {row["check"]: row["level"] for row in rows}
    for check in (
        "kernel",
        "fuse",
        "limits",
        "mount",
        "ingest",
        "clock",
        "modes",
        "store",
        "room",
        "kept aside",
    ):
        assert said[check] == "fine", rows
    for row in rows:
        assert row["level"] == "fine" or row["advice"] or row["check"] == "write path", row
    shown = mount.cli("doctor", str(mount.path), "--config", str(configuration(mount)))
    assert "! " not in shown.stdout


def test_a_key_that_others_can_read(mount: Mount) -> None:
    key = key_of(mount)
    key.chmod(0o644)
    assert "can be read by others" in problems(doctor(mount))["key"]
    assert key.stat().st_mode & 0o777 == 0o644, "nothing is changed without --fix"
    assert not problems(doctor(mount, "--fix"))
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_public_half_of_another_key(mount: Mount) -> None:
    public = key_of(mount).with_suffix(".pub")
    public.write_text(
        subprocess.run(
            "openssl genpkey -algorithm ed25519 | openssl pkey -pubout",
            shell=True,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    )
    assert "is not the public half" in problems(doctor(mount))["key"]


def test_the_key_is_that_of_the_configuration_that_the_daemon_has_read(mount: Mount) -> None:
    done = mount.cli("doctor", str(mount.path), "--json", check=False)
    (key,) = [row for row in json.loads(done.stdout) if row["check"] == "key"]
    assert str(key_of(mount)) in key["said"]


def test_a_key_that_is_none(mount: Mount) -> None:
    key_of(mount).write_text("-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n")
    assert "cannot use the signing key" in problems(doctor(mount))["key"]


def test_a_key_in_the_store(mount: Mount) -> None:
    inside = mount.store / "signing.pem"
    shutil.copy(key_of(mount), inside)
    inside.chmod(0o600)
    text = configuration(mount).read_text()
    configuration(mount).write_text(text.replace(str(key_of(mount)), str(inside)))
    assert "lies in the store" in problems(doctor(mount))["key"]


def test_a_store_that_others_can_write(mount: Mount) -> None:
    mount.store.chmod(0o777)
    assert "can be written by others" in problems(doctor(mount))["store"]
    assert not problems(doctor(mount, "--fix"))
    assert mount.store.stat().st_mode & 0o022 == 0


def test_a_dead_mount(mount: Mount) -> None:
    mount.kill9()
    assert "is dead" in problems(doctor(mount))["mount"]
    assert not problems(doctor(mount, "--fix"))
    assert not os.path.ismount(mount.path)
    assert doctor(mount, on_store=True)


def test_a_mount_that_hangs(mount: Mount) -> None:
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        said = problems(doctor(mount))
        assert "does not answer" in said["mount"]
        assert time.monotonic() - begun < 120
    finally:
        os.kill(mount.pid, signal.SIGCONT)
    assert not problems(doctor(mount))


def test_what_a_loss_of_power_left(mount: Mount) -> None:
    kept = mount.store / "quarantine"
    (kept / "suspect-7").write_bytes(b"half a checkpoint")
    (kept / "suspect-7.json").write_text('{"path": "/run/file"}')
    assert problems(doctor(mount))["kept aside"].startswith("files that a loss of power left")


def test_a_damaged_segment_and_what_a_scrub_found(mount: Mount) -> None:
    run = mount.path / "run"
    run.mkdir()
    (run / "file").write_bytes(os.urandom(400_000))
    mount.publish("run")
    mount.wait_until_ingested()
    segment = max((mount.store / "segments").rglob("*.seg"), key=lambda one: one.stat().st_size)
    with segment.open("r+b") as file:
        file.write(b"damaged!" * 4)
    mount.cli("scrub", str(mount.path), check=False)
    poll(lambda: any((mount.store / "quarantine").glob("*.seg")), 30)
    said = problems(doctor(mount))
    assert "damaged" in said["scrub"] and "copies of damaged segments" in said["kept aside"]


def test_a_file_that_only_its_owner_can_read(mount: Mount) -> None:
    run = mount.path / "run"
    run.mkdir(mode=0o755)
    (run / "closed.safetensors").write_bytes(b"x")
    (run / "closed.safetensors").chmod(0o600)
    private = mount.path / "private"
    private.mkdir(mode=0o700)
    (private / "file").write_bytes(b"x")
    (private / "file").chmod(0o600)
    (row,) = [row for row in doctor(mount) if row["check"] == "modes"]
    assert row["level"] == "note" and "closed.safetensors" in row["said"] and row["said"].endswith(" 1")


def test_a_unit_without_a_whole_save(mount: Mount) -> None:
    run = mount.path / "run"
    run.mkdir()
    whole = safetensors({"w": bytes(100_000)})
    (run / "model.safetensors").write_bytes(whole[:50_000])
    mount.publish("run")
    assert "none is complete" in problems(doctor(mount))["versions"]


def test_something_that_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    command = [*DAEMON, "doctor", "--store", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (row,) = [row for row in json.loads(done.stdout) if row["check"] == "store"]
    assert "could not be looked at" in row["said"]


def test_few_descriptors(mount: Mount) -> None:
    script = (
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        f"sys.argv = ['ckptfs', 'doctor', '--store', {str(mount.store)!r}, '--json']\n"
        "runpy.run_module('ckptfs.daemon', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "at most 256 files" in problems(json.loads(done.stdout))["limits"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 256, "this test needs more than that itself"


def test_a_clock_that_is_wrong() -> None:
    year = 365 * 24 * 3600 * 10**9
    (old,) = doctor_machine.clock(30 * year, None)
    (behind,) = doctor_machine.clock(58 * year, 59 * year)
    (right,) = doctor_machine.clock(59 * year, 58 * year)
    assert (old.level, behind.level, right.level) == (Level.PROBLEM, Level.PROBLEM, Level.FINE)


@pytest.mark.parametrize(
    ("available", "save", "level"), [(30, 20, Level.FINE), (19, 20, Level.PROBLEM), (1, 0, Level.PROBLEM)]
)
def test_room_for_the_next_save(
    available: int, save: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Space(100 << 30, available << 30, available << 30, 1000, 500)
    monkeypatch.setattr(Disk, "space", lambda _: space)
    (found,) = doctor_store.room(str(tmp_path), save << 30)
    assert found.level == level


def test_no_room_for_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "space", lambda _: Space(100, 50, 50, 100_000, 10))
    assert {one.check: one.level for one in doctor_store.room(str(tmp_path), 0)}["inodes"] is Level.PROBLEM


def test_a_check_that_breaks_off_is_told() -> None:
    def check() -> list[Finding]:
        raise NotFound("there is no such thing")

    (found,) = carried_out("thing", lambda: iter(check()))
    assert found.level is Level.NOTE and "no such thing" in found.said


def test_a_mend_that_fails_stays_a_problem() -> None:
    def mend() -> None:
        raise PermissionError(1, "not permitted")

    found = mended(problem("key", "is open", "close it", mend))
    assert found.level is Level.PROBLEM and "not permitted" in found.said
    assert mended(fine("key", "all is well")) == fine("key", "all is well")
