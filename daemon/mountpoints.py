"""Whether something can be mounted at a place, and taking a mount away.

One rule: everything that can be refused is refused in one line before the store is touched; a mount
whose daemon is dead is cleared here and not left to a person.

Sources: umount2(2), fusermount3(1); KERNEL_NOTES.md for why a mount is never looked at from here.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Sequence

from ckptfs.daemon.control_client import ControlClient
from ckptfs.daemon.mounts import MountEntry, follow, is_below, mount_at, mount_table
from ckptfs.daemon.places import socket_path
from ckptfs.daemon.rights import Modes
from ckptfs.store.errors import Conflict, InvalidRequest, NotFound, NotPermitted, Unavailable, Unsupported

log = logging.getLogger(__name__)
DEVICE = "/dev/fuse"
_FUSERMOUNT = "fusermount3"
_FUSE_CONF = "/etc/fuse.conf"
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_MOST_LAYERS = 32
_LOOK_S = 5.0


def real_mountpoint(mountpoint: str, store: str) -> str:
    """The real path of a mount point; InvalidRequest if it lies in the store or the store in it."""
    table = mount_table()
    path, store_path = follow(mountpoint, table), follow(store, table)
    if is_below(path, store_path) or is_below(store_path, path):
        raise InvalidRequest(f"the mount point {path} and the store {store_path} must not lie in each other")
    return path


def prepare_mountpoint(path: str) -> None:
    """Make sure that a real path can be mounted upon; dead mounts of ours are cleared from it.

    Raises Conflict (in use), NotFound, InvalidRequest (no empty directory), Unavailable (somebody else's
    dead mount).
    """
    _clear_dead(path)
    _check_directory(path)


def check_fuse() -> None:
    """Unsupported, with what to do, if this process cannot mount anything."""
    if not os.path.exists(DEVICE):
        raise Unsupported(
            f"there is no {DEVICE}: `modprobe fuse`, or start the container with --device {DEVICE}"
        )
    if os.geteuid() != 0 and shutil.which(_FUSERMOUNT) is None:
        raise Unsupported(f"mounting without root needs {_FUSERMOUNT}: install the package fuse3")
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        how = f"a container needs --device {DEVICE} --cap-add SYS_ADMIN; without root it must be mode 0666"
        raise Unsupported(f"cannot open {DEVICE} ({e.strerror}): {how}") from None


def may_allow_other() -> bool:
    """Whether other users can be let into the mount: root's mounts, or /etc/fuse.conf says so."""
    if os.geteuid() == 0:
        return True
    try:
        with open(_FUSE_CONF, encoding="utf-8", errors="replace") as lines:
            return any(line.strip() == "user_allow_other" for line in lines)
    except OSError:
        return False


def detach(path: str, *, lazy: bool) -> None:
    """Unmount what lies on `path`; Conflict if it is busy (never with `lazy`). May block: use a thread."""
    if os.geteuid() == 0:
        _umount2(path, _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0))
        return
    command = [_FUSERMOUNT, "-u", *(["-z"] if lazy else []), "--", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip()
        if "busy" in said:
            raise _busy(path)
        raise Unavailable(said or f"{_FUSERMOUNT} failed with {done.returncode}")


def _umount2(path: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), flags) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EBUSY:
        raise _busy(path)
    if code == errno.EPERM:
        raise NotPermitted(f"unmounting {path} needs root")
    raise OSError(code, os.strerror(code), path)


def _busy(path: str) -> Conflict:
    return Conflict(f"{path} is busy: somebody has something of it open; `umount -l {path}` forces it")


def _clear_dead(path: str) -> None:
    for _ in range(_MOST_LAYERS):
        entry = mount_at(path, mount_table())
        if entry is None or not entry.file_system.startswith("fuse"):
            return
        if entry.is_ckptfs and _answers(entry):
            raise Conflict(f"{path} is mounted already: `ckptfs umount {path}` first")
        if not is_dead(path):
            raise Conflict(f"something is mounted at {path} already; unmount it or choose another place")
        if not entry.is_ckptfs:
            raise Unavailable(f"a dead mount lies at {path}; clear it with `umount -l {path}`")
        detach(path, lazy=True)
        log.warning("cleared a dead ckptfs mount at %s", path)
    raise Unavailable(f"very many dead mounts lie at {path}; clear them with `umount -l {path}`")


def _answers(entry: MountEntry) -> bool:
    try:
        with ControlClient(socket_path(entry.path, entry.user_id), entry.user_id):
            return True
    except Unavailable:
        return False
    except NotPermitted:
        return True


def is_dead(path: str) -> bool:
    """Whether statfs(2) says ENOTCONN; asked by another process, which may wait for ever if it hangs.
    Unavailable if it does. (The kernel answers a stat(2) of a dead mount's root from its cache.)"""
    asked = subprocess.Popen(
        ["stat", "--file-system", "--", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
    )
    try:
        _, said = asked.communicate(timeout=_LOOK_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        raise Unavailable(f"a mount at {path} does not answer; clear it with `umount -l {path}`") from None
    return b"not connected" in said or b"Connection aborted" in said or b"connection abort" in said


def _check_directory(path: str) -> None:
    try:
        found = os.stat(path)
        if not stat.S_ISDIR(found.st_mode):
            raise InvalidRequest(f"the mount point {path} is not a directory")
        first = next(iter(os.listdir(path)), None)
    except FileNotFoundError:
        raise NotFound(f"there is no directory {path}; make it first: `mkdir -p {path}`") from None
    except OSError as e:
        raise Unavailable(f"the mount point {path} cannot be used: {e.strerror}") from None
    if first is not None:
        raise InvalidRequest(f"the mount point {path} is not empty ({first!r} would be hidden)")


def modes_above(path: str) -> Sequence[Modes]:
    """The modes of the directories above a mount point, from the root down."""
    above = []
    while path != "/":
        path = os.path.dirname(path)
        found = os.stat(path)
        above.append(Modes(found.st_mode, found.st_uid, found.st_gid))
    return above[::-1]
