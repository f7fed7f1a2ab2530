"""What a save is found to be: the values that judging a tree yields.

One rule: a save is complete if and only if nothing is noted as missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

MAX_MISSING: Final = 100
"""More would drown a log line; a last entry then says how many more there are."""

# From the most telling to the least: a Trainer directory may hold a DeepSpeed save, which holds
# torch files.
_KINDS: Final = (
    "hf-trainer",
    "megatron",
    "deepspeed",
    "dcp",
    "orbax",
    "peft",
    "hf-model",
    "lightning",
    "torch",
    "safetensors",
    "gguf",
)


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


@dataclass(slots=True)
class Findings:
    """What is known of one save so far; the rules add to it one after the other.

    A finding names the path that is at fault, so that a person knows what to look for. `local` is
    False if it depended on files of other directories.
    """

    kinds: set[str] = field(default_factory=set)
    step: int | None = None
    missing: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    local: bool = True

    def lack(self, path: str, why: str | None = None) -> None:
        """Note that a file is absent or, with a reason, not whole."""
        self.missing.append(f"{path} ({why})" if why else path)

    def add(self, other: Findings) -> None:
        """Take over what was found of a part of this save; the step that is known stays."""
        self.kinds |= other.kinds
        self.missing += other.missing
        self.elsewhere += other.elsewhere
        if self.step is None:
            self.step = other.step

    def checkpoint(self, path: str) -> Checkpoint | None:
        """Return the save at `path`, or None when nothing that is a save was found."""
        kind = next((kind for kind in _KINDS if kind in self.kinds), None)
        if kind is None:
            return None
        missing = tuple(dict.fromkeys(self.missing)) if self.missing else ()
        if len(missing) > MAX_MISSING:
            rest = f"and {len(missing) - MAX_MISSING} more in {path or 'the unit'}"
            missing = (*missing[:MAX_MISSING], rest)
        return Checkpoint(
            path,
            kind,
            self.step,
            "partial" if missing else "complete",
            missing,
            tuple(self.elsewhere),
        )
