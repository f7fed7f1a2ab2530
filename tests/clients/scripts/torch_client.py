"""torch.save and safetensors as a training job calls them, each save made twice: on the mount and in a plain
folder, so that the test has the truth without asking the mount.

A state is a function of (seed, step, elements): whoever loads can compute what should come out.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from protocol import serve

HELD: dict[str, dict[str, torch.Tensor]] = {}


def tensors(seed: int, step: int, elements: int) -> dict[str, torch.Tensor]:
    """A small model: three weights of different types that all change with the step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return {
        "model.embed.weight": torch.randn(elements // 64, 64, generator=generator),
        "model.layer.0.weight": torch.randn(elements // 128, 128, generator=generator).to(torch.bfloat16),
        "model.layer.0.bias": torch.randn(97, generator=generator),
    }


def training_state(seed: int, step: int, elements: int) -> dict[str, object]:
    model = tensors(seed, step, elements)
    momentum = {name: weight.float() * 0.9 for name, weight in model.items()}
    return {"step": step, "model": model, "optimizer": {"momentum": momentum, "lr": 1e-3 / step}}


def torch_save(paths: list[str], seed: int, step: int, elements: int, legacy: bool) -> None:
    state = training_state(seed, step, elements)
    for path in paths:
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)


def torch_load(path: str, seed: int, step: int, elements: int, mapped: bool) -> bool:
    """Whether the file holds exactly the state of that step."""
    state = torch.load(path, mmap=mapped, weights_only=True)
    return _equal(state, training_state(seed, step, elements))


def safetensors_save(paths: list[str], seed: int, step: int, elements: int) -> None:
    for path in paths:
        safetensors.torch.save_file(tensors(seed, step, elements), path, metadata={"step": str(step)})


def safetensors_load(path: str, seed: int, step: int, elements: int) -> bool:
    with safetensors.safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return file.metadata()["step"] == str(step) and _equal(found, tensors(seed, step, elements))


def hold(path: str) -> None:
    """Map a checkpoint and keep it mapped, as a reader that pages weights in when it needs them does."""
    if path.endswith(".safetensors"):
        HELD[path] = safetensors.torch.load_file(path)
    else:
        HELD[path] = torch.load(path, mmap=True, weights_only=True)["model"]


def check_held(path: str, seed: int, step: int, elements: int) -> bool:
    return _equal(HELD.pop(path), tensors(seed, step, elements))


def held_step(path: str, seed: int, steps: list[int], elements: int) -> int | None:
    """Which of these steps the mapped tensors show now; None if they are a mixture."""
    held = HELD.pop(path)
    return next((step for step in steps if _equal(held, tensors(seed, step, elements))), None)


def read_mapped(path: str) -> str:
    """The file's bytes as a shared mapping shows them, as hexadecimal SHA-256."""
    import hashlib

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        return hashlib.sha256(mapping).hexdigest()


def libraries() -> dict[str, str]:
    place = Path(safetensors.__file__).parent
    return {"torch": torch.__version__, "safetensors": safetensors.__version__, "place": os.fspath(place)}


def _equal(found: object, wanted: object) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(_equal(found[key], wanted[key]) for key in wanted)
        )
    return found == wanted


if __name__ == "__main__":
    operations = (torch_save, torch_load, safetensors_save, safetensors_load)
    operations += (hold, check_held, held_step, read_mapped, libraries)
    serve({operation.__name__: operation for operation in operations})
