"""`ckptfs.gpu.verify` on a bf16 model in a device's memory: `verify_on_device.py [cpu|cuda:0] [--small]`.

The one rule: no mount is needed, so it runs wherever the device is; what to expect is made from the bytes of
a safetensors file, as the daemon makes it. Prints one JSON object; ends with 1 if anything is wrong.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import cast

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import safetensors.torch
from expectations import expectation_of

from ckptfs import gpu
from ckptfs.gpu.report import Reason

LAYERS = 24
WIDTH = 2048
REPEATS = 5


def model(device: str, layers: int) -> torch.nn.Module:
    """About 0.8 GB of bf16 in LAYERS layers, with tied embeddings."""
    torch.manual_seed(3)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.LayerNorm(4 * WIDTH))
        for _ in range(layers)
    ]
    whole = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(1000, WIDTH), "blocks": torch.nn.ModuleList(blocks)}
    )
    head = torch.nn.Linear(WIDTH, 1000, bias=False)
    head.weight = cast("torch.nn.Parameter", whole["embed"].weight)
    whole["head"] = head
    return whole.to(torch.bfloat16).to(device)


def main(device: str, layers: int) -> int:
    module = model(device, layers)
    state = {name: one.cpu() for name, one in module.state_dict().items() if name != "head.weight"}
    expectation = expectation_of({"model.safetensors": safetensors.torch.save(state)})
    bad: list[str] = []

    def expect(holds: bool, what: str) -> None:
        if not holds:
            bad.append(what)

    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        report = gpu.verify(module, expectation)
        seconds.append(time.perf_counter() - started)
    expect(report.ok and report.device == device, str(report))
    tied = next(one for one in report.tensors if one.name == "head.weight")
    expect(tied.tied_to == "embed.weight", "tied weights are hashed once")

    # What torch has queued and not done yet has to be seen: no synchronisation here.
    changed = f"blocks.{layers - 1}.0.weight"
    weight = module.get_parameter(changed)
    with torch.no_grad():
        weight.view(torch.int16)[4000, 77] ^= 1 << 14
    flipped = gpu.verify(module, expectation)
    expect([one.name for one in flipped.corrupt] == [changed], str(flipped))
    offset = (4000 * WIDTH + 77) * 2 // (256 << 10) * (256 << 10)
    expect([one.offset for one in flipped.corrupt[0].bad] == [offset], "the chunk of the flipped bit")
    with torch.no_grad():
        weight.view(torch.int16)[4000, 77] ^= 1 << 14
    expect(gpu.verify(module, expectation).ok, "right again")

    odd = {"embed.weight": module.get_parameter("embed.weight").t(), changed: weight.float()}
    reasons = [one.refusal and one.refusal.reason for one in gpu.verify(odd, expectation).tensors]
    expect(reasons == [Reason.NOT_CONTIGUOUS, Reason.DTYPE], str(reasons))
    rate = report.hashed_bytes / min(seconds) / 1e9
    print(
        json.dumps(
            {
                "stage": "verify",
                "device": device,
                "bytes": report.hashed_bytes,
                "seconds": seconds,
                "call_GBps": round(rate, 1),
                "bad": bad,
            }
        )
    )
    return 1 if bad else 0


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--small"]
    sys.exit(main(given[0] if given else "cuda:0", 1 if "--small" in sys.argv else LAYERS))
