"""A job that saves one checkpoint after the other without a pause and keeps the newest two, as trainers do.

Each checkpoint is a directory that is written below a temporary name and renamed into place. Says `saved` for
each. A save that meets a full disk ends the job with exit code 28, which is ENOSPC.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy
from protocol import emit

sys.path.insert(0, str(Path(__file__).parents[2]))
from clients.recovery import digest_tree


def save(run: Path, step: int, size_bytes: int) -> None:
    """A Trainer-shaped checkpoint of about this size."""
    name = f"checkpoint-{step}"
    temporary = run / f"tmp-{name}"
    temporary.mkdir(parents=True)
    values = np.random.default_rng(step).integers(0, 256, (4, size_bytes // 4), dtype=np.uint8)
    tensors = {f"layer.{number}": values[number] for number in range(4)}
    safetensors.numpy.save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    temporary.rename(run / name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--wait", action="store_true", help="for a line on stdin after each save")
    options = parser.parse_args()
    for step in range(options.first, options.last + 1):
        try:
            save(options.run, step, options.size_bytes)
        except (OSError, safetensors.SafetensorError) as error:
            emit(event="failed", step=step, error=str(error))
            sys.exit(errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else 1)
        name = f"checkpoint-{step}"
        emit(event="saved", path=name, files=digest_tree(options.run / name))
        shutil.rmtree(options.run / f"checkpoint-{step - options.keep}", ignore_errors=True)
        if options.wait:
            sys.stdin.readline()


if __name__ == "__main__":
    main()
