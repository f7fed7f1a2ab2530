"""Whether this machine lets ckptfs work: kernel and FUSE, other users, limits, clock.

One rule: what can be tried is tried; a version number is asked only for what cannot.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
from collections.abc import Iterator

from ckptfs.daemon.diagnosis import Finding, fine, note, problem
from ckptfs.daemon.mountpoints import DEVICE, check_fuse, may_allow_other
from ckptfs.store.errors import Unsupported

_PASSTHROUGH = (6, 9)
_OLDEST = (5, 4)
_LEAST_FILES = 4096
# Before this program was written no clock was right.
_FIRST_YEAR = 2026
_DEBIAN_BACKPORTS = "a kernel of at least 6.9 (Debian 12: from backports)"


def kernel() -> Iterator[Finding]:
    """The kernel's version, and what it can do for us."""
    release = os.uname().release
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if version < _OLDEST:
        yield problem("kernel", f"Linux {release} is older than 5.4", f"use {_DEBIAN_BACKPORTS}")
    elif version < _PASSTHROUGH:
        yield note("kernel", f"Linux {release} has no FUSE passthrough", f"faster with {_DEBIAN_BACKPORTS}")
    else:
        yield fine("kernel", f"Linux {release} has FUSE passthrough")


def fuse() -> Iterator[Finding]:
    """Whether this user can mount."""
    try:
        check_fuse()
    except Unsupported as e:
        said, _, advice = str(e).partition(": ")
        yield problem("fuse", said, advice)
        return
    yield fine("fuse", f"{DEVICE} can be used")


def other_users() -> Iterator[Finding]:
    """Whether others can be let into a mount."""
    if os.geteuid() == 0:
        yield fine("other users", "may enter, as the modes of files allow")
    elif may_allow_other():
        yield fine("other users", "may enter: /etc/fuse.conf has user_allow_other")
    else:
        yield note(
            "other users",
            "cannot enter the mounts of this user, root and containers included",
            "add the line user_allow_other to /etc/fuse.conf, or mount as root",
        )


def limits() -> Iterator[Finding]:
    """How many files a daemon may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = hard if hard == resource.RLIM_INFINITY else max(soft, hard)
    if allowed != resource.RLIM_INFINITY and allowed < _LEAST_FILES:
        advice = f"raise it to at least {_LEAST_FILES}: `ulimit -n`, or LimitNOFILE= of the service"
        yield problem("limits", f"at most {allowed} files can be open at once", advice)
    elif soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        advice = f"many clients at once may need more: `ulimit -n {_LEAST_FILES}` before the mount"
        yield note("limits", f"{soft} files can be open at once", advice)
    else:
        yield fine(
            "limits", f"{'any number of' if soft == resource.RLIM_INFINITY else soft} files can be open"
        )


def clock(now_ns: int, newest_ns: int | None) -> Iterator[Finding]:
    """Whether the time makes sense; `newest_ns` is that of the newest version there is."""
    year = time.gmtime(now_ns / 1e9).tm_year
    advice = "set it: `timedatectl set-ntp true`; versions get the clock's time, and policies go by it"
    if year < _FIRST_YEAR:
        yield problem("clock", f"it says {year}", advice)
    elif newest_ns is not None and newest_ns > now_ns:
        ahead_s = (newest_ns - now_ns) / 1e9
        yield problem("clock", f"the newest version is {ahead_s:.0f} s in the future", advice)
    else:
        yield fine("clock", "agrees with the versions there are" if newest_ns else f"says {year}")


def tools() -> Iterator[Finding]:
    """Programs that a user's mount needs."""
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        yield problem("fusermount3", "is not installed", "install the package fuse3, or mount as root")
