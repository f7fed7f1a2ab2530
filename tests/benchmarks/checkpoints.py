"""The checkpoint set that benchmarks copy: what a training job leaves, with realistic bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def make_set(folder: Path, mib: int, seed: int = 1) -> int:
    """About `mib` MiB: weights and Adam states as .pt, the weights as safetensors; returns the bytes."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    width = 1024
    layers = max(1, mib * (1 << 20) // (4 * width * width * 4))
    weights = {f"layers.{n}.weight": torch.randn(width, width) * 0.02 for n in range(layers)}
    moments = {
        name: {"exp_avg": torch.randn_like(w) * 1e-4, "exp_avg_sq": torch.rand_like(w) * 1e-8}
        for name, w in weights.items()
    }
    torch.save({"model": weights, "optimizer": moments, "step": 1000}, folder / "step1000.pt")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(path.stat().st_size for path in folder.iterdir())


def make_saves(folder: Path, mib: int, count: int = 4, seed: int = 7) -> list[Path]:
    """`count` saves of one model, each about `mib` MiB: every second tensor is the same in all of them."""
    width = 1024
    tensors = max(2, mib * (1 << 20) // (width * width * 4))
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    model = {f"layers.{n}.weight": torch.randn(width, width) for n in range(tensors)}
    paths = []
    for number in range(count):
        for tensor in list(model)[::2]:
            model[tensor] = torch.randn(width, width)
        paths.append(folder / f"{number}.pt")
        torch.save({"model": model, "step": number}, paths[-1])
    return paths


def make_archive(path: Path, count: int = 5000) -> None:
    """A source tree of small files as a tar archive."""
    import io
    import random
    import tarfile

    rng = random.Random(5)
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            payload = rng.randbytes(int(min(60_000, rng.expovariate(1 / 4000))) + 1)
            member = tarfile.TarInfo(f"src/d{number % 200:03d}/f{number:05d}.py")
            member.size = len(payload)
            archive.addfile(member, io.BytesIO(payload))
