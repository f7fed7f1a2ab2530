"""What systemd is told: ready when the mount answers, alive while it does, stopping at the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from kernelmounts import poll
from mounting import Mount, may_pass_through

from ckptfs.daemon.mount_probe import MountProbe
from ckptfs.daemon.service_manager import ServiceManager

UNIT = Path(__file__).parents[2] / "systemd" / "ckptfs@.service"
WATCHDOG_S = 2


class Manager:
    """The service manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)
        self.told: list[dict[str, str]] = []

    def hear(self) -> list[dict[str, str]]:
        """All messages so far."""
        while True:
            try:
                message = self._socket.recv(1 << 16).decode()
            except BlockingIOError:
                return self.told
            self.told.append(dict(line.split("=", 1) for line in message.split("\n")))

    def count(self, key: str) -> int:
        return sum(key in one for one in self.hear())

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@ckptfs-test-{os.getpid()}"
    one = Manager(address)
    yield one
    one.close()


@pytest.fixture
def served(manager: Manager, mount_factory: Callable[..., Mount], monkeypatch: pytest.MonkeyPatch) -> Mount:
    """A mount that was started as systemd would start it."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("FDSTORE", "4")
    monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_S * 1_000_000))
    return mount_factory()


def test_ready_alive_stopping(served: Mount, manager: Manager) -> None:
    poll(lambda: manager.count("READY") == 1, 30)
    (ready,) = [one for one in manager.told if "READY" in one]
    assert ready["READY"] == "1" and str(served.path) in ready["STATUS"]
    if may_pass_through():  # root, and a kernel that can ask again
        assert served.facts("status", str(served.path))["kept"] is True
    poll(lambda: manager.count("WATCHDOG") >= 3, 60)
    served.stop()
    assert manager.count("STOPPING") == 1 and manager.count("READY") == 1
    assert "STOPPING" in manager.told[-1], "nothing is said after it"


@pytest.mark.skipif(not may_pass_through(), reason="needs root, and a kernel that can ask again")
def test_a_hand_over_syncs_nothing(served: Mount, manager: Manager) -> None:
    """Jobs wait for its end, and the disk may take minutes for what they have written."""
    poll(lambda: manager.count("READY") == 1, 30)
    (served.path / "waits").write_bytes(b"in staging")
    os.kill(served.pid, signal.SIGUSR1)
    assert poll(lambda: not served.is_alive(), 30)
    said = served.log_tail()
    served.clean_up()  # the next daemon is none
    assert "handed over" in said and "durable in staging" not in said


def test_a_daemon_that_hangs_is_not_called_alive(served: Mount, manager: Manager) -> None:
    poll(lambda: manager.count("WATCHDOG") >= 1, 60)
    os.kill(served.pid, signal.SIGSTOP)
    try:
        time.sleep(0.5)  # what was under way when it stopped
        before = manager.count("WATCHDOG")
        time.sleep(WATCHDOG_S * 1.5)
        assert manager.count("WATCHDOG") == before
    finally:
        os.kill(served.pid, signal.SIGCONT)
    poll(lambda: manager.count("WATCHDOG") > before, 60)


def test_a_mount_that_nobody_keeps_says_so(
    tmp_path: Path, mount_factory: Callable[..., Mount], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", f"@ckptfs-test-{os.getpid()}")
    monkeypatch.setenv("FDSTORE", "1")
    one = Manager(os.environ["NOTIFY_SOCKET"])
    figures = tmp_path / "a.prom"
    mount = mount_factory(config={"metrics": str(figures)})
    status = mount.facts("status", str(mount.path))
    assert status["kept"] is False and status["kept_why"]
    assert "the mount ends with this daemon" in mount.log_tail()
    assert poll(lambda: figures.exists() and "ckptfs_session_kept 0.0" in figures.read_text(), 30)
    assert "restart" in mount.cli("doctor", str(mount.path), check=False).stdout
    mount.stop()
    one.close()


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "there is none"),
        ({"NOTIFY_SOCKET": "@nobody", "FDSTORE": "4"}, "could not be told"),
        ({"NOTIFY_SOCKET": "@nobody"}, "no FileDescriptorStoreMax"),
        ({"NOTIFY_SOCKET": "@nobody", "FDSTORE": "0"}, "FileDescriptorStoreMax=0"),
        ({"NOTIFY_SOCKET": "@nobody", "FDSTORE": "1"}, "FileDescriptorStoreMax=1"),
    ],
)
def test_who_keeps_nothing_says_why(environment: dict[str, str], why: str) -> None:
    assert why in ServiceManager(environment).keep({"one": 0, "two": 0})


def test_who_does_not_listen_for_a_moment_gets_the_descriptors_all_the_same(tmp_path: Path) -> None:
    """A mount that is not kept for a full queue would be so until it ends."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener, open(os.devnull) as one:
        listener.bind(address)
        manager = ServiceManager({"NOTIFY_SOCKET": address, "FDSTORE": "4"})
        told = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full, suppress(BlockingIOError):
            full.setblocking(False)
            while True:
                full.sendto(b"WATCHDOG=1", address)
                told += 1
        listens = threading.Timer(0.1, lambda: [listener.recv(99) for _ in range(told)])
        listens.start()
        assert manager.keep({"one": one.fileno()}) == ""
        listens.join()
        assert listener.recv(99) == b"FDSTORE=1\nFDNAME=one"


