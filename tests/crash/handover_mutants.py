"""Whether handover.py would find it: a part of the hand-over is switched off, and the clients must notice.

    python tests/crash/handover_mutants.py [MUTANT…] [--seed N]      (all of them, if none is named)

One rule: a mutant lives in the daemon's process of this run only (mutant_daemon.py makes it there), so
nothing of it can be left in the tree. Prints the seed, and of each mutant after how many ends of a daemon it
was found.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import handover  # noqa: E402  # the folder of the tests' own modules comes first
from mounting import memory_folder  # noqa: E402


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is switched off; the write path on which it must be found; whether daemons die just behind a
    change that is journaled (there the answer is lost and the work is done)."""

    text: str
    write_path: str = "plain"
    at_changes: bool = False
    most_kills: int = 40


MUTANTS = {
    "request": Mutant("the journal does not say which request was done", at_changes=True),
    "resend": Mutant("the kernel is not asked to send again what was not answered", most_kills=3),
    "reopen": Mutant("what was open is not opened again"),
    "handles": Mutant("a repeated open is counted twice", at_changes=True, most_kills=6),
    "held": Mutant("how often the kernel holds an inode is not kept"),
    "orphans": Mutant("recovery removes what has no name, whoever holds it"),
    "backing": Mutant("which backing file the kernel has is not kept", "auto"),
    "nodes": Mutant("which inodes of versions the kernel holds is not kept"),
    "saved": Mutant("what is open of versions is not kept"),
}


def kills_until_found(name: str, seed: int) -> tuple[int, str]:
    """How many daemons had ended, and the first finding; "" if nobody noticed."""
    mutant = MUTANTS[name]
    with memory_folder() as memory:
        result = handover.run_store(
            Path(memory) / "store",
            mutant.write_path,
            mutant.most_kills,
            random.Random(f"{seed}:{name}"),
            daemon=(sys.executable, str(HERE / "mutant_daemon.py"), name, str(int(mutant.at_changes))),
            dies_by_itself=mutant.at_changes,
            is_patient=False,
        )
    return result.kills + result.handed_over, next(iter(result.findings), "")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mutants", nargs="*", metavar="MUTANT", choices=[[], *MUTANTS], default=[])
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    unnoticed = 0
    for name in asked.mutants or MUTANTS:
        kills, finding = kills_until_found(name, seed)
        unnoticed += not finding
        said = f"found after {kills} daemons: {finding.strip().splitlines()[-1]}" if finding else "NOT FOUND"
        print(f"{name:8s} {MUTANTS[name].text}\n         {said[:200]}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
