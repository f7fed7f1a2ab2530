"""Staging files: where the bytes of files being written go, until they are ingested.

One rule: a number is used once and never again, so a staging file is the content of exactly
one generation of one inode.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptfs.store.disk import Disk

STAGING_PATH = "staging"


def staging_path(number: int) -> str:
    """Where staging file `number` lies, below the store root."""
    return f"{STAGING_PATH}/{number:016x}"


class Staging:
    """Makes, opens and drops staging files. Touched only by the index thread.

    `failed` are those of which a sync failed, with the error: the kernel may have dropped their pages
    and call the next sync a success, so they are not adopted in this mount. `on_failed` is told of each.
    """

    def __init__(self, disk: Disk, next_number: int) -> None:
        self._disk = disk
        disk.make_dir(STAGING_PATH)
        taken = [int(name, 16) for name in disk.list_dir(STAGING_PATH) if len(name) == 16]
        self.failed: dict[int, OSError] = {}
        self.on_failed: Callable[[int, OSError], None] = lambda number, error: None
        self._next = max([next_number, *(number + 1 for number in taken)])

    def create(self) -> tuple[int, int]:
        """(number, read-write descriptor) of a new, empty staging file. The caller closes it.

        Durable when: the file was synced and `sync_names` returned.
        """
        number = self._next
        fd = self._disk.create(staging_path(number))
        self._next += 1
        return number, fd

    def open_read(self, number: int) -> int:
        """A descriptor for reading; the caller closes it."""
        return self._disk.open_read(staging_path(number))

    def open_write(self, number: int) -> int:
        """A descriptor for reading and writing; the caller closes it."""
        return self._disk.open_write(staging_path(number))

    def drop(self, number: int) -> None:
        """Remove a staging file; it is no error if it is gone. Only after a commit (see Change)."""
        if self._disk.exists(staging_path(number)):
            self._disk.unlink(staging_path(number))

    def note_failed(self, number: int, error: OSError) -> None:
        """A sync of it has failed."""
        self.failed[number] = error
        self.on_failed(number, error)

    def sync_names(self) -> None:
        """Make the names of all staging files durable."""
        self._disk.sync_dir(STAGING_PATH)

    def numbers(self) -> list[int]:
        """Every staging file that exists."""
        return [int(name, 16) for name in self._disk.list_dir(STAGING_PATH) if len(name) == 16]
