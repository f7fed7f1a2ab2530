"""TensorBoard: writes event files as training jobs do, and reads them while they grow as TensorBoard does."""

from __future__ import annotations

import os

from protocol import serve
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

WRITERS: dict[str, SummaryWriter] = {}
LOADERS: dict[str, EventFileLoader] = {}


def write(folder: str, first: int, last: int) -> None:
    """Log these steps through a writer that stays open, and flush it."""
    if folder not in WRITERS:
        WRITERS[folder] = SummaryWriter(folder)
    for step in range(first, last + 1):
        WRITERS[folder].add_scalar("loss", 1 / step, step)
    WRITERS[folder].flush()


def read(folder: str) -> list[int]:
    """The steps that have appeared in all event files there since the last call."""
    steps = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if path not in LOADERS:
            LOADERS[path] = EventFileLoader(path)
        steps += [event.step for event in LOADERS[path].Load() if event.HasField("summary")]
    return steps


if __name__ == "__main__":
    serve({"write": write, "read": read})
