"""Which files of a unit belong to which save.

One rule: every file belongs to at most one save. A directory that is named like a save (or holds
what only the top of one holds) takes in everything below it; otherwise a directory with parts of
a save is one save, and any other tensor file is a save of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptfs.store.formats.file_verdict import TENSOR_SUFFIXES, FileView, Folder
from ckptfs.store.formats.save_names import (
    is_model_name,
    is_save_directory,
    is_trainer_directory,
    split,
    step_of_name,
)
from ckptfs.store.formats.sharded_saves import is_deepspeed_name, is_megatron_directory

ORBAX_MARK = "_CHECKPOINT_METADATA"
_HF_MARKS = frozenset({"trainer_state.json", "adapter_config.json"})


@dataclass(slots=True)
class FolderTraits:
    """What kinds of files a directory holds. `tensor_files` can each be judged alone."""

    dcp: bool = False
    deepspeed: bool = False
    model: bool = False
    orbax: bool = False
    tensor_files: list[str] = field(default_factory=list)

    @property
    def is_save(self) -> bool:
        """Whether the files belong together even though the directory's name does not say so."""
        return self.dcp or self.deepspeed or self.model or self.orbax


def group(files: Mapping[str, FileView]) -> dict[str, dict[str, FileView]]:
    """Return the files of each directory by name; the unit's own directory is ""."""
    tree: dict[str, dict[str, FileView]] = {}
    for path, view in files.items():
        directory, _, name = path.rpartition("/")
        folder = tree.get(directory)
        if folder is None:
            folder = tree[directory] = {}
        folder[name] = view
    return tree


def traits(folder: Folder) -> FolderTraits:
    """Look at the names in a directory, once."""
    result = FolderTraits(orbax=ORBAX_MARK in folder or "manifest.ocdbt" in folder)
    for name in folder:
        suffix = name.rpartition(".")[2]
        if suffix in TENSOR_SUFFIXES:
            result.tensor_files.append(name)
            if suffix == "pt":
                result.deepspeed = result.deepspeed or is_deepspeed_name(name)
            elif not result.model:
                result.model = is_model_name(name)
        elif suffix == "distcp" or suffix == "metadata":
            result.dcp = True
        elif suffix == "json" and not result.model:
            result.model = name in _HF_MARKS or is_model_name(name)
    return result


def all_paths(files: Iterable[str], directories: Iterable[str]) -> set[str]:
    """Return the files and every directory that exists because something lies below it."""
    paths = set(files)
    for directory in directories:
        while directory and directory not in paths:
            paths.add(directory)
            directory = split(directory)[0]
    return paths


class SaveRoots:
    """Finds the top directory of the save that a directory belongs to; remembers the answers."""

    def __init__(self, marked: frozenset[str]) -> None:
        """`marked` are directories that are tops of saves whatever they are called."""
        self._marked = marked
        self._known: dict[str, str | None] = {}

    def root_of(self, directory: str) -> str | None:
        """Return the save's top directory, or None when names do not tell of any."""
        # Not by recursion: a path can have more parts than Python has frames.
        pending: list[str] = []
        while directory not in self._known:
            pending.append(directory)
            if not directory:
                break
            directory = split(directory)[0]
        root = self._known.get(directory)
        for one in reversed(pending):
            root = self._known[one] = self._find(one, root)
        return root

    def _find(self, directory: str, above: str | None) -> str | None:
        parent, name = split(directory)
        if directory in self._marked or is_save_directory(name):
            step = step_of_name(name)
            # checkpoint-100/global_step100 is one save, stage_2/checkpoint-100 is not.
            if above is None or not (
                step is None or is_trainer_directory(split(above)[1]) or step == step_of_name(split(above)[1])
            ):
                return directory
        if above is None and is_megatron_directory(name):
            return parent
        return above
