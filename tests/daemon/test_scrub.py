"""Damage on a real mount: what a reader meets, what the log says, what `verify` and `scrub` find and heal."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kernelmounts import poll
from mounting import Mount
from small_store import random_bytes, safetensors

CONFIG = {"settle_s": 0.3}
TENSORS = {"a": random_bytes(600_000, 1), "b": random_bytes(900_000, 2)}
CONTENT = safetensors(TENSORS)


def digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


@pytest.fixture
def damaged(mount_factory: Callable[..., Mount]) -> tuple[Mount, Path]:
    """A mount with a version of run/model.safetensors in which a bit of tensor b has flipped; its segment."""
    mount = mount_factory(config=CONFIG)
    (mount.path / "run").mkdir()
    (mount.path / "run/model.safetensors").write_bytes(CONTENT)
    (mount.path / "run/notes").write_bytes(b"good")
    mount.publish("run")
    mount.stop()
    segment = max(mount.store.glob("segments/*/*.seg"), key=lambda path: path.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(len(CONTENT) - 1000)
        byte = file.read(1)[0]
        file.seek(len(CONTENT) - 1000)
        file.write(bytes([byte ^ 16]))
    mount.start()
    return mount, segment


def test_a_reader_gets_an_error_and_the_rest(damaged: tuple[Mount, Path]) -> None:
    mount, segment = damaged
    model = mount.path / "run/model.safetensors"
    with model.open("rb", buffering=0) as file:
        for _ in range(3):
            with pytest.raises(OSError) as caught:
                os.pread(file.fileno(), 10, len(CONTENT) - 1000)
            assert caught.value.errno == errno.EIO
        assert digest(os.pread(file.fileno(), 500_000, 0)) == digest(CONTENT[:500_000])
    assert (mount.path / "run/notes").read_bytes() == b"good"
    lines = [line for line in mount.log_tail().splitlines() if "refused" in line]
    assert len(lines) == 1
    for part in ("/run/model.safetensors", "tensor 'b'", "file offset", "bafkr4i", segment.name, "at byte"):
        assert part in lines[0]
    copy = mount.store / "quarantine" / segment.name
    assert poll(copy.exists, 60), mount.log_tail()
    assert digest(copy.read_bytes()) == digest(segment.read_bytes())


def test_verify_and_scrub_name_it_and_a_writer_heals_it(damaged: tuple[Mount, Path]) -> None:
    mount, segment = damaged
    done = mount.cli("verify", str(mount.path / "run"), "--json", check=False)
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)["corrupt"]
    assert (row["path"], row["tensor"]) == ("model.safetensors", "b") and segment.name in row["place"]

    done = mount.cli("scrub", str(mount.path), "--json", check=False)
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)["corrupt"]
    assert (row["path"], row["tensor"]) == ("/run/model.safetensors@1", "b") and not row["healed"]
    assert segment.name in row["place"] and row["chunk"].startswith("bafkr4i")
    scrubbed = mount.facts("status", str(mount.path))["scrub"]
    assert isinstance(scrubbed, dict)
    assert scrubbed["corrupt"] == 1 and 0 <= scrubbed["age_s"] < 60

    # Neither the damage nor the result is forgotten by the next mount.
    mount.stop()
    assert "1 corrupt" in mount.cli("status", "--store", str(mount.store)).stdout
    mount.start()
    (mount.path / "run/copy.safetensors").write_bytes(CONTENT)
    mount.publish("run")
    assert digest((mount.path / "run/model.safetensors").read_bytes()) == digest(CONTENT)
    assert "0 corrupt" in mount.cli("verify", f"{mount.path / 'run'}@1").stdout
    assert "0 corrupt, 0 healed" in mount.cli("scrub", str(mount.path)).stdout


def test_a_scrub_in_the_background(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory(config={**CONFIG, "scrub_every_days": 0, "scrub_rate_mib_s": 100})
    (mount.path / "run").mkdir()
    (mount.path / "run/x").write_bytes(CONTENT)
    mount.publish("run")
    mount.stop()
    mount.start()

    def is_scrubbed() -> bool:
        scrub = mount.facts("status", str(mount.path))["scrub"]
        return isinstance(scrub, dict) and scrub["corrupt"] == 0 and scrub["checked_bytes"] >= len(CONTENT)

    assert poll(is_scrubbed, 30, every_s=0.3)


def test_only_the_owner_scrubs_and_a_bare_store_says_how(mount: Mount) -> None:
    mount.stop()
    done = mount.cli("scrub", "--store", str(mount.store), check=False)
    assert done.returncode == 1 and "needs a daemon" in done.stderr
