"""Descriptors that outlive a process: kept by the keeper, passed to the next one, let go when it says so."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kernelmounts import poll

from ckptfs.daemon import kept_session
from ckptfs.daemon.kept_session import Names, kept_fds, take_over
from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_state import KeptState, Negotiated

LIVES = """
import os, signal, sys
from ckptfs.daemon.kept_session import kept_fds
from ckptfs.daemon.service_manager import ServiceManager
fds, manager = dict(kept_fds(os.environ, os.getpid())), ServiceManager(os.environ)
with open(sys.argv[1], "a") as diary:
    print(*sorted(fds), *[os.get_inheritable(fd) for fd in fds.values()], file=diary)
if not fds:
    out, into = os.pipe()
    os.write(into, b"hello")
    assert manager.keep({"out": out, "into": into}) == ""
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
    assert kept_fds({"LISTEN_PID": pid, "LISTEN_FDS": count, "LISTEN_FDNAMES": "a:b"}, 7) == []
    assert kept_fds({}, 7) == []


def test_the_session_of_a_mount_that_is_gone_is_let_go(tmp_path: Path) -> None:
    state = KeptState.make()
    state.negotiated = Negotiated(str(tmp_path), "/store", 1, b"", b"", False, False)
    names, (out, into) = Names.new(), os.pipe()
    found = take_over([(names.session, into), (names.state, state.fd)], str(tmp_path), "/store")
    assert found.session is None and {*found.stale} == {names.session, names.state}
    assert os.read(out, 1) == b"", "the session is closed, so the kernel ends it"
    os.close(out)


def test_a_part_of_a_session_is_none(tmp_path: Path) -> None:
    names, (out, into) = Names.new(), os.pipe()
    found = take_over([(names.session, into)], str(tmp_path), "/store")
    assert found.session is None and found.stale == (names.session,)
    assert os.read(out, 1) == b""
    os.close(out)


@pytest.mark.parametrize("name", ["ckptfs-queue-5e", "ckptfs-session-5e-2", "ckptfs-state-", "ckptfs-"])
def test_what_another_release_had_kept_is_let_go(name: str, tmp_path: Path) -> None:
    """A session that is neither used nor closed would be a mount that is never dead, and never answers."""
    out, into = os.pipe()
    foreign_out, foreign = os.pipe()
    found = take_over([(name, into), ("foreign", foreign)], str(tmp_path), "/store")
    assert found.session is None and found.stale == (name,)
    assert os.read(out, 1) == b""
    os.fstat(foreign)  # what is not ours is left alone
    for fd in (out, foreign_out, foreign):
        os.close(fd)


KEEPS_ITS_OWN = """
import os, subprocess, sys
from ckptfs.daemon.kept_session import kept_fds
from ckptfs.daemon.service_manager import ServiceManager
if len(sys.argv) > 1:
    ServiceManager(os.environ).keep({sys.argv[1]: 0})
    sys.exit()
fds = dict(kept_fds(os.environ, os.getpid()))
if "own" not in fds:
    subprocess.run([sys.executable, __file__, "foreign"], check=True)  # any process may know the address
    ServiceManager(os.environ).keep({"own": 0})
    os.kill(os.getpid(), 9)
print(*sorted(fds))
"""


KEEPS_TWICE = """
import os, sys, time
from ckptfs.daemon.kept_session import kept_fds
from ckptfs.daemon.service_manager import ServiceManager
fds, manager = kept_fds(os.environ, os.getpid()), ServiceManager(os.environ)
if not fds:
    one = os.open("/dev/null", os.O_RDONLY)
    for name, fd in (("a", one), ("a", os.dup(one)), ("b", one), ("a", os.open("/dev/null", os.O_RDONLY))):
        assert manager.keep({name: fd}) == ""
    for at in range(40):
        fd = os.open("/dev/null", os.O_RDONLY)
        while manager.keep({f"more{at}": fd}):
            time.sleep(0.001)  # its queue is full; what is refused is let go by its name, so each has its own
    os.kill(os.getpid(), 9)
names = [name for name, _ in fds if not name.startswith("more")]
print(*names, len(fds) == int(os.environ["FDSTORE"]))
"""


def test_a_descriptor_is_kept_once_under_a_name_and_as_many_as_there_is_room_for() -> None:
    command = keeper(sys.executable, "-c", KEEPS_TWICE)
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    twice = "a a b a" if not tells_what_is_one() else "a b a"
    assert (done.returncode, done.stdout) == (0, f"{twice} True\n"), done.stderr


