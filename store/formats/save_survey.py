"""Judges every save in a tree by the rules of the frameworks that may have written it.

One rule: rules add to what is found and none overrules another, so a save is whole only if no
rule objects.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ckptfs.store.formats.file_verdict import TENSOR_SUFFIXES, Cache, FileView, Folder, Judge
from ckptfs.store.formats.hf_saves import (
    NO_FAMILY,
    TrainerFamily,
    family_of,
    is_trainer_save,
    judge_model,
    judge_trainer,
)
from ckptfs.store.formats.save_names import (
    is_model_name,
    is_trainer_directory,
    is_unfinished_name,
    split,
    step_of_name,
)
from ckptfs.store.formats.save_tree import (
    ORBAX_MARK,
    SaveRoots,
    all_paths,
    group,
    traits,
)
from ckptfs.store.formats.save_values import Checkpoint, Findings
from ckptfs.store.formats.sharded_saves import judge_dcp, judge_deepspeed, judge_megatron
from ckptfs.store.formats.trackers import Tracker, absence, note_uncommitted, read_trackers

_SAVE_SUFFIXES: Final = TENSOR_SUFFIXES | {"distcp", "metadata", "json"}
_WEIGHT_KINDS: Final = frozenset({"safetensors", "gguf", "dcp", "deepspeed"})


@dataclass(frozen=True, slots=True)
class _Report:
    """What one directory's files amount to on their own. Never changed once it is made.

    `part` is what they mean for the save that they belong to, None if they belong to none; `alone`
    are the files that are saves of their own.
    """

    part: Findings | None
    alone: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A report and all that it depended on."""

    basis: tuple[object, ...]
    report: _Report


_Parts = dict[str, _Report]


