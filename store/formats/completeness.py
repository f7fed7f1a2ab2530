"""Whether every save in a unit's tree is whole, and so whether a version of it is.

One rule: a version that could be resumed from wrongly is never called complete, and a save that
died long ago does not keep later versions from being called so. Judged by the rules of each
framework (hf_saves, sharded_saves, trackers) on names, lengths and headers; payloads are not read.

A save that is partial holds a version back if it changed since the version before, or if it has
the newest step, for that is the one a job resumes from. An older one that nobody touches is
listed for ever, but one killed save must not stop `latest-complete` for ever.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final, Literal

from ckptfs.store.formats.file_verdict import TENSOR_SUFFIXES, FileView, Judge
from ckptfs.store.formats.hf_saves import TRAINER_STATE, is_trainer_save, judge_model, judge_trainer
from ckptfs.store.formats.save_names import (
    is_model_name,
    is_save_directory,
    is_trainer_directory,
    is_unfinished_name,
    split,
    step_of_name,
)
from ckptfs.store.formats.save_pieces import Findings, Folder, judge_tensor_files
from ckptfs.store.formats.save_tree import FolderTraits, ORBAX_MARK, SaveRoots, all_paths, group, traits
from ckptfs.store.formats.sharded_saves import judge_dcp, judge_deepspeed, judge_megatron
from ckptfs.store.formats.trackers import Tracker, absence, note_uncommitted, read_trackers

__all__ = ["Assessment", "Checkpoint", "FileView", "assess"]

State = Literal["complete", "partial", "opaque"]
MAX_MISSING: Final = 100
"""More would drown a log line; a last entry then says how many more there are."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One save. `path` is its directory or file within the unit ("" is the unit itself).

    `kind` is "hf-trainer", "hf-model", "peft", "dcp", "deepspeed", "megatron", "orbax",
    "lightning", "torch", "safetensors" or "gguf". `missing` names what is absent, or not whole
    with the reason in brackets. `elsewhere` names parts that ranks on other nodes keep.
    """

    path: str
    kind: str
    step: int | None
    state: Literal["complete", "partial"]
    missing: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assessment:
    """The state of a version, its step, and its saves in the order of step and path.

    `step` is the newest complete one, or the newest of all if none is complete. `missing` is what
    the partial saves and the trackers lack.
    """

    state: State
    step: int | None
    missing: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]


def assess(
    files: Mapping[str, FileView],
    changed: frozenset[str] | None = None,
    cache: MutableMapping[tuple[str, Hashable], object] | None = None,
    elsewhere_ranks: frozenset[int] = frozenset(),
) -> Assessment:
    """Judge a unit's tree.

    `files` are the unit's regular files by relative path. `changed` are the paths that were
    written, made or removed since the version before; None is all. `cache` keeps verdicts on
    files by (path, identity) and is filled here; its owner may drop entries at will.
    `elsewhere_ranks` are the global ranks that write to other nodes' trees: their absent DCP and
    DeepSpeed parts are "elsewhere" instead of missing. Raises only what the readers raise.
    """
    judge = Judge(files, {} if cache is None else cache)
    survey = _Survey(judge, elsewhere_ranks)
    complaints = survey.judge_trackers()
    checkpoints = sorted(
        (_checkpoint(path, found) for path, found in survey.saves.items() if found.kind),
        key=lambda one: (-1 if one.step is None else one.step, one.path),
    )
    if not checkpoints and not complaints:
        return Assessment("opaque", None, (), ())
    steps = [one.step for one in checkpoints if one.step is not None]
    whole = [one.step for one in checkpoints if one.step is not None and one.state == "complete"]
    touched = survey.saves_of(changed) if changed is not None else None
    held = any(
        one.state == "partial" and (touched is None or one.path in touched or one.step == max(steps, default=-1))
        for one in checkpoints
    )
    missing = dict.fromkeys([*complaints, *(name for one in checkpoints for name in one.missing)])
    return Assessment(
        "partial" if held or complaints else "complete",
        max(whole or steps, default=None),
        tuple(missing),
        tuple(checkpoints),
    )


def _checkpoint(path: str, found: Findings) -> Checkpoint:
    missing = list(dict.fromkeys(found.missing))
    if len(missing) > MAX_MISSING:
        missing[MAX_MISSING:] = [f"and {len(missing) - MAX_MISSING} more in {path or 'the unit'}"]
    assert found.kind is not None
    step = found.step if found.step is not None else step_of_name(split(path)[1])
    state: Literal["complete", "partial"] = "partial" if missing else "complete"
    return Checkpoint(path, found.kind, step, state, tuple(missing), tuple(found.elsewhere))
