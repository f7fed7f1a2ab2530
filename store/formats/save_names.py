"""What the names of files and directories say about a save: its step, and that it is one.

One rule: a name is a hint that is used where the content says nothing; only a directory whose
whole name is that of a save makes everything below it one save.

Source: the names written by HF Trainer (`checkpoint-100`), Megatron (`iter_0000100`), DeepSpeed
(`global_step100`), Lightning (`epoch=1-step=200.ckpt`), and the usual `step_100`, `step=100`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_NUMBER: Final = r"[-_=]?(\d{1,18})(?!\d)"
_STEP: Final = re.compile(rf"(?:^|[^a-z0-9])(?:global_?steps?|steps?|iter(?:ation)?){_NUMBER}", re.I)
_CHECKPOINT: Final = re.compile(rf"(?:^|[^a-z0-9])(?:checkpoint|ckpt){_NUMBER}", re.I)
_SAVE_DIRECTORY: Final = re.compile(
    r"(?:tmp-)?(?:checkpoint|ckpt|global_?step|step|iter(?:ation)?|epoch)[-_=]?\d{1,18}"
    r"(?:[-_,]step[-_=]?\d{1,18})?(?:-v\d+)?(?:\.ckpt)?|.*\.orbax-checkpoint-tmp.*",
    re.I,
)
_MODEL_FILE: Final = re.compile(
    r"(?:model|pytorch_model|adapter_model|diffusion_pytorch_model)(?:\.\w+)?\.(?:safetensors|bin)"
    r"|.+-\d{5}-of-\d{5}\.(?:safetensors|bin)|.+\.(?:safetensors|bin)\.index(?:\.\w+)?\.json"
)
_TORCH_FILE: Final = re.compile(
    r"(?:optimizer|scheduler|scaler)\.pt|rng_state(?:_\d+)?\.pth|training_args\.bin"
    r"|(?:pytorch_model|adapter_model)(?:-\d{5}-of-\d{5})?\.bin|.+_(?:model|optim)_states\.pt"
    r"|model_optim_rng\.pt|distrib_optim\.pt"
)
_TRAINER_DIRECTORY: Final = re.compile(r"(?:tmp-)?checkpoint-\d{1,18}")
_UNFINISHED: Final = re.compile(r"tmp-checkpoint-\d+|.*\.orbax-checkpoint-tmp.*")


# The names of a unit are the same at every publish; asking the regular expressions each time took
# most of the time of judging 10,000 unchanged files.
_MEMORY: Final = 1 << 15


@lru_cache(maxsize=_MEMORY)
def step_of_name(name: str) -> int | None:
    """Return the step in a file's or directory's own name, or None."""
    found = _STEP.findall(name) or _CHECKPOINT.findall(name)
    return int(found[-1]) if found else None


def is_save_directory(name: str) -> bool:
    """Tell whether a directory of this name is one save with all that is below it."""
    return _SAVE_DIRECTORY.fullmatch(name) is not None


def is_trainer_directory(name: str) -> bool:
    """Tell whether HF Trainer names its saves like this."""
    return _TRAINER_DIRECTORY.fullmatch(name) is not None


def is_unfinished_name(name: str) -> bool:
    """Tell whether a writer renames a directory of this name once it is whole."""
    return _UNFINISHED.fullmatch(name) is not None


@lru_cache(maxsize=_MEMORY)
def is_model_name(name: str) -> bool:
    """Tell whether Hugging Face libraries give weights, or the index of their shards, this name."""
    return _MODEL_FILE.fullmatch(name) is not None


@lru_cache(maxsize=_MEMORY)
def is_torch_name(name: str) -> bool:
    """Tell whether a file of this name can only have been written by torch.save."""
    return _TORCH_FILE.fullmatch(name) is not None


def join(directory: str, name: str) -> str:
    """Return the path of `name` in `directory`, which is "" at the top of a unit."""
    return f"{directory}/{name}" if directory else name


def split(path: str) -> tuple[str, str]:
    """Return directory and name of a path."""
    directory, _, name = path.rpartition("/")
    return directory, name