class Survey:
    """The saves of one tree, by their path. Owned by one task."""

    def __init__(self, files: Mapping[str, FileView], cache: Cache, elsewhere_ranks: frozenset[int]) -> None:
        """Judge the whole tree; files whose verdict the cache has are not opened."""
        self._judge = Judge(files, cache)
        self._cache = cache
        self._elsewhere_ranks = elsewhere_ranks
        self._tree = group(files)
        marked = frozenset(path for path, folder in self._tree.items() if ORBAX_MARK in folder)
        self._roots = SaveRoots(marked)
        self._saves: dict[str, Findings] = {}
        self._alone: list[Checkpoint] = []
        parts: dict[str, _Parts] = {}
        for directory, folder in self._tree.items():
            root = self._roots.root_of(directory)
            report = self._report(directory, folder, root is not None)
            self._alone += report.alone
            if report.part is not None:
                parts.setdefault(directory if root is None else root, {})[directory] = report
        families = self._families(parts)
        for root, below in parts.items():
            found = self._judge_save(root, below, families.get(split(root)[0], NO_FAMILY))
            if found.kinds:
                self._saves[root] = found

    def checkpoints(self) -> list[Checkpoint]:
        """Return all saves, in no order."""
        made = [found.checkpoint(path) for path, found in self._saves.items()]
        return [one for one in made if one is not None] + self._alone

    def _report(self, directory: str, folder: Folder, inside: bool) -> _Report:
        # One entry a directory, replaced when it changes, under a key that no file has.
        key = (directory + "/", None)
        basis = (
            inside,
            self._elsewhere_ranks,
            tuple(folder),
            tuple([view.identity for view in folder.values()]),
        )
        known = self._cache.get(key)
        if isinstance(known, _Remembered) and known.basis == basis:
            return known.report
        report = self._judge_folder(directory, folder, inside)
        if report.part is None or report.part.local:
            self._cache[key] = _Remembered(basis, report)
        return report

    def _judge_folder(self, directory: str, folder: Folder, inside: bool) -> _Report:
        seen = traits(folder)
        inside_by_content = not inside and seen.is_save
        found = Findings()
        if seen.dcp:
            judge_dcp(directory, folder, self._judge, self._elsewhere_ranks, found)
        if seen.deepspeed:
            judge_deepspeed(directory, folder, self._judge, self._elsewhere_ranks, found)
        if seen.model:
            judge_model(directory, folder, self._judge, found)
        if seen.orbax:
            found.kinds.add("orbax")
        prefix = f"{directory}/" if directory else ""
        alone: list[Checkpoint] = []
        judge = self._judge.tensors
        for name in seen.tensor_files:
            verdict = judge(prefix + name, folder[name])
            # A run's own directory may hold a final model beside step_100.pt, step_200.pt, …
            if inside or (inside_by_content and (step_of_name(name) is None or is_model_name(name))):
                if verdict.kind is not None:
                    found.kinds.add(verdict.kind)
                if verdict.objection is not None:
                    found.lack(prefix + name, verdict.objection)
                if found.step is None:
                    found.step = verdict.step
            elif verdict.alone is not None:
                alone.append(verdict.alone)
        return _Report(found if inside or inside_by_content else None, tuple(alone))

    def _judge_save(self, root: str, parts: _Parts, family: TrainerFamily) -> Findings:
        name = split(root)[1]
        found = Findings(step=step_of_name(name))
        for report in parts.values():
            if report.part is not None:
                found.add(report.part)
        if "orbax" in found.kinds and found.step is None and name.partition(".")[0].isdecimal():
            found.step = int(name.partition(".")[0][:18])
        if any("mp_rank_" in directory for directory in parts):
            judge_megatron(root, {path: self._tree[path] for path in parts}, found)
        self._judge_trainer(root, family, found)
        if found.kinds and is_unfinished_name(name):
            found.lack(root, "was never renamed into place")
        return found

    def _judge_trainer(self, root: str, family: TrainerFamily, found: Findings) -> None:
        folder = self._tree.get(root, {})
        if not is_trainer_save(root, folder, family):
            return
        step = step_of_name(split(root)[1])
        previous = family.before(step) if step is not None else None
        has_weights = bool(found.kinds & _WEIGHT_KINDS) or any(map(_is_torch_weights, folder))
        judge_trainer(root, folder, has_weights, previous, self._judge, found)

    def _families(self, roots: Iterable[str]) -> dict[str, TrainerFamily]:
        """Return the Trainer directories below each parent directory."""
        members: dict[str, list[tuple[int, Folder]]] = {}
        for root in roots:
            parent, name = split(root)
            if is_trainer_directory(name):
                member = (step_of_name(name) or 0, self._tree.get(root, {}))
                members.setdefault(parent, []).append(member)
        return {parent: family_of(found) for parent, found in members.items()}

    def judge_trackers(self) -> list[str]:
        """Hold the trackers against the saves; return what the trackers of whole runs lack.

        A save that a tracker names and that is absent becomes a save that lacks everything.
        """
        trackers = read_trackers(self._tree, self._judge)
        if not trackers:
            return []
        present = all_paths(self._judge.files, self._tree)
        beside: dict[str, dict[str, Findings]] = {}
        for path, found in self._saves.items():
            if path:
                beside.setdefault(split(path)[0], {})[path] = found
        complaints: list[str] = []
        for tracker in trackers:
            directory = split(tracker.path)[0]
            root = self._roots.root_of(directory)
            inner = self._saves.get(directory if root is None else root)
            if root is not None and inner is not None:
                # It belongs to that save alone: an old save must not hold back later versions.
                why = absence(tracker, present, {root: inner})
                if why is not None:
                    inner.lack(tracker.path, why)
                continue
            complaint = self._judge_run_tracker(tracker, present, beside.get(directory, {}))
            complaints += [complaint] if complaint else []
        return complaints

    def _judge_run_tracker(
        self, tracker: Tracker, present: Container[str], beside: Mapping[str, Findings]
    ) -> str | None:
        why = absence(tracker, present, beside)
        if why is None:
            note_uncommitted(tracker, beside)
            return None
        complaint = f"{tracker.path} ({why})"
        if tracker.target is not None:
            step = step_of_name(split(tracker.target)[1])
            self._saves[tracker.target] = Findings({tracker.kind}, step, [complaint])
        return complaint

    def saves_of(self, changed: Iterable[str]) -> set[str]:
        """Return the saves that a change of these paths concerns, removed paths included."""
        concerned: set[str] = set()
        for path in changed:
            directory, name = split(path)
            removed = path not in self._judge.files
            root = self._roots.root_of(directory)
            concerned.add(path)
            if removed and (below := self._roots.root_of(path)) is not None:
                concerned.add(below)
            # A log that grows beside the weights does not make their save a changed one.
            if removed or name.rpartition(".")[2] in _SAVE_SUFFIXES:
                concerned.add(directory if root is None else root)
        return concerned


def _is_torch_weights(name: str) -> bool:
    return name.startswith(("pytorch_model", "adapter_model"))
