"""Where a daemon's control socket lies.

One rule: the place follows from the mount point and the daemon's user alone, so a command finds
its daemon from the mount table without asking anybody.

A daemon of root listens in /run/ckptfs, where everybody may connect; that of a user in the user's
runtime directory, which other users cannot enter.
"""

from __future__ import annotations

import hashlib
import os
import stat

from ckptfs.store.errors import NotPermitted

ROOT_FOLDER = "/run/ckptfs"
_NAME_DIGITS = 16
_LONGEST_PATH = 107


def socket_path(mountpoint: str, uid: int) -> str:
    """The control socket of the daemon that user `uid` runs for `mountpoint`."""
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:_NAME_DIGITS]
    return f"{socket_folder(uid)}/{digest}.sock"


def socket_folder(uid: int) -> str:
    """The folder of user `uid`'s control sockets."""
    if uid == 0:
        return ROOT_FOLDER
    runtime = os.environ.get("XDG_RUNTIME_DIR", "") if uid == os.geteuid() else ""
    runtime = runtime or f"/run/user/{uid}"
    folder = f"{runtime}/ckptfs"
    fits = len(os.fsencode(folder)) + 1 + _NAME_DIGITS + len(".sock") <= _LONGEST_PATH
    return folder if fits and os.path.isdir(runtime) else f"/tmp/ckptfs-{uid}"


def make_socket_folder(uid: int) -> str:
    """Make the folder for our own sockets, and be sure that nobody else owns it.

    NotPermitted if something else is there already: /tmp is everybody's.
    """
    folder = socket_folder(uid)
    mode = 0o755 if uid == 0 else 0o700
    try:
        os.mkdir(folder, mode)
    except FileExistsError:
        pass
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or stat.S_IMODE(found.st_mode) & 0o022:
        raise NotPermitted(f"{folder} is not a directory of ours alone; remove it and start again")
    os.chmod(folder, mode)
    return folder
