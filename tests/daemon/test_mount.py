"""A daemon from its ready line to its end, as its users start and stop it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kernelmounts import find, poll
from mounting import Mount

from ckptfs.daemon.lifetime import BUSY_S
from ckptfs.fusefs.session import READ_AHEAD_KB
from ckptfs.store.frames import decode_frames, encode_frame
from ckptfs.store.history import RecordKind
from ckptfs.store.signing import SigningKey

MountFactory = Callable[..., Mount]
QUICK = {"settle_s": 0.3, "settle_max_s": 3.0}


@pytest.fixture
def run(mount_factory: MountFactory) -> Mount:
    """A mount with one published unit, `run`, that holds the file `x`."""
    mount = mount_factory(config=QUICK)
    (mount.path / "run").mkdir()
    (mount.path / "run" / "x").write_bytes(b"content")
    mount.publish("run")
    return mount


def failed(mount: Mount, code: int, *arguments: str) -> str:
    """The one line of a command that must fail."""
    done = mount.cli(*arguments, check=False)
    assert done.returncode == code, done
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    return done.stderr


def test_status_has_the_promised_keys(run: Mount) -> None:
    status = run.facts("status", str(run.path))
    assert status["write_path"] in ("plain", "passthrough")
    assert status["mountpoint"] == str(run.path)
    assert {"version", "why", "stored_bytes", "free_bytes", "ingest_pending_bytes"} <= status.keys()
    units = status["units"]
    assert isinstance(units, list) and [unit["name"] for unit in units] == ["run"]
    assert "run" in run.cli("status", str(run.path)).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set a mount's read-ahead")
def test_the_kernel_reads_ahead_of_a_reader(run: Mount) -> None:
    device = os.stat(run.path).st_dev
    shown = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text()
    assert int(shown) == READ_AHEAD_KB


def test_commands_work_from_within_the_mount(run: Mount) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptfs.daemon", "log", "run", "--json"],
        cwd=run.path,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={**run.environment, "PYTHONSAFEPATH": "1"},
    )
    assert [version["number"] for version in json.loads(done.stdout)] == [1]


def test_tags_pins_and_forgetting(run: Mount) -> None:
    unit = str(run.path / "run")
    run.cli("tag", f"{unit}@1", "good")
    run.cli("pin", f"{unit}@good")
    assert "tagged good" in failed(run, 1, "forget", f"{unit}@1")
    run.cli("untag", unit, "good")
    assert "pinned" in failed(run, 1, "forget", f"{unit}@1")
    run.cli("unpin", f"{unit}@1")
    run.cli("forget", f"{unit}@1")
    assert run.ask("log", unit) == []


def test_heads_keys_and_the_proof_of_a_history(run: Mount, tmp_path: Path) -> None:
    unit, store = str(run.path / "run"), str(run.store)
    (head,) = run.ask("head", unit)  # type: ignore[misc]
    assert head["unit"] == "run" and str(head["head"]).startswith("1:")
    assert run.ask("head", str(run.path)) == [head]
    assert run.facts("status", str(run.path))["key"] == head["key"]
    assert run.cli("keys", "fingerprint", str(run.path)).stdout.strip() == head["key"]
    public, other = tmp_path / "public.pem", tmp_path / "other.pem"
    public.write_text(run.cli("keys", "show", str(run.path)).stdout)
    other.write_text(SigningKey(bytes(32)).public.pem())
    (run.path / "run" / "x").write_bytes(b"more")
    run.publish("run")
    run.cli("tag", f"{unit}@2", "good")
    proof = ("--key", str(public), "--expect", str(head["head"]))
    assert "2 versions, 2 signed" in run.cli("log", unit, "--verify", *proof).stdout
    done = run.cli("log", unit, "--verify", "--key", str(other), check=False)
    assert done.returncode == 1 and "key: version 2 is sealed with another key" in done.stdout
    assert "absent" in failed(run, 1, "log", unit, "--key", str(tmp_path / "absent"))

    run.stop()
    assert run.cli("log", "/run", "--store", store, *proof).returncode == 0
    (history,) = (run.store / "history").iterdir()
    whole = history.read_bytes()
    second = [f for f in decode_frames(whole) if f.kind == RecordKind.VERSION][1]
    forged = second.payload.replace(b"v000002", b"v000003")
    frame = encode_frame(second.kind, second.sequence, forged)
    history.write_bytes(whole[: second.end - len(frame)] + frame + whole[second.end :])
    done = run.cli("log", "/run", "--store", store, *proof, "--json", check=False)
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    assert ("altered", 2) in {(finding["fault"], finding["number"]) for finding in findings}
    history.write_bytes(whole)
    run.start()


def test_a_key_that_cannot_be_read_stops_the_start(run: Mount, tmp_path: Path) -> None:
    run.stop()
    key = tmp_path / "mount0" / "logs" / "signing.pem"
    whole = key.read_text()
    key.write_text("rubbish")
    config = tmp_path / "mount0" / "logs" / "ckptfs.toml"
    mounting = ("mount", str(run.path), "--store", str(run.store), "--config", str(config))
    assert str(key) in failed(run, 1, *mounting)
    key.write_text(whole)
    run.start()


def test_what_is_in_use_is_refused(run: Mount, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    line = failed(run, 1, "mount", str(tmp_path / "other"), "--store", str(run.store))
    assert f"in use by process {run.pid}, mounted at {run.path}" in line
    line = failed(run, 1, "mount", str(run.path), "--store", str(tmp_path / "store2"))
    assert "mounted already" in line
    line = failed(run, 1, "mount", str(run.path / "run"), "--store", str(run.path / "run" / "store"))
    assert "must not lie in each other" in line
    line = failed(run, 1, "mount", str(tmp_path / "other"), "--store", str(run.path / "run" / "store"))
    assert "a ckptfs mount" in line


def test_umount_refuses_while_somebody_is_in_it(run: Mount) -> None:
    with (run.path / "run" / "x").open("rb"):
        assert "busy" in failed(run, 1, "umount", str(run.path))
        assert run.is_alive()
    run.unmount()
    assert "no ckptfs is mounted" in failed(run, 1, "umount", str(run.path))


def test_a_stop_keeps_what_was_just_written(run: Mount) -> None:
    (run.path / "run" / "late").write_bytes(b"late" * 1000)
    run.stop()
    run.start()
    assert (run.path / "run" / "late").read_bytes() == b"late" * 1000


def test_a_stop_is_bounded_while_somebody_writes(run: Mount) -> None:
    with (run.path / "run" / "open").open("wb", buffering=0) as file:
        file.write(b"before")
        started = time.monotonic()
        run.stop()
        assert BUSY_S <= time.monotonic() - started < BUSY_S + 10
    run.start()
    assert (run.path / "run" / "open").read_bytes() == b"before"


def test_a_second_signal_does_not_wait(run: Mount) -> None:
    with (run.path / "run" / "open").open("wb", buffering=0) as file:
        file.write(b"before")
        started = time.monotonic()
        # Not SIGINT, which whoever runs tests in the background may have set to be ignored.
        os.kill(run.pid, signal.SIGTERM)
        assert poll(lambda: "SIGTERM: stopping" in run.log_tail(), 60)
        run.stop()
        assert time.monotonic() - started < BUSY_S
    run.start()
    assert (run.path / "run" / "open").read_bytes() == b"before"


def test_a_dead_mount_is_cleared(run: Mount) -> None:
    run.path.stat()  # The kernel then answers a stat of the dead mount, too.
    run.kill9()
    assert find(run.path) is not None
    assert "no ckptfs daemon answers" in failed(run, 1, "log", str(run.path / "run"))
    run.start()
    assert "cleared a dead ckptfs mount" in run.log_tail()
    assert (run.path / "run" / "x").read_bytes() == b"content"
    run.kill9()
    run.cli("umount", str(run.path))
    assert find(run.path) is None


def test_a_bare_store_answers(run: Mount) -> None:
    log = run.ask("log", str(run.path / "run"))
    run.stop()
    assert run.ask("log", "/run", "--store", str(run.store)) == log
    assert run.facts("verify", "run", "--store", str(run.store))["corrupt"] == []
    assert "needs a daemon" in failed(run, 1, "pin", "run@1", "--store", str(run.store))
    run.start()
    assert run.ask("log", "/run", "--store", str(run.store)) == log
    run.cli("pin", "run@1", "--store", str(run.store))


def test_rebuild(run: Mount) -> None:
    log = run.ask("log", str(run.path / "run"))
    assert "in use by process" in failed(run, 1, "rebuild", "--store", str(run.store))
    run.stop()
    shutil.rmtree(run.store / "index")
    assert "ckptfs rebuild" in failed(run, 1, "log", "/run", "--store", str(run.store))
    found = run.facts("rebuild", "--store", str(run.store))
    assert (found["units"], found["versions"], found["missing"]) == (1, 1, [])
    run.start()
    assert run.ask("log", str(run.path / "run")) == log
    assert run.verified("run")


AS_ANOTHER = """
import json, os, socket, sys
path, requests = json.load(sys.stdin)
os.setgroups([]); os.setgid(40001); os.setuid(40001)
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
lines = connection.makefile("rwb")
answers = []
for request in requests:
    lines.write(json.dumps(request).encode() + b"\\n"); lines.flush()
    answer = json.loads(lines.readline())
    answers.append("ok" if answer["ok"] else answer["error"]["kind"])
print(json.dumps(answers))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: connects as another user")
def test_another_user_may_do_what_modes_allow(run: Mount) -> None:
    closed = run.path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "x").write_bytes(b"mine")
    run.publish("closed")
    holder = json.loads((run.store / "lock").read_bytes())
    requests = [
        {"do": "log", "path": "/run"},
        {"do": "verify", "path": "/run"},
        {"do": "publish", "path": "/run"},
        {"do": "log", "path": "/closed"},
        {"do": "du", "path": "/closed/x"},
        {"do": "forget", "path": "/run@1"},
        {"do": "gc"},
    ]
    os.chmod(run.path, 0o755)
    above = [folder for folder in run.path.parents if folder.stat().st_mode & 0o001 == 0]
    for folder in above:
        folder.chmod(folder.stat().st_mode | 0o001)
    done = subprocess.run(
        [sys.executable, "-I", "-c", AS_ANOTHER],
        input=json.dumps([holder["socket"], requests]),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    for folder in above:
        folder.chmod(folder.stat().st_mode & ~0o001)
    refused = "NotPermitted"
    assert json.loads(done.stdout) == ["ok", "ok", refused, refused, refused, refused, refused]
