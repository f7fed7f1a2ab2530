"""SIGHUP: what can change changes, what cannot is named, and what is wrong changes nothing."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from kernelmounts import poll
from mounting import Mount

from ckptfs.daemon.config import Config, parse_config
from ckptfs.daemon.lifetime import Switched
from ckptfs.daemon.reloading import FIXED, Reloader, Reread, compared

OLD = Config()
OTHER = parse_config(
    'settle_s = 1\nsettle_max_s = 9\nunits = ["/*/*"]\nmin_free = "1GiB"\nkey = "none"\n'
    "scrub_rate_mib_s = 1\nscrub_every_days = 1\nencode_after_s = 9\nencode_rate_mib_s = 1\n"
    'encode_level = "small"\n'
    "digests = false\nhealth = false\nprovenance = false\ncopies = 1\n"
    'metrics = "[::1]:1"\nmetrics_names = true\n'
    'log_level = "debug"\nwrite_path = "plain"\n[[policy]]\npath = "/*"\nkeep_last = 3\n'
    '[[remote]]\nname = "away"\nurl = "file:///away"\n'
)
KEYS = Config.__struct_fields__


class Listener:
    """Who has to be told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def reloading(self) -> None:
        self.told.append("reloading")

    def reloaded(self) -> None:
        self.told.append("reloaded")


def reloaded(reloader: Reloader) -> None:
    trio.run(reloader.reload)


def test_other_has_another_value_of_every_key() -> None:
    assert all(getattr(OLD, key) != getattr(OTHER, key) for key in KEYS), "a new key belongs into OTHER"


@given(st.sets(st.sampled_from(KEYS)))
def test_what_is_in_force_afterwards(keys: set[str]) -> None:
    new = Config(**{key: getattr(OTHER if key in keys else OLD, key) for key in KEYS})
    reread = compared(OLD, new)
    assert set(reread.changed) | set(reread.waiting) == keys and set(reread.waiting) == keys & FIXED
    for key in KEYS:
        expected = OTHER if key in keys - FIXED else OLD
        assert getattr(reread.config, key) == getattr(expected, key)
    assert all(key in str(reread) for key in keys)


def test_a_bad_configuration_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, listener, applied = tmp_path / "ckptfs.toml", Listener(), list[Reread]()
    reloader = Reloader(str(path), OLD, applied.append, listener)
    for wrong in ("settle_s = ", "settle = 1", "settle_s = -1", "\0"):
        path.write_text(wrong)
        reloaded(reloader)
        assert not applied and str(path) in reloader.refusal and "is refused" in caplog.text
        caplog.clear()
    path.unlink()
    reloaded(reloader)
    assert not applied and "cannot read" in reloader.refusal
    path.write_text("settle_s = 7")
    reloaded(reloader)
    assert [one.changed for one in applied] == [("settle_s",)] and not reloader.refusal
    assert listener.told == ["reloading", "reloaded"] * 6


def test_without_a_file_there_is_nothing_to_read() -> None:
    applied = list[Reread]()
    reloader = Reloader(None, OLD, applied.append, Listener())
    reloaded(reloader)
    assert not applied and not reloader.refusal


def test_what_waits_for_a_restart_is_named_again(tmp_path: Path) -> None:
    path, applied = tmp_path / "ckptfs.toml", list[Reread]()
    path.write_text('write_path = "plain"')
    reloader = Reloader(str(path), OLD, applied.append, Listener())
    reloaded(reloader)
    reloaded(reloader)
    assert [one.waiting for one in applied] == [("write_path",)] * 2
    assert "write_path can only change at a restart" in str(applied[1])


