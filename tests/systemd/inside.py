"""What is done to ckptfs in a real systemd: by the README, from outside, with the disk as a witness.

The one rule: a client's process stays in the container's own mount namespace, as a training job would; what
it wrote must be seen by findmnt there and be found in the store. Started by run.sh, as a service; only the
standard library is at hand.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MOUNT, STORE = Path("/mnt/ckpt"), Path("/var/lib/ckptfs/mnt-ckpt")
SOURCE = Path("/root/ckptfs")
UNIT = "ckptfs.service"
CONFIG = Path("/etc/ckptfs/config.toml")
WATCHDOG_S = 8
KILLS = 20
MOST_PAUSE_S = 30.0  # a hang, not a figure: the machine may be busy
CONTENT = os.urandom(3_000_000)


def run(*command: str, check: bool = True, timeout_s: float = 600) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def show(key: str) -> str:
    return run("systemctl", "show", "--value", "-p", key, UNIT).strip()


def journal() -> str:
    return run("journalctl", "--no-pager", "-q", "-u", UNIT)


def until(what: str, look: Callable[[], object], most_s: float) -> float:
    """Waits for a state; how long it took."""
    begun = time.monotonic()
    while True:
        try:
            if look():
                return time.monotonic() - begun
        except OSError:
            pass
        if time.monotonic() - begun > most_s:
            raise AssertionError(f"{what}: not after {most_s} s\n{journal()[-3000:]}")
        time.sleep(0.05)


def is_answering() -> bool:
    """Asks in a process of its own, which may hang."""
    done = subprocess.run(
        ["timeout", "2", "stat", "-f", "-c", "%T", str(MOUNT)], capture_output=True, check=False
    )
    return done.returncode == 0 and b"fuse" in done.stdout


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def written(name: str, content: bytes = CONTENT) -> None:
    """A save, synced, and then in the store as well."""
    folder = MOUNT / name
    folder.mkdir()
    with (folder / "model.bin").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    run("ckptfs", "publish", str(folder))
    assert found_in_store(content), f"{name} is not in the store"


def found_in_store(content: bytes) -> bool:
    """Whether a piece of it is in a segment, read past the mount."""
    piece = content[100_000:101_000]
    return any(piece in path.read_bytes() for path in STORE.glob("segments/*/*.seg"))


class Job:
    """A job that works on over all that is done to the daemon: it appends to a file that it holds open, syncs
    it, saves another by rename, and reads through a mapping. An error ends it."""

    PROGRAM = """