def test_nobody_is_told_where_nobody_listens(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory()
    children = Path(f"/proc/{mount.pid}/task/{mount.pid}/children").read_text().split()
    looking = [one for one in children if b"mount_looker" in Path(f"/proc/{one}/cmdline").read_bytes()]
    assert not looking, "without a service manager no process looks at the mount"


def test_a_manager_that_is_gone_does_not_stop_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).tell(READY="1")
    assert "could not be told" in caplog.text
    ServiceManager({}).tell(READY="1")


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_the_watchdog_that_is_meant_for_us(environment: dict[str, str], watchdog_s: float) -> None:
    assert ServiceManager(environment).watchdog_s == watchdog_s


def test_alive_is_said_only_after_a_look() -> None:
    """The rule itself: the loop runs, the mount does not answer, so nothing is said."""
    told: list[str] = []
    looks = iter([True, False, True, False])

    async def look(most_s: float) -> bool:
        answer = next(looks, None)
        if answer is None:
            raise StopAsyncIteration
        return answer

    async def state() -> str:
        return "well"

    manager = ServiceManager({"NOTIFY_SOCKET": "@nobody", "WATCHDOG_USEC": "20000"})
    manager.tell = lambda **fields: told.extend(fields)  # type: ignore[method-assign]
    with pytest.raises(StopAsyncIteration):
        trio.run(manager.run, look, state)
    assert told == ["READY", "STATUS", "STATUS", "WATCHDOG", "STATUS", "STATUS"]


def test_a_probe_of_a_mount_that_hangs_comes_back(
    mount_factory: Callable[..., Mount], tmp_path: Path
) -> None:
    mount = mount_factory()

    async def looked() -> list[bool]:
        found = []
        probe = MountProbe(str(mount.path))
        try:
            found.append(await probe.look(30.0))
            os.kill(mount.pid, signal.SIGSTOP)
            try:
                found.append(await probe.look(1.0))
            finally:
                os.kill(mount.pid, signal.SIGCONT)
            found.append(await probe.look(30.0))
        finally:
            await probe.close()
        return found

    assert trio.run(looked) == [True, False, True]


def test_a_probe_of_a_dead_mount(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory()
    mount.kill9()

    async def looked() -> bool:
        probe = MountProbe(str(mount.path))
        try:
            return await probe.look(30.0)
        finally:
            await probe.close()

    assert not trio.run(looked)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_clean(tmp_path: Path) -> None:
    unit = tmp_path / "ckptfs@mnt-ckpt.service"
    unit.write_text(UNIT.read_text().replace("/opt/ckptfs/bin/ckptfs", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_hides_the_mount_from_nobody() -> None:
    """A directive that gives the service its own mount namespace would."""
    set_here = {line.partition("=")[0] for line in UNIT.read_text().splitlines() if not line.startswith("#")}
    hiding = {
        "PrivateTmp", "PrivateMounts", "PrivateDevices", "PrivateUsers", "ProtectSystem", "ProtectHome",
        "ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups",
        "ProtectProc", "ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths", "BindPaths",
        "TemporaryFileSystem", "RootDirectory", "RootImage", "DynamicUser", "MountFlags",
    }  # fmt: skip
    assert not set_here & hiding
