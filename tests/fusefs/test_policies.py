"""Policies of the configuration on a mount: versions go by themselves, or are not made at all."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable

import pytest
from kernelmounts import poll
from mounting import Mount

SETTLE_S = 0.2


def test_a_rotating_run_keeps_what_its_policy_says(mount_factory: Callable[..., Mount]) -> None:
    policies = [{"path": "/run", "keep_last": 3}, {"path": "/scratch", "versions": False}]
    mount = mount_factory(config={"settle_s": SETTLE_S, "policy": policies}, on_tmpfs=True)
    for name in ("run", "other", "scratch"):
        (mount.path / name).mkdir()
    for _ in range(6):
        for name in ("run", "other"):
            (mount.path / name / "data.bin").write_bytes(os.urandom(300_000))
            mount.publish(name)
    (mount.path / "scratch/data.bin").write_bytes(b"nothing of this")
    assert poll(lambda: len(mount.version_names("run")) == 3, 60), mount.version_names("run")
    last = mount.version_names("run")[0]
    assert len((mount.history("run") / last / "data.bin").read_bytes()) == 300_000
    assert len(mount.version_names("other")) == 6
    assert mount.cli("publish", str(mount.path / "scratch"), check=False).returncode == 1
    assert mount.version_names("scratch") == []

    def is_collected() -> bool:
        # Of run three contents are kept, of other six; the latest of both are live too.
        return mount.count("status", "stored_bytes", str(mount.path)) < 9 * 300_000 + 200_000

    assert poll(is_collected, 60, every_s=0.5), mount.facts("gc", str(mount.path), "--dry-run")
    answer = mount.facts("gc", str(mount.path), "--dry-run")
    assert answer["forgotten"] == []
    kept = answer["kept"]
    assert isinstance(kept, dict)
    # Opaque saves have no last complete version; the newest of each unit counts as a version.
    held = {why: one["versions"] for why, one in kept.items() if one["versions"]}
    assert held == {"policy": 2, "version": 1 + 6}
    assert mount.cli("gc", str(mount.path)).stdout.startswith("0 B given back")


@pytest.mark.parametrize("write_path", ["auto", "plain"])
def test_an_open_file_outlives_its_version(mount_factory: Callable[..., Mount], write_path: str) -> None:
    mount = mount_factory(config={"settle_s": SETTLE_S, "write_path": write_path})
    (mount.path / "run").mkdir()
    content = os.urandom(300_000)
    (mount.path / "run/data.bin").write_bytes(content)
    mount.publish("run", tag="old")
    number = next(version.number for version in mount.versions("run") if "old" in version.tags)
    (mount.path / "run/data.bin").write_bytes(b"new")
    mount.publish("run")
    with (mount.history("run") / "old/data.bin").open("rb") as file:
        file.read(1)  # the kernel asks for the times again after a read
        shown = os.fstat(file.fileno())
        mount.cli("untag", str(mount.path / "run"), "old")
        mount.cli("forget", f"{mount.path}/run@{number}")
        mount.cli("gc", str(mount.path))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert (
            hashlib.sha256(os.pread(file.fileno(), 400_000, 0)).digest() == hashlib.sha256(content).digest()
        )
        again = os.fstat(file.fileno())
        assert (again.st_ino, again.st_size, again.st_mtime_ns) == (
            shown.st_ino,
            shown.st_size,
            shown.st_mtime_ns,
        )
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            assert hashlib.sha256(mapping).digest() == hashlib.sha256(content).digest()
    with pytest.raises(FileNotFoundError):
        (mount.history("run") / "old/data.bin").open("rb")