import mmap, os, signal, sys, time
folder, report = sys.argv[1:]
stopped = []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
log = os.open(f"{folder}/train.log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
os.write(log, b"%019d\\n" % 0)
mapped, count = mmap.mmap(log, 20, prot=mmap.PROT_READ), 1
with open(report, "a", buffering=1) as slow:
    print("begun", file=slow)
    while not stopped:
        begun = time.time()
        os.write(log, b"%019d\\n" % count)
        os.fsync(log)
        with open(f"{folder}/new", "wb") as file:
            file.write(b"%d" % count)
        os.replace(f"{folder}/new", f"{folder}/saved")
        assert open(f"{folder}/saved", "rb").read() == b"%d" % count and mapped[:4] == b"0000"
        count += 1
        if time.time() - begun > 0.1:
            print(begun, time.time(), file=slow)
        time.sleep(0.01)
assert os.pread(log, 1 << 30, 0) == b"".join(b"%019d\\n" % n for n in range(count))
"""

    def __init__(self) -> None:
        self._report = Path("/run/job.report")
        folder = MOUNT / "job"
        folder.mkdir()
        self._process = subprocess.Popen(
            ["/usr/bin/python3", "-c", self.PROGRAM, str(folder), str(self._report)]
        )
        until("the job", lambda: "begun" in self._report.read_text(), 20)

    def pause_s(self, since: float) -> float:
        """Its longest step that ended after `since`; it must be at work."""
        before = self._steps()
        until("its next steps", lambda: self._steps() > before + 2, 30)
        assert self._process.poll() is None, "the job has met an error"
        lines = [line.split() for line in self._report.read_text().splitlines()[1:]]
        return max((float(end) - float(begin) for begin, end in lines if float(end) > since), default=0.0)

    def _steps(self) -> int:
        return (MOUNT / "job" / "train.log").stat().st_size // 20

    def end(self) -> None:
        """It must be able to read all that it wrote."""
        self._process.terminate()
        assert self._process.wait(60) == 0, "the job has met an error, or misses what it wrote"


JOBS: list[Job] = []


def job_pause_s(since: float) -> float:
    assert json.loads(run("ckptfs", "status", "--json", str(MOUNT)))["kept"] is True
    assert "cleared a dead" not in journal(), "it was mounted anew"
    return JOBS[0].pause_s(since)


def install() -> None:
    shutil.copytree(
        "/src", SOURCE, ignore=shutil.ignore_patterns(".venv", ".git", "*.so", "__pycache__", "build")
    )
    run(str(SOURCE / "dev"), "install")
    first = os.readlink("/opt/ckptfs/bin")
    begun = time.monotonic()
    run(str(SOURCE / "dev"), "install")
    assert os.readlink("/opt/ckptfs/bin") == first, "a second call changes nothing"
    say(f"installed; a second call took {time.monotonic() - begun:.1f} s; Type={show('Type')}")
    CONFIG.write_text(CONFIG.read_text() + 'settle_s = 0.5\nlog_level = "debug"\n')
    run(str(SOURCE / "dev"), "install")
    assert "settle_s = 0.5" in CONFIG.read_text(), "what somebody has changed stays"
    for unit in (UNIT, "ckptfs@mnt-scratch.service"):
        said = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
        )
        ours = [line for line in said.stderr.splitlines() if "ckptfs" in line]
        assert not ours, ours
    for line in run("systemd-analyze", "security", "--no-pager", UNIT).splitlines():
        if "exposure level" in line:
            say(line.lstrip("→ ").strip())
    # The test cannot wait for a minute.
    drop = Path("/etc/systemd/system/ckptfs.service.d")
    drop.mkdir(exist_ok=True)
    (drop / "test.conf").write_text(f"[Service]\nWatchdogSec={WATCHDOG_S}\n")
    run("systemctl", "daemon-reload")


def start() -> None:
    begun = time.monotonic()
    run("systemctl", "enable", "--now", UNIT)
    say(f"started in {time.monotonic() - begun:.1f} s: {show('StatusText')}")
    assert show("ActiveState") == "active" and is_answering(), "active means that the mount answers"
    assert "fuse" in run("findmnt", "-no", "FSTYPE", str(MOUNT)), "it is seen from outside the service"
    pid = show("MainPID")
    assert os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"), "no namespace of its own"
    written("run1")
    status = json.loads(run("ckptfs", "status", "--json", str(MOUNT)))
    say(f"write path {status['write_path']}: {status['why']}")
    assert status["kept"] is True, status["kept_why"]
    JOBS.append(Job())


def kill() -> None:
    pauses = []
    for _ in range(KILLS):
        begun, before = time.time(), show("MainPID")
        os.kill(int(before), signal.SIGKILL)
        until("another daemon", lambda before=before: show("MainPID") not in ("0", before), 60)
        until("an answer", is_answering, 60)
        pauses.append(job_pause_s(begun))
        # On a fast machine so many starts would be within StartLimitIntervalSec, at whose end the mount dies.
        run("systemctl", "reset-failed", UNIT)
    pauses.sort()
    median, longest = pauses[len(pauses) // 2], pauses[-1]
    say(f"{KILLS} times kill -9: the job waited {median:.2f} s (median), {longest:.2f} s at most; no error")
    assert longest < MOST_PAUSE_S
    assert (MOUNT / "run1" / "model.bin").read_bytes() == CONTENT
    written("run2", os.urandom(2_000_000))


def hang() -> None:
    begun, before = time.time(), show("MainPID")
    os.kill(int(before), signal.SIGSTOP)
    took = until(
        "the watchdog", lambda: show("MainPID") not in ("0", before) and is_answering(), 6 * WATCHDOG_S
    )
    assert "watchdog" in run("journalctl", "--no-pager", "-q", "-u", UNIT).lower()
    waited = job_pause_s(begun)
    say(f"SIGSTOP: answering after {took:.1f} s, WatchdogSec={WATCHDOG_S}; the job waited {waited:.1f} s")
    assert (MOUNT / "run1" / "model.bin").read_bytes() == CONTENT
    assert show("ActiveState") == "active"


def reload() -> None:
    before, text = show("MainPID"), CONFIG.read_text()
    CONFIG.write_text(text.replace("settle_s = 0.5", "settle_s = 0.7"))
    run("systemctl", "reload", UNIT)
    until("the reload", lambda: "changed settle_s" in journal(), 30)
    CONFIG.write_text(text + "nonsense = 1\n")
    run("systemctl", "reload", UNIT)
    until("the refusal", lambda: "refused" in journal(), 30)
    until("the status", lambda: "REFUSED" in show("StatusText"), 60)
    CONFIG.write_text(text)
    run("systemctl", "reload", UNIT)
    until("the good one", lambda: "REFUSED" not in show("StatusText"), 60)
    assert show("MainPID") == before and show("ActiveState") == "active" and is_answering()
    say("reload: changed, refused, put right, by the same process")


def restart() -> None:
    before, begun = show("MainPID"), time.time()
    run("systemctl", "restart", UNIT)
    took = time.time() - begun
    say(f"restart took {took:.1f} s; the job waited {job_pause_s(begun):.2f} s")
    assert show("MainPID") != before and (MOUNT / "run1" / "model.bin").read_bytes() == CONTENT


def upgrade() -> None:
    """Another release, while the daemon of the one before runs."""
    before, pid = os.readlink("/opt/ckptfs/bin"), show("MainPID")
    source = SOURCE / "daemon" / "__init__.py"
    source.write_text(source.read_text() + "\n# Another release.\n")
    run(str(SOURCE / "dev"), "install")
    assert os.readlink("/opt/ckptfs/bin") != before and show("MainPID") == pid and is_answering()
    begun = time.time()
    run("systemctl", "restart", UNIT)
    waited = job_pause_s(begun)
    written("run3", os.urandom(1_000_000))
    release = os.path.dirname(os.path.realpath("/opt/ckptfs/bin")).encode()
    assert release in Path(f"/proc/{show('MainPID')}/cmdline").read_bytes(), "the new one serves"
    say(f"upgraded under a running daemon, then restarted; the job waited {waited:.2f} s")


def stop() -> None:
    JOBS[0].end()
    (MOUNT / "run1" / "late.bin").write_bytes(b"late")
    begun = time.monotonic()
    run("systemctl", "stop", UNIT)
    say(f"stop took {time.monotonic() - begun:.1f} s, result {show('Result')}")
    assert run("findmnt", "-n", str(MOUNT), check=False) == "" and not os.listdir(MOUNT)
    run("systemctl", "start", UNIT)
    assert (MOUNT / "run1" / "late.bin").read_bytes() == b"late"
    versions = json.loads(run("ckptfs", "log", "--json", str(MOUNT / "run1")))
    programs = [one["program"] for row in versions for one in row["writers"]]
    assert programs and programs[0].startswith("python"), versions


def busy_stop() -> None:
    """Somebody is in it: bounded all the same."""
    with subprocess.Popen(["sleep", "300"], cwd=MOUNT / "run1") as guest:
        begun = time.monotonic()
        run("systemctl", "stop", UNIT)
        took = time.monotonic() - begun
        guest.kill()
    assert took < 60 and show("Result") == "success"
    say(f"stop with a guest in it took {took:.1f} s")


def second_mount() -> None:
    shutil.copy(CONFIG, "/etc/ckptfs/mnt-scratch.toml")
    run("systemctl", "enable", "--now", "ckptfs@mnt-scratch")
    Path("/mnt/scratch/file").write_bytes(b"content")
    assert "fuse" in run("findmnt", "-no", "FSTYPE", "/mnt/scratch")
    say("a second mount, by its template")


def uninstall() -> None:
    run("systemctl", "start", UNIT)
    begun = time.monotonic()
    run(str(SOURCE / "dev"), "uninstall")
    say(f"uninstall took {time.monotonic() - begun:.1f} s")
    assert not Path("/opt/ckptfs").exists() and not Path("/usr/local/bin/ckptfs").is_symlink()
    assert (
        run("findmnt", "-n", str(MOUNT), check=False) == ""
        and run("findmnt", "-n", "/mnt/scratch", check=False) == ""
    )
    assert not run("systemctl", "list-unit-files", "--no-legend", "ckptfs*", check=False).strip()
    assert (STORE / "format").exists() and found_in_store(CONTENT), "what is stored stays"
    assert list(Path("/etc/ckptfs/keys").iterdir()) and CONFIG.exists(), "so do keys and configuration"
    run(str(SOURCE / "dev"), "uninstall")
    say("uninstalled; store, keys and configuration are there")


def main() -> None:
    say(run("systemctl", "--version").splitlines()[0])
    for step in (
        install,
        start,
        kill,
        hang,
        reload,
        restart,
        upgrade,
        stop,
        busy_stop,
        second_mount,
        uninstall,
    ):
        try:
            step()
        except Exception as e:
            say(f"{step.__name__} FAILED: {e}")
            print(run("systemctl", "status", "--no-pager", UNIT, check=False))
            print(re.sub(r"(?m)^.*DEBUG.*\n", "", journal())[-6000:])
            sys.exit(1)
    say("all is well")


main()
