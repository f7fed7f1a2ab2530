"""What the rules of the frameworks find out about one save, and the rule for plain files.

One rule: a finding names the path that is at fault, so that a person knows what to look for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptfs.store.formats.file_verdict import LIGHTNING_KEY, FileView, Judge, TensorVerdict
from ckptfs.store.formats.save_names import is_torch_name, join

Folder = Mapping[str, FileView]

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


@dataclass(slots=True)
class Findings:
    """What is known of one save so far; the rules add to it one after the other."""

    kinds: set[str] = field(default_factory=set)
    step: int | None = None
    missing: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str | None:
        """The most telling of the kinds that were seen, or None when it is no save at all."""
        return next((kind for kind in _KINDS if kind in self.kinds), None)

    def lack(self, path: str, why: str | None = None) -> None:
        """Note that a file is absent or, with a reason, not whole."""
        self.missing.append(f"{path} ({why})" if why else path)


def judge_tensor_files(directory: str, names: Iterable[str], judge: Judge, found: Findings) -> None:
    """Judge files that may hold tensors each on its own."""
    for name in names:
        path = join(directory, name)
        verdict = judge.tensors(path)
        if verdict.format is not None:
            found.kinds.add(kind_of(verdict))
            if verdict.damage is not None:
                found.lack(path, verdict.damage)
            if found.step is None:
                found.step = verdict.step
        elif is_torch_name(name):
            found.lack(path, "is no torch file")


def kind_of(verdict: TensorVerdict) -> str:
    """Return the kind of save that a single file is."""
    assert verdict.format is not None
    if LIGHTNING_KEY in verdict.numbers:
        return "lightning"
    return "torch" if verdict.format.startswith("torch") else verdict.format
