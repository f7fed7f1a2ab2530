"""One recorded run: a mixture on a new store, its log, and what must be true of it.

One rule: the run is made once and cut a thousand times; what it left on the real disk is not looked at.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio
from disklog import Event
from faceclient import FaceClient
from faultdisk import Faults, Log, RecordingDisk, chance_of, stores_on
from mixture import Mixture
from reopened import opened
from truth import Truth

from ckptfs.store.errors import CkptfsError

MOVES = 45
_STOP_ONE_IN = 20
_MOST_LIVES = 60
BOOT = "first"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's log and its truth; `findings`: what was wrong while it ran."""

    seed: str
    events: Sequence[Event]
    truth: Truth
    findings: list[str]


def memory_folder(prefix: str) -> str:
    """A new folder, in memory where there is some."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.mkdtemp(prefix=prefix, dir=shared)


def record(seed: str, moves: int = MOVES, faults: Faults | None = None) -> Run:
    """Make the run of a seed."""
    folder = memory_folder("ckptfs-record-")
    try:
        log, truth = Log(faults=faults), Truth()
        client = FaceClient(log, truth)
        with stores_on(lambda root: RecordingDisk(root, log)):
            _work(f"{folder}/store", client, seed, moves)
        return Run(seed, log.events, truth, client.findings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def record_script(seed: str, script: Callable[[FaceClient], Awaitable[None]]) -> Run:
    """Make a run of these calls instead of a mixture."""
    folder = memory_folder("ckptfs-record-")
    try:
        log, truth = Log(), Truth()
        client = FaceClient(log, truth)

        async def life() -> None:
            client.attach(parts)
            await script(client)

        with stores_on(lambda root: RecordingDisk(root, log)), opened(f"{folder}/store", BOOT) as parts:
            trio.run(life)
        return Run(seed, log.events, truth, client.findings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _work(root: str, client: FaceClient, seed: str, moves: int) -> None:
    """The daemon is stopped and started now and then."""
    chance = chance_of(seed)
    mixture = Mixture(client, chance)
    begun = False
    left = moves
    lives, faults = 0, client.log.faults
    while left > 0:
        lives += 1
        try:
            with opened(root, BOOT) as parts:

                async def one_life() -> None:
                    nonlocal left, begun
                    client.attach(parts)
                    if not begun:
                        await mixture.begin()
                        begun = True
                    while left > 0:
                        left -= 1
                        await mixture.move()
                        if chance.random() < 0.35:
                            await mixture.upkeep()
                        # The pages that a failed sync has dropped outlive the process that knows of it.
                        if chance.randrange(_STOP_ONE_IN) == 0 and "sync" not in faults.failed:
                            break
                    await client.stop()

                trio.run(one_life)
        except (OSError, CkptfsError) as e:
            # A daemon that cannot start or end because of the disk says so, and is started again.
            if not faults.failed or lives > _MOST_LIVES:
                client.findings.append(f"the store cannot be opened: {e!r}")
                return
