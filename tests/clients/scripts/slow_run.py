"""A run directory as slow jobs have it: a log with a line every second, single-file saves that take long.

Says `closed` for each save, with the clock (CLOCK_MONOTONIC, the same in all processes) and its SHA-256.
The pauses are the job's own pace.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import threading
import time
from pathlib import Path

from protocol import emit

TENSOR_BYTES = 256 * 1024
TENSORS = 12


def log_for_ever(path: Path, every_s: float, done: threading.Event) -> None:
    """Append a line every second through one open file, flushed, as loggers do."""
    with path.open("a") as log:
        number = 0
        while not done.wait(every_s):
            number += 1
            log.write(f"step {number} loss {1 / number:.6f} {time.time()}\n")
            log.flush()


def save_slowly(path: Path, step: int, duration_s: float) -> None:
    """Write a safetensors file tensor by tensor, taking `duration_s` for it, and say when it was closed."""
    parts = [_header(step), *(_tensor(step, number) for number in range(TENSORS))]
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            file.flush()
            hasher.update(part)
            time.sleep(duration_s / len(parts))
    emit(event="closed", at=time.monotonic(), path=path.name, sha256=hasher.hexdigest())


def _header(step: int) -> bytes:
    header: dict[str, object] = {"__metadata__": {"step": str(step)}}
    for number in range(TENSORS):
        offsets = [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES]
        header[f"layer.{number}"] = {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": offsets}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def _tensor(step: int, number: int) -> bytes:
    return hashlib.shake_128(f"{step} {number}".encode()).digest(TENSOR_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--save-s", type=float, required=True)
    parser.add_argument("--between-s", type=float, required=True)
    options = parser.parse_args()
    options.run.mkdir()
    done = threading.Event()
    logging = threading.Thread(target=log_for_ever, args=(options.run / "train.log", 1.0, done))
    logging.start()
    for step in range(1, options.saves + 1):
        time.sleep(options.between_s)
        save_slowly(options.run / f"model-step{step}.safetensors", step, options.save_s)
    time.sleep(options.between_s)
    done.set()
    logging.join()


if __name__ == "__main__":
    main()
