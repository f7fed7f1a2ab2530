"""The history files: one per unit, frames appended and synced one after the other.

One rule: a file is longer than it is known to be only by frames that were synced. A write that
fails is taken back; a sync that fails breaks the unit's writer for good, because after it nobody
can say what the disk holds.

Source: FORMAT.md, "History".
"""

from __future__ import annotations

import errno
import re

from ckptfs.store.disk import Disk
from ckptfs.store.errors import CkptfsError, Conflict, Corrupt, NoSpace, Place, ReadOnly
from ckptfs.store.ids import UnitId

HISTORY_PATH = "history"
_FILE_NAME = re.compile(r"([0-9a-f]{32})\.log")
# More than the first frame of a history can have: its name is a path of at most 4096 bytes.
_FIRST_FRAME_BYTES = 8192
_FULL = (errno.ENOSPC, errno.EDQUOT)


def history_path(unit: UnitId) -> str:
    """Where a unit's history lies, below the store root."""
    return f"{HISTORY_PATH}/{unit.hex()}.log"


class HistoryLog:
    """Files are open only during a call. Touched only by the index thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._ends: dict[UnitId, int] = {}
        self._broken: dict[UnitId, str] = {}

    def prepare(self) -> None:
        """Make the directory. Durable when: this returned."""
        if not self._disk.exists(HISTORY_PATH):
            self._disk.make_dir(HISTORY_PATH)
            self._disk.sync_dir("")

    def sizes(self) -> dict[UnitId, int]:
        """The length of every history file in bytes."""
        names = (_FILE_NAME.fullmatch(name) for name in self._disk.list_dir(HISTORY_PATH))
        units = (UnitId(bytes.fromhex(match[1])) for match in names if match)
        return {unit: self._disk.size(history_path(unit)) for unit in units}

    def create(self, unit: UnitId, first: bytes) -> None:
        """A new file that holds the frame `first`. Durable when: this returned.

        Conflict if there is one; after any other error none is left.
        """
        path = history_path(unit)
        try:
            fd = self._disk.create(path)
        except OSError as e:
            if isinstance(e, FileExistsError):
                raise Conflict(f"there is a history {path} already") from e
            raise _explained(e, path) from e
        try:
            self._disk.pwrite(fd, first, 0)
            self._disk.sync(fd)
            self._disk.sync_dir(HISTORY_PATH)
        except OSError as e:
            self._disk.unlink(path)
            raise _explained(e, path) from e
        finally:
            self._disk.close(fd)
        self._ends[unit] = len(first)

    def remove(self, unit: UnitId) -> None:
        """Remove a file that holds nothing. Durable when: the disk gets to it; it does no harm."""
        self._disk.unlink(history_path(unit))
        self._ends.pop(unit, None)

    def append(self, unit: UnitId, end: int, frames: bytes) -> int:
        """Write `frames` at `end`, where the file must end; returns the new end.

        Durable when: this returned. NoSpace: nothing was written. ReadOnly: the writer is broken.
        """
        if unit in self._broken:
            raise ReadOnly(self._broken[unit])
        fd = self._disk.open_write(history_path(unit))
        try:
            if self._disk.fstat(fd).st_size != end:
                raise self._break(unit, "somebody else has changed it")
            self._write(unit, fd, end, frames)
            self._sync(unit, fd)
        finally:
            self._disk.close(fd)
        self._ends[unit] = end + len(frames)
        return end + len(frames)

    def read_behind(self, unit: UnitId, start: int) -> bytes:
        """What the file holds from byte `start` on."""
        path = history_path(unit)
        fd = self._disk.open_read(path)
        try:
            return self._disk.pread(fd, max(self._disk.fstat(fd).st_size - start, 0), start)
        finally:
            self._disk.close(fd)

    def read_all(self, unit: UnitId, start: int = 0) -> bytes:
        """The same from the beginning on; nothing if there is no file."""
        try:
            return self.read_behind(unit, start)
        except FileNotFoundError:
            return b""

    def cut(self, unit: UnitId, end: int) -> None:
        """Cut a torn tail off, if there is one. Durable, all that is left too, when: this returned."""
        fd = self._disk.open_write(history_path(unit))
        try:
            self._disk.truncate(fd, end)
            self._sync(unit, fd)
        finally:
            self._disk.close(fd)
        self._ends.pop(unit, None)

    def mend(self, unit: UnitId, start: int, right: bytes) -> None:
        """Write a record over its damaged self. Durable when: this returned."""
        fd = self._disk.open_write(history_path(unit))
        try:
            self._disk.pwrite(fd, right, start)
            self._sync(unit, fd)
        finally:
            self._disk.close(fd)

    def drop_empty(self, unit: UnitId, content: bytes) -> Corrupt | None:
        """Remove a file without a whole record: the process died while it made the unit. What is wrong
        with one that is too long for that."""
        if len(content) >= _FIRST_FRAME_BYTES:
            return self.corrupt(unit, 0, "a history holds no whole record", final=True)
        self.remove(unit)
        return None

    def end(self, unit: UnitId) -> int:
        """How long the file became by appends of this process; 0 if there were none."""
        return self._ends.get(unit, 0)

    def corrupt(self, unit: UnitId, offset: int, what: str, *, final: bool = False) -> Corrupt:
        """The error for damage found at `offset`; `final`: nothing may be appended to the file any more."""
        place = Place(history_path(unit), offset)
        if final:
            self._broken[unit] = f"{what} ({place}); see `ckptfs doctor`"
        return Corrupt(what, place=place)

    def _write(self, unit: UnitId, fd: int, end: int, frames: bytes) -> None:
        try:
            self._disk.pwrite(fd, frames, end)
        except OSError as e:
            try:
                self._disk.truncate(fd, end)
            except OSError as worse:
                raise self._break(unit, f"a failed write could not be taken back ({worse})") from e
            raise _explained(e, history_path(unit)) from e

    def _sync(self, unit: UnitId, fd: int) -> None:
        try:
            self._disk.sync(fd)
        except OSError as e:
            raise self._break(unit, f"it could not be synced ({e})") from e

    def _break(self, unit: UnitId, why: str) -> ReadOnly:
        self._broken[unit] = (
            f"{history_path(unit)} takes no more versions: {why}; look at the disk, restart ckptfs"
        )
        return ReadOnly(self._broken[unit])


def _explained(e: OSError, path: str) -> CkptfsError | OSError:
    if e.errno in _FULL:
        return NoSpace(f"no room on the disk below the store for {path}; remove something")
    return e
