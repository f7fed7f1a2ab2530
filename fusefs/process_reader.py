"""What /proc tells of a process, as far as it may be kept.

One rule: only `start_of` and `leader_of` are for the thread that serves the mount, because the kernel answers
them without a look at the process's memory. That memory may be a mapping of a file of ours: whoever reads a
command line in the serving thread may wait for himself for ever.

Source: proc_pid_stat(5), proc_pid_cmdline(5), proc_pid_environ(5).
"""

from __future__ import annotations

import os
import pwd
import re

from ckptfs.fusefs.git_head import User, commit_of
from ckptfs.fusefs.kept_facts import kept_arguments, kept_cgroup, kept_ids, kept_program
from ckptfs.store.writers import MOST_CHARACTERS, Writer

_STATUS_BYTES = 4096
_MOST_BYTES = 256 << 10
_START = 19
"""Which field behind the name in a stat file is the start time; it is the 22nd in all."""
_LEADER = re.compile(rb"^Tgid:\s*(\d+)$", re.MULTILINE)
_GROUPS = re.compile(rb"^(?:Gid|Groups):([\d\s]*)$", re.MULTILINE)


def start_of(thread: int) -> int | None:
    """When a thread began, in clock ticks since the boot; None if there is none of this id (any more)."""
    try:
        found = _read(f"/proc/{thread}/task/{thread}/stat", _STATUS_BYTES)
        return int(found.rpartition(b")")[2].split()[_START])
    except (OSError, ValueError, IndexError):
        return None


def leader_of(thread: int) -> int | None:
    """The process that a thread belongs to; None as `start_of`."""
    try:
        found = _LEADER.search(_read(f"/proc/{thread}/status", _STATUS_BYTES))
    except OSError:
        return None
    return int(found[1]) if found is not None else None


def read_writer(pid: int, uid: int) -> Writer:
    """The facts of a process whose open came from `uid`; what cannot be read is left out. May block."""
    folder = f"/proc/{pid}"
    program = kept_program(_link(f"{folder}/exe"))
    cgroup, container = kept_cgroup(_some(f"{folder}/cgroup"))
    groups = {int(one) for line in _GROUPS.findall(_some(f"{folder}/status")) for one in line.split()}
    return Writer(
        pid=pid,
        uid=uid,
        user=_user_name(uid),
        program=program,
        arguments=kept_arguments(program, _some(f"{folder}/cmdline")),
        cgroup=cgroup,
        container=container,
        commit=commit_of(f"{folder}/cwd", f"{folder}/root", User(uid, groups)),
        ids=kept_ids(_some(f"{folder}/environ")),
    )


def _user_name(uid: int) -> str:
    try:
        name = pwd.getpwuid(uid).pw_name[:MOST_CHARACTERS]
    except KeyError:
        return ""
    return name if name.isprintable() else ""


def _link(path: str) -> bytes:
    try:
        return os.readlink(os.fsencode(path))
    except OSError:
        return b""


def _some(path: str) -> bytes:
    try:
        return _read(path, _MOST_BYTES)
    except OSError:
        return b""


def _read(path: str, most_bytes: int) -> bytes:
    """What a file of /proc says. One read: the kernel gives a whole page or more at once, and all of a
    command line or environment at most."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, most_bytes)
    finally:
        os.close(fd)