SEEN_AFTER_ITS_END = """
import select, sys
from ckptfs.daemon.keeper import Keeper
look = select.select
def late(reads, writes, errors, *timeout):
    return look(reads if timeout else reads[1:], writes, errors, *timeout)
select.select = late
sys.exit(Keeper(sys.argv[1:]).run())
"""


def test_what_it_said_between_two_looks_and_then_died_is_heard(tmp_path: Path) -> None:
    """The socket is looked at before the process: what is said in between, and the end, are seen at once."""
    diary = tmp_path / "diary"
    command = [sys.executable, "-c", SEEN_AFTER_ITS_END, sys.executable, "-c", LIVES, str(diary)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert diary.read_text().splitlines() == ["", "into out False False", "out False"]


def tells_what_is_one() -> bool:
    """From Linux 6.10 on the kernel does."""
    try:
        return fcntl.fcntl(0, 1027, 0) == 1
    except OSError:
        return False


def test_nobody_else_has_anything_kept(tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(KEEPS_ITS_OWN)
    command = keeper(sys.executable, str(tmp_path / "daemon.py"))
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "own\n"), done.stderr


def test_who_is_told_to_stop_in_a_pause_starts_nothing_more(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    with subprocess.Popen(keeper("sh", "-c", f"echo x >> {starts}; exit 3")) as one:
        children = Path(f"/proc/{one.pid}/task/{one.pid}/children")
        assert poll(lambda: starts.exists() and not children.read_text(), 30, every_s=0.001)
        one.send_signal(signal.SIGTERM)
        assert one.wait(30) == 3
    assert starts.read_text() == "x\n"


TOLD_JUST_BEFORE = """
import os, signal, sys
from ckptfs.daemon.keeper import Keeper
fork = os.fork
def told():
    os.kill(os.getpid(), signal.SIGTERM)
    return fork()
os.fork = told
sys.exit(Keeper(["sleep", "60"]).run())
"""


def test_who_is_told_to_stop_while_it_starts_a_daemon_ends_it() -> None:
    done = subprocess.run([sys.executable, "-c", TOLD_JUST_BEFORE], timeout=30, check=False)
    assert done.returncode == 128 + signal.SIGTERM


def test_a_reload_is_no_stop(tmp_path: Path) -> None:
    script = (
        f"test -e {tmp_path}/second && exit 0; trap '>{tmp_path}/second; kill -9 $$' HUP; >{tmp_path}/first; "
    )
    with subprocess.Popen(keeper("sh", "-c", script + "while :; do sleep 0.02; done")) as one:
        assert poll((tmp_path / "first").exists, 30)
        one.send_signal(signal.SIGHUP)
        assert one.wait(30) == 0, "the daemon that died then had a successor"


def made(tmp_path: Path) -> KeptState:
    state = KeptState.make()
    state.negotiated = Negotiated(str(tmp_path), "/store", 1, b"", b"", False, False)
    return state


@pytest.fixture
def every_mount_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_session, "_goes_on", lambda state, path, store: True)


@pytest.mark.usefixtures("every_mount_goes_on")
def test_a_state_never_goes_with_another_session(tmp_path: Path) -> None:
    one, other = Names.new(), Names.new()
    states = made(tmp_path), made(tmp_path)
    (out, into), (other_out, other_into) = os.pipe(), os.pipe()
    fds = [(other.session, other_into), (one.state, states[0].fd), ("foreign", 0), (one.session, into)]
    found = take_over(fds, str(tmp_path), "/store")
    assert found.session is not None and found.stale == (other.session,)
    assert (found.session.fuse_fd, found.session.state.fd) == (into, states[0].fd)
    assert os.read(other_out, 1) == b"", "what has no state is closed"
    found.session.close()
    assert os.read(out, 1) == b""

    third_out, third = os.pipe()
    found = take_over([(one.session, third), (other.state, states[1].fd)], str(tmp_path), "/store")
    assert found.session is None and {*found.stale} == {one.session, other.state}
    assert os.read(third_out, 1) == b""
    for fd in (out, other_out, third_out):
        os.close(fd)


@pytest.mark.usefixtures("every_mount_goes_on")
@pytest.mark.parametrize("kind", list(Kind))
def test_what_cannot_be_read_is_not_taken_over(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, names, (out, into) = made(tmp_path), Names.new(), os.pipe()
    state.notes.put(kind, 5, b"\xc1\xc1\xc1")
    found = take_over([(names.session, into), (names.state, state.fd)], str(tmp_path), "/store")
    assert found.session is None and {*found.stale} == {names.session, names.state}
    assert f"{kind.name} of 5" in caplog.text and "must open it again" in caplog.text
    assert os.read(out, 1) == b""
    os.close(out)
