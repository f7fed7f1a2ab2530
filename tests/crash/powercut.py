"""Every call to the disk is a place to die or to lose power at: what is there at the next start.

    python tests/crash/powercut.py [--points 10000] [--seed N] [--json FILE] [--jobs 2] [--only POINT]

One rule: a crash point counts once: two crashes that leave the same bytes under the same names, and after
which the same must be there, are one point.

A run of everything that writes to a store (mixture.py) is recorded call by call (faultdisk.py); at each
place of its log a kill and losses of power of several kinds are tried (diskmodel.py), each is opened and
checked (aftermath.py) against what was answered by then (truth.py). Some are crashed a second time while
they recover. Prints the seed first; the same seed makes the same calls, so a finding can be had again.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from aftermath import Aftermath, Check, Crash, Later
from diskmodel import DiskModel, Image
from faultdisk import chance_of
from recording_run import BOOT, Run, memory_folder, record

from ckptfs.store.index import INDEX_PATH

KINDS = ("kill", "synced", "names", "bytes", "zeros", "torn512", "torn4096", "prefix", "any", "any2")
_AGAIN_ONE_IN = 4
_WITHOUT_INDEX_ONE_IN = 25
_CRASHED_AGAIN_ONE_IN = 12
_REBUILD_CRASHED_ONE_IN = 2
_SECOND_CRASHES = 4


@dataclass(slots=True)
class Tally:
    """What was tried: distinct points by kind, images that were the same as another, findings."""

    points: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    places: int = 0
    runs: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take another's counts in."""
        self.points += other.points
        self.repeated += other.repeated
        self.places += other.places
        self.runs += other.runs
        self.findings += other.findings


class Cutter:
    """Crashes one run at its places. `share`: how many of the points are tried, for a short run;
    `always_again`: after each the store goes on, with versions and a restart."""

    def __init__(self, run: Run, folder: str, share: float = 1.0, *, always_again: bool = False) -> None:
        self.tally = Tally(runs=1, findings=[f"{run.seed}: {what}" for what in run.findings])
        self._run, self._folder, self._share = run, folder, share
        self._always_again = always_again
        self._known: set[bytes] = set()

    def cut_everywhere(self) -> Tally:
        """Every place, every kind."""
        model = DiskModel()
        for place, event in enumerate(self._run.events, 1):
            model.take(event)
            self.tally.places += 1
            for kind in KINDS:
                chance = chance_of(self._run.seed, place, kind)
                if chance.random() < self._share:
                    self.cut(model, place, kind, chance)
        return self.tally

    def cut_at(self, wanted: int, kind: str) -> Tally:
        """One point, as a finding names it."""
        model = DiskModel()
        for event in self._run.events[:wanted]:
            model.take(event)
        chance = chance_of(self._run.seed, wanted, kind)
        chance.random()
        self.cut(model, wanted, kind, chance)
        return self.tally

    def cut(self, model: DiskModel, place: int, kind: str, chance: random.Random) -> None:
        """One crash, and now and then a second one in the recovery from it."""
        image = model.killed() if kind == "kill" else model.power_cut(kind.replace("any2", "any"), chance)
        if image is None:
            return
        crash = Crash(
            place,
            kind,
            again=chance.randrange(_AGAIN_ONE_IN) == 0 or self._always_again,
            without_index=chance.randrange(_WITHOUT_INDEX_ONE_IN) == 0 and "format" in image.files,
        )
        one_in = _REBUILD_CRASHED_ONE_IN if crash.without_index else _CRASHED_AGAIN_ONE_IN
        twice = chance.randrange(one_in) == 0
        found = self._check(image, crash, f"{place}:{kind}", record=twice)
        if found is None or not twice or found.findings:
            return
        if crash.without_index:
            self._cut_rebuild(DiskModel(image.without(INDEX_PATH)), crash, found, chance)
        else:
            after = model.fork() if kind == "kill" else DiskModel(image)
            self._cut_again(after, crash, found, chance)

    def _cut_again(self, model: DiskModel, first: Crash, life: Aftermath, chance: random.Random) -> None:
        """Crash the life after a crash as well, at some places of its log."""
        places = sorted(chance.sample(range(1, len(life.events) + 1), min(_SECOND_CRASHES, len(life.events))))
        for number, event in enumerate(life.events, 1):
            model.take(event)
            if number not in places:
                continue
            kind = chance.choice(("synced", "names", "any", "torn512"))
            image = model.power_cut(kind, chance)
            if image is None:
                continue
            later = Later(
                frozenset(life.versions or ()) if number >= life.seen_at else frozenset(),
                is_begun=number >= life.begun_at,
                is_synced=0 < life.synced_at <= number,
            )
            crash = Crash(first.place, kind, later=later)
            self._check(image, crash, f"{first.place}:{first.kind}, then {number}:{kind}")

    def _cut_rebuild(self, model: DiskModel, first: Crash, life: Aftermath, chance: random.Random) -> None:
        """Crash a rebuild at some places of its log; it is run again then."""
        places = sorted(chance.sample(range(1, life.rebuilt_at + 1), min(_SECOND_CRASHES, life.rebuilt_at)))
        for number, event in enumerate(life.events[: life.rebuilt_at], 1):
            model.take(event)
            if number not in places:
                continue
            kind = chance.choice(("kill", "synced", "names", "any", "torn512"))
            image = model.killed() if kind == "kill" else model.power_cut(kind, chance)
            if image is not None:
                crash = Crash(first.place, kind, rebuilds_again=True)
                self._check(image, crash, f"{first.place}:{first.kind}, then {number}:{kind} of the rebuild")

    def _check(self, image: Image, crash: Crash, name: str, *, record: bool = False) -> Aftermath | None:
        digest = image.digest() + crash.kind.startswith("k").to_bytes(1, "big")
        digest += self._run.truth.moment(crash.place)
        if digest in self._known:
            self.tally.repeated += 1
            return None
        self._known.add(digest)
        boot = BOOT if crash.kind == "kill" else f"after {name}"
        found = Check(image, self._run.truth, crash, boot, record=record).run(self._folder)
        how = "rebuild" if crash.rebuilds_again else "twice" if crash.later is not None else crash.kind
        self.tally.points[how] += 1
        self.tally.findings += [f"{self._run.seed}:{name}: {what}" for what in found.findings]
        return found


