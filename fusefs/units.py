"""Which directory is versioned as a whole: the unit that a place in the tree belongs to.

One rule: a place belongs to the innermost unit above it. Units are the directories that match a
configured glob, those that were named by `ckptfs unit`, else each top-level directory; files
directly in the root belong to the unit `@root`. A root that itself looks like a run is one unit.

Source: ARCHITECTURE §2, "unit".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from ckptfs.fusefs.namespace import Namespace, key_of
from ckptfs.store.index import Change, Table
from ckptfs.store.inode import ROOT_INO

ROOT_UNIT_NAME = b"@root"
_ROOT_IS_RUN = b"root_is_run"
_NAMED = b"unit:"
_RUN_MARK = re.compile(
    rb"checkpoint-\d+|iter_\d{7}|global_step\d+|latest|latest_checkpointed_iteration\.txt|trainer_state\.json"
)


class Units:
    """Answers which unit a directory belongs to. Belongs to the index thread."""

    def __init__(
        self, namespace: Namespace, globs: Sequence[str], is_off: Callable[[bytes], bool] | None = None
    ) -> None:
        """`is_off` tells by a unit's name whether the configuration wants no versions of it."""
        self._namespace = namespace
        self.is_off = is_off
        self._globs = [glob.strip("/").split("/") for glob in globs]
        index = namespace.index
        self._root_is_run = index.get(Table.META, _ROOT_IS_RUN) is not None
        self._named = {int.from_bytes(k[len(_NAMED) :], "big") for k, _ in index.scan(Table.META, _NAMED)}

    def top_of(self, directory: int) -> int:
        """The inode of the unit's directory for a directory; ROOT_INO for `@root`."""
        if self._root_is_run:
            return ROOT_INO
        chain = self._namespace.ancestors(directory)
        for position, ino in enumerate(chain[:-1]):
            if self._is_unit(ino, chain[position:]):
                return ino
        return ROOT_INO

    def is_top(self, directory: int) -> bool:
        """Whether a directory is a unit's own."""
        return self.top_of(directory) == directory

    def name_of(self, top: int) -> bytes:
        """The name that a unit has in the history: its path below the mount, or `@root`."""
        return ROOT_UNIT_NAME if top == ROOT_INO else self._namespace.path_of(top)[1:]

    def takes_subdirectories(self, top: int) -> bool:
        """Whether a unit's tree goes on below its directory; `@root` is only the root's own files."""
        return top != ROOT_INO or self._root_is_run

    def path_in_unit(self, top: int, directory: int) -> list[tuple[int, bytes]]:
        """(inode, name) of each directory from below the unit's top down to `directory`."""
        steps: list[tuple[int, bytes]] = []
        while directory != top:
            parent, name = self._namespace.inode(directory).links[0]
            steps.append((directory, name))
            directory = parent
        return steps[::-1]

    def name_unit(self, directory: int, change: Change) -> None:
        """Make a directory a unit from now on (`ckptfs unit DIR`)."""
        change.put(Table.META, _NAMED + key_of(directory), b"")
        self._named.add(directory)

    def notice_root_entry(self, name: bytes, change: Change) -> None:
        """A name was made in the root: see whether the root is itself a run.

        Only while no other directory is there: a tree of runs does not become one unit because
        somebody puts a file named `latest` beside them.
        """
        if self._root_is_run or not _RUN_MARK.fullmatch(name):
            return
        if all(_RUN_MARK.fullmatch(other) for _, other, ino in self._namespace.entries(ROOT_INO, limit=64)
               if self._namespace.inode(ino).is_dir):  # fmt: skip
            change.put(Table.META, _ROOT_IS_RUN, b"1")
            self._root_is_run = True

    def versions_off(self, directory: int) -> bool:
        """Whether versioning is switched off at or above a directory, or for its unit."""
        if any(self._namespace.inode(ino).versions_off for ino in self._namespace.ancestors(directory)):
            return True
        return self.is_off is not None and self.is_off(self.name_of(self.top_of(directory)))

    def _is_unit(self, ino: int, chain: list[int]) -> bool:
        """`chain` runs from `ino` up to the root."""
        if ino in self._named:
            return True
        if any(len(glob) == len(chain) - 1 for glob in self._globs):
            path = [part.decode("utf-8", "surrogateescape") for part in self._parts(ino)]
            if any(self._matches(glob, path) for glob in self._globs):
                return True
        return len(chain) == 2

    def _parts(self, ino: int) -> Iterator[bytes]:
        return iter(self._namespace.path_of(ino)[1:].split(b"/"))

    @staticmethod
    def _matches(glob: list[str], path: list[str]) -> bool:
        return len(glob) == len(path) and all(fnmatchcase(p, g) for p, g in zip(path, glob, strict=True))
