"""One rank of a job that verifies its part of sharded tensors against a version.

Rank 0 saves the whole tensors, both ranks save their parts by DCP, rank 0 publishes; then each verifies what
it holds. Rank 0 says `verified` with the rows of each rank's report for each of the two saves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from protocol import emit, end
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ckptfs import gpu
from ckptfs.gpu.asking import expectation_of

SHAPES = {
    "aligned": (1024, 512),
    "unaligned": (1000, 513),
    "uneven": (5, 70_000),
    "one_row": (1, 300),
    "columns": (512, 512),
    "everywhere": (300, 300),
}
PLACEMENTS = {"columns": Shard(1), "everywhere": Replicate()}


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {
        name: distribute_tensor(value, mesh, [PLACEMENTS.get(name, Shard(0))])
        for name, value in whole_tensors().items()
    }


def publish(run: Path) -> None:
    command = [sys.executable, "-m", "ckptfs.daemon", "publish", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)


def report(run: Path, mesh: DeviceMesh) -> dict[str, object]:
    """What this rank finds: as it is, against the whole file; and with a flipped bit, against both."""
    state = sharded(mesh)
    partial = DTensor.from_local(torch.ones(300, 300), mesh, [Partial()])
    plain = gpu.verify({**state, "everywhere": partial}, f"{run}/whole.safetensors@latest")
    same = gpu.verify(state, f"{run}/dcp@latest")
    # What was asked for nobody in particular does not know where these ranks' rows end.
    anybody = gpu.verify(state, expectation_of(f"{run}/whole.safetensors@latest"))
    gathered = gpu.verify(whole_tensors(), f"{run}/dcp@latest")
    for name, row in (("aligned", 200), ("unaligned", 499), ("uneven", 1)):
        local = state[name].to_local()  # type: ignore[attr-defined]
        local.view(torch.int32)[row, 7] ^= 1
    flipped = {name: gpu.verify(state, f"{run}/{name}@latest") for name in ("whole.safetensors", "dcp")}
    reports = {"plain": plain, "same": same, "gathered": gathered, "anybody": anybody}
    reports |= flipped
    return {name: one.to_json()["tensors"] for name, one in reports.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("rendezvous", help="a path where no file is yet")
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{options.rendezvous}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    dcp.save(sharded(mesh), checkpoint_id=options.run / "dcp")
    if rank == 0:
        safetensors.torch.save_file(whole_tensors(), options.run / "whole.safetensors")
        publish(options.run)
    dist.barrier()
    reports: list[object] = [None] * ranks
    dist.all_gather_object(reports, report(options.run, mesh))
    if rank == 0:
        emit(event="verified", ranks=reports)
    dist.destroy_process_group()
    end()


if __name__ == "__main__":
    main()
