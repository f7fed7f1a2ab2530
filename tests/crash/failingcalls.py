"""Calls to the disk that fail: what was answered stays, and the store goes on when the disk does.

    python tests/crash/failingcalls.py [--runs 400] [--seed N] [--json FILE] [--jobs 2] [--only FAILURE]

One rule: one run is one failure: the Nth call, or some calls from the Nth on, with EIO or as a full disk
(ENOSPC, half of a write done). The run goes on to its end; then the process dies, or the machine.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import multiprocessing
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from aftermath import Check, Crash
from diskmodel import DiskModel
from faultdisk import Faults, chance_of
from recording_run import BOOT, memory_folder, record

from ckptfs.store.errors import CkptfsError

MOVES = 25
_SOME_CALLS = 15
KINDS = {
    "eio": (errno.EIO, 1),
    "full": (errno.ENOSPC, 1),
    "eio-for-a-while": (errno.EIO, _SOME_CALLS),
    "full-for-a-while": (errno.ENOSPC, _SOME_CALLS),
}
_CRASHES = ("kill", "synced", "names", "any")


@dataclass(slots=True)
class Outcome:
    """What one failure led to; `failed` are the calls that did."""

    failed: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


class _Unforeseen(logging.Handler):
    """Collects errors that nobody foresaw: neither the disk's nor ours."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, OSError | CkptfsError):
            self.found.append(f"{record.getMessage()}: {error!r}")


def calls_of(seed: str) -> int:
    """How many calls a run without a failure makes."""
    faults = Faults()
    record(seed, MOVES, faults)
    return faults.calls


def fail_at(seed: str, call: int, kind: str) -> Outcome:
    """One run in which one call, or some from it on, fail."""
    code, count = KINDS[kind]
    faults = Faults(call, call + count - 1, code, halfway=code == errno.ENOSPC)
    unforeseen = _Unforeseen()
    logger = logging.getLogger("ckptfs")
    logger.addHandler(unforeseen)
    logger.propagate = False
    folder = memory_folder("ckptfs-failing-")
    try:
        run = record(seed, MOVES, faults)
        outcome = Outcome(faults.failed, [*run.findings, *unforeseen.found])
        model, place = DiskModel(), len(run.events)
        for event in run.events:
            model.take(event)
        for crash in _CRASHES:
            image = model.killed() if crash == "kill" else model.power_cut(crash, chance_of(seed, call))
            if image is not None:
                boot = BOOT if crash == "kill" else "another"
                check = Check(image, run.truth, Crash(place, crash, again=True), boot)
                outcome.findings += [f"then {crash}: {what}" for what in check.run(folder).findings]
    finally:
        logger.removeHandler(unforeseen)
        logger.propagate = True
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _fail_named(name: str) -> tuple[str, Outcome]:
    seed, call, kind = name.split(":")
    return name, fail_at(seed, int(call), kind)


def planned(seed: int, runs: int) -> list[str]:
    """Names of so many failures, spread over the calls of as many runs as that takes."""
    chance = chance_of(seed)
    names: list[str] = []
    number = 0
    while len(names) < runs:
        one = f"{seed}.{number}"
        calls = calls_of(one)
        some = [f"{one}:{call}:{kind}" for call in range(1, calls + 1) for kind in KINDS]
        names += chance.sample(some, min(len(some), max(runs // 4, 40), runs - len(names)))
        number += 1
    return names


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default=None, help="one failure: SEED:CALL:KIND, as findings name it")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    begun = time.monotonic()
    names = [asked.only] if asked.only is not None else planned(seed, asked.runs)
    failed: Counter[str] = Counter()
    findings: list[str] = []
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for number, (name, outcome) in enumerate(pool.imap_unordered(_fail_named, names), 1):
            if number % 50 == 0:
                print(f"{number:6d} failures {time.monotonic() - begun:6.0f} s", flush=True)
            failed.update(outcome.failed[:1])
            for finding in outcome.findings:
                findings.append(f"{name}: {finding}")
                print(f"      ! {findings[-1]}", flush=True)
    facts = {
        "seed": seed,
        "runs": len(names),
        "first_failed_call": dict(failed),
        "findings": len(findings),
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(facts, indent=2))
    if asked.json is not None:
        asked.json.write_text(json.dumps({**facts, "found": findings}, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
