"""The series of real training that the codecs are measured on, and the files of their saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptfs.store.formats.save_names import step_of_name

# (series, its saves, goal of issue 9, how its files are found)
SERIES = (
    ("AdamW .pt", 1.29, ("adamw/*.pt",)),
    ("HF full directories", 1.36, ("trainer/checkpoint-*/*",)),
    ("bf16 weights of the fine-tune", 3.8, ("finetuned/*",)),
    ("bf16 weights of the pretraining", None, ("exports/*.bf16.safetensors",)),
    ("LoRA whole model", 4.7, ("lora/*.safetensors",)),
    (".pt + fp32 + bf16 exports", 1.78, ("adamw/*.pt", "exports/*")),
)


def saves_of(folder: Path, globs: Iterable[str]) -> Iterator[list[Path]]:
    """The files of each save, by step: one below a directory or a file that carries the step's name."""
    by_step: dict[int, list[Path]] = {}
    for pattern in globs:
        for path in sorted(folder.glob(pattern)):
            steps = [step_of_name(part) for part in path.relative_to(folder).parts]
            step = next((one for one in reversed(steps) if one is not None), None)
            assert step is not None, path
            by_step.setdefault(step, []).append(path)
    return (by_step[step] for step in sorted(by_step))
