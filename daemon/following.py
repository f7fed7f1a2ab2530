"""When something in a directory outside is a save that is done: the rules of the mount, by looking.

One rule: what a mount would hold back is held back: nothing is taken of a directory in which something
happened within `settle_s`, or a file is open for writing; a log that grows a little holds back nothing.

A mount is told of each write and close; here two looks, some seconds apart, are compared, so this works
where nobody tells anything (NFS, Lustre). Whether a file is open for writing is asked of a file system of
this machine; one of several machines does not know, and there `settle_s` alone counts.

Source: fusefs/quiet.py, whose judgement this is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from ckptfs.daemon.import_plan import Found, newest_change_ns
from ckptfs.daemon.outside import Outside
from ckptfs.fusefs.openfile import Growth
from ckptfs.fusefs.quiet import Quiet
from ckptfs.store.errors import Unavailable

Path = tuple[bytes, ...]
_FIRST_BYTES = 64
_Stamp = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Ready:
    """Something is to be taken; `left` are the paths that are not: directories with their files, or files.
    What changed after `looked_ns`, by the times of its file system, was not judged."""

    left: tuple[Path, ...]
    looked_ns: int


@dataclass(slots=True)
class _Folder:
    """What was seen in one directory: its files (with what tells one state from the next), the names of all
    else, and the paths of what changed since the last version."""

    number: int
    files: dict[bytes, _Stamp] = field(default_factory=dict)
    others: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    changed: set[Path] = field(default_factory=set)


class Following:
    """Looks again and again. One task's own; every method blocks. Times are monotonic seconds."""

    def __init__(self, outside: Outside, settle_s: float, settle_max_s: float) -> None:
        self._outside = outside
        self._quiet = Quiet(settle_s, settle_max_s)
        self._folders: dict[Path, _Folder] = {}
        self._numbers: dict[int, Path] = {}
        self._growth: dict[Path, Growth] = {}
        self._files: dict[Path, int] = {}
        self._news: set[Path] = set()
        self._taken: set[Path] = set()
        self._settled: set[Path] = set()
        # A number is given out once: Quiet may still know one of something that has gone.
        self._folder_numbers, self._file_numbers = count(1), count(1)
        self._looked: float | None = None

    def look(self, top: Found, now: float) -> Ready | None:
        """What `top`, scanned just now, says; None if there is nothing to take yet."""
        ticks = 1.0 if self._looked is None else max(1.0, (now - self._looked) / 0.25)
        seen: set[Path] = set()
        for path, found in _directories(top, ()):
            seen.add(path)
            self._compare(path, found, now, ticks)
        for path in self._folders.keys() - seen:
            self._forget(path)
        self._looked = now
        return self._ready(now, newest_change_ns(top))

    def taken(self, now: float) -> None:
        """What the last `look` gave is in a version, or was nothing new."""
        for path in self._taken:
            folder = self._folders.get(path)
            if folder is not None:
                self._quiet.forget(folder.number)
                for what in folder.changed:
                    if what[-1:] and what[-1] not in folder.files:
                        self._files.pop(what, None)
                folder.changed.clear()
        self._news -= self._taken
        for path in self._settled & self._folders.keys():
            self._quiet.published_settled(self._folders[path].number, now)

    def refused(self, now: float) -> None:
        """It could not be taken: something is at work there all the same."""
        for path in self._taken:
            if path in self._folders:
                self._quiet.postpone(self._folders[path].number, now)

    def _compare(self, path: Path, found: Found, now: float, ticks: float) -> None:
        folder = self._folders.get(path)
        if folder is None:
            folder = self._folders[path] = _Folder(next(self._folder_numbers))
            self._numbers[folder.number] = path
            self._news.add(path)
        files = {one.name: _stamp(one) for one in found.children if one.is_file}
        others = {one.name: (one.inode, one.mode) for one in found.children if not one.is_file}
        for one in found.children:
            if one.is_file and folder.files.get(one.name) != files[one.name]:
                self._file_changed((*path, one.name), folder, one, now, ticks)
        for name in folder.files.keys() - files.keys():
            self._happened(path, folder, (*path, name), now)
            self._growth.pop((*path, name), None)
        if others != folder.others:
            self._happened(path, folder, path, now)
        folder.files, folder.others = files, others

    def _file_changed(self, file: Path, folder: _Folder, found: Found, now: float, ticks: float) -> None:
        growth = self._growth.get(file)
        if growth is None:
            # One that is there when it is first seen is a name that was made.
            self._growth[file] = Growth(found.size, mtime_ns=found.mtime_ns)
            self._happened(file[:-1], folder, file, now)
            return
        growth.sample(found.size, found.mtime_ns, self._first_bytes(file, found, growth), ticks)
        if growth.is_log(found.name):
            self._news.add(file[:-1])
            self._quiet.minor(folder.number, now)
        else:
            self._happened(file[:-1], folder, file, now)

    def _first_bytes(self, file: Path, found: Found, growth: Growth) -> bytes:
        if growth.first or not growth.appends_only:
            return b""
        try:
            with self._outside.opened(file, found) as fd:
                return os.pread(fd, _FIRST_BYTES, 0)
        except (OSError, Unavailable):
            return b""

    def _happened(self, path: Path, folder: _Folder, what: Path, now: float) -> None:
        self._news.add(path)
        folder.changed.add(what)
        self._quiet.major(folder.number, self._number_of(what), now)

    def _number_of(self, what: Path) -> int:
        if what not in self._files:
            self._files[what] = next(self._file_numbers)
        return self._files[what]

    def _forget(self, path: Path) -> None:
        folder = self._folders.pop(path)
        del self._numbers[folder.number]
        self._quiet.forget(folder.number)
        self._news.discard(path)
        for name in folder.files:
            self._growth.pop((*path, name), None)
        for what in {path, *folder.changed, *((*path, name) for name in folder.files)}:
            self._files.pop(what, None)

    def _ready(self, now: float, looked_ns: int) -> Ready | None:
        numbers = [self._folders[path].number for path in self._news]
        due = self._quiet.due(numbers, now, self._writers)
        if not due.publish:
            return None
        quiet = {self._numbers[number] for number in due.quiet}
        settled_only = {self._numbers[number] for number in due.settled_only}
        self._taken, self._settled = quiet, settled_only
        left = list(self._news - quiet - settled_only)
        for path in settled_only:
            left += self._unsettled(path, now)
        return Ready(tuple(sorted(left)), looked_ns)

    def _unsettled(self, path: Path, now: float) -> Iterator[Path]:
        """The files of a busy directory that are not to be taken yet."""
        folder = self._folders[path]
        for name in folder.files:
            file = (*path, name)
            settled = self._quiet.is_settled(folder.number, self._number_of(file), now)
            if not settled or self._is_written(file):
                yield file

    def _writers(self, number: int) -> set[int]:
        """The files of a directory that changed and are open for writing; logs left out."""
        folder = self._folders[self._numbers[number]]
        return {self._number_of(file) for file in folder.changed if self._is_written(file)}

    def _is_written(self, file: Path) -> bool:
        growth = self._growth.get(file)
        if growth is None or growth.is_log(file[-1]):
            return False
        try:
            with self._outside.opened_now(file) as fd:
                return not self._outside.has_no_writer(fd)
        except (OSError, Unavailable):
            return False


def _directories(found: Found, path: Path) -> Iterator[tuple[Path, Found]]:
    yield path, found
    for child in found.children:
        if child.is_dir:
            yield from _directories(child, (*path, child.name))


def _stamp(found: Found) -> _Stamp:
    return found.inode, found.size, found.mtime_ns, found.ctime_ns
