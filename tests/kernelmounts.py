"""What the kernel says of mounts and processes, without asking a file system that may be wedged.

The one rule: /proc, /sys and umount2(MNT_DETACH) only; never stat(), isdir() or umount(8) on a mount point,
which can wait for a dead daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_STOPPED_S = 60.0
CONTROL = Path("/sys/fs/fuse/connections")
_libc = ctypes.CDLL(None, use_errno=True)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of /proc/self/mountinfo. The minor of its device is the number of a FUSE connection."""

    path: Path
    minor: int
    file_system: str
    source: str


def mount_table() -> list[MountEntry]:
    entries = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        _, _, device, _, point, *_ = fields.split(" ")
        file_system, source, *_ = rest.split(" ")
        minor = int(device.partition(":")[2])
        entries.append(MountEntry(Path(_unescape(point)), minor, file_system, _unescape(source)))
    return entries


def find(path: Path) -> MountEntry | None:
    """The topmost mount on exactly this path."""
    found = [entry for entry in mount_table() if entry.path == path]
    return found[-1] if found else None


def below(folder: Path) -> list[MountEntry]:
    return [entry for entry in mount_table() if entry.path.is_relative_to(folder)]


def abort(path: Path) -> None:
    """Make every request that waits on a FUSE mount fail now."""
    entry = find(path)
    if entry is not None and entry.file_system.startswith("fuse"):
        with contextlib.suppress(FileNotFoundError):  # the connection has ended by itself meanwhile
            abort_file(entry).write_text("1")


def remove(path: Path) -> None:
    """Abort and detach every mount on this path; does nothing if there is none."""
    while find(path) is not None:
        abort(path)
        if _libc.umount2(os.fsencode(path), MNT_DETACH | UMOUNT_NOFOLLOW) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))


_WATCH = """timeout "$1" cat > /dev/null
grep -qF " 0:$2 / $3 " /proc/self/mountinfo || exit
echo 1 > "$4"
umount -l "$5"
"""


def start_watchdog(path: Path, limit_s: float) -> subprocess.Popen[bytes]:
    """A process (group) that aborts this mount's connection after `limit_s`, however stuck all others are,
    or when its starter is gone without having killed it, and takes the mount away.

    It looks at the table of mounts again before it does: a watchdog that outlives its test must not abort
    another mount that got the same number. It sees its starter's end as the end of its input.
    """
    entry = find(path)
    assert entry is not None and entry.file_system.startswith("fuse"), f"{path} is not mounted: {entry}"
    written = re.sub(r"[ \t\n\\]", lambda found: f"\\{ord(found[0]):03o}", str(entry.path))
    arguments = [str(limit_s), str(entry.minor), written, str(abort_file(entry)), str(entry.path)]
    return subprocess.Popen(
        ["sh", "-c", _WATCH, "watchdog", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop_watchdog(watchdog: subprocess.Popen[bytes]) -> None:
    """Its test is over, and cleans up by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(watchdog.pid, signal.SIGKILL)
    watchdog.wait(_STOPPED_S)
    assert watchdog.stdin is not None
    watchdog.stdin.close()


def abort_file(entry: MountEntry) -> Path:
    """The file that aborts this connection. Mounts fusectl where no init system has done it (containers)."""
    if find(CONTROL) is None:
        subprocess.run(["mount", "-t", "fusectl", "fusectl", str(CONTROL)], check=True, timeout=20)
    return CONTROL / str(entry.minor) / "abort"


def rss_anon_bytes(pid: int) -> int:
    """RssAnon of one process; 0 if it has gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def family(leader: int) -> set[int]:
    """Pids of a process, of those in the session that it leads, and of whatever they have started."""
    parents = {int(name): _parent_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found = {leader} | {pid for pid in parents if _session_of(pid) == leader}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def poll(look: Callable[[], Found], timeout_s: float, *, every_s: float = 0.05) -> Found | None:
    """Ask until the answer is true or `timeout_s` is over; the true answer, else None."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = look()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            return None
        time.sleep(every_s)


def _parent_of(pid: int) -> int | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _session_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
