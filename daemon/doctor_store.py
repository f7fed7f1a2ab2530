"""Whether a store is well: can it be opened, is there room, is its key there, has something been kept aside?

One rule: nothing in the store is changed or waited for; a daemon may be at work in it. What is said of the
file system was tried beside it, in a file of its own that is gone afterwards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ckptfs.daemon.cli_output import human_bytes
from ckptfs.daemon.diagnosis import Finding, fine, note, problem
from ckptfs.daemon.key_files import load_key, public_path, read_public_key
from ckptfs.daemon.mounts import is_below
from ckptfs.store.disk import BLOCK_BYTES, Disk
from ckptfs.store.errors import CkptfsError, InvalidRequest, NotPermitted
from ckptfs.store.layout import open_store
from ckptfs.store.recovery import QUARANTINE_PATH

_LEAST_SHARE = 50


def store(path: str) -> Iterator[Finding]:
    """Whether it is a store that this program can write to, and who else could."""
    disk = open_store(path, writing=False)
    mode = stat.S_IMODE(os.stat(disk.root).st_mode)
    if mode & 0o022:
        yield problem(
            "store",
            f"{disk.root} can be written by others (mode {mode:04o})",
            f"chmod go-w {disk.root}",
            lambda: os.chmod(disk.root, mode & ~0o022),
        )
    else:
        yield fine("store", f"{disk.root} is a store of a known format")


def punching(path: str) -> Iterator[Finding]:
    """Whether duplicates cost room, tried in a nameless file."""
    fd = os.open(path, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        disk = Disk(path)
        disk.pwrite(fd, b"\1" * (2 * BLOCK_BYTES), 0)
        can = disk.punch(fd, 0, BLOCK_BYTES) and not any(disk.pread(fd, BLOCK_BYTES, 0))
    finally:
        os.close(fd)
    if can:
        yield fine("holes", "the file system gives back ranges of a file")
    else:
        yield note(
            "holes",
            "the file system cannot give back ranges of a file: duplicates cost room until gc copies",
            "put the store on ext4, XFS, btrfs or tmpfs",
        )


def room(path: str, save_bytes: int) -> Iterator[Finding]:
    """Whether the next save fits; `save_bytes` is the size of the largest unit's newest version."""
    space = Disk(path).space()
    said = f"{human_bytes(space.available)} of {human_bytes(space.total)} are free"
    if space.available < max(save_bytes, space.total // _LEAST_SHARE):
        wanted = f", a save like the last needs up to {human_bytes(save_bytes)}" if save_bytes else ""
        advice = (
            "`ckptfs gc --dry-run` says what could go; keep fewer versions ([[policy]]), or a larger disk"
        )
        yield problem("room", said + wanted, advice)
    else:
        yield fine("room", said)
    if space.inodes and space.inodes_free < space.inodes // 100:
        said = f"{space.inodes_free} of {space.inodes} are free"
        yield problem("inodes", said, "use a file system with more inodes")


def key(path: str | None, store_path: str) -> Iterator[Finding]:
    """The signing key: there, ours alone, and not in the store that it is to protect."""
    if path is None:
        yield note("key", "versions are not signed", 'take `key = "none"` out of the configuration')
        return
    if not os.path.lexists(path):
        yield note(
            "key", f"there is none at {path} yet", "the first mount makes one; keep its .pub elsewhere"
        )
        return
    try:
        signing = load_key(path)
    except NotPermitted:
        yield problem(
            "key", f"{path} can be read by others", f"chmod 600 {path}", lambda: os.chmod(path, 0o600)
        )
        return
    except (InvalidRequest, OSError) as e:
        yield problem("key", str(e), "put it back from a copy")
        return
    yield from _public_half(path, signing.public.pem())
    if is_below(os.path.realpath(path), os.path.realpath(store_path)):
        advice = "move it out: whoever can change the store could sign what he made of it"
        yield problem("key", f"{path} lies in the store", advice)


def _public_half(path: str, pem: str) -> Iterator[Finding]:
    place = public_path(path)
    try:
        is_its = read_public_key(place).pem() == pem
    except FileNotFoundError:
        yield note("key", f"its public half {place} is not there", "the next mount writes it")
        return
    except (CkptfsError, OSError) as e:
        said = f"its public half cannot be read: {e}"
        yield problem("key", said, f"remove {place}; the next mount writes it")
        return
    if is_its:
        yield fine("key", f"{path} and its public half")
    else:
        yield problem("key", f"{place} is not the public half of {path}", f"remove {place}")


def kept_aside(path: str) -> Iterator[Finding]:
    """What recovery and scrub have put into quarantine."""
    disk = Disk(path)
    names = disk.list_dir(QUARANTINE_PATH) if disk.exists(QUARANTINE_PATH) else []
    suspects = [name for name in names if name.startswith("suspect-") and not name.endswith(".json")]
    segments = [name for name in names if name.endswith(".seg")]
    others = len([name for name in names if not name.endswith(".json")]) - len(suspects) - len(segments)
    folder = f"{disk.root}/{QUARANTINE_PATH}"
    if suspects:
        said = f"files that a loss of power left unsynced, in {folder}: {len(suspects)}"
        advice = "the .json beside each says what it was; copy back what you want, then remove them"
        yield problem("kept aside", said, advice)
    if segments:
        said = f"copies of damaged segments, in {folder}: {len(segments)}"
        advice = "`ckptfs scrub` says what is still wrong; look after the disk, then remove them"
        yield problem("kept aside", said, advice)
    if others:
        yield note("kept aside", f"other files in {folder}: {others}", "look at them, then remove them")
    if not names:
        yield fine("kept aside", "nothing")
