"""A Disk that works on a real folder, writes down what happens to it, and fails when it is told to.

One rule: the log is the order in which the calls took effect: a call and its entry are one step, whatever
thread makes it. LMDB, which does not go through Disk, is one entry a commit (`watched_commits`); what it
does within a commit is the matter of lmdbcuts.py.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from disklog import (
    ROOT,
    AllSynced,
    Committed,
    Event,
    FolderSynced,
    Mark,
    Names,
    Place,
    Punch,
    Resize,
    Synced,
    SyncFailed,
    Write,
)
from diskmodel import BLOCK_BYTES, Image

from ckptfs.store import layout
from ckptfs.store.disk import Disk, ShortWrite
from ckptfs.store.index import INDEX_PATH, Index
from ckptfs.store.mapped_file import MappedFile

SET_ASIDE_BYTES = 1 << 18
_SECOND_LIFE = 1 << 32
_NEED_ROOM = {"make_dir", "create", "pwrite", "link", "rename", "sync", "sync_dir"}


@dataclass
class Faults:
    """Which calls fail: those numbered `first` to `last`, with `code`. `calls` counts them.

    `only`: of these calls only. `halfway`: a write that fails has written its first half, as on a full
    disk.
    """

    first: int = 0
    last: int = 0
    code: int = errno.EIO
    halfway: bool = False
    only: str = ""
    calls: int = 0
    failed: list[str] = field(default_factory=list)
    is_paused: bool = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted, nothing fails."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def due(self, call: str) -> bool:
        """Count a call; whether it is to fail."""
        if self.is_paused or (self.code == errno.ENOSPC and call not in _NEED_ROOM):
            return False
        self.calls += 1
        if not self.first <= self.calls <= self.last or self.only not in ("", call):
            return False
        self.failed.append(call)
        return True

    @property
    def are_over(self) -> bool:
        """Whether no call will fail any more."""
        return self.calls >= self.last

    def error(self) -> OSError:
        """What a failing call raises."""
        return OSError(self.code, os.strerror(self.code))


class Log:
    """The entries, and which file or folder has which number: that of its first appearance."""

    def __init__(self, known: Mapping[int, int] | None = None, faults: Faults | None = None) -> None:
        self.events: list[Event] = []
        self.lock = threading.RLock()
        self.faults = faults if faults is not None else Faults()
        self._numbers = dict(known) if known is not None else {}
        # In a second life: above every number of the first, also of files that are gone.
        self._next = ROOT + 1 if known is None else _SECOND_LIFE
        self._index_files: dict[str, dict[int, bytes]] = {}

    def number(self, status: os.stat_result) -> int:
        """The number of a file or folder of the real disk."""
        if status.st_ino not in self._numbers:
            self._numbers[status.st_ino] = self._next
            self._next += 1
        return self._numbers[status.st_ino]

    def forget(self, status: os.stat_result) -> None:
        """The file is gone with its last name: another may get its st_ino."""
        if status.st_nlink <= 1 or stat.S_ISDIR(status.st_mode):
            self._numbers.pop(status.st_ino, None)

    def mark(self, name: str) -> int:
        """Make an entry that means something to the caller; the number of entries then."""
        with self.lock:
            self.events.append(Mark(name))
            return len(self.events)

    def note_index(self, root: str, folder: int | None) -> None:
        """What LMDB's file holds now, if it is there; its first appearance also is a new name, in
        `folder`, unless another entry says so."""
        path = f"{root}/{INDEX_PATH}/data.mdb"
        if not os.path.exists(path):
            return
        with open(path, "rb") as file:
            held = file.read()
            number = self.number(os.fstat(file.fileno()))
        before = self._index_files.setdefault(path, {})
        blocks = {i: held[at : at + BLOCK_BYTES] for i, at in enumerate(range(0, len(held), BLOCK_BYTES))}
        changed = {i: block for i, block in blocks.items() if before.get(i) != block}
        if (
            folder is not None
            and not before
            and not any(isinstance(e, Names) and _puts(e, number) for e in self.events)
        ):
            self.events.append(Names((Place(folder, "data.mdb", number),)))
        self._index_files[path] = blocks
        if changed:
            self.events.append(Committed(number, len(held), changed))

    def knows_index(self, root: str) -> bool:
        """Whether LMDB's file was seen."""
        return f"{root}/{INDEX_PATH}/data.mdb" in self._index_files