def test_a_task_is_switched() -> None:
    running: list[int] = []
    wanted: list[int | None] = [None]

    def make() -> Callable[[], object] | None:
        number = wanted[0]
        if number is None:
            return None

        async def task() -> None:
            running.append(number)
            try:
                await trio.sleep_forever()
            finally:
                running.remove(number)

        return task

    async def steps() -> None:
        switched = Switched("counting", make)  # type: ignore[arg-type]  # object is more than it needs
        async with trio.open_nursery() as nursery:
            nursery.start_soon(switched.run)
            for number in (None, 1, 2, None, 3):
                wanted[0] = number
                switched.changed()
                await trio.testing.wait_all_tasks_blocked()
                assert running == ([] if number is None else [number])
            nursery.cancel_scope.cancel()
        assert not running

    trio.run(steps)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_running_mount(mount_factory: Callable[..., Mount]) -> None:
    port = free_port()
    mount = mount_factory(config={"settle_s": 3600, "settle_max_s": 7200, "write_path": "plain"})
    (mount.path / "run").mkdir()
    (mount.path / "run" / "file").write_bytes(b"content")
    with (mount.path / "run" / "open").open("wb") as held:
        held.write(b"before")
        mount.configure(
            {"settle_s": 0.1, "metrics": f"127.0.0.1:{port}", "write_path": "auto", "log_level": "debug"}
        )
        said = mount.reload()
        for key in ("settle_s", "settle_max_s", "metrics", "log_level"):
            assert key in said.partition(";")[0], said
        assert "write_path can only change at a restart" in said
        assert mount.facts("status", str(mount.path))["write_path"] == "plain"
        assert poll(lambda: is_listening(port), 30)
        held.write(b" and after")
    assert (mount.path / "run" / "open").read_bytes() == b"before and after"
    assert poll(lambda: len(mount.versions("run")) > 0, 60)
    mount.configure({"settle_s": "soon"})
    assert "refused" in mount.reload() and mount.is_alive()
    assert is_listening(port), "the old one stays"
    mount.configure({"settle_s": 0.1, "versions": True})
    assert "refused" in mount.reload()
    mount.configure(
        {
            "settle_s": 0.1,
            "provenance": False,
            "digests": False,
            "policy": [{"path": "/*", "versions": False}],
        }
    )
    assert "refused" not in mount.reload()
    assert poll(lambda: not is_listening(port), 30)
    before = len(mount.versions("run"))
    (mount.path / "run" / "more").write_bytes(b"more")
    mount.publish("run")
    assert len(mount.versions("run")) == before, "no versions are wanted any more"


def test_the_service_manager_is_told(
    mount_factory: Callable[..., Mount], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        mount = mount_factory()
        heard = iter(lambda: manager.recv(1 << 16).decode(), "")
        heard_until(heard, "READY=1")
        began_us = time.monotonic_ns() // 1000
        mount.configure({"settle_s": "soon"})
        mount.reload()
        about = [one for one in heard_until(heard, "READY=1") if not one.startswith("STATUS")]
        assert about[-1] == "READY=1"
        fields = dict(line.split("=", 1) for line in about[-2].split("\n"))
        assert fields["RELOADING"] == "1"
        assert began_us <= int(fields["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        assert any("REFUSED" in one for one in heard_until(heard, "STATUS")), (
            "it is seen in `systemctl status`"
        )
        mount.stop()


def heard_until(heard: Iterator[str], word: str) -> list[str]:
    """Messages up to the first that begins with `word`."""
    found: list[str] = []
    while not found or not found[-1].startswith(word):
        found.append(next(heard))
    return found


def test_a_terminal_that_goes_away_is_a_stop(tmp_path: Path) -> None:
    """Whoever closes the window of a mount in the foreground wants it to end."""
    mount = Mount(tmp_path / "mnt", tmp_path / "store", logs=tmp_path / "logs")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ckptfs.daemon", "mount", str(mount.path), "--store", str(mount.store)]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(command, stdin=slave, stdout=out, stderr=out, env=mount.environment)
    try:
        poll(lambda: b"ready" in (tmp_path / "out").read_bytes(), 30)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0, (tmp_path / "out").read_text()
    finally:
        process.kill()
        process.wait(30)
        os.close(master)
        os.close(slave)
        mount.clean_up()
