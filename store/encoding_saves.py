"""Which files of a unit's history make up a save, and which of them are not the newest of their kind.

One rule: what is called newest stays raw; a file is the newest of its kind if no other whose path is the
same, apart from the step in it, is of a later step or, at the same step, of a later version; among all files,
or among those that the newest version holds (a roll back goes back to an earlier step). Pure.

Source: FORMAT.md, "Encoded segments"; encoding_plan.py, which orders saves in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckptfs.store.encoding_plan import path_key, path_step
from ckptfs.store.ids import RecipeId


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A content of a path, and the version (its number and time) that had it first."""

    path: str
    recipe: RecipeId
    size: int
    version: int
    time_ns: int

    @property
    def order(self) -> tuple[int, int]:
        """What is of a later save has a greater one."""
        return path_step(self.path) or 0, self.version


@dataclass(slots=True)
class SavedFiles:
    """The files of one save by path: those of one step, or, without a step, of one version."""

    step: int | None
    number: int
    files: dict[str, SavedFile] = field(default_factory=dict)


def group_saves(files: Iterable[SavedFile]) -> list[SavedFiles]:
    """The saves that files make up, the earliest first. A path that a step has twice begins another one."""
    saves: dict[tuple[int | None, int], SavedFiles] = {}
    of_step: dict[int, SavedFiles] = {}
    for one in sorted(files, key=lambda file: (file.version, file.path)):
        step = path_step(one.path)
        save = of_step.get(step) if step is not None else saves.get((None, one.version))
        if save is None or one.path in save.files:
            save = saves[step, one.version] = SavedFiles(step, one.version)
            if step is not None:
                of_step[step] = save
        save.files[one.path] = one
    return sorted(saves.values(), key=lambda save: (save.step or 0, save.number))


def newest_files(files: Sequence[SavedFile]) -> set[RecipeId]:
    """The contents that are the newest of their kind."""
    newest: dict[str, SavedFile] = {}
    for one in files:
        key = path_key(one.path)
        if key not in newest or newest[key].order < one.order:
            newest[key] = one
    return {one.recipe for one in newest.values()}