def cut_run(seed: str, share: float = 1.0) -> Tally:
    """Record the run of a seed and crash it."""
    logger = logging.getLogger("ckptfs")
    level = logger.level
    # A store that lost power says what it found, and here that is a thousand lines.
    logger.setLevel(logging.CRITICAL)
    folder = memory_folder("ckptfs-powercut-")
    try:
        return Cutter(record(seed), folder, share).cut_everywhere()
    finally:
        logger.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)


def campaign(points: int, seed: int, jobs: int) -> Iterator[Tally]:
    """Runs, `jobs` at a time, until there are so many points."""
    done = number = 0
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Tally]] = set()
        while done < points or running:
            while done < points and len(running) < jobs:
                running.add(pool.submit(cut_run, f"{seed}.{number}"))
                number += 1
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done += sum(future.result().points.values())
                yield future.result()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default=None, help="one point, SEED:PLACE:KIND as findings name it")
    asked = parser.parse_args()
    if asked.only is not None:
        return _repeat(asked.only)
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    begun, total = time.monotonic(), Tally()
    for tally in campaign(asked.points, seed, asked.jobs):
        total.add(tally)
        for finding in tally.findings:
            print(f"      ! {finding}", flush=True)
        points, seconds = sum(total.points.values()), time.monotonic() - begun
        print(
            f"{points:7d} points {total.runs:3d} runs {len(total.findings):3d} findings {seconds:6.0f} s",
            flush=True,
        )
    facts = {
        "seed": seed,
        "distinct_points": sum(total.points.values()),
        "by_kind": dict(total.points),
        "places": total.places,
        "repeated": total.repeated,
        "runs": total.runs,
        "findings": len(total.findings),
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(facts, indent=2))
    if asked.json is not None:
        asked.json.write_text(json.dumps({**facts, "found": total.findings}, indent=1))
    return 1 if total.findings else 0


def _repeat(name: str) -> int:
    seed, place, kind = name.partition(",")[0].split(":")[:3]
    folder = memory_folder("ckptfs-powercut-")
    try:
        tally = Cutter(record(seed), folder).cut_at(int(place), kind)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(tally.findings) or "nothing was found")
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
