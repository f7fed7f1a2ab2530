"""What a durable version has is removed where it was imported from, if it still is that.

One rule: nothing is removed before it was looked at under a name that nobody else uses: it is renamed into a
directory of ours beside it, compared there with what was saved, and then removed or put back. What has its
name by then may be anything, such as the file of a save that is not anywhere else.

A kill leaves such a directory with one name in it at most; the next import of any kind puts it back first.

Source: FORMAT.md, "Importing".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial

from ckptfs.daemon.import_plan import Found, Path
from ckptfs.daemon.outside import ASIDE_PREFIX, Outside
from ckptfs.store.errors import Unavailable


class Remover:
    """Removes from one directory. Everything blocks: for a worker thread, one at a time."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def scan(self) -> Found:
        """As Outside.scan, after what a killed import had set aside was put back."""
        top = self._outside.scan()
        asides = _asides(top, ())
        for path, names in asides:
            for name in names:
                self._outside.put_back(path, name)
            self._outside.remove_directory(path)
        return self._outside.scan() if asides else top

    def remove(self, path: Path, saved: Found) -> str | None:
        """Remove what was `saved`; else why it is still there. A directory that is not empty just stays."""
        if saved.is_dir:
            self._outside.remove_directory(path)
            return None
        try:
            if not saved.is_file:
                return self._remove_if(path, partial(self._is_other, saved, None))
            with self._outside.opened(path, saved) as fd:
                now = os.fstat(fd)
                # Names that are removed change the time of the inode.
                if saved.links == 1 and now.st_ctime_ns != saved.ctime_ns:
                    return "was changed meanwhile, so it was left where it is"
                return self._remove_if(path, partial(self._is_other, saved, fd))
        except Unavailable:
            return "was replaced meanwhile, so it was left where it is"

    def _remove_if(self, path: Path, is_other: Callable[[int, bytes], str | None]) -> str | None:
        with self._outside.set_aside(path) as aside:
            if aside is None:
                return None
            why = is_other(aside.directory, path[-1])
            if why is None:
                aside.remove()
                return None
        if aside.stays_in is not None:
            return f"{why}, and its name was taken again, so it is in {aside.stays_in} now"
        return f"{why}, so it was left where it is"

    def _is_other(self, saved: Found, fd: int | None, directory: int, name: bytes) -> str | None:
        """Why what was set aside is not, or may soon not be, what was saved."""
        now = os.stat(name, dir_fd=directory, follow_symlinks=False)
        kind = (now.st_dev, now.st_ino, stat.S_IFMT(now.st_mode))
        if kind != (saved.device, saved.inode, stat.S_IFMT(saved.mode)):
            return "was replaced meanwhile"
        if fd is not None:
            if (now.st_size, now.st_mtime_ns) != (saved.size, saved.mtime_ns):
                return "was changed meanwhile"
            return None if self._outside.has_no_writer(fd) else "is open for writing"
        if saved.target is not None and os.fsencode(os.readlink(name, dir_fd=directory)) != saved.target:
            return "was replaced meanwhile"
        return None


def _asides(found: Found, above: Path) -> list[tuple[Path, list[bytes]]]:
    """Each directory of ours below a directory, with the names in it."""
    asides = []
    for child in found.children:
        if child.is_dir:
            path = (*above, child.name)
            if child.name.startswith(ASIDE_PREFIX):
                asides.append((path, [one.name for one in child.children]))
            else:
                asides += _asides(child, path)
    return asides
