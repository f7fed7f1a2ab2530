"""Which ckptfs mounts there are, and which of them a path lies on.

One rule: never touch a mount. What is asked is the kernel's mount table; a path is followed by
lstat only up to its mount point, because a mount whose daemon is dead or busy would make the
caller wait, and a daemon that looks at its own mount waits for itself (KERNEL_NOTES.md).

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.store.errors import InvalidRequest, NotFound

FILE_SYSTEM = "fuse.ckptfs"
_MOUNTINFO = "/proc/self/mountinfo"
_MAX_LINKS = 40
_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One mount: its path, file system type, source, and for FUSE who mounted it and who may enter it.

    `is_shared`: what is mounted below it later shows up in containers that have it as a slave.
    """

    path: str
    file_system: str
    source: str
    minor: int
    user_id: int = 0
    allow_other: bool = False
    is_shared: bool = False

    @property
    def is_ckptfs(self) -> bool:
        """Whether a ckptfs daemon made it, alive or not."""
        return self.file_system == FILE_SYSTEM


def mount_table() -> list[MountEntry]:
    """All mounts that this process sees, in the kernel's order (later ones lie on top)."""
    with open(_MOUNTINFO, "rb") as file:
        return parse_mountinfo(file.read())


def parse_mountinfo(content: bytes) -> list[MountEntry]:
    """The mounts in the bytes of a mountinfo file; lines that are not of its form are left out."""
    entries = []
    for line in content.splitlines():
        fields, separator, rest = line.partition(b" - ")
        front, back = fields.split(b" "), rest.split(b" ")
        if not separator or len(front) < 6 or len(back) < 3:
            continue
        options = dict(option.partition(b"=")[::2] for option in back[2].split(b","))
        entries.append(
            MountEntry(
                path=_unescaped(front[4]),
                file_system=os.fsdecode(back[0]),
                source=_unescaped(back[1]),
                minor=int(front[2].partition(b":")[2]),
                user_id=int(options.get(b"user_id", b"0")),
                allow_other=b"allow_other" in options,
                is_shared=any(field.startswith(b"shared:") for field in front[6:]),
            )
        )
    return entries


def mount_at(path: str, table: Sequence[MountEntry]) -> MountEntry | None:
    """The topmost mount on exactly this path."""
    return next((entry for entry in reversed(table) if entry.path == path), None)


def mount_over(path: str, table: Sequence[MountEntry]) -> MountEntry:
    """The mount that an absolute path without symbolic links lies on."""
    at = path
    while (entry := mount_at(at, table)) is None and at != "/":
        at = os.path.dirname(at)
    if entry is None:
        raise NotFound(f"{path} is on no mount that this process sees")
    return entry


@dataclass(frozen=True, slots=True)
class MountedPath:
    """A path on a ckptfs mount; `inner` is the rest of it, "/" for the mount point itself."""

    mount: MountEntry
    inner: str


def find_mounted(path: str) -> MountedPath:
    """Where `path`, as a user typed it, lies; NotFound if that is on no ckptfs mount."""
    table = mount_table()
    found = follow(path, table)
    entry = mount_over(found, table)
    if not entry.is_ckptfs:
        hint = "" if any(e.is_ckptfs for e in table) else "; no ckptfs is mounted here"
        raise NotFound(f"{path} is not on a ckptfs mount{hint}")
    rest = found if entry.path == "/" else found[len(entry.path) :]
    return MountedPath(entry, rest or "/")


def follow(path: str, table: Sequence[MountEntry]) -> str:
    """The absolute path, symbolic links resolved as far as a ckptfs mount and not within it."""
    if "\0" in path:
        raise InvalidRequest("a path cannot hold a zero byte")
    mounted = [entry.path for entry in table if entry.is_ckptfs]
    todo = _parts(os.path.join(_here(), path))
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            done = done[:-1]
            continue
        step = "/" + "/".join([*done, part])
        target = None if any(is_below(step, one) for one in mounted) else _link_target(step)
        if target is None:
            done.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise InvalidRequest(f"{path} has too many symbolic links")
        todo = _parts(target) + todo
        done = [] if target.startswith("/") else done
    return "/" + "/".join(done)


def is_below(path: str, folder: str) -> bool:
    """Whether an absolute path is `folder` or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def who_else_has(entry: MountEntry) -> str | None:
    """A process in another mount namespace in which the same file system is mounted, by name and number; None
    if there is none that we may see. A container that was started with its mounts private is such a place."""
    ours = _namespace_of("self")
    looked_at = {ours, None}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        namespace = _namespace_of(pid)
        if namespace in looked_at:
            continue
        looked_at.add(namespace)
        try:
            with open(f"/proc/{pid}/mountinfo", "rb") as file:
                table = parse_mountinfo(file.read())
            with open(f"/proc/{pid}/comm", "rb") as file:
                name = os.fsdecode(file.read()).strip()
        except OSError:
            continue  # gone, or not for us to see
        if any((one.minor, one.file_system) == (entry.minor, entry.file_system) for one in table):
            return f"{name} (process {pid})"
    return None


def _namespace_of(pid: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise NotFound("the current directory is gone; give an absolute path") from None


def _link_target(path: str) -> str | None:
    """Where a symbolic link points; None for what is none, is not there or may not be looked at."""
    try:
        return os.readlink(path) if stat.S_ISLNK(os.lstat(path).st_mode) else None
    except OSError:
        return None


def _unescaped(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda code: bytes((int(code[1], 8),)), field))
