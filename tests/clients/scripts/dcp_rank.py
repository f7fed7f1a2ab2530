"""One rank of a DCP job: saves sharded tensors with save and async_save, rotates, resumes.

Rank 0 says `started` with the step it resumed from and `saved` for each step, with the SHA-256 of its files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from protocol import emit, end
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from clients.recovery import digest_tree

KEEP = 2
ROWS = 512


def state_at(step: int, mesh: DeviceMesh) -> dict[str, object]:
    """What training would hold at this step: two matrices split over the ranks, and a counter."""
    generator = torch.Generator().manual_seed(100 + step)
    names = ("weight", "momentum")
    whole = {name: torch.randn(ROWS, 256, generator=generator) for name in names}
    return {
        **{name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()},
        "step": step,
    }


def save(state: dict[str, object], path: Path, files_per_rank: int, in_background: bool) -> None:
    writer = dcp.FileSystemWriter(path, thread_count=files_per_rank)
    if in_background:
        dcp.async_save(state, storage_writer=writer).result()
    else:
        dcp.save(state, storage_writer=writer)


def load(path: Path, step: int, mesh: DeviceMesh) -> bool:
    """Whether this checkpoint holds exactly the state of that step."""
    wanted, found = state_at(step, mesh), state_at(0, mesh)
    dcp.load(found, checkpoint_id=path)
    return found["step"] == step and all(
        torch.equal(_local(found[name]), _local(wanted[name])) for name in ("weight", "momentum")
    )


def report_and_rotate(output: Path, step: int) -> None:
    if dist.get_rank() == 0:
        name = f"step-{step}"
        emit(event="saved", path=name, files=digest_tree(output / name))
        shutil.rmtree(output / f"step-{step - KEEP}", ignore_errors=True)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("rendezvous", help="a path where no file is yet")
    parser.add_argument("--resume", type=int, default=0, metavar="STEP")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--files-per-rank", type=int, default=1)
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{options.rendezvous}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    if options.resume:
        correct = load(options.output / f"step-{options.resume}", options.resume, mesh)
        emit(event="started", step=options.resume, correct=correct)
    for step in range(options.resume + 1, options.resume + options.steps + 1):
        path = options.output / f"step-{step}"
        save(state_at(step, mesh), path, options.files_per_rank, in_background=step % 2 == 0)
        dist.barrier()
        report_and_rotate(options.output, step)
    dist.destroy_process_group()
    end()


def _local(value: object) -> torch.Tensor:
    assert isinstance(value, DTensor)
    return value.to_local()


if __name__ == "__main__":
    main()
