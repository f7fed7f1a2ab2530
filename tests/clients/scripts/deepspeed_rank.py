"""One rank of a DeepSpeed ZeRO-1 job on the CPU: saves every step, keeps the newest two tags, resumes.

Rank 0 says `started` with the step it resumed from and `saved` for each tag, with the SHA-256 of its files.
DeepSpeed rotates nothing itself; jobs remove old tags as this one does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from protocol import emit, end

sys.path.insert(0, str(Path(__file__).parents[2]))
from clients.recovery import digest_tree

KEEP = 2
WIDTH, BATCH = 256, 4
# It would be compiled at the first start, which takes a minute and a C++ compiler; gloo does without it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def start_engine(ranks: int) -> deepspeed.DeepSpeedEngine:
    """An engine around a small model whose optimizer state is split over the ranks."""
    torch.manual_seed(3)
    layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    model = torch.nn.Sequential(*layers)
    settings = {
        "train_batch_size": BATCH * ranks,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def train_step(engine: deepspeed.DeepSpeedEngine, step: int) -> None:
    samples = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    engine.backward(engine(samples).square().mean())
    engine.step()


def save_and_rotate(engine: deepspeed.DeepSpeedEngine, output: Path, step: int) -> None:
    tag = f"global_step{step}"
    engine.save_checkpoint(str(output), tag=tag, client_state={"checked": fingerprint(engine)})
    dist.barrier()
    if dist.get_rank() == 0:
        emit(event="saved", path=tag, files=digest_tree(output / tag))
        shutil.rmtree(output / f"global_step{step - KEEP}", ignore_errors=True)
    dist.barrier()


def resume(engine: deepspeed.DeepSpeedEngine, output: Path) -> int:
    """The step that the file `latest` leads to."""
    path, state = engine.load_checkpoint(str(output))
    assert path is not None, "no checkpoint was found"
    if dist.get_rank() == 0:
        correct = state["checked"] == fingerprint(engine)
        emit(event="started", step=engine.global_steps, correct=correct)
    return engine.global_steps


def fingerprint(engine: deepspeed.DeepSpeedEngine) -> list[float]:
    """Sums over the weights, which are the same on all ranks."""
    return [float(parameter.detach().double().sum()) for parameter in engine.module.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("rendezvous", help="a path where no file is yet")
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{options.rendezvous}", rank=rank, world_size=ranks)
    engine = start_engine(ranks)
    first = resume(engine, options.output) if options.resume else 0
    for step in range(first + 1, options.max_steps + 1):
        train_step(engine, step)
        save_and_rotate(engine, options.output, step)
    dist.destroy_process_group()
    end()


if __name__ == "__main__":
    main()
