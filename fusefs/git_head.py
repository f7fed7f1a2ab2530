"""Which commit is checked out in a directory of somebody else's.

One rule: nothing is read that its user could not read: no symbolic link is followed, and modes and owners
are checked on the way, because the daemon could read everything. What is read counts only if it is a commit.

git itself is not run: it would run what the repository's configuration says. Blocks: for a thread.
Source: gitrepository-layout(5).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_COMMIT = re.compile(rb"[0-9a-f]{40}([0-9a-f]{24})?")
_REF = re.compile(rb"ref: (refs/[\w./+@-]{1,200})", re.ASCII)
_MOST_ABOVE = 40
_SMALL_BYTES = 4096
_PACKED_BYTES = 8 << 20
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class User:
    """On whose behalf something is read."""

    uid: int
    groups: Collection[int]

    def may(self, found: os.stat_result, bit: int) -> bool:
        """Whether the modes allow it: 4 to read, 1 to search."""
        if self.uid == 0:
            return True
        if found.st_uid == self.uid:
            return bool(found.st_mode >> 6 & bit)
        return bool(found.st_mode >> (3 if found.st_gid in self.groups else 0) & bit)


def commit_of(directory: str, root: str, user: User) -> str:
    """The commit of the work tree that `directory` is in, as hex digits; "" if there is none to be read.

    `root` is what the user's processes see as /. Never raises OSError.
    """
    try:
        with _opened(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) as start:
            return _commit_above(start, root, user)
    except OSError:
        return ""


def _commit_above(start: int, root: str, user: User) -> str:
    with _opened(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) as top_fd:
        top = os.fstat(top_fd)
        here = os.dup(start)
        try:
            for _ in range(_MOST_ABOVE):
                found = os.fstat(here)
                if not user.may(found, 1):
                    break
                if _has(here, b".git"):
                    return _commit_in(here, top_fd, user)
                if os.path.samestat(found, top):
                    break
                above = os.open("..", _DIRECTORY, dir_fd=here)
                os.close(here)
                here = above
        finally:
            os.close(here)
    return ""


def _commit_in(tree: int, top: int, user: User) -> str:
    """The commit of the work tree whose top directory is `tree`."""
    if stat.S_ISDIR(os.stat(b".git", dir_fd=tree, follow_symlinks=False).st_mode):
        with _walked(tree, [b".git"], user) as folder:
            return _resolved(folder, folder, user)
    # A further work tree, or a submodule: a file that says where the folder is.
    named = _read(tree, b".git", user, _SMALL_BYTES).strip().removeprefix(b"gitdir: ")
    with _walked(top if named.startswith(b"/") else tree, named.split(b"/"), user) as folder:
        if not _has(folder, b"commondir"):
            return _resolved(folder, folder, user)
        common = _read(folder, b"commondir", user, _SMALL_BYTES).strip()
        with _walked(top if common.startswith(b"/") else folder, common.split(b"/"), user) as shared:
            return _resolved(folder, shared, user)


def _resolved(folder: int, shared: int, user: User) -> str:
    """What HEAD in `folder` leads to, by a ref in `shared` if it is on a branch."""
    head = _read(folder, b"HEAD", user, _SMALL_BYTES).strip()
    named = _REF.fullmatch(head)
    if named is None:
        return _checked(head)
    ref = named[1]
    *above, name = ref.split(b"/")
    if b".." in above:
        return ""
    try:
        with _walked(shared, above, user) as last:
            return _checked(_read(last, name, user, _SMALL_BYTES).strip())
    except FileNotFoundError:
        packed = _read(shared, b"packed-refs", user, _PACKED_BYTES)
    found = re.search(rb"^(\w+) " + re.escape(ref) + rb"$", packed, re.MULTILINE)
    return _checked(found[1]) if found is not None else ""


def _checked(commit: bytes) -> str:
    return commit.decode() if _COMMIT.fullmatch(commit) else ""


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _walked(start: int, names: list[bytes], user: User) -> Iterator[int]:
    """The directory that `names` lead to, one by one; PermissionError where the user could not go."""
    here = os.dup(start)
    try:
        for name in names:
            if name in (b"", b"."):
                continue
            if not user.may(os.fstat(here), 1):
                raise PermissionError
            further = os.open(name, _DIRECTORY, dir_fd=here)
            os.close(here)
            here = further
        yield here
    finally:
        os.close(here)


def _has(directory: int, name: bytes) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _read(directory: int, name: bytes, user: User, most_bytes: int) -> bytes:
    """The content of a regular file that the user may read; PermissionError for any other."""
    if not user.may(os.fstat(directory), 1):
        raise PermissionError
    fd = os.open(name, _FILE, dir_fd=directory)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not user.may(found, 4):
            raise PermissionError
        content = b""
        while len(content) < most_bytes and (part := os.read(fd, most_bytes - len(content))):
            content += part
        return content
    finally:
        os.close(fd)
