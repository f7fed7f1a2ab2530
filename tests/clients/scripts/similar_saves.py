"""Saves that are nearly the same as others: LoRA runs, the same weights in two formats, rank duplicates.

The base model is the same in every call: 32 MiB of random BF16, which no compressor makes smaller.
"""

from __future__ import annotations

import random

import safetensors.torch
import torch
from protocol import serve

LAYERS, ROWS, COLUMNS, LORA_RANK = 8, 1024, 2048, 2


class Layer(torch.nn.Module):
    """A frozen matrix with a trainable low-rank correction, as PEFT wraps it."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        weight = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.lora_A = torch.nn.Parameter(torch.randn(LORA_RANK, COLUMNS, generator=generator))
        self.lora_B = torch.nn.Parameter(torch.zeros(ROWS, LORA_RANK))


def model_at(step: int) -> torch.nn.ModuleList:
    """The model after so many steps: every value of A and B has changed, the base has not."""
    generator = torch.Generator().manual_seed(17)
    model = torch.nn.ModuleList([Layer(generator) for _ in range(LAYERS)])
    updates = torch.Generator().manual_seed(1000 + step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 1e-3 * torch.randn(parameter.shape, generator=updates)
    return model


def save_model(path: str, step: int) -> None:
    """The whole model, as many jobs save it though only the adapter has changed."""
    state = model_at(step).state_dict()
    if path.endswith(".safetensors"):
        safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


def save_rank(path: str, rank: int) -> None:
    """What each data-parallel rank saves: the same weights beside its own rng state and host name."""
    weights = model_at(1).state_dict()
    rng = random.Random(rank).getstate()
    torch_rng = torch.Generator().manual_seed(rank).get_state()
    host = f"worker-{10**rank}.cluster.example"
    torch.save({"host": host, "rng": rng, "torch_rng": torch_rng, "module": weights, "step": 1}, path)


if __name__ == "__main__":
    serve({"save_model": save_model, "save_rank": save_rank})
