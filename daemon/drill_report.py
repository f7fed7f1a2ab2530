"""What a drill has found, and what that amounts to: good, suspect, or failed.

One rule: it has failed if anything would have kept somebody from going on with the version; what has only
another shape than in the version before is suspect, for people to judge. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias, cast

import msgspec

from ckptfs.daemon.messages import Json, Outcome
from ckptfs.store.formats import Layout
from ckptfs.store.formats.save_names import step_of_name

Shapes: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) by the name of a tensor."""
MOST_DEVIATIONS = 100


class LoadedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What loading one file came to. `loader` is who read it: "safetensors", "torch", "json", or "ckptfs",
    whose parser has found all tensors and read them. `refused`: torch would not load it with weights_only,
    which says that it holds objects, and nothing of its bytes. `error`: it cannot be loaded."""

    path: str
    bytes: int
    loader: str
    tensors: int = 0
    refused: str | None = None
    error: str | None = None

    def renamed(self, path: str) -> LoadedFile:
        """The same under another path."""
        return msgspec.structs.replace(self, path=path)


class Drill(msgspec.Struct, kw_only=True):
    """The report. Times in seconds: of what was done, and how old the version is. `reasons`: why it is not
    good, worst first. `probe_output`: what the probe said, of `probe_output_bytes` the first and the last
    4096 if there are more."""

    path: str
    unit: str
    version: str
    number: int
    step: int | None
    state: str
    source: str
    started_ns: int
    data_age_s: float
    fetch_s: float = 0.0
    verify_s: float = 0.0
    load_s: float = 0.0
    probe_s: float = 0.0
    recovery_s: float = 0.0
    checked_bytes: int = 0
    files: list[LoadedFile] = []
    before: str | None = None
    deviations: list[str] = []
    failures: list[str] = []
    probe: str | None = None
    probe_output: str = ""
    probe_output_bytes: int = 0

    @property
    def outcome(self) -> Outcome:
        """The judgement."""
        if self.failures or any(one.error for one in self.files):
            return "failed"
        return "suspect" if self.deviations else "good"

    @property
    def reasons(self) -> list[str]:
        """Why it is not good."""
        broken = [f"{one.path}: {one.error}" for one in self.files if one.error]
        return [*self.failures, *broken, *self.deviations]

    def as_json(self) -> dict[str, Json]:
        """What `--json` and the report's file have."""
        fields = cast("dict[str, Json]", msgspec.to_builtins(self))
        reasons: list[Json] = [*self.reasons]
        return {"outcome": self.outcome, "reasons": reasons, **fields}

    def lines(self) -> list[str]:
        """The report for people."""
        loaded = [one for one in self.files if not one.error]
        by_loader = {
            who: sum(one.loader == who for one in loaded) for who in sorted({o.loader for o in loaded})
        }
        how = ", ".join(f"{count} by {who}" for who, count in by_loader.items()) or "none"
        size = sum(one.bytes for one in self.files)
        tensors = sum(one.tensors for one in self.files)
        step = "" if self.step is None else f", step {self.step}"
        lines = [
            f"{self.outcome.upper()}: {self.unit} {self.version} ({self.state}{step}) from {self.source}",
            f"recovery took {self.recovery_s:.1f} s: fetched in {self.fetch_s:.1f}, verified in "
            f"{self.verify_s:.1f}, loaded in {self.load_s:.1f}; the data are {_age(self.data_age_s)} old",
            f"files loaded: {how}; {tensors} tensors, {size} bytes; {self.checked_bytes} bytes were hashed",
        ]
        lines += [f"{one.path}: not loaded as a whole: {one.refused}" for one in self.files if one.refused]
        if self.before is not None:
            lines.append(f"names, dtypes and shapes were compared with those of {self.before}")
        if self.probe is not None:
            lines.append(f"the probe ran for {self.probe_s:.1f} s: {self.probe}")
        return [*lines, *(f"- {reason}" for reason in self.reasons)]


def shapes_of(layout: Layout) -> Shapes:
    """The tensors of a file."""
    return {one.name: (one.dtype, one.shape) for one in layout.tensors}


def newest_of_each(paths: Iterable[str]) -> dict[str, str]:
    """Of files that differ only in the step that their path tells, the one of the highest step, by the path
    with `*` in place of the step: what a job would go on from."""
    newest: dict[str, tuple[int, str]] = {}
    for path in sorted(paths):
        key, step = _without_step(path)
        if key not in newest or step >= newest[key][0]:
            newest[key] = (step, path)
    return {key: path for key, (_, path) in newest.items()}


def deviations(now: Mapping[str, Shapes], before: Mapping[str, Shapes]) -> list[str]:
    """How the tensors differ from those of the version before, in sentences; files by their `newest_of_each`
    keys. Values are not compared."""
    said: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        if key not in now:
            said.append(f"{key}: the version before has it, and this one has not")
        elif key in before:
            said += _of_file(key, now[key], before[key])
    more = len(said) - MOST_DEVIATIONS
    return said if more <= 0 else [*said[:MOST_DEVIATIONS], f"and {more} more"]


def _of_file(key: str, now: Shapes, before: Shapes) -> list[str]:
    said = [f"{key}: the tensor {name!r} is missing" for name in sorted(before.keys() - now.keys())]
    said += [f"{key}: the tensor {name!r} is new" for name in sorted(now.keys() - before.keys())]
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            old, new = (f"{dtype} {list(shape)}" for dtype, shape in (before[name], now[name]))
            said.append(f"{key}: the tensor {name!r} was {old} and is {new}")
    return said


def _without_step(path: str) -> tuple[str, int]:
    parts, highest = [], -1
    for part in path.split("/"):
        step = step_of_name(part)
        if step is not None:
            highest = max(highest, step)
            part = re.sub(rf"(?<!\d)0*{step}(?!\d)", "*", part)
        parts.append(part)
    return "/".join(parts), highest


def _age(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
