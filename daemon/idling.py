"""Processes of ours that run only when nothing else wants the core.

One rule: it is about speed alone, so what the kernel does not allow is left; but only who can be hurried
again is made idle.

SCHED_IDLE gives way within a group of tasks. A kernel with CONFIG_SCHED_AUTOGROUP (Debian's, for one) makes
a group of each session, and to another group the daemon's idle tasks are as good as any: beside a job on the
same core they took half of it (measured: 1.31 s of CPU against its 1.32 s). So such a process leads a session
of its own, and the group of that has a niceness of its own (then 0.03 s against 1.87 s). Where a service
manager shares out the cores among control groups, those count instead.

Source: sched(7), "The autogroup feature"; setpriority(2) and RLIMIT_NICE in getrlimit(2).
"""

from __future__ import annotations

import functools
import os
import resource
from pathlib import Path

_LEAST = 19
_CAP_SYS_NICE = 23
# RLIMIT_NICE counts from 20 downwards: a limit of 20 allows niceness 0.
_NICENESS_0 = 20


@functools.cache
def may_be_hurried() -> bool:
    """Whether who was made idle by us can be made like others again: a matter of how we were started."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= _NICENESS_0:
        return True
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_SYS_NICE & 1)
    return False


def set_idle(pid: int, is_idle: bool) -> bool:
    """Have a process run when nothing else wants the core, or like any other. Whether that could be done."""
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE if is_idle else os.SCHED_OTHER, os.sched_param(0))
        if os.getsid(pid) == pid:  # else the group is somebody else's as well
            _set_group_niceness(pid, _LEAST if is_idle else 0)
    except OSError:
        return False
    return True


def _set_group_niceness(pid: int, niceness: int) -> None:
    path = Path(f"/proc/{pid}/autogroup")
    if path.exists():
        path.write_text(str(niceness))
