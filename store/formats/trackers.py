"""Tracker files: the one file of a run that names its newest save, written last.

One rule: a tracker that names something absent, or still names an older step than the newest save
has, means that a save has not been finished.

Source: DeepSpeed's `latest` (the tag, a directory beside it) and Megatron's
`latest_checkpointed_iteration.txt` (a number for `iter_%07d`, or `release`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final

from ckptfs.store.formats.file_verdict import Folder, Judge
from ckptfs.store.formats.save_names import join, split, step_of_name
from ckptfs.store.formats.save_values import Findings

LATEST: Final = "latest"
ITERATION: Final = "latest_checkpointed_iteration.txt"
_KINDS: Final = {LATEST: "deepspeed", ITERATION: "megatron"}


@dataclass(frozen=True, slots=True)
class Tracker:
    """A tracker file and the directory that it names; `target` is None when it names none."""

    path: str
    kind: str
    target: str | None


def read_trackers(tree: Mapping[str, Folder], judge: Judge) -> list[Tracker]:
    """Return the trackers of a tree."""
    trackers: list[Tracker] = []
    for directory, folder in tree.items():
        for name, kind in _KINDS.items():
            if name in folder:
                path = join(directory, name)
                tag = _tag(name, judge.tracker(path).line)
                trackers.append(Tracker(path, kind, join(directory, tag) if tag else None))
    return trackers


def _tag(name: str, line: str | None) -> str | None:
    if line is None or "/" in line or line in {".", ".."} or len(line) > 255:
        return None
    if name == LATEST or line == "release":
        return line
    return f"iter_{int(line):07d}" if line.isascii() and line.isdigit() and len(line) <= 18 else None


def absence(tracker: Tracker, present: Container[str], beside: Mapping[str, Findings]) -> str | None:
    """Return what is wrong with the target of a tracker, or None.

    `present` are the paths of the tree, directories included; `beside` are the saves in the
    tracker's own directory. A file called `latest` is a tracker only if there are such, or if it
    names a step.
    """
    kin = any(tracker.kind in found.kinds for found in beside.values())
    if tracker.target is None:
        return "names no save" if kin or tracker.kind == "megatron" else None
    name = split(tracker.target)[1]
    if tracker.target in present:
        return None
    if kin or tracker.kind == "megatron" or step_of_name(name) is not None:
        return f"names {name}, which is absent"
    return None


def note_uncommitted(tracker: Tracker, beside: Mapping[str, Findings]) -> None:
    """Mark the newest save as unfinished if its tracker still names an older one."""
    named = step_of_name(split(tracker.target)[1]) if tracker.target is not None else None
    steps = [
        (found.step, path)
        for path, found in beside.items()
        if found.step is not None and tracker.kind in found.kinds
    ]
    if named is None or not steps or max(steps)[0] <= named:
        return
    beside[max(steps)[1]].lack(tracker.path, f"still names step {named}")
