"""Encoding on a real mount: every byte of every version is the same before and after, on both write paths,
and the newest save stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from encoded_series import saves
from kernelmounts import poll
from mounting import Mount

CONFIG = {"settle_s": 0.3, "encode_after_s": "never"}
SAVES = saves(4, values=300_000)


def digests(folder: Path) -> dict[str, str]:
    """What every version of a unit holds."""
    found = {}
    for version in sorted(os.listdir(folder / ".versions")):
        top = folder / ".versions" / version
        if version.startswith("v") and not top.is_symlink():
            for path in sorted(top.rglob("*")):
                if path.is_file():
                    found[str(path.relative_to(top.parent))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def save(mount: Mount, folder: str, files: dict[str, bytes]) -> None:
    target = mount.path / folder
    target.mkdir(parents=True, exist_ok=True)
    for name, payload in files.items():
        (target / (name + ".tmp")).write_bytes(payload)
        (target / (name + ".tmp")).rename(target / name)
    mount.publish(folder.partition("/")[0])


def encode(mount: Mount, path: str, *options: str) -> dict[str, int]:
    answer = json.loads(mount.cli("encode", str(mount.path / path), *options, "--json").stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize("write_path", ["auto", "plain"])
def test_every_version_reads_as_before(mount_factory: Callable[..., Mount], write_path: str) -> None:
    mount = mount_factory(config={**CONFIG, "write_path": write_path})
    for files in SAVES:
        save(mount, "run", files)
    before = digests(mount.path / "run")
    usage = mount.facts("du", str(mount.path / "run"))
    would = encode(mount, "run", "--dry-run")
    assert would["looked_at_bytes"] > 0 and digests(mount.path / "run") == before
    done = encode(mount, "run")
    assert done["looked_at_bytes"] == would["looked_at_bytes"]
    assert 0 < done["encoded_bytes"] < 0.7 * done["plain_bytes"]
    assert digests(mount.path / "run") == before
    after = mount.facts("du", str(mount.path / "run"))
    assert (after["logical_bytes"], after["unique_bytes"]) == (usage["logical_bytes"], usage["unique_bytes"])
    assert isinstance(after["stored_bytes"], int) and isinstance(usage["stored_bytes"], int)
    assert after["stored_bytes"] == usage["stored_bytes"] - done["plain_bytes"] + done["encoded_bytes"]
    by_codec = after["by_codec"]
    assert isinstance(by_codec, dict) and by_codec.keys() >= {"raw", "planes", "delta", "cast"}
    by_dtype = mount.facts("du", "--by-dtype", str(mount.path / "run"))["by_dtype"]
    assert isinstance(by_dtype, dict) and by_dtype.keys() == {"F32", "BF16", "I64", "other"}
    for key in ("unique_bytes", "stored_bytes"):
        assert sum(sums[key] for sums in by_dtype.values()) == after[key]
    assert by_dtype["BF16"]["stored_bytes"] < 0.5 * by_dtype["BF16"]["unique_bytes"]
    assert encode(mount, "run")["encoded_chunks"] == 0, "once is enough"

    mount.stop()
    mount.start()
    assert digests(mount.path / "run") == before
    for version in (1, 2, 4):
        assert "0 corrupt" in mount.cli("verify", f"{mount.path / 'run'}@{version}").stdout
    assert "0 corrupt, 0 healed" in mount.cli("scrub", str(mount.path)).stdout
    mount.cli("rollback", str(mount.path / "run"), "--to", "1")
    for name, payload in SAVES[0].items():
        assert (mount.path / "run" / name).read_bytes() == payload
    mount.cli("forget", f"{mount.path / 'run'}@2")
    mount.cli("gc", str(mount.path))
    kept = {path: digest for path, digest in before.items() if not path.startswith("v000002")}
    assert kept.items() <= digests(mount.path / "run").items()


def test_at_the_small_level_every_version_reads_as_before(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory(config=CONFIG)
    for name, files_of_saves in (("fast", SAVES), ("small", saves(4, values=300_000, seed=2))):
        for files in files_of_saves:
            save(mount, name, files)
    before = digests(mount.path / "small")
    # What was encoded at one level stays so when the other is asked for.
    assert encode(mount, "fast@2")["encoded_chunks"] > 0
    assert encode(mount, "fast@2", "--level", "small")["encoded_chunks"] == 0
    refused = mount.cli("encode", str(mount.path / "small"), "--level", "tiny", check=False)
    assert refused.returncode == 2
    encode(mount, "small@1")
    small = encode(mount, "small@2", "--level", "small")
    assert "context" in by_codec(mount, "small") and "context" not in by_codec(mount, "fast")
    assert 0 < small["encoded_bytes"] < 0.7 * small["plain_bytes"]
    assert digests(mount.path / "small") == before

    mount.stop()
    mount.start()
    assert digests(mount.path / "small") == before
    assert "0 corrupt" in mount.cli("verify", f"{mount.path / 'small'}@2").stdout
    assert "0 corrupt, 0 healed" in mount.cli("scrub", str(mount.path)).stdout
    mount.cli("forget", f"{mount.path / 'small'}@1")
    mount.cli("gc", str(mount.path))
    kept = {path: digest for path, digest in before.items() if not path.startswith("v000001")}
    assert kept.items() <= digests(mount.path / "small").items()


def test_the_configured_level_holds_in_the_background_and_by_hand(
    mount_factory: Callable[..., Mount],
) -> None:
    mount = mount_factory(config={**CONFIG, "encode_level": "small"})
    for files in SAVES:
        save(mount, "run", files)
    encode(mount, "run@1")
    encode(mount, "run@2", "--level", "fast")
    assert "context" not in by_codec(mount, "run") and "delta" in by_codec(mount, "run")
    encode(mount, "run")
    assert "context" in by_codec(mount, "run")


def by_codec(mount: Mount, path: str) -> dict[str, object]:
    found = mount.facts("du", str(mount.path / path))["by_codec"]
    assert isinstance(found, dict)
    return found


def test_in_the_background_and_never_the_newest_step(
    mount_factory: Callable[..., Mount],
) -> None:
    mount = mount_factory(config={**CONFIG, "encode_after_s": 0, "encode_rate_mib_s": 0})
    for step, files in enumerate(SAVES, 1):
        save(mount, f"run/checkpoint-{step}00", files)
    before = digests(mount.path / "run")

    def is_encoded() -> bool:
        state = mount.facts("status", str(mount.path))["encoding"]
        return isinstance(state, dict) and state["plain_bytes"] > 0 and not state["pending_bytes"]

    assert poll(is_encoded, 60, every_s=0.3)
    assert digests(mount.path / "run") == before
    newest = mount.facts("du", str(mount.path / "run/checkpoint-400"))["by_codec"]
    oldest = mount.facts("du", str(mount.path / "run/checkpoint-100"))["by_codec"]
    assert isinstance(newest, dict) and isinstance(oldest, dict)
    assert newest.keys() == {"raw"} and "planes" in oldest
    for step, files in enumerate(SAVES, 1):
        for name, payload in files.items():
            assert (mount.path / f"run/checkpoint-{step}00" / name).read_bytes() == payload


def test_a_daemon_that_is_killed_while_it_encodes_goes_on(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory(config={**CONFIG, "encode_after_s": 0, "encode_rate_mib_s": 0.5})
    for files in SAVES:
        save(mount, "run", files)
    before = digests(mount.path / "run")
    for _ in range(3):
        mount.kill9()
        mount.start()
        assert digests(mount.path / "run") == before
    assert "0 corrupt, 0 healed" in mount.cli("scrub", str(mount.path)).stdout


def test_what_cannot_be_encoded_is_said(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory(config=CONFIG)
    (mount.path / "run/sub").mkdir(parents=True)
    mount.publish("run")
    done = mount.cli("encode", str(mount.path / "run/sub"), check=False)
    assert done.returncode == 1 and "name the unit" in done.stderr
    assert encode(mount, "run@1")["chunks"] == 0
