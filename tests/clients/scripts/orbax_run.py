"""An Orbax job: saves a JAX state every step (OCDBT, asynchronously), keeps the newest two, resumes.

Says `started` with the step it resumed from and `saved` for every checkpoint, with the SHA-256 of its files.
The manager itself removes the steps that are too many.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from protocol import emit

sys.path.insert(0, str(Path(__file__).parents[2]))
from clients.recovery import digest_tree

KEEP = 2
State = dict[str, object]


def state_at(step: int) -> State:
    """What training would hold at this step."""
    rng = np.random.default_rng(step)
    weights = {name: jax.numpy.asarray(rng.random((256, 256), np.float32)) for name in ("weight", "momentum")}
    return {**weights, "step": step}


def load(manager: ocp.CheckpointManager, step: int) -> bool:
    """Whether this checkpoint holds exactly the state of that step."""
    wanted = state_at(step)
    found = manager.restore(step, args=ocp.args.StandardRestore(state_at(0)))
    return found.keys() == wanted.keys() and all(np.array_equal(found[key], wanted[key]) for key in wanted)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-steps", type=int, required=True)
    options = parser.parse_args()
    settings = ocp.CheckpointManagerOptions(max_to_keep=KEEP, enable_async_checkpointing=True)
    with ocp.CheckpointManager(options.output, options=settings) as manager:
        first = manager.latest_step() or 0
        if first:
            emit(event="started", step=first, correct=load(manager, first))
        for step in range(first + 1, options.max_steps + 1):
            manager.save(step, args=ocp.args.StandardSave(state_at(step)))
            manager.wait_until_finished()
            emit(event="saved", path=str(step), files=digest_tree(options.output / str(step)))


if __name__ == "__main__":
    main()