def _puts(event: Names, number: int) -> bool:
    return any(place.node == number for place in event.places)


class RecordingDisk(Disk):
    """A Disk whose calls are in `log`. Parts of one store may have several with one log."""

    def __init__(self, root: str, log: Log) -> None:
        super().__init__(root)
        self.log = log
        if os.path.isdir(root) and not log._numbers:
            log._numbers[os.stat(root).st_ino] = ROOT

    @contextmanager
    def _step(self, call: str, fails: bool = True) -> Iterator[None]:
        """One call: nothing else happens meanwhile."""
        log = self.log
        with log.lock:
            if not log.knows_index(self.root) and os.path.exists(f"{self.root}/{INDEX_PATH}/data.mdb"):
                self.note_commit()
            if fails and log.faults.due(call):
                raise log.faults.error()
            yield

    def note_commit(self) -> None:
        """LMDB has committed."""
        folder = os.stat(self.absolute(INDEX_PATH))
        with self.log.lock:
            self.log.note_index(self.root, self.log.number(folder))

    def below(self, path: str) -> RecordingDisk:
        return RecordingDisk(self.absolute(path), self.log)

    def set_aside(self, most: int) -> int:
        return min(most, SET_ASIDE_BYTES)

    def make_dir(self, path: str) -> None:
        with self._step("make_dir"):
            at = self.root
            if not os.path.isdir(at):
                os.makedirs(at, mode=0o700)
                self.log._numbers[os.stat(at).st_ino] = ROOT
            for part in path.split("/") if path else []:
                parent, at = at, f"{at}/{part}"
                if not os.path.isdir(at):
                    os.mkdir(at, 0o700)
                    self._placed(parent, part, at, is_folder=True)

    def create(self, path: str) -> int:
        with self._step("create"):
            fd = super().create(path)
            folder, name = os.path.split(self.absolute(path))
            self._placed(folder, name, self.absolute(path))
            return fd

    def open_read(self, path: str, *, waits: bool = True) -> int:
        with self._step("open_read"):
            return super().open_read(path, waits=waits)

    def open_write(self, path: str) -> int:
        with self._step("open_write"):
            return super().open_write(path)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        with self._step("pread"):
            return super().pread(fd, length, offset)

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._step("read_into"):
            return super().read_into(fd, buffer, offset)

    def map(self, fd: int, length: int, offset: int) -> MappedFile:
        with self._step("map"):
            return super().map(fd, length, offset)

    def pwrite(self, fd: int, payload: bytes | bytearray | memoryview, offset: int) -> int:
        with self.log.lock:
            half = self.log.faults.halfway and len(payload) > 1
            try:
                with self._step("pwrite" if self._needs_room(fd, offset, len(payload)) else "overwrite"):
                    return self._write(fd, payload, offset)
            except OSError as e:
                if half:
                    raise ShortWrite(e, self._write(fd, payload[: len(payload) // 2], offset)) from e
                raise

    @staticmethod
    def _needs_room(fd: int, offset: int, length: int) -> bool:
        """Whether a write goes where no block is yet."""
        try:
            return os.lseek(fd, offset, os.SEEK_HOLE) < offset + length
        except OSError:
            return True  # beyond the end

    def _write(self, fd: int, payload: bytes | bytearray | memoryview, offset: int) -> int:
        done = super().pwrite(fd, payload, offset)
        self.log.events.append(Write(self._of(fd), offset, bytes(payload)))
        return done

    def truncate(self, fd: int, size: int) -> None:
        with self._step("truncate"):
            super().truncate(fd, size)
            self.log.events.append(Resize(self._of(fd), size))

    def sync(self, fd: int) -> None:
        with self.log.lock:
            try:
                with self._step("sync"):
                    self.log.events.append(Synced(self._of(fd)))
            except OSError:
                self.log.events.append(SyncFailed(self._of(fd)))
                raise

    def sync_dir(self, path: str) -> None:
        with self._step("sync_dir"):
            if not os.path.realpath(self.absolute(path)).startswith(os.path.realpath(self.root)):
                return  # the parent of the store
            self.log.events.append(FolderSynced(self.log.number(os.stat(self.absolute(path)))))

    def sync_all(self) -> None:
        with self._step("sync_all"):
            self.log.events.append(AllSynced())

    def link(self, source: str, target: str) -> None:
        with self._step("link"):
            super().link(source, target)
            folder, name = os.path.split(self.absolute(target))
            self._placed(folder, name, self.absolute(target))

    def rename(self, source: str, target: str) -> None:
        with self._step("rename"):
            replaced = os.lstat(self.absolute(target)) if os.path.lexists(self.absolute(target)) else None
            super().rename(source, target)
            if replaced is not None:
                self.log.forget(replaced)
            new = os.stat(self.absolute(target))
            if os.path.basename(target) == "data.mdb":
                self.log.note_index(self.root, None)  # whole before it has its name
            places = []
            for path, node in ((source, None), (target, self.log.number(new))):
                folder, name = os.path.split(self.absolute(path))
                places.append(Place(self.log.number(os.stat(folder)), name, node))
            self.log.events.append(Names(tuple(places)))

    def unlink(self, path: str) -> None:
        with self._step("unlink"):
            gone = self.stat(path)
            super().unlink(path)
            self._removed(self.absolute(path), gone)

    def remove_tree(self, path: str) -> None:
        with self._step("remove_tree"):
            for folder, _, files in os.walk(self.absolute(path), topdown=False):
                for name in files:
                    gone = os.lstat(f"{folder}/{name}")
                    os.unlink(f"{folder}/{name}")
                    self._removed(f"{folder}/{name}", gone)
                gone = os.lstat(folder)
                os.rmdir(folder)
                self._removed(folder, gone)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        with self._step("punch"):
            done = super().punch(fd, offset, length)
            if done:
                self.log.events.append(Punch(self._of(fd), offset, length))
            return done

    def allocate(self, fd: int, length: int) -> bool:
        with self._step("allocate", fails=False):
            return super().allocate(fd, length)

    def set_times(self, fd: int, atime_ns: int, mtime_ns: int) -> None:
        with self._step("set_times"):
            super().set_times(fd, atime_ns, mtime_ns)

    def _of(self, fd: int) -> int:
        return self.log.number(os.fstat(fd))

    def _placed(self, folder: str, name: str, path: str, *, is_folder: bool = False) -> None:
        place = Place(self.log.number(os.stat(folder)), name, self.log.number(os.lstat(path)), is_folder)
        self.log.events.append(Names((place,)))

    def _removed(self, path: str, gone: os.stat_result) -> None:
        self.log.forget(gone)
        folder, name = os.path.split(path)
        place = Place(self.log.number(os.stat(folder)), name, None)
        self.log.events.append(Names((place,)))


class SmallDisk(Disk):
    """A Disk that keeps little aside, so that a thousand stores are opened quickly."""

    def set_aside(self, most: int) -> int:
        return min(most, SET_ASIDE_BYTES)


@contextmanager
def stores_on(make: Callable[[str], Disk]) -> Iterator[None]:
    """`open_store` makes its Disk by `make`, and LMDB's commits are noted."""
    commit = Index._commit_transaction

    def noted(self: Index) -> None:
        commit(self)
        if isinstance(self._disk, RecordingDisk):
            self._disk.note_commit()

    with (
        mock.patch.object(layout, "Disk", make),
        mock.patch.object(Index, "_commit_transaction", noted),
    ):
        yield


def materialise(image: Image, root: str) -> dict[int, int]:
    """Make an image a real folder; which st_ino is which number of the model."""
    os.mkdir(root, 0o700)
    numbers = {os.stat(root).st_ino: ROOT}
    for folder in image.folders:
        os.mkdir(f"{root}/{folder}", 0o700)
        numbers[os.stat(f"{root}/{folder}").st_ino] = image.folder_nodes[folder]
    made: dict[int, str] = {}
    for path, (node, held) in image.files.items():
        if node in made:
            os.link(made[node], f"{root}/{path}")
            continue
        made[node] = f"{root}/{path}"
        fd = os.open(made[node], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for offset, payload in held.runs():
                os.pwrite(fd, payload, offset)
            os.ftruncate(fd, held.size)
            numbers[os.fstat(fd).st_ino] = node
        finally:
            os.close(fd)
    return numbers


def chance_of(*parts: object) -> random.Random:
    """Random numbers that depend on these only."""
    return random.Random(":".join(map(str, parts)))
