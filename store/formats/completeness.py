"""Whether every save in a unit's tree is whole, and so whether a version of it is.

One rule: a version that could be resumed from wrongly is never called complete, and a save that
died long ago does not keep later versions from being called so. Judged by the rules of each
framework (hf_saves, sharded_saves, trackers) on names, lengths and headers; payloads are not read.

A save that is partial holds a version back if it changed since the version before, or if it has
the newest step, for that is the one a job resumes from. An older one that nobody touches is
listed for ever, but one killed save must not stop `latest-complete` for ever. A version in which no save is
whole is never complete: whatever changed, there is nothing in it to resume from.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from ckptfs.store.formats.file_verdict import FileView
from ckptfs.store.formats.save_survey import Survey
from ckptfs.store.formats.save_values import Checkpoint

__all__ = ["Assessment", "Checkpoint", "FileView", "assess"]

State = Literal["complete", "partial", "opaque"]


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
    since_step: int | None = None,
) -> Assessment:
    """Judge a unit's tree.

    `files` are the unit's regular files by relative path. `changed` are the paths that were
    written, made or removed since the version before; None is all. `cache` keeps verdicts on
    files by (path, identity) and is filled here; its owner may drop entries at will.
    `elsewhere_ranks` are the global ranks that write to other nodes' trees: their absent DCP and
    DeepSpeed parts are "elsewhere" instead of missing. Saves of steps before `since_step` are listed,
    and do not hold a version back. Raises only what the readers raise.
    """
    survey = Survey(files, {} if cache is None else cache, elsewhere_ranks)
    complaints = survey.judge_trackers()
    checkpoints = survey.checkpoints()
    # Two passes of one key each: a key of two parts would double the cost at 10,000 saves.
    checkpoints.sort(key=attrgetter("path"))
    checkpoints.sort(key=lambda one: -1 if one.step is None else one.step)
    if not checkpoints and not complaints:
        return Assessment("opaque", None, (), ())
    newest = _newest(checkpoints)
    touched = survey.saves_of(changed) if changed is not None else None
    held = any(
        one.state == "partial"
        and (since_step is None or one.step is None or one.step >= since_step)
        and (touched is None or one.path in touched or (one.step is not None and one.step == newest))
        for one in checkpoints
    )
    complete = [one for one in checkpoints if one.state == "complete"]
    whole = _newest(complete)
    missing = dict.fromkeys([*complaints, *(name for one in checkpoints for name in one.missing)])
    return Assessment(
        "partial" if held or complaints or not complete else "complete",
        newest if whole is None else whole,
        tuple(missing),
        tuple(checkpoints),
    )


def _newest(checkpoints: Iterable[Checkpoint]) -> int | None:
    return max((one.step for one in checkpoints if one.step is not None), default=None)
