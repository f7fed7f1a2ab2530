"""Whether a mount is well: does it answer, who can see it, what does its daemon say of itself?

One rule: a mount is looked at by other processes only, each with a bound; a wedged one costs seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from ckptfs.daemon import messages
from ckptfs.daemon.cli_output import human_age, human_bytes
from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.diagnosis import Finding, fine, note, problem
from ckptfs.daemon.mountpoints import detach, is_dead
from ckptfs.daemon.mounts import MountEntry, mount_over, mount_table
from ckptfs.daemon.places import socket_path
from ckptfs.store.errors import CkptfsError, Unavailable

_LOOK_S = 30.0
_SCRUB_LATE = 2.0
_MOST_NAMED = 3


def answering(entry: MountEntry) -> Iterator[Finding]:
    """Whether anybody serves the mount."""
    path = entry.path
    try:
        dead = is_dead(path)
    except Unavailable:
        yield problem(
            "mount",
            f"{path} does not answer",
            f"see the daemon's log; `echo 1 > /sys/fs/fuse/connections/{entry.minor}/abort` ends what waits "
            f"for it, then `umount -l {path}` and mount again",
        )
        return
    if dead:
        advice = f"`umount -l {path}`, and mount again (which clears it by itself)"
        yield problem(
            "mount", f"{path} is dead: its daemon has ended", advice, lambda: detach(path, lazy=True)
        )
    else:
        yield fine("mount", f"{path} answers")


def seen_by(entry: MountEntry) -> Iterator[Finding]:
    """Who can see into it: other users, containers."""
    if not entry.allow_other:
        yield note(
            "other users",
            f"cannot enter {entry.path}: it was mounted for one user",
            "add user_allow_other to /etc/fuse.conf, or mount as root",
        )
    above = mount_over(os.path.dirname(entry.path), mount_table())
    if above.is_shared:
        yield fine("containers", f"see {entry.path} if they have {above.path} as a slave (rslave)")
    else:
        yield note(
            "containers",
            f"that run already do not see {entry.path}: {above.path} is not shared",
            f"`mount --make-rshared {above.path}` before they start, and mountPropagation: HostToContainer",
        )


def ask(entry: MountEntry) -> Mapping[str, object]:
    """The daemon's `status`. Unavailable if it does not answer."""
    with ControlClient(socket_path(entry.path, entry.user_id), entry.user_id) as client:
        return cast("Mapping[str, object]", client.ask(messages.Status()))


def said_by(status: Mapping[str, object]) -> Iterator[Finding]:
    """What its status tells that somebody should know."""
    yield (fine if status["write_path"] == "passthrough" else note)(
        "write path", f"{status['write_path']}: {status['why']}"
    )
    if status.get("kept") is False:
        yield problem(
            "restart",
            f"the mount ends with its daemon, and with it whatever is open: {status['kept_why']}",
            "put that right and restart the service while no job runs",
        )
    else:
        yield fine("restart", f"the mount outlives its daemon: {'yes' if status.get('kept') else 'no'}")
    pending = cast(int, status["ingest_pending_bytes"])
    yield fine("ingest", f"{human_bytes(pending)} wait" if pending else "nothing waits")
    scrub = status.get("scrub")
    if isinstance(scrub, Mapping):
        yield from _of_scrub(cast("Mapping[str, object]", scrub))
    if status.get("key") is None:
        yield note("key", "versions of this mount are not signed", 'take `key = "none"` out')
    for unit in cast("Sequence[Mapping[str, object]]", status["units"]):
        if unit["live"] and unit["versions"] and unit["newest_complete"] is None:
            advice = f"`ckptfs log` of {unit['name']} says what is missing in each"
            yield problem("versions", f"{unit['name']} has {unit['versions']}, and none is complete", advice)


def newest_versions(entry: MountEntry, status: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The newest version of each unit, as `log` lists it."""
    found = []
    for unit in cast("Sequence[Mapping[str, object]]", status["units"]):
        if not unit["live"] or not unit["versions"]:
            continue
        with ControlClient(socket_path(entry.path, entry.user_id), entry.user_id) as client:
            try:
                rows = client.ask(messages.Log(path=f"/{unit['name']}"))
            except CkptfsError:
                continue
        found += cast("list[Mapping[str, object]]", rows)[-1:]
    return found


def owner_only(entry: MountEntry) -> Iterator[Finding]:
    """Files that only their owners can read, in directories that others can list: savers that write to a
    temporary file and rename it leave them so (mode 0600), and the job's colleagues notice on Monday."""
    walker = [sys.executable, "-P", "-m", "ckptfs.daemon.owner_only", entry.path]
    try:
        done = subprocess.run(walker, capture_output=True, text=True, timeout=_LOOK_S, check=False)
    except subprocess.TimeoutExpired:
        yield note("modes", f"could not be looked at in {_LOOK_S:.0f} s")
        return
    paths = [path for path in done.stdout.split("\0") if path]
    if not paths:
        yield fine("modes", "no file is closed to those who can list its directory")
        return
    named = ", ".join(paths[:_MOST_NAMED]) + (", …" if len(paths) > _MOST_NAMED else "")
    yield note(
        "modes",
        f"files that only their owner can read, where others can list ({named}): {len(paths)}",
        "chmod g+r (or o+r) them if others are to load them; copies keep the mode",
    )


def _of_scrub(scrub: Mapping[str, object]) -> Iterator[Finding]:
    age_s, corrupt = cast("float | None", scrub["age_s"]), cast("int | None", scrub["corrupt"])
    if age_s is None:
        yield note("scrub", "the store was never read as a whole", "`ckptfs scrub` does it now")
    elif corrupt:
        advice = "`ckptfs scrub` names them; save the same content again, or copy it back"
        yield problem("scrub", f"{corrupt} stored chunks are damaged", advice)
    else:
        yield fine("scrub", f"all was right {human_age(age_s)} ago")
