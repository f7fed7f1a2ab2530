"""Judges every save in a tree by the rules of the frameworks that may have written it.

One rule: rules add to what is found and none overrules another, so a save is whole only if no
rule objects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from ckptfs.store.formats.file_verdict import TENSOR_SUFFIXES, Judge
from ckptfs.store.formats.hf_saves import TRAINER_STATE, is_trainer_save, judge_model, judge_trainer
from ckptfs.store.formats.save_names import (
    is_model_name,
    is_trainer_directory,
    is_unfinished_name,
    split,
    step_of_name,
)
from ckptfs.store.formats.save_pieces import Findings, Folder, judge_tensor_files
from ckptfs.store.formats.save_tree import (
    ORBAX_MARK,
    FolderTraits,
    SaveRoots,
    all_paths,
    group,
    traits,
)
from ckptfs.store.formats.sharded_saves import judge_dcp, judge_deepspeed, judge_megatron
from ckptfs.store.formats.trackers import Tracker, absence, note_uncommitted, read_trackers

_SAVE_SUFFIXES: Final = TENSOR_SUFFIXES | {"distcp", "metadata", "json"}
_WEIGHT_KINDS: Final = frozenset({"safetensors", "gguf", "dcp", "deepspeed"})

_Parts = dict[str, tuple[Folder, FolderTraits]]


class Survey:
    """The saves of one tree, by their path. Owned by one task."""

    def __init__(self, judge: Judge, elsewhere_ranks: frozenset[int]) -> None:
        """Judge the whole tree; files whose verdict the judge knows are not opened."""
        self.saves: dict[str, Findings] = {}
        self._judge = judge
        self._elsewhere_ranks = elsewhere_ranks
        self._tree = group(judge.files)
        marked = frozenset(path for path, folder in self._tree.items() if ORBAX_MARK in folder)
        self._roots = SaveRoots(marked)
        parts: dict[str, _Parts] = {}
        for directory, folder in self._tree.items():
            self._assign(directory, folder, parts)
        families = _families(parts)
        for root, below in parts.items():
            found = self._judge_save(root, below, families.get(split(root)[0], ()))
            if found.kinds:
                self.saves[root] = found

    def _assign(self, directory: str, folder: Folder, parts: dict[str, _Parts]) -> None:
        """Give a directory to its save, and judge the files that are saves of their own."""
        seen = traits(folder)
        root = self._roots.root_of(directory)
        alone: list[str] = []
        if root is None and seen.is_save:
            root = directory
            # A run's own directory may hold a final model beside step_100.pt, step_200.pt, …
            alone = [
                name
                for name in seen.tensor_files
                if step_of_name(name) is not None and not is_model_name(name)
            ]
        elif root is None:
            alone = seen.tensor_files
        for name in alone:
            found = Findings(step=step_of_name(name))
            judge_tensor_files(directory, (name,), self._judge, found)
            if found.kinds:
                self.saves[f"{directory}/{name}" if directory else name] = found
        if root is not None:
            own = set(seen.tensor_files).difference(alone)
            seen.tensor_files = [name for name in seen.tensor_files if name in own]
            parts.setdefault(root, {})[directory] = (folder, seen)

    def _judge_save(self, root: str, parts: _Parts, family: Iterable[tuple[int, Folder]]) -> Findings:
        name = split(root)[1]
        found = Findings(step=step_of_name(name))
        for directory, (folder, seen) in parts.items():
            if seen.dcp:
                judge_dcp(directory, folder, self._judge, self._elsewhere_ranks, found)
            if seen.deepspeed:
                judge_deepspeed(directory, folder, self._judge, self._elsewhere_ranks, found)
            if seen.model:
                judge_model(directory, folder, self._judge, found)
            if seen.orbax:
                found.kinds.add("orbax")
                if found.step is None and name.partition(".")[0].isdecimal():
                    found.step = int(name.partition(".")[0][:18])
            judge_tensor_files(directory, seen.tensor_files, self._judge, found)
        judge_megatron(root, {path: folder for path, (folder, _) in parts.items()}, found)
        self._judge_trainer(root, parts, list(family), found)
        if found.kinds and is_unfinished_name(name):
            found.lack(root, "was never renamed into place")
        return found

    def _judge_trainer(
        self, root: str, parts: _Parts, family: list[tuple[int, Folder]], found: Findings
    ) -> None:
        folder: Folder = parts[root][0] if root in parts else {}
        step = step_of_name(split(root)[1])
        with_state = [other for other in family if other[1] is not folder and TRAINER_STATE in other[1]]
        siblings = len(family) > 1
        if not is_trainer_save(root, folder, bool(with_state) if siblings else None):
            return
        earlier = bisect_left(with_state, step if step is not None else -1, key=lambda one: one[0])
        previous = with_state[earlier - 1][1] if earlier else None
        has_weights = bool(found.kinds & _WEIGHT_KINDS) or any(
            name.startswith(("pytorch_model", "adapter_model")) for name in folder
        )
        judge_trainer(root, folder, has_weights, previous, self._judge, found)
