"""What happens to a unit while a version of it is being made.

One rule: every action is done at several moments of a publish that takes a while (a large file is stored in
it), and whatever moment it was, no version is a mixture, nothing is lost and the publish ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from asking import let_settle
from kernelmounts import poll
from mounting import Mount

SETTLE_S = 1
LARGE_BYTES = 128 << 20
_START_S = 0.45  # what the command needs before it asks
MOMENTS_S = (0.05, 0.3)
BLOCK = os.urandom(1 << 20)


@pytest.fixture(params=["auto", "plain"])
def place(request: pytest.FixtureRequest, mount_factory: Callable[..., Mount]) -> Mount:
    return mount_factory(config={"settle_s": 3600, "write_path": request.param}, on_tmpfs=True)


@pytest.fixture(params=["auto", "plain"])
def fast(request: pytest.FixtureRequest, mount_factory: Callable[..., Mount]) -> Mount:
    """Versions are made by themselves."""
    return mount_factory(config={"settle_s": SETTLE_S, "write_path": request.param}, on_tmpfs=True)


def write_large(path: Path, seed: int) -> str:
    """A file that takes a while to be stored; returns its digest."""
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as f:
        for number in range(LARGE_BYTES // len(BLOCK)):
            part = seed.to_bytes(8, "big") + number.to_bytes(8, "big") + BLOCK[16:]
            f.write(part)
            digest.update(part)
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def publishing(mount: Mount, unit: str, after_s: float) -> Iterator[None]:
    """A `ckptfs publish` that has run for `after_s` when the block begins, and has ended well behind it."""
    command = [sys.executable, "-m", "ckptfs.daemon", "publish", str(mount.path / unit)]
    asked = subprocess.Popen(command, env=mount.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(_START_S + after_s)
    try:
        yield
    finally:
        said = asked.communicate(timeout=60)
    assert asked.returncode in (0, 1), said


@pytest.mark.parametrize("after_s", MOMENTS_S)
def test_a_directory_that_moves_to_another_unit(place: Mount, after_s: float) -> None:
    run, other = place.path / "run", place.path / "other"
    (run / "step").mkdir(parents=True)
    other.mkdir()
    (other / "own").write_bytes(b"own")
    (run / "stays").write_bytes(b"stays")
    saved = write_large(run / "step/large", 1)
    with publishing(place, "run", after_s):
        (run / "step").rename(other / "step")
    place.publish("run")
    place.publish("other")
    for unit in ("run", "other"):
        for version in place.version_names(unit):
            for found in (place.history(unit) / version).rglob("large"):
                assert digest_of(found) == saved
    newest = place.history("other") / place.versions("other")[-1].name
    assert digest_of(newest / "step/large") == saved
    assert not (place.history("run") / place.versions("run")[-1].name / "step").exists()
    assert place.verified("run") and place.verified("other")


@pytest.mark.parametrize("after_s", MOMENTS_S)
def test_a_writer_who_opens_what_is_being_stored(place: Mount, after_s: float) -> None:
    run = place.path / "run"
    run.mkdir()
    before = write_large(run / "large", 2)
    with publishing(place, "run", after_s), (run / "large").open("r+b", buffering=0) as f:
        f.seek(100 << 20)
        f.write(b"changed")
    after = digest_of(run / "large")
    assert after != before
    place.publish("run")
    found = [digest_of(place.history("run") / name / "large") for name in place.version_names("run")]
    assert found[-1] == after
    assert set(found) <= {before, after}


@pytest.mark.parametrize("after_s", MOMENTS_S)
def test_another_file_of_the_unit_is_removed(place: Mount, after_s: float) -> None:
    run = place.path / "run"
    run.mkdir()
    large, second = write_large(run / "large", 3), write_large(run / "second", 4)
    (run / "small").write_bytes(b"small")
    with publishing(place, "run", after_s):
        (run / "small").unlink()
        (run / "second").unlink()
    place.publish("run")
    for name in place.version_names("run"):
        version = place.history("run") / name
        assert digest_of(version / "large") == large
        if (version / "second").exists():
            assert digest_of(version / "second") == second
        if (version / "small").exists():
            assert (version / "small").read_bytes() == b"small"
    newest = place.history("run") / place.versions("run")[-1].name
    assert sorted(path.name for path in newest.iterdir()) == ["large"]


def test_a_mapping_is_written_while_others_read(fast: Mount) -> None:
    run = fast.path / "run"
    run.mkdir()
    (run / "mapped").write_bytes(bytes(1 << 20))
    fd = os.open(run / "mapped", os.O_RDWR)
    mapping = mmap.mmap(fd, 0)
    os.close(fd)
    try:
        for value in range(1, 60):
            mapping[: 1 << 20] = bytes([value]) * (1 << 20)
            with (run / "mapped").open("rb") as reader:
                content = reader.read()
            assert content.count(bytes([value])) == 1 << 20, "a reader does not see the mapping"
            time.sleep(0.05)
    finally:
        mapping.close()
    last = hashlib.sha256(content).hexdigest()
    assert poll(lambda: _newest_digest(fast, "run", "mapped") == last, 30, every_s=0.5)


def test_a_mapped_file_beside_a_log_makes_no_version_every_few_seconds(fast: Mount) -> None:
    run = fast.path / "run"
    run.mkdir()
    (run / "mapped").write_bytes(b"x" * 4096)
    fast.wait_for_version("run", lambda version: True)
    fd = os.open(run / "mapped", os.O_RDWR)
    mapping = mmap.mmap(fd, 0)
    os.close(fd)
    with (run / "train.log").open("ab", buffering=0) as log:
        log.write(b"begins\n")
        let_settle(SETTLE_S)
        had = len(fast.version_names("run"))
        for number in range(24):
            log.write(b"%d\n" % number)
            mapping[0] = number
            time.sleep(0.25)
        made = len(fast.version_names("run")) - had
    mapping.close()
    assert made <= 1


def test_a_stored_log_that_is_cut_extended_and_appended_to(fast: Mount) -> None:
    run = fast.path / "run"
    run.mkdir()
    (run / "run.log").write_bytes(b"a" * 300_000)
    fast.wait_for_version("run", lambda version: True)
    with (run / "run.log").open("r+b", buffering=0) as log:
        log.truncate(100_000)
        log.truncate(200_000)
        log.seek(0, os.SEEK_END)
        log.write(b"b" * 50_000)
        wanted = b"a" * 100_000 + bytes(100_000) + b"b" * 50_000
        digest = hashlib.sha256(wanted).hexdigest()
        assert digest_of(run / "run.log") == digest
        fast.publish("run")
    assert poll(lambda: _newest_digest(fast, "run", "run.log") == digest, 60, every_s=0.5)
    assert digest_of(run / "run.log") == digest


def _newest_digest(mount: Mount, unit: str, name: str) -> str | None:
    names = mount.version_names(unit)
    path = mount.history(unit) / names[-1] / name if names else None
    return digest_of(path) if path is not None and path.exists() else None


def test_a_pinned_file_that_somebody_reads_is_opened_for_writing(mount_factory: Callable[..., Mount]) -> None:
    """The kernel reads its staging file by itself, so neither the pin nor the store may have that file."""
    mount = mount_factory(config={"settle_s": SETTLE_S}, on_tmpfs=True)
    run = mount.path / "run"
    run.mkdir()
    with (run / "slow.bin").open("wb", buffering=0) as slow, contextlib.ExitStack() as readers:
        slow.write(b"\x00\x01 holds the directory back")
        saved = {name: os.urandom(400_000) for name in ("model", "other")}
        for name, content in saved.items():
            with (run / name).open("wb", buffering=0) as writer:
                writer.write(content)
                reader = readers.enter_context((run / name).open("rb", buffering=0))
        let_settle(SETTLE_S)
        (run / "other").unlink()  # pins the settled state, "model" with it
        started = time.monotonic()
        with (run / "model").open("r+b", buffering=0) as writer:
            assert time.monotonic() - started < 20, "it waited for the directory to be quiet"
            mount.wait_for_version("run", lambda version: True)
            writer.seek(1000)
            writer.write(b"changed")
            assert os.pread(reader.fileno(), 7, 1000) != b"changed", "that is the reader of the removed file"
            with (run / "model").open("rb") as again:
                assert again.read()[1000:1007] == b"changed"
        changed = digest_of(run / "model")
    mount.publish("run")
    versions = [mount.history("run") / name for name in mount.version_names("run")]
    wanted = {name: hashlib.sha256(content).hexdigest() for name, content in saved.items()}
    preimage = next(version for version in versions if (version / "other").exists())
    assert {name: digest_of(preimage / name) for name in wanted} == wanted
    assert digest_of(versions[-1] / "model") == changed == digest_of(run / "model") != wanted["model"]
    assert mount.verified("run")
