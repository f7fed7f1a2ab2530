"""Descriptors that outlive a process: kept by the keeper, passed to the next one, let go when it says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kernelmounts import poll

from ckptfs.daemon.kept_session import SESSION_NAME, STATE_NAME, kept_fds, take_over
from ckptfs.fusefs.kept_state import KeptState, Negotiated

LIVES = """
import os, signal, sys
from ckptfs.daemon.kept_session import kept_fds
from ckptfs.daemon.service_manager import ServiceManager
fds, manager = kept_fds(os.environ, os.getpid()), ServiceManager(os.environ)
with open(sys.argv[1], "a") as diary:
    print(*sorted(fds), *[os.get_inheritable(fd) for fd in fds.values()], file=diary)
if not fds:
    out, into = os.pipe()
    os.write(into, b"hello")
    manager.keep("out", out)
    manager.keep("into", into)
elif len(fds) == 2:
    assert os.read(fds["out"], 9) == b"hello"
    os.write(fds["into"], b"again")
    manager.let_go("into")
else:
    assert os.read(fds["out"], 9) == b"again"
    assert os.read(fds["out"], 9) == b"", "nobody has the other end"
    sys.exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def keeper(*command: str) -> list[str]:
    return [sys.executable, "-m", "ckptfs.daemon.keeper", *command]


def test_what_is_kept_is_passed_on_until_it_is_let_go(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    command = keeper(sys.executable, "-c", LIVES, str(diary))
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert diary.read_text().splitlines() == ["", "into out False False", "out False"]


def test_who_refuses_to_start_is_not_started_for_ever(tmp_path: Path) -> None:
    command = keeper("sh", "-c", f"echo x >> {tmp_path}/starts; exit 3")
    assert subprocess.run(command, timeout=60, check=False).returncode == 3
    assert len((tmp_path / "starts").read_text().splitlines()) == 5
    assert subprocess.run(keeper("/nothing/there"), timeout=60, check=False).returncode == 127


def test_who_is_told_to_stop_is_not_started_again(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with subprocess.Popen(
        keeper("sh", "-c", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60")
    ) as one:
        poll(pid.exists, 30)
        one.send_signal(signal.SIGTERM)
        assert one.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(("pid", "count"), [("", ""), ("1", "2"), ("7", "many"), ("7", "")])
def test_what_is_not_for_us_is_left_alone(pid: str, count: str) -> None:
    assert kept_fds({"LISTEN_PID": pid, "LISTEN_FDS": count, "LISTEN_FDNAMES": "a:b"}, 7) == {}
    assert kept_fds({}, 7) == {}


def test_the_session_of_a_mount_that_is_gone_is_let_go(tmp_path: Path) -> None:
    state = KeptState.make()
    state.negotiated = Negotiated(str(tmp_path), "/store", 1, b"", b"", False, False)
    out, into = os.pipe()
    assert take_over({SESSION_NAME: into, STATE_NAME: state.fd}, str(tmp_path), "/store") is None
    assert os.read(out, 1) == b"", "the session is closed, so the kernel ends it"
    os.close(out)


def test_a_part_of_a_session_is_none(tmp_path: Path) -> None:
    out, into = os.pipe()
    assert take_over({SESSION_NAME: into}, str(tmp_path), "/store") is None
    assert os.read(out, 1) == b""
    os.close(out)


KEEPS_ITS_OWN = """
import os, subprocess, sys
from ckptfs.daemon.kept_session import kept_fds
from ckptfs.daemon.service_manager import ServiceManager
if len(sys.argv) > 1:
    ServiceManager(os.environ).keep(sys.argv[1], 0)
    sys.exit()
fds = kept_fds(os.environ, os.getpid())
if "own" not in fds:
    subprocess.run([sys.executable, __file__, "foreign"], check=True)  # any process may know the address
    ServiceManager(os.environ).keep("own", 0)
    os.kill(os.getpid(), 9)
print(*sorted(fds))
"""


def test_nobody_else_has_anything_kept(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(KEEPS_ITS_OWN)
    command = keeper(sys.executable, str(tmp_path / "daemon.py"))
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "own\n"), done.stderr


def test_of_several_of_a_name_none_is_right(tmp_path: Path) -> None:
    script = """if True:
        import os, sys
        from ckptfs.daemon.kept_session import kept_fds
        os.environ["LISTEN_PID"] = str(os.getpid())
        print(*kept_fds(os.environ, os.getpid()))
        assert [fd for fd in (3, 4, 5) if os.path.exists(f"/proc/self/fd/{fd}")] == [4]
    """
    (tmp_path / "x").touch()
    fds = [os.open(tmp_path / "x", os.O_RDONLY) for _ in range(3)]
    environment = {**os.environ, "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:a"}
    shell = " ".join(f"{3 + at}<&{fd}" for at, fd in enumerate(fds))
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {shell}', sys.executable, script],
        env=environment,
        pass_fds=fds,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    for fd in fds:
        os.close(fd)
    assert (done.returncode, done.stdout) == (0, "b\n"), done.stderr
