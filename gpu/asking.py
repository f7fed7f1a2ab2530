"""Asking ckptfs what to expect of a version.

One rule: the daemon is asked through the command line, which is a contract (ARCHITECTURE.md, section 8).
So this package knows neither mounts nor sockets, a job that has threads and a device open only starts a
process, and whoever is on another machine gives the same JSON by hand.
"""

from __future__ import annotations

import subprocess
import sys

from ckptfs.gpu.expected import Expectation, parse_expectation
from ckptfs.store.errors import Unavailable

_PREFIX = "ckptfs: "


def expectation_of(version: str, ways: int = 1) -> Expectation:
    """What `ckptfs expect PATH@VERSION` says to one of `ways` ranks; Unavailable with its own words if it
    fails."""
    # -P: a job's working directory is no place to import from.
    command = [sys.executable, "-P", "-m", "ckptfs.daemon", "expect", "--ways", str(ways), "--", version]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as e:
        raise Unavailable(f"ckptfs could not be started with {sys.executable}: {e.strerror}") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "backslashreplace").strip().splitlines() or ["it ended silently"]
        raise Unavailable(said[-1].removeprefix(_PREFIX))
    return parse_expectation(done.stdout)
