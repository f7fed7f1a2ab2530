"""The file system below a store: whether a store may lie on it, and what it can do.

One rule: what a file system can do is tried, not looked up; only where a store must never lie
(a network, a mount of our own) is told by its name, because LMDB and flock seem to work there.

Source: FORMAT.md, "What is assumed of the disk"; proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs.store.disk import BLOCK_BYTES, Disk
from ckptfs.store.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the file system below can do.

    `punch`: ranges can be given back. `seek_data`: allocated blocks of 4 KiB are reported exactly,
    so an overlay can be read. `leases`: it can be asked whether somebody has a file open or mapped.
    """

    punch: bool
    seek_data: bool
    leases: bool


_NETWORK = {
    "9p2000.L", "afs", "beegfs", "ceph", "cifs", "coda", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs",
    "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
}  # fmt: skip
_NETWORK_FUSE = {
    "beegfs", "ceph-fuse", "gcsfuse", "glusterfs", "goofys", "juicefs", "mount-s3", "rclone", "s3fs", "sshfs",
}  # fmt: skip


def check_file_system(root: str) -> None:
    """Unsupported if `root` (or the folder it would be made in) lies where a store must not."""
    existing = os.path.realpath(root)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    device = os.stat(existing).st_dev
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        kind, source = file_system_at(lines, existing, f"{os.major(device)}:{os.minor(device)}")
    refused = refusal(kind, source)
    if refused:
        raise Unsupported(f"a store cannot lie on {refused}: {root}; choose a folder on a local disk")


def refusal(kind: str, source: str) -> str | None:
    """What is wrong with a file system of this kind and source, in words; None: nothing."""
    subtype = kind.removeprefix("fuse.")
    if subtype == "ckptfs" or (kind.startswith("fuse") and source == "ckptfs"):
        return "a ckptfs mount"
    if kind in _NETWORK or (kind.startswith("fuse.") and subtype in _NETWORK_FUSE):
        return f"the network file system {kind}"
    return None


def file_system_at(mountinfo: Iterable[str], path: str, device: str) -> tuple[str, str]:
    """(kind, source) of the mount that `path` (real, absolute) lies on; ("", "") if none is found.

    A mount whose device (`major:minor`) is the path's wins over one that only contains it, because
    a later mount may hide an earlier one; btrfs shows other devices, there the longest path wins.
    """
    best: tuple[bool, int] = (False, -1)
    found = ("", "")
    for line in mountinfo:
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split()
        if not separator or len(fields) < 5 or len(rest) < 2:
            continue
        point = _unescaped(fields[4])
        if path != point and not path.startswith(point.rstrip("/") + "/"):
            continue
        rank = (fields[2] == device, len(point))
        if rank >= best:
            best, found = rank, (rest[0], rest[1])
    return found


def _unescaped(text: str) -> str:
    for code in ("040", "011", "012", "134"):
        text = text.replace("\\" + code, chr(int(code, 8)))
    return text


def probe_abilities(disk: Disk) -> Abilities:
    """Try what ingest and the overlay need, on a file in staging/. Unsupported without hard links."""
    name, twin = "staging/probe.tmp", "segments/probe.tmp"
    for path in (name, twin):
        if disk.exists(path):
            disk.unlink(path)
    fd = disk.create(name)
    try:
        try:
            disk.link(name, twin)
        except OSError as e:
            raise Unsupported(
                f"no hard links between staging/ and segments/ of {disk.root}: {e.strerror}"
            ) from None
        disk.unlink(twin)
        return Abilities(
            seek_data=_exact_extents(disk, fd), punch=_can_punch(disk, fd), leases=_can_lease(disk, name)
        )
    finally:
        disk.close(fd)
        disk.unlink(name)


_PATTERN = ((0, 1), (2, 2), (6, 1))


def _blocks(*runs: tuple[int, int]) -> list[tuple[int, int]]:
    return [(first * BLOCK_BYTES, count * BLOCK_BYTES) for first, count in runs]


def _exact_extents(disk: Disk, fd: int) -> bool:
    # Both before and after the blocks are allocated on disk: delayed allocation must count as well.
    size = 8 * BLOCK_BYTES
    disk.truncate(fd, size)
    for offset, length in _blocks(*_PATTERN):
        disk.pwrite(fd, b"\xa5" * length, offset)
    try:
        early = disk.data_extents(fd, size)
        disk.sync(fd)
        return early == _blocks(*_PATTERN) == disk.data_extents(fd, size)
    except OSError:
        return False


def _can_punch(disk: Disk, fd: int) -> bool:
    offset = 3 * BLOCK_BYTES
    return disk.punch(fd, offset, BLOCK_BYTES) and not any(disk.pread(fd, BLOCK_BYTES, offset))


def _can_lease(disk: Disk, path: str) -> bool:
    # Our own writable descriptor is open, so the right answer is a refusal, not an error.
    fd = disk.open_read(path)
    try:
        return not disk.lease(fd, "read")
    except OSError:
        return False
    finally:
        disk.close(fd)
